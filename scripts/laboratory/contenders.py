"""What races: the default, or a user's file in its place."""

import ast
import functools
import inspect
import re
from pathlib import Path

import torch
from scipy.stats import qmc

from nanomuon import recipe
from nanomuon.gpt import GPT
from nanomuon.runtime import InputError
from nanomuon.settings import sha256_of
from nanomuon.trained import model_sources
from scripts.laboratory.tasks import FIELDS, batch_of, changed_config, check_fields, digest


class Contender:
    """SOURCE[:key=value,...]. SOURCE: `default` or a Python file. Keys: keywords of its functions, fields of
    its model, and lr_scale.

    Raises InputError if SOURCE is neither, and for keys that it does not have.
    """

    def __init__(self, text):
        self.name = text
        self.source, _, options = text.partition(":")
        self.options = parse_options(f"contender {text}", options)
        build, schedule, names, self.sha256 = recipe.param_groups, recipe.schedule, {}, None
        if Path(self.source).is_file():
            build, schedule, names = recipe.load_recipe(self.source)
            self.sha256 = sha256_of(self.source)
        elif self.source != "default":
            raise InputError(
                f"contender {self.source} is neither default nor a file, such as contenders/adamw.py"
            )
        build_model, self.dial = names.get("model", GPT), names.get("DIAL")
        if isinstance(build_model, torch.nn.Module):
            raise InputError(f"contender {text}: model must be a class or function, not a finished model")
        of_model = keywords(build_model, 2, {})
        of_build = keywords(build, 1, recipe.RATES)
        of_schedule = keywords(schedule, 3, recipe.SCHEDULE)
        self.keywords = {"lr_scale": 1} | of_model | of_build | of_schedule  # {keyword: default}
        fields = [name for name in FIELDS if name != "seq_len"]  # the race decides the length of its rows
        known = [*self.keywords, *fields]
        if unknown := self.options.keys() - set(known):
            raise InputError(
                f"contender {self.source} has no {', '.join(unknown)}; it has {', '.join(known)}"
            )
        declared = recipe.RATES | recipe.SCHEDULE
        for key, value in self.options.items():
            if isinstance(self.keywords.get(key), int | float) and not isinstance(value, int | float):
                raise InputError(f"contender {text}: {key} must be a number, not {value!r}")
            if key in declared and isinstance(value, int | float) and not 0 <= value <= declared[key].largest:
                raise InputError(f"contender {text}: {key} must be from 0 to {declared[key].largest:g}")
        self.build_model = functools.partial(build_model, **self.chosen(of_model))  # (config, compute_dtype)
        self.build = functools.partial(build, **self.chosen(of_build))  # (model)
        self.schedule = functools.partial(schedule, **self.chosen(of_schedule))  # (group, step, steps)
        recipe.check_call(self.build_model, "config", "compute_dtype")
        recipe.check_call(self.schedule, "group", "step", "steps")
        if "lr_scale" in self.options:
            self.schedule = functools.partial(scaled, self.schedule, self.options["lr_scale"])
        self.fields = self.chosen(set(fields) - self.keywords.keys())
        check_fields(f"contender {text}", self.fields)

    def chosen(self, keys):
        return {key: value for key, value in self.options.items() if key in keys}

    def with_options(self, options):
        """The same contender, with these options added to its own or replacing them."""
        text = ",".join(f"{key}={value!r}" for key, value in {**self.options, **options}.items())
        return Contender(f"{self.source}:{text}")

    def model(self, setup, device):
        """Its model, with uninitialized parameters."""
        config = changed_config(f"contender {self.name}", setup["model"], self.fields)
        with torch.device("meta"):
            model = self.build_model(config, getattr(torch, setup["dtype"]))
        if not isinstance(model, GPT):
            raise InputError(
                f"contender {self.name}: model(config, compute_dtype) must return a subclass of GPT"
            )
        return model.to_empty(device=device)

    def initial_model(self, setup, device, seed):
        """Its initial model. Parameters whose name and shape occur in the default model have its values."""
        default, model = Contender("default").model(setup, device), self.model(setup, device)
        default.init_weights(seed)
        model.init_weights(seed)
        values = dict(default.named_parameters())
        with torch.no_grad():
            for name, param in model.named_parameters():
                if name in values and values[name].shape == param.shape:
                    param.copy_(values[name])
        return model

    def describe(self, setup):
        """Its number of parameters, and a warning of new tensors that start at zero, one fact per line. Tries
        one step on the CPU, so that an error in its file comes before the first run.
        """
        known = tensors(Contender("default").model(setup, "meta"))
        model = self.initial_model(setup, "cpu", seed=0)
        facts = [f"{self.name}: {sum(param.numel() for param in model.parameters()):,} parameters"]
        zeros = [name for name, tensor in tensors(model).items() if name not in known and not tensor.any()]
        if zeros:
            facts.append(
                f"warning: {self.name}: {', '.join(zeros)} start at zero; if such a tensor is multiplied by "
                "another one that starts at zero, neither learns: initialize one in the model's init_weights "
                "(values set in a constructor are discarded)"
            )
        optimizer, _ = self.prepare(model, setup)
        tokens = torch.randint(model.config.vocab_size, (1, model.config.seq_len))
        model(tokens, tokens).backward()
        optimizer.step()
        return facts

    def prepare(self, model, setup):
        """(optimizer, its groups as they were built) for a model."""
        try:
            optimizer = recipe.make_optimizer(
                self.build, model, batch_of(setup), setup["steps"], ns_dtype=model.compute_dtype
            )
        except InputError as error:
            raise InputError(f"contender {self.name}: {error}") from error
        return optimizer, [dict(group) for group in optimizer.param_groups]

    def version(self):
        """A digest of its file and the model's code, which may change while a race runs."""
        return digest(self.sha256, model_sources())

    def key(self, setup):
        """A digest of its file, its hyperparameters at every step and the model's code, but not of what else
        the file imports.

        InputError if its functions do not return what they should.
        """
        model = self.initial_model(setup, "cpu", seed=0)  # a file may compute with the weights
        optimizer, groups = self.prepare(model, setup)
        try:
            values = list(recipe.values_at_every_step(self.schedule, groups, setup["steps"]))
        except InputError as error:
            raise InputError(f"contender {self.name}: {error}") from error
        if left_out := recipe.untrained(model, optimizer):
            warn(f"contender {self.source} does not train {len(left_out)} parameters: {left_out[0]}, ...")
        described = []
        for group in groups:
            described.append({key: value for key, value in group.items() if key != "params"})
        return digest(self.version(), described, values)

    def dials(self):
        """{keyword: (low, high)} that a sweep searches: a factor on all rates, the weight decay, one more.

        The last is the dial that the contender's file names, as in DIAL = ("c", 0.1, 0.8), or else the rate
        of the matrices. Keywords with the value zero are not searched.
        """
        declared = recipe.RATES | recipe.SCHEDULE
        widths = {"lr_scale": 3} | {name: each.sweep for name, each in declared.items() if each.sweep}
        if self.dial is not None:
            del widths["matrix_lr"]
        values = self.keywords | self.options
        found = {}
        for key, width in widths.items():
            value = values.get(key)
            if isinstance(value, int | float) and value > 0:
                found[key] = value / width, value * width
        if self.dial is None:
            return found
        match self.dial:
            case (str() as key, int() | float() as low, int() | float() as high):
                if key in self.keywords and low < high:
                    return found | {key: (low, high)}
        raise InputError(
            f"{self.source}: DIAL must be (keyword, low, high), low < high, with one of the keywords "
            f"{', '.join(self.keywords)}, not {self.dial!r}"
        )

    def trials(self, count):
        """The contender itself, and count - 1 variants with its dials at the points of a Sobol sequence."""
        searched = self.dials()
        sequence = qmc.Sobol(len(searched), scramble=False)
        sequence.fast_forward(2)  # skip the lowest corner, and the middle, which is close to the first trial
        chosen = [self]
        for point in sequence.random(count - 1):
            options = {}
            for (key, (low, high)), position in zip(searched.items(), point, strict=True):
                value = dial_value(low, high, position)
                is_count = all(isinstance(each, int) for each in (low, high, self.keywords.get(key)))
                options[key] = round(value) if is_count else value
            chosen.append(self.with_options(options))
        return chosen


