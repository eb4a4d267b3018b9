"""The laboratory: contenders, the tasks they race on, and one run of one of them. scripts/optim_race.py
drives it.
"""

import ast
import functools
import hashlib
import inspect
import itertools
import json
import math
import multiprocessing
import os
import re
import statistics
import threading
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from nanomuon import attention, gpt, moe, optim, orthogonalize, qk_clip, recipe, report, shards
from nanomuon.dataloader import TrainLoader, validation_batches
from nanomuon.evaluate import bits_per_byte
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.param_groups import build_param_groups
from nanomuon.runtime import InputError, compile_enabled, start, write_json, write_text
from nanomuon.schedule import lr_multiplier
from nanomuon.tokenizer import Tokenizer

EVAL_ROWS = 64  # windows of a validation batch of the shakespeare task

# ------------------------------------------------------------------------------------------------------------
# Contenders. The presets stay as they are while the recipe moves on.


def preset_groups(model, matrices, embedding_lr, unembedding_lr, scalar_lr):
    """The presets differ in how they train the matrices; the rest gets AdamW with a rate per role from all of
    them.
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
    return [{**group, **matrices} if group["kind"] == "muon" else group for group in groups]


def adamw_groups(
    model, *, matrix_lr=0.004, embedding_lr=0.1, unembedding_lr=0.01, scalar_lr=0.02, weight_decay=0.1
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


def plain_schedule(group, step, steps, *, warmup_ratio=0.0, warmdown_ratio=1.0):
    return {"lr": group["lr"] * lr_multiplier(step, steps, warmup_ratio, warmdown_ratio)}


PRESETS = {
    "adamw": (adamw_groups, plain_schedule),
    "muon": (muon_groups, plain_schedule),
    "normuon": (functools.partial(muon_groups, beta2=0.95), plain_schedule),  # arXiv 2510.05491
    "default": (recipe.param_groups, recipe.schedule),
}


class Contender:
    """SOURCE[:key=value,...]: a preset or a Python file, with keywords for its two functions and lr_scale.

    InputError for what is neither, and for keywords that neither function has.
    """

    def __init__(self, text):
        self.source, _, rest = text.partition(":")
        if self.source not in PRESETS and not Path(self.source).is_file():
            raise InputError(f"contender {self.source} is neither a file nor one of {', '.join(PRESETS)}")
        self.options = {}
        for part in (
            re.split(r",(?![^([]*[)\]])", rest) if rest else []
        ):  # betas=(0.9,0.95) has a comma of its own
            key, equals, value = part.partition("=")
            if not equals:
                raise InputError(f"contender {text}: {part!r} is not key=value")
            try:
                self.options[key] = ast.literal_eval(value)
            except (ValueError, SyntaxError):
                self.options[key] = value
        scale = self.options.get("lr_scale", 1)
        if not isinstance(scale, int | float) or not 0 <= scale < math.inf:
            raise InputError(f"contender {text}: lr_scale must be a number, not negative, but is {scale}")
        self.functions()

    @property
    def name(self):
        options = ",".join(f"{key}={value}".replace(" ", "") for key, value in self.options.items())
        return self.source + (options and f":{options}")

    def scaled(self, factor):
        """The same with all its learning rates multiplied."""
        scale = {"lr_scale": self.options.get("lr_scale", 1) * factor}
        options = ",".join(f"{key}={value}" for key, value in {**self.options, **scale}.items())
        return self if factor == 1 else Contender(f"{self.source}:{options}")

    def functions(self):
        """build(model) and schedule(group, step, steps), each with the options that it knows."""
        build, schedule = PRESETS[self.source] if self.source in PRESETS else recipe.load_recipe(self.source)
        bound, known = [], ["lr_scale"]
        for function, given in ((build, 1), (schedule or recipe.schedule, 3)):
            keywords = list(inspect.signature(function).parameters)[given:]
            known += keywords
            bound.append(
                functools.partial(function, **{k: v for k, v in self.options.items() if k in keywords})
            )
        if unknown := self.options.keys() - set(known):
            raise InputError(
                f"contender {self.source} has no {', '.join(unknown)}; it has {', '.join(known)}"
            )
        return bound

    def prepare(self, model, task):
        """(optimizer, its groups as built, schedule) for a model."""
        build, schedule = self.functions()
        optimizer = recipe.make_optimizer(build, model, task["rows"] * model.config.seq_len)
        for group in optimizer.param_groups:
            group["lr"] *= self.options.get("lr_scale", 1)
        built = [dict(group) for group in optimizer.param_groups]
        recipe.check_schedule(schedule, built, task["steps"])
        return optimizer, built, schedule

    def key(self, task):
        """Changes with its code, that of the optimizer, and its hyperparameters at every step. What a
        contender's file imports is not looked at.
        """
        code = [Path(module.__file__).read_bytes() for module in (optim, orthogonalize)]
        code += [Path(self.source).read_bytes()] if self.source not in PRESETS else []
        _, groups, schedule = self.prepare(empty_model(task, "cpu"), task)
        course = [[schedule(group, step, task["steps"]) for group in groups] for step in range(task["steps"])]
        return digest(*code, described(groups), course)


def described(groups):
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def digest(*parts):
    """Twelve hex digits of bytes and of values like those of JSON; a function counts by its name."""
    state = hashlib.sha256()
    for part in parts:
        state.update(
            part if isinstance(part, bytes) else json.dumps(part, sort_keys=True, default=_text).encode()
        )
    return state.hexdigest()[:12]


def _text(value):
    return getattr(value, "__qualname__", None) or str(value)


# ------------------------------------------------------------------------------------------------------------
# Tasks. A task is a dict of all that two runs must share to be compared. data(task, place, seed, device)
# gives the training batches, in an order that is a function of the seed, the validation batches, and the
# bytes of each token.


def shakespeare_task(text, vocab_size=None):
    """Characters of a text: the first 90% to train on, the loss over all windows of the last 10% to score."""
    if not text:
        raise InputError("the task shakespeare needs --text FILE, a plain text such as tinyshakespeare.txt")
    try:
        characters = Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--text {text}: {getattr(error, 'strerror', None) or 'not UTF-8'}") from error
    if len(characters) < 1000:
        raise InputError(f"--text {text} has {len(characters)} characters, too few to train on")
    model = dict(vocab_size=len(set(characters)), seq_len=64, depth=4, width=128, heads=4, kv_heads=4)
    return text, dict(
        data=digest(characters.encode()),
        model=model,
        rows=12,
        micro_rows=12,
        steps=2000,
        eval_every=50,
        eval_batches=4,
        whole_every=200,
        unit="nats per character",
    )


def shakespeare_data(task, text, seed, device):
    characters = Path(text).read_text(encoding="utf-8")
    ids = {character: index for index, character in enumerate(sorted(set(characters)))}
    tokens = torch.tensor([ids[character] for character in characters])
    cut, length = int(0.9 * len(tokens)), task["model"]["seq_len"]
    count = (len(tokens) - cut - 1) // length
    if count < 1 or cut <= length:
        raise InputError(f"{text} has {len(tokens)} characters, too few for windows of {length}")
    windows = tokens[:cut].unfold(0, length + 1, 1)

    def batches():
        for step in itertools.count():
            starts = np.random.default_rng([seed, step]).integers(len(windows), size=task["rows"])
            rows = windows[torch.from_numpy(starts)].to(device)
            yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    inputs = tokens[cut : cut + count * length].view(count, length).to(device)
    targets = tokens[cut + 1 : cut + 1 + count * length].view(count, length).to(device)
    empty = -count % EVAL_ROWS  # rows that are not scored: one shape to compile
    inputs = torch.cat([inputs, inputs.new_zeros(empty, length)]).view(EVAL_ROWS, -1, length)
    targets = torch.cat([targets, targets.new_full((empty, length), -1)]).view(EVAL_ROWS, -1, length)
    # each batch takes windows from all over the text: some batches then say more about all of them
    validation = [(inputs[:, i].contiguous(), targets[:, i].contiguous()) for i in range(inputs.size(1))]
    return batches(), validation, torch.ones(len(ids), device=device)


def python_task(text=None, vocab_size=None):
    """The corpus that needs no download, with base_train's loader and model of depth 4: bits per byte."""
    return corpus_task(
        "python",
        vocab_size,
        dict(depth=4),
        seq_len=256,
        rows=16,
        micro_rows=16,
        steps=300,
        eval_every=25,
        eval_batches=8,
        whole_every=300,
        unit="bits per byte",
    )


