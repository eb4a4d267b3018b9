"""Who races: presets, which stay as they are while the recipe moves on, and users' files."""

import ast
import functools
import hashlib
import inspect
import math
import re
from pathlib import Path

from scipy.stats import qmc

from nanomuon import recipe
from nanomuon.optim_groups import build_param_groups
from nanomuon.recipe import load_recipe, lr_multiplier, make_optimizer, run_file, untrained, values_at
from nanomuon.runtime import InputError
from scripts.laboratory.tasks import digest, empty_model


def preset_groups(model, matrices, embedding_lr, unembedding_lr, scalar_lr):
    """Groups that train a model's matrices by the group `matrices`, the only part in which presets differ.

    AdamW trains the rest, with a rate for each role.
    """
    adamw = dict(betas=(0.8, 0.95), eps=1e-8, weight_decay=0.0)
    groups = build_param_groups(
        model,
        muon={},
        adamw=dict(adamw, lr=scalar_lr),
        skip_keys=["value_gate"],
        roles={
            "wte": dict(adamw, lr=embedding_lr),
            "lm_head": dict(adamw, lr=unembedding_lr),
        },
    )
    for group in groups:
        if group["kind"] == "muon":
            group.update(matrices)
    return groups


def adamw_groups(
    model,
    *,
    matrix_lr=0.004,
    embedding_lr=0.1,
    unembedding_lr=0.01,
    scalar_lr=0.02,
    weight_decay=0.1,
):
    matrices = dict(kind="adamw", lr=matrix_lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay)
    return preset_groups(model, matrices, embedding_lr, unembedding_lr, scalar_lr)


def muon_groups(
    model,
    *,
    matrix_lr=0.02,
    embedding_lr=0.1,
    unembedding_lr=0.01,
    scalar_lr=0.02,
    beta2=None,
    weight_decay=0.0,
):
    """Muon as its author wrote it (https://kellerjordan.github.io/posts/muon)."""
    matrices = dict(
        lr=matrix_lr,
        momentum=0.95,
        ns_steps=5,
        beta2=beta2,
        weight_decay=weight_decay,
        coefficients="simple",
        weight_decay_form="decoupled",
    )
    return preset_groups(model, matrices, embedding_lr, unembedding_lr, scalar_lr)


normuon_groups = functools.partial(muon_groups, beta2=0.95)  # arXiv 2510.05491


def plain_schedule(group, step, steps, *, warmup_ratio=0.0, warmdown_ratio=1.0):
    return {"lr": group["lr"] * lr_multiplier(step, steps, warmup_ratio, warmdown_ratio)}


# build(model) returns param groups, schedule(group, step, steps) their values at a step
PRESETS = {
    "adamw": (adamw_groups, plain_schedule),
    "muon": (muon_groups, plain_schedule),
    "normuon": (normuon_groups, plain_schedule),
    "default": (recipe.param_groups, recipe.schedule),
}


