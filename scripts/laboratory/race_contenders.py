"""Who races: presets, which stay as they are while the recipe moves on, and users' files."""

import ast
import functools
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nanomuon import recipe
from nanomuon.param_groups import build_param_groups
from nanomuon.runtime import InputError
from nanomuon.schedule import lr_multiplier
from nanomuon.user_file import check_schedule, load_recipe, make_optimizer
from scripts.laboratory.race_tasks import code_digest, digest, empty_model


def preset_groups(model, matrices, embedding_lr, unembedding_lr, scalar_lr):
    """Groups of a model whose matrices are trained as the group `matrices` says.

    The presets differ in that alone; the rest gets AdamW with a rate per role from all of them.
    """
    adamw = dict(betas=(0.8, 0.95), eps=1e-8, weight_decay=0.0)
    groups = build_param_groups(
        model,
        muon={},
        adamw=dict(adamw, lr=scalar_lr),
        skip_keys=["value_gate", "router"],
        expert_keys=["mlp.w1", "mlp.w2"],
        roles={
            "wte": dict(adamw, lr=embedding_lr),
            "value_embeds": dict(adamw, lr=embedding_lr),
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


@dataclass(frozen=True)
class Preset:
    """build(model) gives param groups, schedule(group, step, steps) their values at a step."""

    build: Callable
    schedule: Callable


PRESETS = {
    "adamw": Preset(adamw_groups, plain_schedule),
    "muon": Preset(muon_groups, plain_schedule),
    "normuon": Preset(normuon_groups, plain_schedule),
    "default": Preset(recipe.param_groups, recipe.schedule),
}


class Contender:
    """SOURCE[:key=value,...]: a preset or a Python file, with keywords for its two functions and lr_scale.

    InputError for what is neither, and for keywords that neither function has.
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
        self.functions()  # raises for unknown keywords

    @property
    def name(self):
        if not self.options:
            return self.source
        options = ",".join(f"{key}={value}".replace(" ", "") for key, value in self.options.items())
        return f"{self.source}:{options}"

    def with_options(self, options):
        """The same with these options beside, or in place of, its own."""
        text = ",".join(f"{key}={value}" for key, value in {**self.options, **options}.items())
        return Contender(f"{self.source}:{text}")

    def keywords(self):
        """{keyword: default} of its two functions."""
        build, schedule = self.unbound()
        return defaults(build, 1) | defaults(schedule, 3)

    def functions(self):
        """build(model) and schedule(group, step, steps), each with the options that it knows."""
        build, schedule = self.unbound()
        of_build, of_schedule = defaults(build, 1), defaults(schedule, 3)
        known = ["lr_scale", *of_build, *of_schedule]
        unknown = self.options.keys() - set(known)
        if unknown:
            raise InputError(
                f"contender {self.source} has no {', '.join(unknown)}; it has {', '.join(known)}"
            )
        return self.bound(build, of_build), self.bound(schedule, of_schedule)

    def unbound(self):
        """Its two functions, as they are defined."""
        if self.is_preset:
            return PRESETS[self.source].build, PRESETS[self.source].schedule
        build, own_schedule = load_recipe(self.source)
        return build, own_schedule or recipe.schedule

    def bound(self, function, keywords):
        options = {key: value for key, value in self.options.items() if key in keywords}
        return functools.partial(function, **options)

    def prepare(self, model, setup):
        """(optimizer, its groups as built, schedule) for a model."""
        build, schedule = self.functions()
        batch = setup["rows"] * model.config.seq_len
        optimizer = make_optimizer(build, model, batch, setup["steps"], ns_dtype=model.compute_dtype)
        for group in optimizer.param_groups:
            group["lr"] *= self.lr_scale
        built = [dict(group) for group in optimizer.param_groups]
        check_schedule(schedule, built, setup["steps"])
        return optimizer, built, schedule

    def key(self, setup):
        """Changes with its file's code and its hyperparameters at every step.

        What a contender's file imports is not looked at.
        """
        code = [] if self.is_preset else [code_digest(self.source)]
        steps = setup["steps"]
        _, groups, schedule = self.prepare(empty_model(setup, "cpu"), setup)
        course = []
        for step in range(steps):
            course.append([schedule(group, step, steps) for group in groups])
        return digest(*code, described(groups), course)


def defaults(function, given):
    """{keyword: default} of a function, without the arguments that it is `given` by position."""
    parameters = list(inspect.signature(function).parameters.values())[given:]
    return {parameter.name: parameter.default for parameter in parameters}


def parse_options(text, options):
    """{key: value} of key=value,key=value; text: all of the contender, for the error message."""
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
            parsed[key] = value
    return parsed


def described(groups):
    """Param groups without their parameters."""
    descriptions = []
    for group in groups:
        descriptions.append({key: value for key, value in group.items() if key != "params"})
    return descriptions
