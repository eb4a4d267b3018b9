"""Race optimizers on a fixed task, over several seeds, and say in words which differences are real.

    python -m scripts.optim_race --text tinyshakespeare.txt --contenders default adamw muon normuon --seeds 5
    python -m scripts.optim_race --text tinyshakespeare.txt --contenders default default:matrix_lr=0.03 my_idea.py
    python -m scripts.optim_race --text tinyshakespeare.txt --contenders adamw my_idea.py --sweep 0.5,1,2
    python -m scripts.optim_race --task python --contenders adamw default --seeds 3

A contender is a preset (adamw, muon, normuon, default: the recipe of base_train) or a Python file with

    def param_groups(model, *, beta=0.9): ...    # groups for MuonAdamW; or build_optimizer(model): any torch optimizer
    def schedule(group, step, steps): ...        # optional: {"lr": ..., ...} of a group, as built, at a step from 0

NAME:key=value,key=value passes keywords on to both functions; lr_scale=X multiplies every learning rate. An optimizer
that evaluates other weights than it trains (an average, say) swaps them in its eval() and train(). Contenders get the
same initial weights and the same rows per seed. Every finished run is kept in races/NAME under NANOMUON_BASE_DIR: an
interrupted race goes on, and a race with more seeds or contenders trains only what is new.
"""

import argparse
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
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import numpy as np
import torch

from nanomuon import attention, compare, gpt, optim, orthogonalize, recipe, report
from nanomuon.evaluate import bits_per_byte
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.param_groups import build_param_groups
from nanomuon.runtime import InputError, base_dir, compile_enabled, run_command
from nanomuon.schedule import lr_multiplier

EVAL_ROWS = 64  # rows of a batch of validation windows

# ----------------------------------------------------------------------------------------------------------------------
# Contenders


def preset_groups(model, matrices, embedding_lr, unembedding_lr, scalar_lr):
    """The presets differ in how they train the matrices; the rest gets AdamW with a rate per role from all of them."""
    adamw = dict(betas=(0.8, 0.95), eps=1e-8, weight_decay=0.0)
    groups = build_param_groups(
        model,
        muon={},
        adamw=dict(adamw, lr=scalar_lr),
        skip_keys=["value_gate"],
        roles={"wte": dict(adamw, lr=embedding_lr), "value_embeds": dict(adamw, lr=embedding_lr),
               "lm_head": dict(adamw, lr=unembedding_lr)},
    )  # fmt: skip
    return [{**group, **matrices} if group["kind"] == "muon" else group for group in groups]


def adamw_groups(
    model, *, matrix_lr=0.004, embedding_lr=0.1, unembedding_lr=0.01, scalar_lr=0.02, weight_decay=0.1
):
    matrices = dict(kind="adamw", lr=matrix_lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay)
    return preset_groups(model, matrices, embedding_lr, unembedding_lr, scalar_lr)


def muon_groups(
    model, *, matrix_lr=0.02, embedding_lr=0.1, unembedding_lr=0.01, scalar_lr=0.02, beta2=None, weight_decay=0.0
):
    """Muon as its author wrote it (https://kellerjordan.github.io/posts/muon)."""
    matrices = dict(lr=matrix_lr, momentum=0.95, ns_steps=5, beta2=beta2, weight_decay=weight_decay,
                    coefficients="simple", weight_decay_form="decoupled")  # fmt: skip
    return preset_groups(model, matrices, embedding_lr, unembedding_lr, scalar_lr)


def plain_schedule(group, step, steps, *, warmup_ratio=0.0, warmdown_ratio=1.0):
    return {"lr": group["lr"] * lr_multiplier(step, steps, warmup_ratio, warmdown_ratio)}


PRESETS = {
    "adamw": (adamw_groups, plain_schedule),
    "muon": (muon_groups, plain_schedule),
    "normuon": (functools.partial(muon_groups, beta2=0.95), plain_schedule),  # arXiv 2510.05491
    "default": (recipe.param_groups, recipe.schedule),
}


def parse_contender(text):
    """(source, options) of SOURCE[:key=value,...]."""
    source, _, rest = text.partition(":")
    options = {}
    for part in re.split(r",(?![^(]*\))", rest) if rest else []:
        key, equals, value = part.partition("=")
        if not equals:
            raise InputError(f"contender {text}: {part!r} is not key=value")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    if source not in PRESETS and not Path(source).is_file():
        raise InputError(f"contender {source} is neither a file nor one of {', '.join(PRESETS)}")
    return source, options


