"""Which parameter is trained by which kind: from names and shapes to the groups that MuonAdamW takes."""

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # torch.compile, activation checkpointing
NOT_MUON = (
    "embed_tokens", "tok_embeddings", "wte", "value_embeds", "lm_head", "output", "mhc_attn", "mhc_ffn", "lambda_proj",
)  # fmt: skip


def clean_name(name):
    """The name without wrapper components: `a._orig_mod.b` and `a.b` are the same parameter."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def matches(name, key):
    """Whether `key` is a run of whole components of `name`: `output` is in `model.output.weight`, not in
    `output_proj`."""
    return f".{key}." in f".{clean_name(name)}."


def route(name, param, skip_keys=(), expert_keys=()):
    """(kind, why) of one parameter. An expert's leading dimension counts matrices, so it leaves one fewer for the 2-D
    test."""
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
    roles:  {key: overrides}; a parameter whose name matches a key (the first one that does) gets a group of its own
            kind with these hyperparameters on top, e.g. {"wte": dict(lr=0.3), "lm_head": dict(lr=0.004)}
    skip_keys: more names that are never Muon.  expert_keys: names whose leading dimension counts matrices, (E, m, n).
    is_muon: a predicate (name, parameter) -> bool that decides instead of the rules.
    Each group carries `names`, without wrapper components, and is in the order of the model.
    """
    groups = {}  # (kind, role) -> group
    for name, param, kind, _ in _routed(model, skip_keys, expert_keys, is_muon):
        role = next((key for key in roles or {} if matches(name, key)), None)
        if (kind, role) not in groups:
            base = muon if kind == "muon" else adamw
            groups[kind, role] = dict(kind=kind, params=[], names=[], **{**base, **(roles[role] if role else {})})
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