def scaled(schedule, lr_scale, group, step, steps):
    """A schedule whose rates are multiplied, also if they do not depend on the group's."""
    values = recipe.values_at(schedule, group, step, steps)
    if "lr" in group:
        values = {**values, "lr": values.get("lr", group["lr"]) * lr_scale}
    return values


def tensors(model):
    """{name: tensor} of its parameters and buffers."""
    return dict([*model.named_parameters(), *model.named_buffers()])


@functools.cache
def warn(text):
    """Print a warning, but only once."""
    print(f"warning: {text}", flush=True)


def dial_value(low, high, position):
    """The value at a position from 0 to 1, logarithmic if low is positive, else linear, with three digits."""
    if low > 0:
        value = low * (high / low) ** position
    else:
        value = low + position * (high - low)
    return float(f"{value:.3g}")


def keywords(function, given, declared):
    """{keyword: default} of a function, without its first `given` arguments, which are positional, and
    without batch and steps, which the race sets. `**keywords` stands for the recipe's hyperparameters
    `declared`.
    """
    found = recipe.keywords_of(function, recipe.with_defaults(declared, {}))
    for name in (*list(inspect.signature(function).parameters)[:given], "batch", "steps"):
        found.pop(name, None)
    return found


def parse_options(source, text):
    """{key: value} of key=value,key=value. source: where they come from, for errors."""
    parsed = {}
    if not text:
        return parsed
    for part in re.split(r",(?=\w+=)", text):  # not at the comma in betas=(0.9,0.95)
        key, equals, value = part.partition("=")
        if not equals:
            raise InputError(f"{source}: {part!r} is not key=value")
        try:
            parsed[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            parsed[key] = float(value) if value in ("inf", "nan") else value
    return parsed
