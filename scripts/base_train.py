"""Pretrain a GPT.

    python -m scripts.base_train --total-batch-size 4096 --num-iterations 300   # what a CPU trains in minutes
    torchrun --standalone --nproc_per_node=8 -m scripts.base_train -- --depth 24 --corpus hf:ORG/NAME
    torchrun ... -m scripts.base_train -- --depth 48 --shard fsdp --tensor-parallel 2   # larger than a GPU
    python -m scripts.base_train --corpus path:my_texts --run mine     # your own text
    python -m scripts.base_train --optimizer-file my_optim.py          # your own: build_optimizer(model)

The -- keeps torchrun from taking --run for its own --run-path. What is not given follows from --depth and the
device. A run lives in runs/NAME under NANOMUON_BASE_DIR; the same command given again carries it on from its
last checkpoint. SIGTERM, SIGHUP and Ctrl-C save and stop it after the step, with exit code 75 (ranks exit
with 0, or torchrun would restart them); runs/NAME/stopped is then there until the run goes on.
"""

import argparse
import os
import re
import statistics
import time
from collections import deque

import torch

from nanomuon import core_bundle, fp8, guards, parallel, provenance, run_folder, shards, sizing, user_file
from nanomuon.arguments import (
    LENGTH_FLAGS,
    RECIPE_FLAGS,
    ArgumentParser,
    add_step_arguments,
    check_not_negative,
    check_one_length,
    check_shares,
    check_step_arguments,
)
from nanomuon.attention import use_flash_attention
from nanomuon.compilation import choose_compilation
from nanomuon.corpus import check_corpus
from nanomuon.launch import Launch, open_core_tasks, prepare_data, start_run
from nanomuon.moe import balance_
from nanomuon.optim import MuonAdamW
from nanomuon.planning import duration, plan_run, print_plan
from nanomuon.qk_clip import clip_
from nanomuon.run import Run, finish, give_up
from nanomuon.runtime import (
    InputError,
    check_at_least_1,
    check_name,
    first_rank_first,
    flag_of,
    make_deterministic,
    peak_flops,
    print0,
    run_command,
    start,
    together,
)

EAGER_STEPS = 3  # before it is decided whether to compile, on a CPU
CORE_ITEMS = 500  # of each task of CORE, in an evaluation on the way
MAX_BAD_STEPS = 10  # this many steps in a row with a loss or gradient that is not finite end the run