def contender_name(source, options):
    return source + ":" * bool(options) + ",".join(f"{key}={value}" for key, value in options.items())


def open_contender(source, options):
    """build(model) -> param groups or optimizer, schedule(group, step, steps), each with its share of the options."""
    build, schedule = PRESETS[source] if source in PRESETS else recipe.load_recipe(source)
    schedule = schedule or recipe.schedule
    rest = {key: value for key, value in options.items() if key != "lr_scale"}
    bound = []
    for function, given in ((build, 1), (schedule, 3)):
        known = list(inspect.signature(function).parameters)[given:]
        bound.append(functools.partial(function, **{key: rest.pop(key) for key in known if key in rest}))
    if rest:
        known = [*list(inspect.signature(build).parameters)[1:], *list(inspect.signature(schedule).parameters)[3:]]
        raise InputError(f"contender {source} has no {', '.join(rest)}; it has {', '.join(['lr_scale', *known])}")
    return bound


def digest(*parts):
    """Twelve hex digits of any JSON-like values and bytes."""
    state = hashlib.sha256()
    for part in parts:
        state.update(part if isinstance(part, bytes) else json.dumps(part, sort_keys=True, default=repr).encode())
    return state.hexdigest()[:12]


def contender_key(source, options, task):
    """Changes with whatever could change what the contender does: its code, and its hyperparameters over the run."""
    code = [Path(module.__file__).read_bytes() for module in (optim, orthogonalize)]
    build, schedule = open_contender(source, options)
    if source not in PRESETS:
        return digest(*code, Path(source).read_bytes(), options)
    with torch.device("meta"):
        groups = build(GPT(GPTConfig(**task["model"])))
    course = [[schedule(group, step, task["steps"]) for group in groups] for step in range(task["steps"])]
    return digest(*code, described(groups), course, options.get("lr_scale", 1))


def described(groups):
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


# ----------------------------------------------------------------------------------------------------------------------
# Tasks


def shakespeare_task(args):
    """Characters of a text: the first 90% to train on, the loss over all windows of the last 10% to score."""
    if not args.text or not Path(args.text).is_file():
        raise InputError("--task shakespeare needs --text FILE, a plain text such as tinyshakespeare.txt")
    text = Path(args.text).read_text()
    model = dict(vocab_size=len(set(text)), seq_len=64, depth=4, width=128, heads=4, kv_heads=4)
    return dict(data=digest(text.encode()), model=model, rows=12, micro_rows=12, steps=2000, eval_every=50,
                eval_batches=4, unit="nats per character")  # fmt: skip


