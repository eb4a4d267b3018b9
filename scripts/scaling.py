"""How large a model, on how many tokens? Train a family of small ones and fit what compute buys.

    python -m scripts.scaling --depths 1,2,3 --tokens 250e3,500e3,1e6 -- --total-batch-size 4096
    python -m scripts.scaling --depths 4,6,8,10 --tokens 1e8,2e8,4e8,8e8 --corpus hf:ORG/NAME
    python -m scripts.scaling --target-flops 1e18     # the best depth for this much compute

Trains every depth with base_train on every number of tokens, each to the end of its own learning-rate
schedule; flags after -- go to base_train. Then it fits the law of Hoffmann et al. (arXiv 2203.15556) to the
final losses, which takes seven runs of three depths and three numbers of tokens:

    loss = E + A / N^alpha + B / D^beta       N parameters of matrices and head, D tokens

FLOPs are counted as in PaLM: 6 per weight and token, plus attention. Under NANOMUON_BASE_DIR the table is
scaling/NAME/scaling.md, and the runs are runs/NAME-d2-t500000. After an interruption the same command goes
on; it skips finished runs. Several GPUs share each run, under torchrun.
"""

if __name__ == "__main__":
    import scripts

    scripts.begin()

import json
import math
import signal
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
from scipy import optimize

from nanomuon.command import STOPPED, ArgumentParser, amount, exit_when_asked, layers, run_command
from nanomuon.corpus import check_corpus
from nanomuon.gpt import GPTConfig
from nanomuon.plan import default_context, meta_model, total_batch_size
from nanomuon.runtime import InputError, base_dir, check_name, folder_of, locked, usable_gpus, write_text
from nanomuon.trained import read_config
from scripts import base_train
from scripts.laboratory.report import columns


@dataclass(frozen=True)
class Member:
    """A finished run of a family. parameters: of the matrices and the head."""

    config: GPTConfig
    tokens: int
    parameters: int
    token_flops: float
    loss: float  # bits per byte


def main(argv=None):
    args, flags = parse_arguments(sys.argv[1:] if argv is None else argv)
    folder = base_dir() / "scaling" / args.name
    folder.mkdir(parents=True, exist_ok=True)
    exit_when_asked()  # the run in training saves first
    with locked(folder):
        for depth, tokens in sorted((d, t) for d in args.depths for t in args.tokens):
            train(args, depth, tokens, flags)
        members = finished(args.name)
        text, law = table(members), fit(members)
        if law is None:
            text += "\nA law takes 7 runs, of 3 depths and 3 numbers of tokens."
        else:
            text += "\nloss = {:.3f} + {:.4g} / N^{:.3f} + {:.4g} / D^{:.3f}".format(*law)
        if args.target_flops is not None:
            text += "\n" + advice(law, members[-1].config, args.target_flops)
        write_text(folder / "scaling.md", f"{text}\n")
    print(f"\n{text}\n\n{folder}/scaling.md")


def parse_arguments(argv):
    """The arguments, and the flags after --, for base_train."""
    flags = []
    if "--" in argv:
        here = argv.index("--")
        argv, flags = argv[:here], argv[here + 1 :]
    parser = ArgumentParser("python -m scripts.scaling", __doc__)
    add = parser.add_argument
    add("--depths", type=depths, default=[], help="depths of the models to train, e.g. 1,2,3")
    add("--tokens", type=numbers, default=[], help="numbers of tokens to train each on, e.g. 250e3,500e3,1e6")
    add("--corpus", default="python", help="as in base_train (default: %(default)s)")
    add("--target-flops", type=amount, help="print the best depth and number of tokens for this much compute")
    add("--name", default="family", help="a folder under scaling/ (default: %(default)s)")
    args = parser.parse_args(argv)
    check_name("--name", args.name)
    if bool(args.depths) != bool(args.tokens):
        raise InputError("--depths and --tokens go together: each depth is trained on each number of tokens")
    if args.depths:
        check_corpus(args.corpus)
    base_train.make_parser().parse_args(flags)
    return args, flags


def numbers(text):
    """1,2,3 or 250e3,1e6 as a list of int."""
    return [round(float(part)) for part in text.split(",")]


def depths(text):
    """1,2,3 as depths of models."""
    return [layers(part) for part in text.split(",")]