def train(run: Run, requests: guards.Requests) -> int | None:
    """The training loop. Returns None once the run has all of its steps, else the exit code."""
    args, plan, device = run.args, run.plan, run.runtime.device
    model, optimizer = run.model, run.optimizer
    is_ours = isinstance(optimizer, MuonAdamW)  # averages gradients and skips what is not finite by itself
    flops_per_token = model.estimate_flops()
    peak = peak_flops(device) if device.type == "cuda" else None
    bad_steps = 0  # in a row, up to the last one
    shown_at, times = 0.0, deque(maxlen=20)  # milliseconds of the last steps

    requests.steps_begin()
    while run.step < plan.steps:
        # Before the next step, not after the last: a signal need not wait for it, and a resumed run makes up
        # for it
        evaluate_what_is_due(run)
        began = time.perf_counter()

        lr_multiplier = set_hyperparameters(run)
        loss = accumulate_gradients(run)
        if run.mesh is not None and args.shard == "none":
            parallel.average_gradients(model, run.mesh)
        gradients_finite = None
        if not is_ours:
            parallel.average_whole_gradients(model)
            gradients_finite = guards.gradients_finite(model)

        # What one rank's signals ask for, and a loss that is not finite on one, holds for all
        agreed = requests.agree(loss, gradients_finite)  # (2,): mean loss, ranks to stop
        finite = agreed[0].isfinite()
        update_began = guards.Moment(device)
        if is_ours:
            optimizer.step(finite=finite)
            skipped = optimizer.skipped_steps
        else:
            # Whether such an optimizer may step at all is for the host to know: one wait for the device more
            if finite:
                optimizer.step()
            skipped = run.skipped + finite.logical_not()
        balance_(model)
        if args.qk_clip:
            clip_(model, args.qk_clip)
        optimizer.zero_grad(set_to_none=True)
        update_ended = guards.Moment(device)

        # The step's one wait for the device: all that the host wants to know, in one copy
        told = torch.cat([agreed.double(), skipped.double().view(1)])
        train_loss, stops, skipped_steps = told.tolist()
        step_ms = 1000 * (time.perf_counter() - began)
        run.step += 1
        if skipped_steps > run.skipped:
            run.skipped += 1
            bad_steps += 1
        else:
            bad_steps = 0
        row = {
            "step": run.step,
            "tokens": run.step * plan.batch,
            "train_loss": train_loss,
            "lr_multiplier": lr_multiplier,
            "step_ms": step_ms,
            "tokens_per_second": 1000 * plan.batch / step_ms,
            "optimizer_ms": update_ended.milliseconds_since(update_began),
            "skipped_steps": run.skipped,
        }
        if peak is not None:
            row["mfu"] = row["tokens_per_second"] * flops_per_token / run.runtime.world_size / peak

        times.append(step_ms)
        if args.compile is None and EAGER_STEPS <= run.step < plan.steps:
            run.decide_compilation(min(times))
        if run.log:
            run.log.log(row)
        if time.perf_counter() - shown_at > 5 or run.step == plan.steps:
            shown_at = time.perf_counter()
            print_progress(row, plan.steps, statistics.median(times))
        if bad_steps:
            what = f"loss {train_loss}; it or a gradient is not finite: no update"
            print0(f"step {run.step}: {what} ({bad_steps} in a row)")
        if bad_steps == MAX_BAD_STEPS:
            return give_up(run, bad_steps)
        # Only a few checkpoints are kept: those of bad steps must not push the good ones out
        due = is_due(args.save_every, run.step) and bad_steps == 0
        is_last = bool(stops) or run.step == plan.steps
        if due or is_last:
            run.save(is_last=is_last)
        if stops:
            return requests.stopped(f"at step {run.step} and saved")
    requests.steps_end()
    return None


def evaluate_what_is_due(run: Run) -> None:
    """The evaluations that come after this many steps, unless an earlier launch has made them."""
    args = run.args
    if is_due(args.eval_every, run.step) and run.step not in run.evaluations:
        run.evaluate(args.eval_tokens)
    if is_due(args.core_every, run.step) and run.core_tasks and run.step not in run.core_steps:
        run.evaluate_core(args.core_items or CORE_ITEMS)


def set_hyperparameters(run: Run) -> float | None:
    """Give each param group the values of this step in place of those it was built with. Returns the
    multiplier of the first group's rate; None where an optimizer of the user's has no rate.
    """
    groups = run.optimizer.param_groups
    for group, initial in zip(groups, run.initial_groups, strict=True):
        group.update(run.schedule(initial, run.step, run.plan.steps))
    if "lr" not in run.initial_groups[0]:
        return None
    return float(groups[0]["lr"] / (run.initial_groups[0]["lr"] or 1))


def accumulate_gradients(run: Run) -> torch.Tensor:
    """Forward and backward of every micro-step. Returns the mean loss over this rank's rows, 0-D, which is
    not read here.
    """
    plan = run.plan
    loss = torch.zeros((), device=run.runtime.device)
    position = run.loader.state_dict()  # of the first of these rows
    for _ in range(plan.micro_steps):
        try:
            inputs, targets = next(run.loader)  # (rows, seq_len) each
        except shards.NobodyWrites:
            save_where_data_ends(run, position)
            raise
        micro_loss = run.forward(inputs, targets) / plan.micro_steps
        micro_loss.backward()
        loss += micro_loss.detach()
    return loss


def save_where_data_ends(run: Run, position: dict) -> None:
    """Keep what has been trained until scripts.data_prep, which has failed, goes on. position: of the loader,
    before the step that cannot be taken. All ranks come here from the same micro-step.
    """
    run.save(position)
    print0(f"stopped at step {run.step} and saved; the same command carries on where there is data again")


def is_due(every: int, step: int) -> bool:
    """Whether what comes every so many steps, -1: never, comes after this many."""
    return every > 0 and step > 0 and step % every == 0


