"""The recipe: how each parameter is trained, and how that changes over a run; or a user's file in its place.

RATES and SCHEDULE declare its hyperparameters: each is a flag of base_train and a keyword of param_groups or
schedule. Races (scripts/optim_race.py) compare the recipe with others.
"""

import inspect
import sys
import types
from dataclasses import dataclass
from pathlib import Path

from nanomuon.optim import DistMuonAdamW, MuonAdamW
from nanomuon.optim_groups import REQUIRED, build_param_groups, check_number, check_values, option_name
from nanomuon.optim_state import FIXED_KEYS
from nanomuon.runtime import InputError

# nanochat trains depth 12 on about this many tokens, with this batch size. Rates and decay are specified for
# a run of the resulting number of steps
REFERENCE_TOKENS = 1.2e9
REFERENCE_BATCH = 2**19
REFERENCE_STEPS = REFERENCE_TOKENS / REFERENCE_BATCH  # 2,289
REFERENCE_WIDTH = 768
FEWEST_STEPS = 100  # shorter runs were not measured, and use the rates for this length


@dataclass(frozen=True)
class Hyperparameter:
    """Allowed from 0 to `largest`. A race's sweep searches from value / sweep to value * sweep."""

    default: float
    meaning: str
    largest: float = 1e30
    sweep: float | None = None


# Keywords of param_groups
RATES = {
    "matrix_lr": Hyperparameter(0.02, "rate of Muon, at 4,096 tokens per step and 2,289 steps", sweep=2),
    "embedding_lr": Hyperparameter(0.3, "AdamW's rate for the embedding, at 2,289 steps and width 768"),
    "unembedding_lr": Hyperparameter(0.004, "AdamW's rate for the head, at 2,289 steps and width 768"),
    "scalar_lr": Hyperparameter(0.01, "AdamW's rate for scalars and gates, at 2,289 steps"),
    "weight_decay": Hyperparameter(0.2, "decay of Muon's matrices at 2,289 steps, falling to 0", sweep=4),
}
# Keywords of schedule
SCHEDULE = {
    "warmup_ratio": Hyperparameter(0.0, "fraction of the run with rising rates", largest=1),
    "warmdown_ratio": Hyperparameter(1.0, "fraction of the run with falling rates", largest=1),
}


def with_defaults(declared, given):
    """{name: value} of the declared hyperparameters, with defaults. TypeError for an undeclared name."""
    if unknown := given.keys() - declared.keys():
        raise TypeError(f"the recipe has no {', '.join(unknown)}; it has {', '.join(declared)}")
    return {name: given.get(name, each.default) for name, each in declared.items()}


def param_groups(model, batch, steps, **rates):
    """Groups of a GPT: Muon for the matrices, AdamW with a learning rate per role for the rest.

    batch: tokens per step; steps: those of the run. Rates and decay are given for 2,289 steps, and scaled by
    horizon_lr_scale and horizon_decay_scale. Muon's are given for 4,096 tokens a step, and scaled by
    matrix_lr_scale; the rates of embedding and head for width 768, and scaled by adamw_lr_scale. Short runs
    average gradients over fewer steps: momentum and beta1 are 0.95 and 0.8 at 2,289 steps, 0.90 and 0.62 at
    300. rates: see RATES. docs/recipe.md has the measurements.
    """
    rates = with_defaults(RATES, rates)
    batch_scale, width_scale = matrix_lr_scale(batch), adamw_lr_scale(model.config.width)
    lr_scale, decay_scale = horizon_lr_scale(steps), horizon_decay_scale(steps)
    return build_param_groups(
        model,
        muon=dict(
            lr=rates["matrix_lr"] * batch_scale * lr_scale,
            momentum=1 - 0.05 * lr_scale,  # short runs average over fewer gradients
            ns_steps=5,  # of Polar Express, arXiv 2505.16932
            beta2=0.95,  # of the second moment, arXiv 2510.05491
            # a step decays by rate times decay, and this product does not depend on the batch
            weight_decay=rates["weight_decay"] * decay_scale / batch_scale,
        ),
        adamw=dict(
            lr=rates["scalar_lr"] * lr_scale,  # x0 scalars and gates diverged at five times this rate
            betas=(1 - 0.2 * lr_scale, 0.99),  # the head's second moment needs a long average
            eps=1e-10,  # a larger one damps rare tokens: large batches have tiny gradients (docs/recipe.md)
            weight_decay=0.0,
        ),
        roles={
            "wte": dict(lr=rates["embedding_lr"] * width_scale * lr_scale),
            "lm_head": dict(lr=rates["unembedding_lr"] * width_scale * lr_scale),
            "taps": dict(lr=0.02 * lr_scale),
        },
        skip_keys=["value_gate"],
    )