def speedrun_task(text=None, vocab_size=None):
    """The setting of modded-nanogpt's track 3 (records/track_3_optimization): 12 layers, width 768, context
    1,024, 524,288 tokens a step of FineWeb, steps to 3.28 nats per token; its Muon baseline takes 3,800.

    Two things differ, so that its figures compare with each other and not with that track's: the tokenizer is
    our own of GPT-2's size, and the model is this repo's, with value embeddings and residual scalars.
    """
    if not torch.cuda.is_available():
        raise InputError(
            "the task speedrun trains on 2 billion tokens and needs a GPU; shakespeare and python do not"
        )
    shape = dict(depth=12, heads=6, kv_heads=6)
    return corpus_task(
        "hf:HuggingFaceFW/fineweb",
        vocab_size or 50257,
        shape,
        seq_len=1024,
        rows=512,
        micro_rows=16,
        steps=3800,
        eval_every=125,
        eval_batches=64,
        whole_every=500,
        unit="nats per token",
    )


def corpus_task(corpus, vocab_size, shape, seq_len, **rest):
    folder = shards.prepare_for_training(corpus, vocab_size, rest["steps"] * rest["rows"] * seq_len)
    manifest, tokenizer = shards.read_manifest(folder), Tokenizer.load(folder / "tokenizer")
    model = asdict(GPTConfig.from_depth(vocab_size=tokenizer.vocab_size, seq_len=seq_len, **shape))
    first = [manifest["val"][:1], manifest["train"][:1]]  # of a corpus on the hub more may still be written
    return str(folder), dict(data=digest(tokenizer.hash, first), model=model, **rest)


