"""Param groups: what each kind requires, which kind trains which parameter, and whether ranks agree.

Muon trains the matrices between hidden layers; AdamW trains the rest. `route` decides by a parameter's
module, name and shape; `routing_table` lists the decisions for a model.
"""

import difflib
import itertools
import math
import numbers

import torch
import torch.distributed as dist
from torch import nn

from nanomuon.orthogonalize import triples, update_scale

REQUIRED = {
    "muon": {"lr", "momentum", "ns_steps", "beta2", "weight_decay"},
    "adamw": {"lr", "betas", "eps", "weight_decay"},
}
MUON_OPTIONS = {
    "nesterov": True,  # False: orthogonalize the momentum itself, without the look-ahead
    "coefficients": "polar_express",  # a name in orthogonalize.COEFFICIENTS, or a list of (a, b, c)
    "scale": "shape",  # see orthogonalize.update_scale
    "weight_decay_form": "cautious",  # or "decoupled"
    "split": None,  # the parts of a fused matrix, see split_rows
    "direction": None,  # your own function instead of the polar factor, see optim.Rule
    "tensor_parallel": None,  # or "duplicated", "distributed", "blockwise", see optim_tp.py
}
OF_TORCH = ("maximize", "amsgrad", "adjust_lr_fn")  # options of torch's optimizers that this one lacks
CHOICES = {
    "weight_decay_form": ("cautious", "decoupled"),
    "tensor_parallel": (None, "duplicated", "distributed", "blockwise"),
    "nesterov": (True, False),
}
# torch.compile, activation checkpointing, FullyShardedDataParallel
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
NOT_MUON = (
    "embed_tokens",
    "tok_embeddings",
    "wte",
    "value_embeds",
    "lm_head",
    "output.weight",  # a layer called `output` is a head; BERT's `output.dense` is a hidden layer
    "mhc_attn",
    "mhc_ffn",
    "lambda_proj",
    "A_log",  # Mamba's decay per channel and state, which multiplies elementwise
    # The (m, 1) magnitudes of torch's weight_norm, new and old
    "parametrizations.weight.original0",
    "weight_g",
)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CONVOLUTION = nn.modules.conv._ConvNd  # the base class of all, transposed ones too


def clean_name(name):
    """The name without components that wrappers add: `a._orig_mod.b` and `a.b` are the same parameter, and so
    is `module.a.b`, as DistributedDataParallel calls it.
    """
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while parts[0] == "module" and len(parts) > 1:
        parts = parts[1:]
    return ".".join(parts)


def matches(name, key):
    """Whether `key` is a run of whole components of `name`: `output` matches `output.weight`, not
    `output_proj`.
    """
    return f".{key}." in f".{clean_name(name)}."


def find_heads(model):
    """The nn.Linear modules whose outputs are the vocabulary or the classes.

    A linear layer with m outputs is a head if no module takes them (none has in_features, embedding_dim or
    normalized_shape m), and m is the number of rows of an nn.Embedding or the layer has the last matrix of
    the model. Convolutions are ignored: one on 3 color channels does not take the outputs of a 3-class head.
    """
    widths, vocabularies = set(), set()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            widths.add(module.in_features)
        elif isinstance(module, nn.Embedding):
            widths.add(module.embedding_dim)
            vocabularies.add(module.num_embeddings)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            widths.add(module.normalized_shape[-1])
    matrices = [param for param in model.parameters() if param.ndim >= 2]
    last = matrices[-1] if matrices else None
    heads = []
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.out_features not in widths:
            if module.out_features in vocabularies or module.weight is last:
                heads.append(module)
    return heads