def matrix_lr_scale(batch: int) -> float:
    """Factor on Muon's rate by tokens per step: the square-root rule (arXiv 2205.10287) at both ends.

    It is published for batches above REFERENCE_BATCH (nanochat, 2026). Below 4,096 tokens: at 768, rates of
    0.01 and 0.02 were equally good and 0.04 was worse (docs/log.md). From 4,096 to REFERENCE_BATCH it is
    constant, because the rate chosen at 4,096, 0.02, is also the one published for REFERENCE_BATCH.
    """
    return min(1.0, (batch / 4096) ** 0.5) * max(1.0, (batch / REFERENCE_BATCH) ** 0.5)


def adamw_lr_scale(width: int) -> float:
    """Factor on the rates of embedding and head, which are tuned at width 768 and scale as width^-1/2."""
    return (width / REFERENCE_WIDTH) ** -0.5


def horizon_lr_scale(steps: int) -> float:
    """Learning rates relative to those at REFERENCE_STEPS: short runs need larger ones.

    The best rate scales as the number of steps to the power -0.32 (arXiv 2409.19913, AdamW in language
    models); our short runs of Muon and AdamW agree (docs/recipe.md). Longer runs keep the rates published for
    REFERENCE_STEPS (nanochat, 2026).
    """
    return max(1.0, (REFERENCE_STEPS / max(steps, FEWEST_STEPS)) ** 0.32)


def horizon_decay_scale(steps: int) -> float:
    """Weight decay relative to that at REFERENCE_STEPS.

    It keeps the total decay of a run, rate times decay times steps, constant (arXiv 2405.13698; nanochat's
    published rule for longer runs).
    """
    return REFERENCE_STEPS / max(steps, FEWEST_STEPS) / horizon_lr_scale(steps)


def schedule(group, step, steps, **ratios):
    """{hyperparameter: value} of a group at `step` (from 0) of `steps`: its lr, by lr_multiplier, and the
    weight decay of matrices, which falls to 0. group: as it was built; ratios: see SCHEDULE.
    """
    values, ratios = {}, with_defaults(SCHEDULE, ratios)
    if "lr" in group:
        values["lr"] = group["lr"] * lr_multiplier(
            step, steps, ratios["warmup_ratio"], ratios["warmdown_ratio"]
        )
    if group.get("kind") == "muon":
        # Linear to zero: at the end of a run decay only adds noise (nanochat, 2026)
        values["weight_decay"] = group["weight_decay"] * (1 - step / steps)
    return values


def lr_multiplier(step: int, steps: int, warmup: float, cooldown: float) -> float:
    """Trapezoid: a linear rise over the first fraction `warmup` of `steps`, then flat, then a linear fall to
    0 over the last fraction `cooldown`. Step counts from 0. The first step's multiplier is never 0.
    """
    rise = fall = 1.0
    if warmup:
        rise = (step + 1) / (warmup * steps)
    if cooldown:
        fall = (steps - step) / (cooldown * steps)
    return min(1.0, rise, fall)


def describe_scales(batch: int, steps: int, width: int) -> str:
    """A line with the factors by which param_groups scales its rates and decay in a run of this size."""
    of_batch, of_length = matrix_lr_scale(batch), horizon_lr_scale(steps)
    return (
        f"scales     rates x{of_length:.3g} by length; of muon x{of_batch:.3g} by batch, of embedding and "
        f"head x{adamw_lr_scale(width):.3g} by width; decay x{horizon_decay_scale(steps):.3g} by length, "
        f"x{1 / of_batch:.3g} by batch"
    )


def describe(groups, schedule, steps):
    """A line for each param group: its parameters, and its hyperparameters at step 0."""
    lines = []
    for group in groups:
        numbers = []
        for key, value in {**group, **values_at(schedule, group, 0, steps)}.items():
            if type(value) in (int, float, tuple) or callable(value):
                numbers.append(f"{key} {shown(value)}")
        size = sum(param.numel() for param in group["params"])
        first = f" from {group['names'][0]}" if "names" in group else ""
        lines.append(f"{group.get('kind', 'group'):<10} {size:,} parameters{first}: {', '.join(numbers)}")
    return lines