def corpus_data(task, folder, seed, device):
    length, micro_rows = task["model"]["seq_len"], task["micro_rows"]
    batches = TrainLoader(folder, length, task["rows"], micro_rows, seed=seed, device=device)
    validation = list(validation_batches(folder, length, micro_rows, device=device))
    token_bytes = torch.from_numpy(Tokenizer.load(Path(folder) / "tokenizer").token_bytes).to(device)
    if task["unit"] == "nats per token":
        token_bytes = (token_bytes > 0).float()
    return batches, validation, token_bytes


TASKS = {
    "shakespeare": (shakespeare_task, shakespeare_data, [1.775, 1.6]),
    "python": (python_task, corpus_data, [1.5, 1.4]),
    "speedrun": (speedrun_task, corpus_data, [3.5, 3.28]),
}


def open_task(name, text, vocab_size, steps, model):
    """(where its data is, the task) with other numbers of steps and other fields of GPTConfig where they are
    given.
    """
    place, task = TASKS[name][0](text, vocab_size)
    task = {"name": name, **task, "model": {**task["model"], **model}}
    task |= {"steps": steps or task["steps"], "device": "cuda" if torch.cuda.is_available() else "cpu"}
    try:
        task["model"] = asdict(GPTConfig(**task["model"]))
    except (TypeError, ValueError) as error:
        raise InputError(f"--model: {error}") from error
    task["model_code"] = digest(
        *(Path(module.__file__).read_bytes() for module in (gpt, attention, moe, qk_clip))
    )
    return place, task


def empty_model(task, device, dtype=torch.float32):
    with torch.device("meta"):
        model = GPT(GPTConfig(**task["model"]), dtype)
    return model.to_empty(device=device)


# ------------------------------------------------------------------------------------------------------------
# Runs