def not_hidden_matrices(model):
    """{parameter: why}: the parameters that Muon must not train because of their module."""
    reasons = {}
    for head in find_heads(model):
        why = f"head: no module takes its {head.out_features} outputs"
        reasons.update(dict.fromkeys(head.parameters(), why))
    for module in model.modules():
        for param in module.parameters():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):  # also if a head is tied to it
                reasons[param] = "weight of an nn.Embedding"
            elif isinstance(module, CONVOLUTION) and 1 < module.groups == module.in_channels:
                reasons[param] = "depthwise convolution: each channel by itself"
            elif isinstance(module, CONVOLUTION) and param.ndim == 3:
                # (out, in, k) would be mistaken for `out` matrices
                reasons[param] = "1-D convolution: 3 dimensions, but not a batch of matrices"
            elif isinstance(module, nn.LayerNorm | nn.RMSNorm):  # of several dimensions
                reasons[param] = "of a norm: it multiplies or adds elementwise"
        if not isinstance(module, nn.Linear):
            for param in module.parameters(recurse=False):
                if param.ndim == 2 and 1 in param.shape:
                    reasons.setdefault(param, "one row or column, outside of an nn.Linear: a vector")
    return reasons


def route(name, param, reasons, skip_keys, expert_keys):
    """(kind, why) of one parameter. The first of these rules that applies decides:

    1. it is the weight of an nn.Embedding or tied to one, of a head (see `find_heads`), or of a depthwise or
       1-D convolution, or it has one row or column outside of an nn.Linear, like a bare vector: AdamW.
       reasons: {parameter: why}, from `not_hidden_matrices`;
    2. a key of the caller's skip_keys, or of NOT_MUON, is in its name: AdamW;
    3. it has fewer than 2 dimensions (not counting the leading one if an expert key matches its name) or more
       than 4; or no expert key matches its name, and it is named like a bias, or has at least 3 dimensions
       and either a leading 1, like position embeddings, or one number per leading index, like a scale per
       head: AdamW;
    4. Muon. 3 dimensions are a batch of matrices, 4 a convolution's matrix (out, in * height * width).
    """
    if param in reasons:
        return "adamw", reasons[param]
    for key in (*skip_keys, *NOT_MUON):
        if matches(name, key):
            return "adamw", f"name has {key}"
    expert = next((key for key in expert_keys if matches(name, key)), None)
    if param.ndim - (expert is not None) < 2:
        return "adamw", "fewer than 2 dimensions"
    if param.ndim > 4:
        return "adamw", "more than 4 dimensions"
    if expert:
        return "muon", f"matrices of {expert}"
    if param.ndim > 2 and param.size(0) == 1:
        return "adamw", "leading dimension of 1: not a batch of matrices"
    if param.ndim > 2 and param.size(0) == param.numel():
        return "adamw", "one number per leading index: a vector"
    own_name = name.split(".")[-1]
    if own_name == "bias" or own_name.endswith("_bias"):
        return "adamw", "a bias"
    if param.ndim == 4:
        return "muon", f"matrix of {param.size(0)}x{param.shape[1:].numel()}"
    return "muon", "batch of matrices" if param.ndim == 3 else "matrix"


def build_param_groups(model, *, muon, adamw, roles=None, skip_keys=(), expert_keys=(), is_muon=None):
    """Groups for MuonAdamW from `model.named_parameters()`; frozen parameters are left out.

    muon:   hyperparameters of the Muon group: lr, momentum, ns_steps, beta2, weight_decay and any option
    adamw:  lr, betas, eps, weight_decay of everything else: embeddings, heads, non-matrices (`route`)
    roles:  {key: overrides}; parameters whose names match a key (the first that matches counts) get a group
            of their kind with these hyperparameters on top, e.g. {"wte": dict(lr=0.3)}
    skip_keys: more names that Muon must not train. expert_keys: names whose leading dimension counts
    matrices, (E, m, n). is_muon: a predicate (name, parameter) -> bool that replaces the rules. Each group
    has `names`, without wrapper components, in the order of the model. A parameter that two modules share is
    trained once, under the name that comes first. ValueError for a model sharded by FullyShardedDataParallel
    (FSDP1).
    """
    roles = roles or {}
    groups = {}  # (kind, role) -> group
    for name, param, kind, _ in _routed(model, skip_keys, expert_keys, is_muon):
        role = next((key for key in roles if matches(name, key)), None)
        if (kind, role) not in groups:
            base = muon if kind == "muon" else adamw
            overrides = roles[role] if role else {}
            groups[kind, role] = dict(kind=kind, params=[], names=[], **{**base, **overrides})
        groups[kind, role]["params"].append(param)
        groups[kind, role]["names"].append(name)
    return list(groups.values())