def shown(value):
    """A number, or those of a tuple, with at most four digits; the name of a function."""
    if isinstance(value, tuple):
        return f"({', '.join(map(shown, value))})"
    if callable(value):
        return option_name(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# ------------------------------------------------------------------------------------------------------------
# A user's file in place of the recipe


def load_recipe(file):
    """(build, schedule, names) from a user's Python file, which this runs. names: everything it defines.

    The file defines one or more of these: `param_groups(model)`, a list of groups for MuonAdamW, or
    `build_optimizer(model)`, any torch.optim.Optimizer (see docs/running.md for what a checkpoint has of it);
    `schedule(group, step, steps)`; for races `model(config, compute_dtype)`, see scripts.optim_race.
    The recipe supplies the rest. A builder may have the parameters `batch` and `steps` (see make_optimizer;
    pass them on to the recipe's param_groups). InputError if there is no such function.
    """
    names = run_file(file)
    kinds = ("param_groups", "build_optimizer", "schedule", "model")
    found = [names[kind] for kind in kinds if kind in names]
    groups, optimizer = names.get("param_groups", param_groups), names.get("build_optimizer")
    if not found or not all(map(callable, found)):
        raise InputError(
            f"{file} must define a function: param_groups(model) or build_optimizer(model), "
            "schedule(group, step, steps), or model(config, compute_dtype)"
        )
    if optimizer and groups is not param_groups:
        raise InputError(f"{file} defines both param_groups and build_optimizer: leave one out")
    return optimizer or groups, names.get("schedule", schedule), names


def run_file(file) -> dict:
    """What a Python file defines, by name. The user sees its exceptions with their tracebacks."""
    # Not with an import, which may use an outdated copy in __pycache__
    module = types.ModuleType(Path(file).stem)
    module.__file__ = str(file)
    if getattr(sys.modules.get(module.__name__), "__spec__", None) is None:  # not an installed module's name
        sys.modules[module.__name__] = module  # torch.compile finds the globals of its functions there
    exec(compile(Path(file).read_bytes(), str(file), "exec"), vars(module))
    return vars(module)


def make_optimizer(build, model, batch, steps, world_size=1, **keywords):
    """MuonAdamW, for one process or many, from the groups that build(model) returns; or the optimizer that it
    returns.

    A builder with a parameter `batch` gets the tokens per step, one with `steps` the steps of the run, and
    one with `**keywords` both. keywords: of the constructor. InputError if it returns neither, or something
    invalid.
    """
    of_run = {"batch": batch, "steps": steps}
    accepted = keywords_of(build, of_run)
    of_run = {name: value for name, value in of_run.items() if name in accepted}
    check_call(build, "model", **of_run)
    built = build(model, **of_run)
    if hasattr(built, "param_groups"):
        # LBFGS needs a closure. Of the class: a torch scheduler replaces the method of its optimizer
        check_call(type(built).step, "self")
        return built
    if built is None:
        raise InputError("no optimizer was built: the function returned None, not groups or an optimizer")
    try:
        return (DistMuonAdamW if world_size > 1 else MuonAdamW)(built, **keywords)
    except (ValueError, TypeError) as error:
        raise InputError(f"no optimizer was built: {error}") from error


def check_call(function, *arguments, **keywords):
    """InputError if a user's function does not take these arguments; the positional ones are their names."""
    try:
        inspect.signature(function).bind(*arguments, **keywords)
    except TypeError as error:
        raise InputError(
            f"{option_name(function)} must take the arguments ({', '.join(arguments)}), and others need a "
            f"default: {error}"
        ) from error


def keywords_of(function, known) -> dict:
    """{parameter: default} of a function; `**keywords` stands for all of known, {name: default}."""
    found = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            found = {**known, **found}
        else:
            found[parameter.name] = parameter.default
    return found


def values_at(schedule, group, step, steps):
    """{key: value} that a schedule returns for a group, as it was built, at a step. The schedule gets a copy
    of the group. Hyperparameters of this repo's optimizer that it does not return stay as built. InputError
    if it returns anything but a dict, a key that the group lacks, or an impossible value.
    """
    values = schedule(dict(group), step, steps)
    if not isinstance(values, dict):
        raise InputError(
            f"schedule(group, step, steps) must return a dict, such as {{'lr': 0.01}}, not {values!r}"
        )
    if extra := values.keys() - group.keys():
        raise InputError(
            f"schedule(group, step, steps) returned {', '.join(map(str, extra))}, which the group lacks; it "
            f"has {', '.join(map(str, group))}. Keys differ between Muon and AdamW: test group['kind']"
        )
    fixed = {"kind", "params", "names"}
    if "kind" in group:  # of MuonAdamW
        fixed |= FIXED_KEYS
    if changed := values.keys() & fixed:
        raise InputError(
            f"schedule(group, step, steps) returned {', '.join(changed)}, which never change: set them in "
            "param_groups"
        )
    try:
        if "kind" in group:
            check_values({**group, **values})
        elif "lr" in values:
            check_number("lr", values["lr"])
    except (TypeError, ValueError) as error:
        raise InputError(f"schedule(group, step, steps) at step {step} of {steps}: {error}") from error
    if "kind" in group:
        # Without these, a value returned at some steps only would last until the run is resumed
        values = {key: group[key] for key in REQUIRED[group["kind"]] - FIXED_KEYS} | values
    return values


def values_at_every_step(schedule, groups, steps):
    """Yield the values of the groups, as they were built, at every step of a run. Errors as values_at."""
    for step in range(steps):
        yield [values_at(schedule, group, step, steps) for group in groups]


def untrained(model, optimizer):
    """The names of parameters that are in no group of the optimizer."""
    held = {param for group in optimizer.param_groups for param in group["params"]}
    return [name for name, param in model.named_parameters() if param not in held]


def switch_weights(optimizer, mode):
    """Call optimizer.train() or optimizer.eval() if it has them, as Schedule-Free optimizers do: eval() swaps
    in the weights to evaluate, train() those to train.
    """
    getattr(optimizer, mode, lambda: None)()