def train(task, place, text, seed, file):
    """Train the contender `text` with one seed; the result goes to `file` as JSON, at once and whole.

    curve: [step, loss over a part of the validation set, over all of it or null]; score: the last of these;
    step_ms and optimizer_ms: medians; initial, rows: digests of the first parameters and of every row trained
    on.
    """
    runtime, contender = start(), Contender(text)
    torch.manual_seed(seed)
    model = empty_model(task, runtime.device, runtime.compute_dtype)
    model.init_weights(seed)
    optimizer, built, schedule = contender.prepare(model, task)
    initial = digest(*(p.detach().cpu().numpy().tobytes() for p in model.parameters()))
    forward = torch.compile(model, dynamic=False) if compile_enabled() else model
    batches, validation, token_bytes = TASKS[task["name"]][1](task, place, seed, runtime.device)
    part = validation[:: max(1, len(validation) // task["eval_batches"])]
    accumulation = task["rows"] // task["micro_rows"]

    def evaluate(batches):
        getattr(optimizer, "eval", lambda: None)()
        bits = bits_per_byte(forward, batches, token_bytes)
        getattr(optimizer, "train", lambda: None)()
        return bits * math.log(2) if task["unit"].startswith("nats") else bits

    def now():
        if runtime.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    rows, curve, step_ms, optimizer_ms = hashlib.sha256(), [], [], []
    for step in range(task["steps"] + 1):
        last = step == task["steps"]
        if step % task["eval_every"] == 0 or last:
            whole = last or (step > 0 and step % task["whole_every"] == 0)
            curve.append((step, evaluate(part), evaluate(validation) if whole else None))
        if last:
            break
        began = now()
        for group, values in zip(optimizer.param_groups, built, strict=True):
            group.update(schedule(values, step, task["steps"]))
        for _ in range(accumulation):
            inputs, targets = next(batches)
            (forward(inputs, targets) / accumulation).backward()
            rows.update(inputs.cpu().numpy())
        before = now()
        optimizer.step()
        after = now()
        optimizer.zero_grad()
        step_ms.append(1000 * (after - began))
        optimizer_ms.append(1000 * (after - before))
    result = {
        "contender": text,
        "seed": seed,
        "score": curve[-1][-1],
        "curve": curve,
        "step_ms": statistics.median(step_ms),
        "optimizer_ms": statistics.median(optimizer_ms),
        "initial": initial,
        "rows": rows.hexdigest()[:12],
        "groups": described(built),
        "compiled": compile_enabled(),
        "machine": report.machine_description(),
    }
    write_text(file, json.dumps(result, indent=1, default=_text) + "\n")
    return result


def run_all(folder, task, place, contenders, seeds, jobs):
    """{name: its results, one a seed} of every contender; only what is not in `folder` yet is trained.

    `jobs` runs at a time, each in a process of one thread or on a GPU. InputError where `folder` holds runs
    of another task, or where two contenders had not the same start and the same rows.
    """
    check_task(folder, task)
    files = {}
    for contender in contenders:
        key, slug = contender.key(task), re.sub(r"[^\w.=-]+", "_", contender.name)
        files |= {(contender.name, seed): folder / f"{slug}-{key}-seed{seed}.json" for seed in seeds}
    pending = [
        (name, seed)
        for seed in seeds
        for name, other in files
        if other == seed and not files[name, seed].exists()
    ]
    if len(pending) < len(files):
        print(f"{len(files) - len(pending)} of {len(files)} runs are there already", flush=True)
    if pending:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(
            min(jobs, len(pending)), context, start_worker, (context.Value("i", 0),)
        ) as pool:
            running = [
                pool.submit(train, task, place, name, seed, files[name, seed]) for name, seed in pending
            ]
            try:
                for done, future in enumerate(as_completed(running), len(files) - len(pending) + 1):
                    result = future.result()
                    print(
                        f"[{done}/{len(files)}] {result['contender']} seed {result['seed']}: {result['score']:.4f}, "
                        f"{result['step_ms']:.0f} ms a step, optimizer {result['optimizer_ms']:.1f}",
                        flush=True,
                    )
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    results = {}
    for (name, _), file in files.items():
        results.setdefault(name, []).append(json.loads(file.read_text()))
    for runs in zip(*results.values(), strict=True):
        if len({(run["initial"], run["rows"]) for run in runs}) > 1:
            raise InputError(
                f"race {folder.name}: the contenders of seed {runs[0]['seed']} differ in initial weights or rows: does "
                "one change them, or has the code changed? Choose another --name"
            )
    return results


def start_worker(counter):
    """One thread, or a GPU, for this process; it ends with the one that started it, however that ends."""
    threading.Thread(
        target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True
    ).start()
    with counter.get_lock():
        index, counter.value = counter.value, counter.value + 1
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        os.environ["LOCAL_RANK"] = str(index % torch.cuda.device_count())


def check_task(folder, task):
    """Write the task of a new race; refuse to add runs with different data or another model to one that
    exists.
    """
    file = folder / "task.json"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(file, task)
    before = json.loads(file.read_text())
    if changed := [
        f"{key} {before.get(key)}, not {task[key]}" for key in task if before.get(key) != task[key]
    ]:
        raise InputError(f"race {folder.name} was run with {'; '.join(changed)}: choose another --name")