class Contender:
    """SOURCE[:key=value,...]: a preset or a Python file, with keywords for its two functions and lr_scale.

    Raises InputError if SOURCE is neither, and for keywords that neither function has.
    """

    def __init__(self, text):
        self.source, _, options = text.partition(":")
        self.is_preset = self.source in PRESETS
        if not self.is_preset and not Path(self.source).is_file():
            raise InputError(f"contender {self.source} is neither a file nor one of {', '.join(PRESETS)}")
        self.options = parse_options(text, options)
        self.lr_scale = self.options.get("lr_scale", 1)
        if not isinstance(self.lr_scale, int | float) or not 0 <= self.lr_scale < math.inf:
            raise InputError(
                f"contender {text}: lr_scale must be a number, not negative, but is {self.lr_scale}"
            )
        build, schedule = PRESETS[self.source] if self.is_preset else load_recipe(self.source)
        schedule = schedule or recipe.schedule
        of_build, of_schedule = defaults(build, 1), defaults(schedule, 3)
        self.keywords = of_build | of_schedule  # {keyword: default}
        known = ["lr_scale", *self.keywords]
        unknown = self.options.keys() - set(known)
        if unknown:
            raise InputError(
                f"contender {self.source} has no {', '.join(unknown)}; it has {', '.join(known)}"
            )
        for key, value in self.options.items():
            if isinstance(self.keywords.get(key), int | float) and not isinstance(value, int | float):
                raise InputError(f"contender {text}: {key} must be a number, not {value!r}")
        self.build = self.bound(build, of_build)  # (model)
        self.schedule = self.bound(schedule, of_schedule)  # (group, step, steps)

    def bound(self, function, keywords):
        options = {key: value for key, value in self.options.items() if key in keywords}
        return functools.partial(function, **options)

    @property
    def name(self):
        if not self.options:
            return self.source
        options = ",".join(f"{key}={value}".replace(" ", "") for key, value in self.options.items())
        return f"{self.source}:{options}"

    def with_options(self, options):
        """The same contender with these options added to its own, or replacing them."""
        text = ",".join(f"{key}={value}" for key, value in {**self.options, **options}.items())
        return Contender(f"{self.source}:{text}")

    def prepare(self, model, setup):
        """(optimizer, its groups as built, schedule) for a model."""
        batch = setup["rows"] * model.config.seq_len
        optimizer = make_optimizer(self.build, model, batch, setup["steps"], ns_dtype=model.compute_dtype)
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] *= self.lr_scale
        built = [dict(group) for group in optimizer.param_groups]
        return optimizer, built, self.schedule

    def sha256(self):
        """Of its file; None for a preset."""
        if self.is_preset:
            return None
        return hashlib.sha256(Path(self.source).read_bytes()).hexdigest()

    def key(self, setup):
        """A digest of its file and of its hyperparameters at every step, but not of the file's imports.

        InputError if its functions do not return what they should.
        """
        steps, model, course = setup["steps"], empty_model(setup, "cpu"), []
        try:
            optimizer, groups, schedule = self.prepare(model, setup)
            for step in range(steps):
                course.append([values_at(schedule, group, step, steps) for group in groups])
        except InputError as error:
            raise InputError(f"contender {self.name}: {error}") from error
        if left_out := untrained(model, optimizer):
            warn(f"contender {self.source} does not train {len(left_out)} parameters: {left_out[0]}, ...")
        described = []
        for group in groups:
            described.append({key: value for key, value in group.items() if key != "params"})
        return digest(self.sha256(), described, course)

    def dials(self):
        """{keyword: (low, high)} that a sweep searches: all rates together, the weight decay, and one more.

        The last is the dial that the contender's file names, as in DIAL = ("c", 0.1, 0.8), or else the rate
        of the matrices. A keyword whose value is zero is not searched.
        """
        own = None if self.is_preset else load_dial(self.source)
        widths = {"lr_scale": 3, "weight_decay": 4}
        if own is None:
            widths["matrix_lr"] = 2
        elif own[0] not in self.keywords:
            raise InputError(
                f"contender {self.source}: its DIAL {own[0]} is not one of {', '.join(self.keywords)}"
            )
        values = {"lr_scale": 1} | self.keywords | self.options
        found = {}
        for key, width in widths.items():
            value = values.get(key)
            if isinstance(value, int | float) and value > 0:
                found[key] = value / width, value * width
        if own is not None:
            found[own[0]] = own[1:]
        return found

    def trials(self, count):
        """The contender itself, and count - 1 with its dials at the points of a Sobol sequence."""
        searched = self.dials()
        sequence = qmc.Sobol(len(searched), scramble=False)
        sequence.fast_forward(2)  # skips the lowest corner, and the middle, which is near the first trial
        chosen = [self]
        for point in sequence.random(count - 1):
            options = {}
            for (key, (low, high)), position in zip(searched.items(), point, strict=True):
                options[key] = dial_value(low, high, position)
            chosen.append(self.with_options(options))
        return chosen


@functools.cache
def warn(text):
    """Print a warning once."""
    print(f"warning: {text}", flush=True)


def dial_value(low, high, position):
    """The value at a position from 0 to 1: logarithmic if low is positive, else linear; to three digits."""
    if low > 0:
        value = math.exp(math.log(low) + position * math.log(high / low))
    else:
        value = low + position * (high - low)
    return float(f"{value:.3g}")


def defaults(function, given):
    """{keyword: default} of a function, without the first `given` arguments, which are positional, and
    without batch and steps, which are the race's.
    """
    keywords = list(inspect.signature(function).parameters.values())[given:]
    return {each.name: each.default for each in keywords if each.name not in ("batch", "steps")}


def parse_options(text, options):
    """{key: value} of key=value,key=value; text: the whole contender, for the error message."""
    if not options:
        return {}
    parsed = {}
    for part in re.split(r",(?![^([]*[)\]])", options):  # not at the comma of betas=(0.9,0.95)
        key, equals, value = part.partition("=")
        if not equals:
            raise InputError(f"contender {text}: {part!r} is not key=value")
        try:
            parsed[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            parsed[key] = float(value) if value in ("inf", "nan") else value
    return parsed


def load_dial(file):
    """The DIAL of a user's file, (keyword, low, high), or None."""
    dial = run_file(file).get("DIAL")
    match dial:
        case None:
            return None
        case (str(), int() | float() as low, int() | float() as high) if low < high:
            return dial
    raise InputError(f"{file}: DIAL has to be (keyword, low, high) with low < high, not {dial!r}")
