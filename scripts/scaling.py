"""How large a model, on how many tokens? Train a family of small ones and fit what compute buys.

    python -m scripts.scaling --depths 1,2,3 --tokens 250k,500k,1M -- --total-batch-size 4096     # on a CPU
    python -m scripts.scaling --depths 4,6,8,10 --tokens 100M,200M,400M,800M --corpus hf:ORG/NAME   # GPUs
    python -m scripts.scaling --target-flops 1e18     # the best depth for so much compute

Every depth is trained with every number of tokens by base_train, to the end of its learning-rate schedule,
as a run cut short is no shorter run. What follows -- goes to base_train. To the final losses on the whole
validation set the law of Hoffmann et al. (arXiv 2203.15556) is fitted:

    loss = E + A / N^alpha + B / D^beta       N parameters of matrices and head, D tokens

It takes seven runs at least, of three depths and three numbers of tokens. Compute is counted in training
FLOPs as PaLM does: 6 per weight and token, and attention. The table and the picture are scaling/NAME/ under
NANOMUON_BASE_DIR, the runs runs/NAME-d2-t500000. The same command goes on after an interruption and skips
finished runs; more depths or tokens train only what is new. Several GPUs share each run, by torchrun.
"""

import argparse
import json
import math
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, fields

import numpy as np
from scipy import optimize

from nanomuon import locks, planning, run_folder, schedule
from nanomuon.arguments import ArgumentParser, check_sizes
from nanomuon.corpus import check_corpus
from nanomuon.gpt import GPTConfig
from nanomuon.planning import meta_model
from nanomuon.runtime import (
    STOPPED,
    InputError,
    base_dir,
    check_name,
    exit_when_asked,
    print0,
    run_command,
    usable_gpus,
    write_text,
)
from scripts import base_train

FEWEST_RUNS, FEWEST_KINDS = 7, 3  # of runs, and of depths and lengths, that determine a law of 5 constants
MULTIPLES = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9}


@dataclass(frozen=True)
class Member:
    """A finished run of a family. parameters: of the matrices and the head."""

    depth: int
    tokens: int
    parameters: int
    flops: float
    loss: float  # bits per byte


def main(argv=None):
    args, flags = parse_arguments(sys.argv[1:] if argv is None else argv)
    folder = base_dir() / "scaling" / args.name
    folder.mkdir(parents=True, exist_ok=True)
    exit_when_asked()  # the run in training saves first
    with locks.locked(folder):
        for depth, tokens in sorted((d, t) for d in args.depths for t in args.tokens):
            train(args, depth, tokens, flags)
        members, config = finished(args.name)
        text = table(members)
        law = fit(members)
        if law is None:
            text += f"\nA law takes {FEWEST_RUNS} runs, of {FEWEST_KINDS} depths and {FEWEST_KINDS} lengths."
        else:
            text += "\nloss = {:.3f} + {:.4g} / N^{:.3f} + {:.4g} / D^{:.3f}".format(*law)
        if args.target_flops is not None:
            text += "\n" + advice(law, config, max(member.depth for member in members), args.target_flops)
        write_text(
            folder / "scaling.md", f"# Family {args.name}\n\n{text}\n\n![Loss over compute](scaling.png)\n"
        )
        plot(members, folder / "scaling.png")
    print(f"\n{text}\n\n{folder}/scaling.md, {folder}/scaling.png")