def train(args, depth, tokens, flags):
    """Train one run to its end, unless it is finished. InputError with the run's own error if it fails."""
    run = f"{args.name}-d{depth}-t{tokens}"
    run_dir = folder_of(run)
    if (run_dir / "summary.json").exists():
        print(f"{run} is finished, skipped")
        return
    gpus = usable_gpus()
    given = base_train.make_parser().parse_args(flags)
    row = (given.max_seq_len or default_context(gpus > 0)) * max(1, gpus)
    batch = given.total_batch_size or total_batch_size(tokens, row)
    command = [sys.executable, "-m"]
    if gpus > 1:
        torchrun = "torch.distributed.run --standalone --local_addr=localhost"
        command += [*torchrun.split(), f"--nproc_per_node={gpus}", "-m"]
    command += ["scripts.base_train", "--run", run, "--corpus", args.corpus, "--depth", str(depth)]
    command += ["--total-batch-size", str(batch), "--num-iterations", str(max(1, round(tokens / batch)))]
    command += ["--eval-every", "-1", "--keep-last", "1", *flags]
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    log = run_dir.parent / f"{run}.log"
    print(f"training {run}, output in {log}", flush=True)
    with open(log, "ab") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            code = process.wait()
        except BaseException:  # asked to stop: the run saves first
            process.send_signal(signal.SIGTERM)
            process.wait()
            raise
    if code == STOPPED or (run_dir / "stopped").exists():  # under torchrun ranks that stop exit with 0
        raise SystemExit(STOPPED)
    if code != 0:
        said = [line for line in log.read_text(errors="replace").split("\n") if line.startswith("error: ")]
        raise InputError(f"run {run}: {''.join(said[-1:]).removeprefix('error: ')} (output in {log})")


def finished(name):
    """The finished runs of a family, the deepest last."""
    members = []
    for run_dir in folder_of(name).parent.glob(f"{name}-d*-t*"):
        if (run_dir / "summary.json").exists():
            summary = json.loads((run_dir / "summary.json").read_text())
            config = read_config(run_dir)
            members.append(Member(config, summary["tokens"], *size_of(config), summary["val_bpb"]))
    if not members:
        raise InputError(f"family {name} has no finished run yet: give --depths and --tokens")
    return sorted(members, key=lambda member: (member.config.depth, member.tokens))


def size_of(config):
    """(parameters of the matrices and the head, training FLOPs per token)."""
    model = meta_model(config)
    return model.multiplied_weights(), model.estimate_flops()


def table(members):
    lines = [["depth", "parameters", "tokens", "FLOPs", "bits per byte"]]
    for m in members:
        sizes = f"{m.parameters:,}", f"{m.tokens:,}", f"{m.tokens * m.token_flops:.3g}"
        lines.append([m.config.depth, *sizes, f"{m.loss:.4f}"])
    return columns(lines) + "\n"


def law_loss(law, parameters, tokens):
    E, A, alpha, B, beta = law
    return E + A / parameters**alpha + B / tokens**beta


def fit(members):
    """(E, A, alpha, B, beta) by least squares of the logarithm of the loss; None for too few runs."""
    if len(members) < 7 or min(len({m.config for m in members}), len({m.tokens for m in members})) < 3:
        return None
    sizes = np.array([(m.parameters, m.tokens) for m in members], dtype=float)
    losses = np.log([m.loss for m in members])
    # Relative to the mean run the constants of a term hardly depend on its exponent
    middle = np.exp(np.log(sizes).mean(axis=0))

    def differences(logs):
        return np.log(law_loss(np.exp(logs), *(sizes / middle).T)) - losses

    third = math.exp(losses.mean()) / 3
    found = optimize.least_squares(differences, np.log([third, third, 0.4, third, 0.4]), bounds=(-20, 5))
    E, A, alpha, B, beta = np.exp(found.x)
    return E, A * middle[0] ** alpha, alpha, B * middle[1] ** beta, beta


def advice(law, config, flops):
    """The depth with the lowest loss after this many FLOPs, up to twice the deepest that was trained."""
    if law is None:
        raise InputError("--target-flops needs a law: train more runs")
    rows = []
    for depth in range(1, 2 * config.depth + 1):
        parameters, per_token = size_of(GPTConfig.from_depth(depth, config.vocab_size, config.seq_len))
        rows.append((law_loss(law, parameters, flops / per_token), depth, flops / per_token))
    loss, depth, tokens = min(rows)
    return f"{flops:.3g} FLOPs: depth {depth} on {tokens:.3g} tokens, {loss:.4f} bits per byte by the law."


if __name__ == "__main__":
    run_command(main)