def routing_table(model, *, skip_keys=(), expert_keys=(), is_muon=None):
    """A text table of the decision for every trained parameter: name, shape, kind, why."""
    lines = [f"{'parameter':44}  {'shape':14}  {'kind':5}  why"]
    for name, param, kind, why in _routed(model, skip_keys, expert_keys, is_muon):
        shape = "x".join(map(str, param.shape)) or "scalar"
        lines.append(f"{name:44}  {shape:14}  {kind:5}  {why}")
    return "\n".join(lines)


def _routed(model, skip_keys, expert_keys, is_muon):
    """(name, parameter, kind, why) of every parameter that is trained, in the order of the model."""
    refuse_flat_parameters(model)
    reasons = not_hidden_matrices(model)
    for name, param in model.named_parameters():
        name = clean_name(name)
        if not param.requires_grad:
            continue
        if is_muon:
            kind, why = ("muon" if is_muon(name, param) else "adamw"), "the caller's predicate"
        else:
            kind, why = route(name, param, reasons, skip_keys, expert_keys)
        yield name, param, kind, why


def refuse_flat_parameters(model):
    """ValueError for FullyShardedDataParallel (FSDP1), whose parameters are slices of a flat tensor: they are
    not matrices, nor DTensors that say which part of a matrix they are.
    """
    for module in model.modules():
        is_fsdp1 = type(module).__name__ == "FullyShardedDataParallel"
        if is_fsdp1 and module.sharding_strategy.name != "NO_SHARD":
            raise ValueError(
                "FullyShardedDataParallel (FSDP1) leaves no matrices to train: use fully_shard (FSDP2)"
            )