def shakespeare_data(task, path, seed, device):
    text = Path(path).read_text()
    ids = {character: index for index, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([ids[character] for character in text])
    cut, length, rows = int(0.9 * len(tokens)), task["model"]["seq_len"], task["rows"]
    windows = tokens[:cut].unfold(0, length + 1, 1)

    def training():
        for step in itertools.count():
            starts = np.random.default_rng([seed, step]).integers(len(windows), size=rows)
            batch = windows[torch.from_numpy(starts)].to(device)
            yield batch[:, :-1].contiguous(), batch[:, 1:].contiguous()

    count = (len(tokens) - cut - 1) // length
    inputs = tokens[cut : cut + count * length].view(count, length).to(device)
    targets = tokens[cut + 1 : cut + 1 + count * length].view(count, length).to(device)
    filled = -(-count // EVAL_ROWS) * EVAL_ROWS - count  # one shape to compile
    inputs = torch.cat([inputs, inputs.new_zeros(filled, length)])
    targets = torch.cat([targets, targets.new_full((filled, length), -1)])
    validation = list(zip(inputs.split(EVAL_ROWS), targets.split(EVAL_ROWS), strict=True))
    return training(), validation, torch.ones(len(ids), device=device)


TASKS = {"shakespeare": (shakespeare_task, shakespeare_data)}

# ----------------------------------------------------------------------------------------------------------------------
# One run


def train(task, path, source, options, seed, file):
    """Train one contender with one seed and write its result to `file`."""
    device = torch.device("cpu")
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**task["model"])).to(device)
    model.init_weights(seed)
    initial = digest(*(p.detach().cpu().numpy().tobytes() for p in model.parameters()))
    build, schedule = open_contender(source, options)
    optimizer = recipe.make_optimizer(build(model))
    for group in optimizer.param_groups:
        group["lr"] *= options.get("lr_scale", 1)
    start = [dict(group) for group in optimizer.param_groups]
    forward = torch.compile(model, dynamic=False) if compile_enabled() else model
    batches, validation, token_bytes = TASKS[task["name"]][1](task, path, seed, device)
    some = validation[:: max(1, len(validation) // task["eval_batches"])]
    nats = math.log(2) if task["unit"].startswith("nats") else 1

    def score(on):
        getattr(optimizer, "eval", lambda: None)()
        value = nats * bits_per_byte(forward, on, token_bytes)
        getattr(optimizer, "train", lambda: None)()
        return value

    rows, curve, step_ms, optimizer_ms = hashlib.sha256(), [(0, score(some))], [], []
    for step in range(task["steps"]):
        began = time.perf_counter()
        for group, values in zip(optimizer.param_groups, start, strict=True):
            group.update(schedule(values, step, task["steps"]))
        for _ in range(task["rows"] // task["micro_rows"]):
            inputs, targets = next(batches)
            (forward(inputs, targets) * task["micro_rows"] / task["rows"]).backward()
            rows.update(inputs.cpu().numpy().tobytes())
        before = time.perf_counter()
        optimizer.step()
        now = time.perf_counter()
        optimizer.zero_grad()
        step_ms.append(1000 * (now - began))
        optimizer_ms.append(1000 * (now - before))
        if (step + 1) % task["eval_every"] == 0 or step + 1 == task["steps"]:
            curve.append((step + 1, score(some)))
            if not math.isfinite(curve[-1][1]):
                break
    result = {
        "contender": contender_name(source, options), "seed": seed, "score": score(validation), "curve": curve,
        "step_ms": statistics.median(step_ms), "optimizer_ms": statistics.median(optimizer_ms), "initial": initial,
        "rows": rows.hexdigest(), "groups": described(start), "compiled": compile_enabled(),
        "machine": report.machine_description(),
    }  # fmt: skip
    write_json(file, result)
    return result


def write_json(file, content):
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(content, default=repr))
    os.replace(temporary, file)


# ----------------------------------------------------------------------------------------------------------------------
# The race


def open_race(folder, task):
    """Refuse to compare runs of different data or models."""
    file = folder / "task.json"
    task = json.loads(json.dumps(task))
    if file.exists():
        before = json.loads(file.read_text())
        if changed := [f"{key} {before.get(key)!r}, not {task[key]!r}" for key in task if before.get(key) != task[key]]:
            raise InputError(f"race {folder.name} was run with {'; '.join(changed)}: choose another --name")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(file, task)


def run_all(folder, task, path, contenders, seeds, jobs):
    """Results of every contender, {name: [one a seed]}; only what is not there yet is trained."""
    runs = {}  # (name, seed) -> arguments of train
    for source, options in contenders:
        name, key = contender_name(source, options), contender_key(source, options, task)
        slug = re.sub(r"[^\w.=-]+", "_", contender_name(Path(source).name, options))
        for seed in seeds:
            runs[name, seed] = task, path, source, options, seed, folder / f"{slug}-{key}-seed{seed}.json"
    pending = [runs[name, seed] for seed in seeds for name, other in runs
               if seed == other and not runs[name, seed][-1].exists()]  # fmt: skip
    done = len(runs) - len(pending)
    if done:
        print(f"{done} of {len(runs)} runs are there already", flush=True)
    if pending:
        context = multiprocessing.get_context("spawn")
        threads = max(1, len(os.sched_getaffinity(0)) // jobs)
        with ProcessPoolExecutor(min(jobs, len(pending)), context, torch.set_num_threads, (threads,)) as pool:
            running = [pool.submit(train, *run) for run in pending]
            try:
                for future in as_completed(running):
                    result, done = future.result(), done + 1
                    print(
                        f"[{done}/{len(runs)}] {result['contender']} seed {result['seed']}: {result['score']:.4f}, "
                        f"{result['step_ms']:.0f} ms a step, optimizer {result['optimizer_ms']:.1f}", flush=True
                    )  # fmt: skip
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    results = {}
    for (name, _), run in runs.items():
        results.setdefault(name, []).append(json.loads(run[-1].read_text()))
    for seed_results in zip(*results.values(), strict=True):
        if len({(result["initial"], result["rows"]) for result in seed_results}) > 1:
            raise InputError(f"race {folder.name}: initial weights or rows differ between contenders of one seed; the "
                             "model's code has changed since: choose another --name")  # fmt: skip
    return results


def table(header, rows):
    rows = [header, *rows]
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(header))]
    return "\n".join("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                     for row in rows)  # fmt: skip


def summarize(results, baseline, targets, unit):
    lines, reference = [], [result["score"] for result in results[baseline]]
    others = [name for name in results if name != baseline]
    differences = {name: compare.paired_difference([r["score"] for r in results[name]], reference) for name in others}
    adjusted = dict(zip(others, compare.holm([differences[name].p for name in others]), strict=True))
    for name, runs in results.items():
        mean, error = compare.mean_and_error([run["score"] for run in runs])
        step_ms = statistics.median(run["step_ms"] for run in runs)
        row = [name, len(runs), f"{mean:.4f}", f"{error:.4f}"]
        row += [f"{differences[name].mean:+.4f}", f"{differences[name].low:+.4f} to {differences[name].high:+.4f}"
                ] if name in differences else ["", "baseline"]  # fmt: skip
        for target in targets:
            reached = [compare.crossing(corrected(run), target) for run in runs]
            if None in reached:
                row.append("-")
            else:
                row.append(f"{statistics.fmean(reached):.0f} ({statistics.fmean(reached) * step_ms / 1000:.0f} s)")
        row += [f"{step_ms:.0f}", f"{statistics.median(run['optimizer_ms'] for run in runs):.1f}"]
        lines.append(row)
    header = ["contender", "seeds", "mean", "error", "difference", "95% interval", *(f"steps to {t}" for t in targets),
              "step ms", "optimizer ms"]  # fmt: skip
    words = [f"{name}: {compare.verdict(differences[name], adjusted[name])}" for name in others]
    return f"{unit}\n" + table(header, lines) + "\n" + "\n".join(words)


def corrected(run):
    """The curve, measured on some of the windows, moved by what all of them differ from those at the end."""
    shift = run["score"] - run["curve"][-1][1]
    return [(step, loss + shift) for step, loss in run["curve"]]


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m scripts.optim_race", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--task", default="shakespeare", choices=TASKS, help="(default: %(default)s)")
    add("--text", help="the text of the shakespeare task")
    add("--contenders", nargs="+", required=True, metavar="NAME_OR_FILE[:key=value,...]")
    add("--baseline", help="the contender that the others are compared with (default: the first)")
    add("--seeds", type=int, default=5, help="runs per contender (default: %(default)s)")
    add("--first-seed", type=int, default=0, help="(default: %(default)s)")
    add("--steps", type=int, help="optimizer steps (default: the task's)")
    add("--model", nargs="+", default=[], metavar="KEY=VALUE", help="other fields of GPTConfig")
    add("--targets", type=lambda text: [float(part) for part in text.split(",")], default=[], help="losses: how soon "
        "is each reached, e.g. 1.775,1.6")  # fmt: skip
    add("--name", help="folder under races/ (default: the task)")
    add("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time (default: %(default)s)")
    args = parser.parse_args(argv)
    task = {"name": args.task, **TASKS[args.task][0](args)}
    task["steps"] = args.steps or task["steps"]
    for pair in args.model:
        key, _, value = pair.partition("=")
        task["model"][key] = ast.literal_eval(value)
    task["code"] = digest(*(Path(module.__file__).read_bytes() for module in (gpt, attention)))
    folder = base_dir() / "races" / (args.name or args.task)
    contenders = [parse_contender(text) for text in args.contenders]
    names = [contender_name(*contender) for contender in contenders]
    baseline = contender_name(*parse_contender(args.baseline)) if args.baseline else names[0]
    open_race(folder, task)
    with torch.device("meta"):
        counts = GPT(GPTConfig(**task["model"])).parameter_counts()
    print(f"{counts['total'] - counts['wte']:,} parameters outside the token embedding, {counts['wte']:,} in it")
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    results = run_all(folder, task, args.text, contenders, seeds, args.jobs)
    print(summarize(results, baseline, args.targets, task["unit"]))


if __name__ == "__main__":
    run_command(main)