def main(argv: list[str] | None = None) -> int:
    resolved = resolve_arguments(argv)
    first, _, _ = resolved
    requests = guards.Requests(None if first.plan else run_folder.folder_of(first.run))
    if first.deterministic:
        make_deterministic()
    runtime = start()
    args, settings, changed = together(lambda: resolved)[0]  # one settings.json, read once
    source = None
    if args.optimizer_file:
        source = together(lambda: user_file.read_source(args.optimizer_file))[0]
    choose_compilation(args, runtime.device.type)
    if args.fp8:
        fp8.check(runtime, args.tensor_parallel)
    measured = sizing.recalled(settings, args.shard, args.tensor_parallel, runtime)
    runtime = sizing.choose_dtype(args.dtype, runtime, measured)
    # What is wrong with the arguments shows here, before the data is worked on
    together(lambda: check_corpus(args.corpus))
    plan = plan_run(args, args.vocab_size or shards.default_vocab_size(args.corpus), runtime, measured)
    if args.plan:
        print_plan(args, plan, runtime)
        return 0

    folder = run_folder.folder_of(args.run)
    run_folder.check_writable(folder)
    run_folder.check_no_links(folder)
    with run_folder.held(folder, runtime.rank):
        if runtime.rank == 0:
            requests.hold()
        core_tasks = open_core_tasks(args, runtime)
        data, recorded = first_rank_first(
            lambda: prepare_data(args, settings, source, plan.tokens, runtime), runtime
        )
        tokenizer = shards.open_tokenizer(data)
        plan = plan_run(args, tokenizer.vocab_size, runtime, measured)
        if flash := use_flash_attention(runtime.device):
            print0(f"attention: {flash}")
        defined = run_folder.definition(args, plan, tokenizer)
        if args.resume != "never":
            run_folder.check_definition(folder, defined)
        if args.resume == "auto" and run_folder.is_complete(folder, plan.steps):
            return 0
        provenance.check_optimizer_file(settings, args, folder)
        launch = Launch(
            args=args,
            changed_arguments=changed,
            runtime=runtime,
            plan=plan,
            measured=measured,
            source=source,
            data=data,
            tokenizer=tokenizer,
            core_tasks=core_tasks,
            defined=defined,
            recorded=recorded,
        )
        run = start_run(launch)
        code = train(run, requests)
        return finish(run) if code is None else code


def print_progress(row: dict, steps: int, median_ms: float) -> None:
    step = row["step"]
    left = (steps - step) * median_ms / 1000
    rate = "no lr" if row["lr_multiplier"] is None else f"lr x{row['lr_multiplier']:.2f}"
    print0(
        f"step {step:5d}/{steps} | loss {row['train_loss']:.4f} | {rate} | "
        f"{row['step_ms']:.0f} ms | {row['tokens_per_second']:,.0f} tokens/s | "
        f"{100 * step / steps:.0f}% | {duration(left)} left"
    )


def resolve_arguments(argv: list[str] | None) -> tuple[argparse.Namespace, dict, list[str]]:
    """The arguments; the settings of the run if it exists, else {}; and in words what the arguments change in
    it: a run keeps what is not given anew.
    """
    args = parse_arguments(argv, {})
    given = parse_arguments(argv, dict.fromkeys(LENGTH_FLAGS))  # None for a length that is not given
    check_name("--run", args.run)  # before anything is read of the folder that it names
    check_one_length(given)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        args.resume = "auto"  # torchrun has replaced a rank that died on the way
    settings = run_folder.read_settings(run_folder.folder_of(args.run))
    if args.resume == "never" or not settings:
        check_arguments(args)
        return args, {}, []

    folder = run_folder.folder_of(args.run)
    before = run_folder.remembered_options(folder, settings, make_parser())
    try:
        check_arguments(parse_arguments(["--run", args.run], before))
    except InputError as error:
        raise InputError(f"{folder}/settings.json: options: {error}") from error
    remembered = dict(before)
    # A length that is given anew decides the number of steps, in place of the one that is remembered. The
    # ratio, which has a default, stays: it decides where the others are None
    if any(getattr(given, name) is not None for name in LENGTH_FLAGS):
        remembered["num_iterations"] = remembered["target_flops"] = None
    resume = args.resume
    args = parse_arguments(argv, remembered)
    args.resume = resume
    check_arguments(args)
    changed = []
    unused = RECIPE_FLAGS if args.optimizer_file else ()
    for name, value in before.items():
        if getattr(args, name) != value and name not in unused:
            changed.append(f"{flag_of(name)} {getattr(args, name)} (was {value})")
    return args, settings, changed