def split_rows(split, m):
    """The parts of a fused matrix of m rows as (heads, groups, rows): `heads` equal matrices, each of
    `groups` equal blocks, each with rows[i] rows of part i.

    split: ("qkv", (q, k, v)), their row counts in each query group; a tuple of row counts, one per part; or
    the number of heads, each of which is a part. ValueError if it does not divide m rows.
    """
    heads, grouped, rows = 1, False, split
    if isinstance(split, bool) or not isinstance(split, int | tuple | list):
        raise ValueError(f"split={split!r} is neither a number of heads nor row counts")
    if isinstance(split, int):
        heads, rows = split, (m // max(split, 1),)
    elif len(split) == 2 and split[0] == "qkv":
        grouped, rows = True, split[1]
    rows = tuple(rows)
    if not rows or not all(isinstance(each, int) and each > 0 for each in rows):
        raise ValueError(f"split={split!r} is neither a number of heads nor row counts")
    groups = m // sum(rows) if grouped else 1
    if heads * groups * sum(rows) != m:
        raise ValueError(f"split={split!r} does not divide {m} rows")
    return heads, groups, rows


def default_names(index, count):
    return [f"group{index}.{i}" for i in range(count)]


def check_group(group, others):
    """A copy of a user's group, with options and names filled in.

    params may be (name, parameter) pairs, as in torch's optimizers. others: the groups before it. A
    ValueError names the group and the parameter.
    """
    group, where, kind = dict(group), f"param group {len(others)}", group.get("kind")
    if kind not in REQUIRED:
        raise ValueError(
            f"{where}: unknown kind {kind!r}; known: {', '.join(REQUIRED)}; "
            "MuonAdamW.for_model(model, lr=...) and build_param_groups(model, ...) build groups"
        )
    check_keys(group, where)
    group = {**(MUON_OPTIONS if kind == "muon" else {}), **group}
    if isinstance(group["params"], set):
        raise ValueError(f"{where}: params is a set, whose order differs between processes: use a list")
    params = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
    names = group.get("names") or default_names(len(others), len(params))
    if params and all(isinstance(param, tuple) for param in params):  # from model.named_parameters()
        names, params = zip(*params, strict=True)
    # Saved state is looked up by clean names
    group["params"], group["names"] = list(params), [clean_name(name) for name in names]
    try:
        check_params(group, others)
        check_values(group)
        if kind == "muon":
            check_muon_group(group)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None
    return group


def check_keys(group, where):
    """ValueError for a missing key, a misspelled one, or an option of the other kind. Other keys are the
    user's own. Schedulers write momentum into every group; AdamW does not read it.
    """
    kind = group["kind"]
    of_muon, of_adamw = REQUIRED["muon"] | MUON_OPTIONS.keys(), REQUIRED["adamw"]
    known, others = (of_muon, of_adamw) if kind == "muon" else (of_adamw | {"momentum"}, of_muon)
    for key in group.keys() - known:
        close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.85)
        if key in others or close:
            meant = f"did you mean {close[0]}?" if close else "an option of the other kind"
            first = f" of {group['names'][0]}" if group.get("names") else ""
            raise ValueError(f"{where}{first} ({kind}): unknown {key}: {meant}")
    if unsupported := [key for key in OF_TORCH if group.get(key)]:  # maximize=False is no request
        raise ValueError(f"{where} ({kind}): this optimizer has no {', '.join(unsupported)}: leave it out")
    if missing := (REQUIRED[kind] | {"params"}) - group.keys():
        raise ValueError(f"{where} ({kind}): missing {', '.join(sorted(missing))}")


def named_parameters(groups):
    """(name, parameter) of param groups, in their order. ValueError if a group has more of one than of the
    other, as after a parameter was appended to its params.
    """
    for group in groups:
        names, params = group["names"], group["params"]
        if len(names) != len(params):
            raise ValueError(
                f"{len(names)} names for {len(params)} params: {', '.join(names[:3])}, ...: keep them "
                "aligned (to add parameters, call add_param_group)"
            )
        yield from zip(names, params, strict=True)


def option_name(value):
    """The form in which an option is saved, and compared between ranks and with saved state: a function by
    its name, because every process and every optimizer may create it anew; a list as a tuple, because PyTorch
    turns tuples into lists when it broadcasts state.
    """
    if isinstance(value, list | tuple):
        return tuple(map(option_name, value))
    if not callable(value):
        return value
    value = getattr(value, "func", value)  # of a functools.partial
    if not hasattr(value, "__qualname__"):
        value = type(value)
    return f"{value.__module__}.{value.__qualname__}"


def fixed_options(group):
    """The options of a group that must be equal on all ranks and stay as they were planned."""
    chosen = {"kind": group["kind"]}
    if group["kind"] == "muon":  # a scheduler may add a momentum to any group
        chosen |= {"second moment": group["beta2"] is not None, "momentum": group["momentum"] is not None}
    for key, default in {"ns_steps": 5, **MUON_OPTIONS}.items():
        if group.get(key, default) != default:
            chosen[key] = option_name(group[key])
    return chosen


def as_numbers(value):
    """A group's value with numbers in place of tensors, which print their device and few digits, and which
    `==` compares one by one.
    """
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return tuple(map(as_numbers, value)) if isinstance(value, list | tuple) else value


