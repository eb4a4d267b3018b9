"""Param groups: what each kind needs, and which parameter is trained by which kind, from its name and
shape.
"""

import math
import numbers

import torch

from nanomuon.orthogonalize import triples, update_scale

MUON_OPTIONS = {
    "nesterov": True,  # False: the direction is the momentum itself
    "coefficients": "polar_express",  # a name in orthogonalize.COEFFICIENTS, or a list of (a, b, c)
    "scale": "shape",  # see orthogonalize.update_scale
    "weight_decay_form": "cautious",  # or "decoupled"
    "row_equilibrate": False,  # MuonEq, arXiv 2603.28254
    "renormalize": False,  # Muon+, arXiv 2602.21545
    "split": None,  # the parts of a fused matrix, see split_rows
    "direction": None,  # a function of your own in place of the polar factor, see optim.CustomDirection
    "tensor_parallel": None,  # duplicated | distributed | blockwise; None: by shape, see optim.DistMuonAdamW
}
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # torch.compile, activation checkpointing
NOT_MUON = (
    "embed_tokens",
    "tok_embeddings",
    "wte",
    "value_embeds",
    "lm_head",
    "output",
    "mhc_attn",
    "mhc_ffn",
    "lambda_proj",
)


def clean_name(name):
    """The name without wrapper components: `a._orig_mod.b` and `a.b` are the same parameter."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def matches(name, key):
    """Whether `key` is a run of whole components of `name`: `output` matches `output.weight`, not
    `output_proj`.
    """
    return f".{key}." in f".{clean_name(name)}."


def route(name, param, skip_keys=(), expert_keys=()):
    """(kind, why) of one parameter. An expert's leading dimension counts matrices and not for the 2-D
    test.
    """
    for key in (*NOT_MUON, *skip_keys):
        if matches(name, key):
            return "adamw", f"name has {key}"
    expert = next((key for key in expert_keys if matches(name, key)), None)
    if param.ndim - (expert is not None) < 2:
        return "adamw", "fewer than 2 dimensions"
    return "muon", f"matrices of {expert}" if expert else "matrix"


def build_param_groups(model, *, muon, adamw, roles=None, skip_keys=(), expert_keys=(), is_muon=None):
    """Groups for MuonAdamW from `model.named_parameters()`; frozen parameters are left out.

    muon:   hyperparameters of the Muon group: lr, momentum, ns_steps, beta2, weight_decay and any option
    adamw:  lr, betas, eps, weight_decay of everything else
    roles:  {key: overrides}; a parameter whose name matches a key (the first one that does) gets a group of
            its own kind with these hyperparameters on top, e.g. {"wte": dict(lr=0.3)}
    skip_keys: more names that are never Muon.  expert_keys: names whose leading dimension counts matrices,
    (E, m, n). is_muon: a predicate (name, parameter) -> bool that decides instead of the rules. Each group
    carries `names`, without wrapper components, and is in the order of the model.
    """
    roles = roles or {}
    groups = {}  # (kind, role) -> group
    for name, param, kind, _ in _routed(model, skip_keys, expert_keys, is_muon):
        role = next((key for key in roles if matches(name, key)), None)
        if (kind, role) not in groups:
            base = muon if kind == "muon" else adamw
            groups[kind, role] = dict(
                kind=kind, params=[], names=[], **{**base, **(roles[role] if role else {})}
            )
        groups[kind, role]["params"].append(param)
        groups[kind, role]["names"].append(clean_name(name))
    return list(groups.values())


def routing_table(model, *, skip_keys=(), expert_keys=(), is_muon=None):
    """The decision for every trained parameter as text: parameter, shape, kind, why."""
    rows = [("parameter", "shape", "kind", "why")]
    for name, param, kind, why in _routed(model, skip_keys, expert_keys, is_muon):
        rows.append((clean_name(name), "x".join(map(str, param.shape)) or "scalar", kind, why))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _routed(model, skip_keys, expert_keys, is_muon):
    for name, param in model.named_parameters():
        if param.requires_grad:
            if is_muon:
                kind, why = ("muon" if is_muon(name, param) else "adamw"), "the caller's predicate"
            else:
                kind, why = route(name, param, skip_keys, expert_keys)
            yield name, param, kind, why


def split_rows(split, m):
    """The parts of a fused matrix of m rows as (heads, groups, rows): `heads` equal matrices one after the
    other, each of `groups` equal runs, which hold rows[i] rows of part i.

    split: ("qkv", (q, k, v)), the rows of each in a query group; a tuple of row counts, the parts one after
    the other; or the number of heads, each a part. ValueError where m rows are not so many.
    """
    heads, grouped, rows = 1, False, split
    if isinstance(split, bool) or not isinstance(split, int | tuple | list):
        raise ValueError(f"split={split!r}: neither a number of heads nor row counts")
    if isinstance(split, int):
        heads, rows = split, (m // max(split, 1),)
    elif len(split) == 2 and split[0] == "qkv":
        grouped, rows = True, split[1]
    rows = tuple(rows)
    if not rows or not all(isinstance(each, int) and each > 0 for each in rows):
        raise ValueError(f"split={split!r}: neither a number of heads nor row counts")
    groups = m // sum(rows) if grouped else 1
    if heads * groups * sum(rows) != m:
        raise ValueError(f"split={split!r} does not divide {m} rows")
    return heads, groups, rows


def default_names(index, count):
    return [f"group{index}.{i}" for i in range(count)]


def check_group(group, others, kinds):
    """A copy of a user's group with options and names filled in.

    others: the groups before it. kinds: optim.KINDS. ValueError that names the group and the parameter.
    """
    group, where, kind = dict(group), f"param group {len(others)}", group.get("kind")
    if kind not in kinds:
        raise ValueError(f"{where}: unknown kind {kind!r}; known: {', '.join(kinds)}")
    required, options = kinds[kind].required, kinds[kind].options
    given = group.keys() - {"kind", "params", "names", "initial_lr"}
    if missing := required - given:
        raise ValueError(f"{where} ({kind}): missing {', '.join(sorted(missing))}")
    if unknown := given - required - options.keys():
        raise ValueError(f"{where} ({kind}): unknown {', '.join(sorted(unknown))}")
    group = {**options, **group}
    params = group["params"]
    group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
    group["names"] = list(group.get("names") or default_names(len(others), len(group["params"])))
    check_names(group, where, others)
    try:
        check_values(group)
        if kind == "muon":
            check_muon_group(group)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return group


def check_values(group):
    """ValueError for hyperparameters that no step can be taken with. Cheap: it is asked before every step."""
    for key in ("lr", "weight_decay", "eps"):
        if key in group and not 0 <= number(key, group[key]) < math.inf:
            raise ValueError(f"{key} must be finite and not negative, but is {group[key]}")
    averages = {key: group[key] for key in ("momentum", "beta2") if group.get(key) is not None}
    if "betas" in group:
        if not isinstance(group["betas"], tuple | list) or len(group["betas"]) != 2:
            raise ValueError(f"betas are two numbers, not {group['betas']!r}")
        averages |= {"betas[0]": group["betas"][0], "betas[1]": group["betas"][1]}
    for key, value in averages.items():
        if not 0 <= number(key, value) < 1:
            raise ValueError(f"{key} must be at least 0 and below 1, but is {value}")


def number(key, value):
    """The value; ValueError for what is none. A tensor, as torch allows for rates, is not read here."""
    if isinstance(value, torch.Tensor):
        return 0.0
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{key} must be a number, but is {value!r}")
    return value


def check_names(group, where, others):
    """ValueError where a parameter or a name is there already."""
    params, names = group["params"], group["names"]
    if len(names) != len(params):
        raise ValueError(f"{where}: {len(names)} names for {len(params)} params")
    seen = {param: i for i, other in enumerate(others) for param in other["params"]}
    seen_names = {name for other in others for name in other["names"]}
    for name, param in zip(names, params, strict=True):
        if param in seen:
            raise ValueError(f"{where}: {name} is already in group {seen[param]}")
        if name in seen_names:
            raise ValueError(f"{where}: the name {name} is used twice")
        seen[param] = len(others)
        seen_names.add(name)


def check_muon_group(group):
    """ValueError for what cannot be trained as matrices, and for options that do not exist."""
    for name, param in zip(group["names"], group["params"], strict=True):
        if not 2 <= param.ndim <= 4:
            raise ValueError(f"{name} has shape {tuple(param.shape)}; Muon takes matrices, 2-D to 4-D")
        if param.ndim == 4 and not param.is_contiguous():
            raise ValueError(f"{name} is 4-D and not contiguous, so it cannot be viewed as a matrix")
    steps = group["ns_steps"]
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int)):
        raise ValueError(f"ns_steps must be a whole number or None, but is {steps!r}")
    triples(group["coefficients"], steps)
    update_scale(group["scale"], 1, 1)
    if group["split"] is not None:
        for param in group["params"]:
            split_rows(group["split"], param.size(1 if param.ndim == 3 else 0))
        if group["direction"] is not None:
            raise ValueError("the parts of a fused matrix (split) are orthogonalized; they take no direction")
    if group["direction"] is not None and not callable(group["direction"]):
        raise ValueError(f"direction={group['direction']!r} is not a function")
    if group["tensor_parallel"] not in (None, "duplicated", "distributed", "blockwise"):
        raise ValueError(f"unknown tensor_parallel {group['tensor_parallel']!r}")
    if group["weight_decay_form"] not in ("cautious", "decoupled"):
        raise ValueError(f"unknown weight_decay_form {group['weight_decay_form']!r}; cautious, decoupled")