def parse_arguments(argv):
    """The arguments, and what follows --, for base_train."""
    flags = []
    if "--" in argv:
        here = argv.index("--")
        argv, flags = argv[:here], argv[here + 1 :]
    parser = ArgumentParser("python -m scripts.scaling", __doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--depths", type=whole_numbers, default=[], help="of the models to train, e.g. 1,2,3")
    add("--tokens", type=whole_numbers, default=[], help="to train each on, e.g. 250k,500k,1M")
    add("--corpus", default="python", help="as in base_train (default: %(default)s)")
    add("--target-flops", type=float, help="which depth and how many tokens make the best of them?")
    add("--name", default="family", help="a folder under scaling/ (default: %(default)s)")
    args = parser.parse_args(argv)
    check_name("--name", args.name)
    if bool(args.depths) != bool(args.tokens):
        raise InputError("--depths and --tokens go together: each depth is trained on each number of tokens")
    if args.depths:
        check_corpus(args.corpus)
    if args.target_flops is not None and not 0 < args.target_flops < math.inf:
        raise InputError(f"--target-flops must be above 0 and finite, not {args.target_flops:g}")
    for depth in args.depths:
        check_sizes(argparse.Namespace(depth=depth))
    base_train.check_arguments(base_train.parse_arguments(flags, {}))
    return args, flags


def whole_numbers(text):
    """250k,500k,1M as [250_000, 500_000, 1_000_000]."""
    numbers = []
    for part in text.lower().split(","):
        found = re.fullmatch(r"(\d+\.?\d*)([kmb]?)", part.strip())
        if found is None:
            raise argparse.ArgumentTypeError(f"{part!r} is not a number such as 3 or 250k")
        numbers.append(round(float(found[1]) * MULTIPLES[found[2]]))
    return numbers


def train(args, depth, tokens, flags):
    """Train one run to its end, unless it is there. InputError if it fails, with its last line."""
    run = f"{args.name}-d{depth}-t{tokens}"
    run_dir = run_folder.folder_of(run)
    if (run_dir / "summary.json").exists():
        print0(f"{run} is finished, skipped")
        return
    given = base_train.parse_arguments(flags, {})
    gpus = usable_gpus()
    row = (given.max_seq_len or planning.default_context(gpus > 0)) * max(1, gpus)
    batch = given.total_batch_size or schedule.total_batch_size(tokens, row)
    command = [sys.executable, "-m"]
    if gpus > 1:
        torchrun = "torch.distributed.run --standalone --local_addr=localhost"
        command += [*torchrun.split(), f"--nproc_per_node={gpus}", "-m"]
    command += ["scripts.base_train", "--run", run, "--corpus", args.corpus, "--depth", str(depth)]
    command += ["--total-batch-size", str(batch), "--num-iterations", str(max(1, round(tokens / batch)))]
    command += ["--eval-every", "-1", "--keep-last", "1", *flags]
    print0(f"training {run}: what it prints goes to {run_dir.parent}/{run}.log")
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    log = run_dir.parent / f"{run}.log"
    with open(log, "ab") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            code = process.wait()
        except BaseException:  # asked to stop: the run saves first
            process.send_signal(signal.SIGTERM)
            process.wait()
            raise
    if code == STOPPED or (run_dir / "stopped").exists():  # under torchrun ranks that stop end with 0
        raise SystemExit(STOPPED)
    if code != 0:
        lines = log.read_text(errors="replace").split("\n")
        said = [line for line in lines if line.startswith("error: ")] or ["it said nothing"]
        raise InputError(f"run {run}: {said[-1].removeprefix('error: ')} (all it said: {log})")


def finished(name):
    """The finished runs of a family, and the fields of one model; InputError if there are none."""
    members, config = [], None
    for run_dir in run_folder.folder_of(name).parent.glob(f"{name}-d*-t*"):
        if (run_dir / "summary.json").exists():
            settings = run_folder.read_settings(run_dir)
            summary = json.loads((run_dir / "summary.json").read_text())
            config = GPTConfig(**{field.name: settings[field.name] for field in fields(GPTConfig)})
            parameters, flops = size_of(config)
            tokens = summary["tokens"]
            members.append(Member(config.depth, tokens, parameters, flops * tokens, summary["val_bpb"]))
    if not members:
        raise InputError(f"family {name} has no finished run yet: give --depths 1,2,3 and --tokens 250k,500k")
    return sorted(members, key=lambda member: (member.depth, member.tokens)), config


def size_of(config):
    """(parameters of the matrices and the head, training FLOPs per token)."""
    model = meta_model(config)
    counts = model.parameter_counts()
    return counts["matrices"] + counts["lm_head"], model.estimate_flops()


def table(members):
    lines = ["| depth | parameters | tokens | FLOPs | bits per byte |", "| --- | --- | --- | --- | --- |"]
    for m in members:
        lines.append(f"| {m.depth} | {m.parameters:,} | {m.tokens:,} | {m.flops:.3g} | {m.loss:.4f} |")
    return "\n".join(lines) + "\n"


def law_loss(law, parameters, tokens):
    E, A, alpha, B, beta = law
    return E + A / parameters**alpha + B / tokens**beta


def fit(members):
    """(E, A, alpha, B, beta) by least squares of the logarithm of the loss; None for too few runs.

    Hoffmann et al. minimize a Huber loss of the same differences, against outliers among 400 runs; a dozen
    has none to spare.
    """
    depths, lengths = {m.depth for m in members}, {m.tokens for m in members}
    if len(members) < FEWEST_RUNS or min(len(depths), len(lengths)) < FEWEST_KINDS:
        return None
    parameters = np.array([m.parameters for m in members], dtype=float)
    tokens = np.array([m.tokens for m in members], dtype=float)
    losses = np.log([m.loss for m in members])
    # Relative to the mean run the constants of a term hardly depend on its exponent
    middle_n, middle_d = np.exp(np.log(parameters).mean()), np.exp(np.log(tokens).mean())

    def differences(logs):
        return np.log(law_loss(np.exp(logs), parameters / middle_n, tokens / middle_d)) - losses

    best = None
    for alpha in (0.2, 0.4, 0.8):
        for beta in (0.2, 0.4, 0.8):
            third = math.exp(losses.mean()) / 3
            start = np.log([third, third, alpha, third, beta])
            found = optimize.least_squares(differences, start, bounds=(-20, 5))
            if best is None or found.cost < best.cost:
                best = found
    E, A, alpha, B, beta = np.exp(best.x)
    return E, A * middle_n**alpha, alpha, B * middle_d**beta, beta


def advice(law, config, deepest, flops):
    """Which depth has the least loss after so many FLOPs, up to twice the deepest that was trained."""
    if law is None:
        raise InputError("--target-flops needs a law: train more runs")
    rows = []
    for depth in range(1, 2 * deepest + 1):
        parameters, per_token = size_of(GPTConfig.from_depth(depth, config.vocab_size, config.seq_len))
        rows.append((law_loss(law, parameters, flops / per_token), depth, flops / per_token))
    loss, depth, tokens = min(rows)
    return f"{flops:.3g} FLOPs: depth {depth} on {tokens:.3g} tokens, {loss:.4f} bits per byte by the law."


def plot(members, image):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for depth in sorted({member.depth for member in members}):
        curve = [member for member in members if member.depth == depth]
        axes.plot([m.flops for m in curve], [m.loss for m in curve], "o-", label=f"depth {depth}")
    axes.set(xscale="log", xlabel="training FLOPs", ylabel="validation bits per byte")
    axes.legend()
    figure.savefig(image, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


if __name__ == "__main__":
    run_command(main)