def compare_ranks(groups, process_group):
    """ValueError, the same on every rank, if ranks differ in names, shapes, dtypes, options, numbers, or how
    parameters are grouped.
    """
    described = []
    for group in groups:
        hyper = {key: as_numbers(group[key]) for key in sorted(REQUIRED[group["kind"]] - {"ns_steps"})}
        for i, (name, param) in enumerate(named_parameters([group])):
            about = f"{name} {tuple(param.shape)} {param.dtype}, number {i} of its group"
            described.append(f"{about}, {fixed_options(group)}, {hyper}")
    of_ranks = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(of_ranks, described, group=process_group)
    for rank, theirs in enumerate(of_ranks):
        pairs = itertools.zip_longest(of_ranks[0], theirs, fillvalue="nothing")
        for i, (first, here) in enumerate(pairs):
            if first != here:
                difference = f"{first} on rank 0, {here} on rank {rank}"
                raise ValueError(f"ranks differ in parameter {i} or its options: {difference}")


def check_values(group):
    """ValueError for hyperparameters with which no step is possible."""
    values = {key: group[key] for key in ("lr", "weight_decay", "eps") if key in group}
    averages = {}
    if group["kind"] == "muon":  # None: not used
        averages = {key: group[key] for key in ("momentum", "beta2") if group[key] is not None}
    elif isinstance(group["betas"], list | tuple) and len(group["betas"]) == 2:
        averages["betas[0]"], averages["betas[1]"] = group["betas"]
    else:
        raise ValueError(f"betas must be two numbers, not {group['betas']!r}")
    for key, value in {**values, **averages}.items():
        check_number(key, value)
        if key in averages and value >= 1:
            raise ValueError(f"{key} must be at least 0 and below 1, but is {value}")


def check_number(key, value):
    """ValueError for anything but a finite number that is not negative."""
    if isinstance(value, torch.Tensor):
        is_number = value.numel() == 1
    else:
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number:
        raise ValueError(f"{key} must be a number, but is {value!r}")
    if not -1e-12 <= value < math.inf:  # by rounding, torch's LinearLR may end below zero
        raise ValueError(f"{key} must be finite and not negative, but is {value}")


def check_params(group, others):
    """ValueError for anything but parameters, and for a parameter or name that occurs twice."""
    seen = {param: i for i, other in enumerate(others) for param in other["params"]}
    seen_names = {name for other in others for name in other["names"]}
    for name, param in named_parameters([group]):
        if not isinstance(param, torch.Tensor):
            raise ValueError(f"{name} is a {type(param).__name__}, not a parameter")
        if param.dtype not in DTYPES or param.layout != torch.strided:
            raise ValueError(f"{name} is {param.dtype}, {param.layout}: neither Muon nor AdamW trains this")
        if param in seen:
            raise ValueError(f"{name} is already in group {seen[param]}")
        if name in seen_names:
            raise ValueError(f"the name {name} is used twice (without prefixes such as module.)")
        seen[param] = len(others)
        seen_names.add(name)


def check_muon_group(group):
    """ValueError for parameters that are not matrices, and for unknown or impossible options. Makes
    coefficients hashable.
    """
    for name, param in named_parameters([group]):
        if not 2 <= param.ndim <= 4:
            raise ValueError(f"{name} has shape {tuple(param.shape)}; Muon takes matrices, 2-D to 4-D")
    steps = group["ns_steps"]
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int)):
        raise ValueError(f"ns_steps must be a whole number or None, but is {steps!r}")
    triples(group["coefficients"], steps)
    if not isinstance(group["coefficients"], str):
        group["coefficients"] = tuple(tuple(triple) for triple in group["coefficients"])
    if not callable(group["scale"]):
        update_scale(group["scale"], 1, 1)
    if group["split"] is not None:
        for param in group["params"]:
            split_rows(group["split"], param.size(1 if param.ndim == 3 else 0))
        if group["direction"] is not None:
            raise ValueError("split and direction cannot be combined")
    if group["direction"] is not None and not callable(group["direction"]):
        raise ValueError(f"direction={group['direction']!r} is not a function")
    for key, known in CHOICES.items():
        check_choice(key, group[key], known)


def check_choice(key, value, known):
    if value not in known:
        raise ValueError(f"{key} must be one of {known}, not {value!r}")
