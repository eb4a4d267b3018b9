"""The recipe: which parameter is trained how, and how that changes over a run. Its keywords are flags of
base_train.

Both functions are pure, so the laboratory (scripts/optim_race.py) compares them with others, and a user's own
file may define either in their place (see `load_recipe`).
"""

import importlib.util
import inspect
import traceback
from pathlib import Path

from nanomuon import schedule as rules
from nanomuon.optim import DistMuonAdamW, MuonAdamW
from nanomuon.param_groups import build_param_groups
from nanomuon.runtime import InputError


def param_groups(
    model,
    batch=None,
    *,
    matrix_lr=0.02,
    embedding_lr=0.3,
    unembedding_lr=0.004,
    scalar_lr=0.01,
    weight_decay=0.2,
):
    """Groups of a GPT: Muon for the matrices, AdamW with a learning rate per role for the rest
    (docs/recipe.md).

    batch: tokens per step; below some thousand the matrices' rate falls (schedule.matrix_lr_scale).
    weight_decay is of Muon's matrices. AdamW's rates are those of width 768 and follow
    schedule.adamw_lr_scale.
    """
    batch_scale = rules.matrix_lr_scale(batch) if batch else 1
    matrix_lr, weight_decay = (
        matrix_lr * batch_scale,
        weight_decay / batch_scale,
    )  # a step decays by their product
    scale = rules.adamw_lr_scale(model.config.width)
    # a smaller eps makes rounding into updates, and two world sizes into two runs (docs/log.md)
    adamw = dict(betas=(0.8, 0.95), eps=1e-6, weight_decay=0.0)
    embedding, head = dict(adamw, lr=embedding_lr * scale), dict(adamw, lr=unembedding_lr * scale)
    return build_param_groups(
        model,
        muon=dict(lr=matrix_lr, momentum=0.95, ns_steps=5, beta2=0.95, weight_decay=weight_decay),
        adamw=dict(adamw, lr=scalar_lr),
        skip_keys=["value_gate", "router"],
        expert_keys=["mlp.w1", "mlp.w2"],
        roles={
            "wte": embedding,
            "value_embeds": embedding,
            "lm_head": head,
            # ten times as fast, the fullest of 8 experts gets 2.7 times the mean in place of 1.2
            # (docs/log.md)
            "router": dict(head, lr=head["lr"] / 10),
            "taps": dict(adamw, lr=0.02),
        },
    )


def schedule(group, step, steps, *, warmup_ratio=0.0, warmdown_ratio=1.0):
    """What a group, as it was built, has in its place at `step` (from 0) of `steps`: {hyperparameter:
    value}.
    """
    values = {"lr": group["lr"] * rules.lr_multiplier(step, steps, warmup_ratio, warmdown_ratio)}
    if group.get("kind") == "muon":
        values["momentum"] = rules.muon_momentum(step, steps)
        values["weight_decay"] = group["weight_decay"] * rules.weight_decay_multiplier(step, steps)
    return values


def make_optimizer(build, model, batch, world_size=1):
    """MuonAdamW, on one process or many, of what build(model) gives; an optimizer that it has built stays as
    it is.

    A builder with a parameter `batch` is told the tokens of a step. InputError for what is neither, or not
    sound.
    """
    groups = build(model, **({"batch": batch} if "batch" in inspect.signature(build).parameters else {}))
    if hasattr(groups, "param_groups"):
        return groups
    if not isinstance(groups, list) or not groups or not all(isinstance(group, dict) for group in groups):
        raise InputError(f"no list of param groups and no optimizer, but {type(groups).__name__}, was built")
    try:
        return DistMuonAdamW(groups) if world_size > 1 else MuonAdamW(groups)
    except ValueError as error:
        raise InputError(str(error)) from error


def check_schedule(schedule, groups, steps):
    """InputError where a schedule gives a group what it does not have: a slip of the pen would go
    unnoticed.
    """
    for group in groups:
        values = schedule(group, 0, steps)
        if not isinstance(values, dict) or values.keys() - group.keys():
            has = ", ".join(key for key in group if key not in ("params", "names"))
            raise InputError(f"schedule() has to return a dict of what the group has ({has}), not {values!r}")


def load_recipe(file):
    """(build, schedule or None) of a user's Python file.

    The file defines `param_groups(model)`, a list of groups for MuonAdamW, or `build_optimizer(model)`, any
    torch.optim.Optimizer; and if it likes `schedule(group, step, steps)`, else the one above is meant.
    InputError where there is no such file or function, or the file does not run.
    """
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or not Path(file).is_file():
        raise InputError(f"{file}: no such Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        frames = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)
        ]
        line = error.lineno if isinstance(error, SyntaxError) else frames[-1] if frames else 1
        raise InputError(f"{file} line {line}: {type(error).__name__}: {error}") from error

    def function(name):
        value = getattr(module, name, None)
        if inspect.ismodule(value):  # from nanomuon import schedule
            return None
        if value is not None and not callable(value):
            raise InputError(f"{file}: {name} is not a function")
        return value

    groups, optimizer, course = map(function, ("param_groups", "build_optimizer", "schedule"))
    if optimizer and groups is param_groups:  # imported, to build on
        groups = None
    if bool(groups) == bool(optimizer):
        both = "both param_groups(model) and" if groups else "neither param_groups(model) nor"
        raise InputError(f"{file} has {both} build_optimizer(model): define one of them")
    return groups or optimizer, None if course is schedule else course
