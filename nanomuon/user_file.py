"""A Python file of the user's in place of the recipe, and what makes an optimizer of either."""

import importlib.util
import inspect
import traceback
from pathlib import Path

import nanomuon.param_groups
import nanomuon.schedule
from nanomuon import recipe
from nanomuon.optim import DistMuonAdamW, MuonAdamW
from nanomuon.runtime import InputError

# What a file imports under these names from nanomuon, to build on, is not its own
OURS = (nanomuon.param_groups, nanomuon.schedule, recipe.schedule)


def load_recipe(file, source: bytes | None = None):
    """(build, schedule or None) of a user's Python file.

    The file defines `param_groups(model)`, a list of groups for MuonAdamW, or `build_optimizer(model)`, any
    torch.optim.Optimizer, either with the parameters `batch` and `steps` if it likes (see make_optimizer);
    and if it likes `schedule(group, step, steps)`. None where it has no schedule: that of the recipe is
    meant. source: what was read of the file before; this runs, whatever it holds by now.
    InputError where there is no such file or function, or the file does not run.
    """
    module = run_file(file, read_source(file) if source is None else source)
    groups = own_function(file, module, "param_groups")
    optimizer = own_function(file, module, "build_optimizer")
    schedule = own_function(file, module, "schedule")
    if groups is recipe.param_groups and optimizer:
        # Imported for build_optimizer to build on; by itself it would be what the file trains by
        groups = None
    if groups and optimizer:
        raise InputError(
            f"{file} has both param_groups(model) and build_optimizer(model): define one of them"
        )
    if not groups and not optimizer:
        raise InputError(
            f"{file} has neither param_groups(model) nor build_optimizer(model): define one of them"
        )
    return groups or optimizer, schedule


def read_source(file) -> bytes:
    """The text of a Python file; InputError where there is none."""
    if not str(file).endswith(".py") or not Path(file).is_file():
        raise InputError(f"{file}: no such Python file")
    return Path(file).read_bytes()


def run_file(file, source: bytes):
    """The module that the text of a Python file makes; InputError, with the line, where it does not run."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    try:
        # Not by the loader of the module, which takes what an earlier import has left in __pycache__
        exec(compile(source, str(file), "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        line = line_of(error, file)
        raise InputError(f"{file} line {line}: {type(error).__name__}: {error}") from error
    return module


def line_of(error, file):
    """The last line of the file that was at work when the error came up."""
    if isinstance(error, SyntaxError):
        return error.lineno
    line = 1
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == str(file):
            line = frame.lineno
    return line


def own_function(file, module, name):
    """The function of this name that the file has; None where it has none but ours."""
    value = getattr(module, name, None)
    if value is None or any(value is ours for ours in OURS):
        return None
    if not callable(value):
        raise InputError(f"{file}: {name} is not a function")
    return value


def make_optimizer(build, model, batch, steps, world_size=1, **settings):
    """MuonAdamW, on one process or many, of the groups that build(model) gives; an optimizer stays as it is.

    A builder with a parameter `batch` is told the tokens of a step, one with `steps` the steps of the run.
    settings: keywords of the constructor. InputError for what is neither, or not sound.
    """
    of_run = {"batch": batch, "steps": steps}
    told = inspect.signature(build).parameters
    built = build(model, **{name: value for name, value in of_run.items() if name in told})
    if hasattr(built, "param_groups"):
        return built
    if not isinstance(built, list) or not built or not all(isinstance(group, dict) for group in built):
        raise InputError(f"no list of param groups and no optimizer, but {type(built).__name__}, was built")
    try:
        if world_size > 1:
            return DistMuonAdamW(built, **settings)
        return MuonAdamW(built, **settings)
    except ValueError as error:
        raise InputError(str(error)) from error


def check_schedule(schedule, groups, steps):
    """InputError where a schedule gives a group what it does not have: a misspelt key would go unnoticed."""
    for group in groups:
        values = schedule(group, 0, steps)
        if not isinstance(values, dict) or values.keys() - group.keys():
            has = ", ".join(key for key in group if key not in ("params", "names"))
            raise InputError(f"schedule() has to return a dict of what the group has ({has}), not {values!r}")


def load_dial(file):
    """(keyword, low, high): the DIAL of a user's file, which a race searches from low to high; or None."""
    dial = getattr(run_file(file, read_source(file)), "DIAL", None)
    if dial is None:
        return None
    problem = f"{file}: DIAL has to be (keyword, low, high) with low < high, not {dial!r}"
    if not isinstance(dial, tuple) or len(dial) != 3 or not isinstance(dial[0], str):
        raise InputError(problem)
    _, low, high = dial
    if not isinstance(low, int | float) or not isinstance(high, int | float) or not low < high:
        raise InputError(problem)
    return dial