def check_arguments(args: argparse.Namespace) -> None:
    """InputError for the first argument that cannot be meant."""
    check_step_arguments(args)
    check_at_least_1(args, "eval_tokens", "keep_last", "core_items")
    check_not_negative(
        args,
        "matrix_lr",
        "embedding_lr",
        "unembedding_lr",
        "scalar_lr",
        "weight_decay",
    )
    check_shares(args, "warmup_ratio", "warmdown_ratio")  # together they may be more: they meet below the top
    if args.resume not in ("auto", "never") and not re.fullmatch("step_[0-9]+", args.resume):
        raise InputError(f"--resume is auto, never or the name of a checkpoint, step_N, not {args.resume!r}")
    if args.qk_clip is not None and not (args.no_qk_norm and args.qk_clip > 0):
        raise InputError(
            "--qk-clip is a positive number, for models with --no-qk-norm: the norm bounds logits itself"
        )


def parse_arguments(argv: list[str] | None, remembered: dict) -> argparse.Namespace:
    """What is given, else what is remembered, else the default."""
    return make_parser().parse_args(argv, argparse.Namespace(**remembered))


def make_parser() -> ArgumentParser:
    parser = ArgumentParser("python -m scripts.base_train", __doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--run", default="base", help="name of the run, a folder under runs/ (default: %(default)s)")
    add_step_arguments(parser)  # corpus, model, batch, layout: those that train_bench takes too
    add(
        "--qk-clip",
        type=float,
        metavar="TAU",
        help="with --no-qk-norm: scale heads whose largest attention logit is above TAU back to it, say 100 "
        "(default: off)",
    )
    add(
        "--matrix-lr",
        type=float,
        default=0.02,
        help="Muon learning rate, at 4,096 tokens a step and 2,289 steps; it follows batch and length of the "
        "run, the other rates its length (docs/recipe.md) (default: %(default)s)",
    )
    add(
        "--embedding-lr",
        type=float,
        default=0.3,
        help="AdamW, token and value embeddings (default: %(default)s)",
    )
    add("--unembedding-lr", type=float, default=0.004, help="AdamW, head (default: %(default)s)")
    add("--scalar-lr", type=float, default=0.01, help="AdamW, residual scalars (default: %(default)s)")
    add(
        "--weight-decay",
        type=float,
        default=0.2,
        help="of Muon's matrices, falling to 0 (default: %(default)s)",
    )
    add("--warmup-ratio", type=float, default=0.0, help="share of the run with rising rates (%(default)s)")
    add("--warmdown-ratio", type=float, default=1.0, help="share of the run with falling rates (%(default)s)")
    add(
        "--eval-every",
        type=int,
        default=100,
        help="steps between evaluations, -1: only at the end (%(default)s)",
    )
    add(
        "--eval-tokens",
        type=int,
        default=131072,
        help="validation tokens of an evaluation on the way; the last takes the whole set "
        "(default: %(default)s)",
    )
    add(
        "--core-bundle",
        type=core_bundle.from_anywhere,
        help="tasks of CORE: a folder, a zip or its address, fetched once; evaluated at the end of the run "
        "(default: none, or with --core-every the public bundle)",
    )
    add(
        "--core-every",
        type=int,
        default=-1,
        help="steps between evaluations of CORE, -1: only at the end, where a bundle is named (%(default)s)",
    )
    add(
        "--core-items",
        type=int,
        help=f"items of each task of CORE (default: {CORE_ITEMS} on the way; the last evaluation takes all)",
    )
    add(
        "--save-every",
        type=int,
        default=100,
        help="steps between checkpoints, -1: only at the end (%(default)s)",
    )
    add("--keep-last", type=int, default=2, help="how many checkpoints to keep (default: %(default)s)")
    add(
        "--resume",
        default="auto",
        help="auto: the newest checkpoint of the run; step_N: that one; never: start over",
    )
    add("--wandb", action="store_true", help="log to Weights & Biases as well (WANDB_MODE=offline works)")
    add("--plan", action="store_true", help="print the size of the run, its memory and its time, and stop")
    return parser


if __name__ == "__main__":
    run_command(main)
