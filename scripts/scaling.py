"""How large a model, on how many tokens? Train a family of small models, and fit a scaling law.

    python -m scripts.scaling --depths 1,2,3 --tokens 250e3,500e3,1e6 -- --total-batch-size 4096
    torchrun --standalone --nproc_per_node=8 -m scripts.scaling -- --depths 4,6,8,10 --tokens 1e8,2e8,4e8 \\
        --corpus hf:ORG/NAME
    python -m scripts.scaling --target-flops 1e18     # the best depth for this much compute

It trains every depth with base_train on every number of tokens, each to the end of its own learning-rate
schedule; flags after a -- go to base_train. Then it fits the law of Hoffmann et al. (arXiv 2203.15556) to the
final bits per byte, which needs at least seven runs, with three depths and three numbers of tokens:

    loss = E + A / N^alpha + B / D^beta       N million parameters of matrices and head, D million tokens

It minimizes relative errors. FLOPs are counted as in PaLM: 6 per weight and token, plus attention. The runs
are runs/NAME-d2-t500000 under NANOMUON_BASE_DIR. After an interruption, which saves the current run, run the
same command again; without --depths it prints the results and the law again.
"""

if __name__ == "__main__":
    import scripts

    scripts.begin()

import re
from dataclasses import dataclass

import numpy as np
import torch
from scipy import optimize

from nanomuon.command import ArgumentParser, amount, run_command
from nanomuon.gpt import GPTConfig
from nanomuon.plan import meta_model, model_config
from nanomuon.run import read_summary
from nanomuon.runtime import InputError, folder_of, print0, read_json, usable_gpus
from nanomuon.settings import Settings, corpus_name, refuse_changes
from nanomuon.trained import read_config
from scripts import base_train


@dataclass(order=True)
class Member:
    """A finished run of a family."""

    N: int  # parameters of the matrices and the head
    D: int  # tokens
    loss: float  # bits per byte
    config: GPTConfig
    corpus: str


def main(argv=None):
    parser = ArgumentParser("python -m scripts.scaling", __doc__)
    add = parser.add_argument
    add("--depths", type=numbers, default=[], help="depths of the models to train, e.g. 1,2,3")
    add("--tokens", type=numbers, default=[], help="numbers of tokens to train each on, e.g. 250e3,500e3,1e6")
    add("--corpus", type=corpus_name, default="python", help="as in base_train (default: %(default)s)")
    add("--target-flops", type=amount, help="print the best depth and number of tokens for this much compute")
    add("--name", default="family", help="prefix of the runs' names (default: %(default)s)")
    add("flags", nargs="*", metavar="-- FLAGS", help="flags of base_train")
    args = parser.parse_args(argv)
    if bool(args.depths) != bool(args.tokens):
        raise InputError("--depths and --tokens go together: each depth is trained on each number of tokens")
    if args.depths:
        refuse_other_members(args)
    for flags in [flags_of(args, depth, tokens) for depth in args.depths for tokens in args.tokens]:
        torch.compiler.reset()  # otherwise it compiles the same code for at most eight models
        if code := base_train.main(flags):
            return code

    members = finished(args.name)
    for member in members:
        print0(
            f"{member.config.depth:3} layers {member.N:12,} weights {member.D:15,} tokens {member.loss:.4f}"
        )
    law = fit(members)
    if law is None:
        needs = f"a law needs 7 runs, with 3 depths and 3 numbers of tokens; {args.name} has {len(members)}"
        if not members or args.target_flops:
            raise InputError(f"{needs}: train more with --depths and --tokens")
        print0(needs)
        return
    print0("loss = {:.3f} + {:.4g} / N^{:.3f} + {:.4g} / D^{:.3f}".format(*np.exp(law)))
    if args.target_flops:
        print0(advice(law, members[-1].config, args.target_flops))


def numbers(text):
    """The text 1,2,3 or 250e3,1e6 as a list of int."""
    values = [float(part) for part in text.split(",")]
    if not all(value.is_integer() and value > 0 for value in values):
        raise ValueError
    return list(map(int, values))


numbers.__name__ = "list of whole numbers"  # argparse's "invalid ... value"


def flags_of(args, depth, tokens):
    """The flags of base_train for a member of the family."""
    run = f"{args.name}-d{depth}-t{tokens}"
    flags = ["--run", run, "--corpus", args.corpus, "--depth", str(depth), "--eval-every", "-1", *args.flags]
    given = base_train.make_parser().parse_args(flags)
    if (given.run, given.corpus, given.depth) != (run, args.corpus, depth):
        raise InputError("flags after -- cannot set --run, --corpus or --depth: set them before it")
    model = meta_model(model_config(given, "cpu"))
    return [*flags, f"--target-param-data-ratio={(tokens + 0.5) / model.multiplied_weights()}"]


def refuse_other_members(args):
    """InputError if a run of this family has another corpus, vocabulary or context: no law fits both."""
    given = base_train.make_parser().parse_args(["--corpus", args.corpus, *args.flags])
    ours = model_config(given, "cuda" if usable_gpus() else "cpu")
    for member in finished(args.name):
        theirs = shared_flags(member.corpus, member.config)
        now = shared_flags(args.corpus, ours)
        refuse_changes(f"family {args.name} was trained with", theirs, now, "choose another --name")


def shared_flags(corpus, config):
    """{flag: value} of what all runs of a family have."""
    return {"--corpus": corpus, "--vocab-size": config.vocab_size, "--max-seq-len": config.seq_len}


def finished(name):
    """The finished runs of a family, the largest last."""
    members = []
    for file in folder_of(name).parent.glob("*/summary.json"):
        if not re.fullmatch(re.escape(name) + "-d[0-9]+-t[0-9]+", file.parent.name):  # such as a copy
            continue
        config, summary = read_config(file.parent), read_summary(file)
        corpus = read_json(file.parent / "settings.json", Settings).trained_on.get("corpus")
        weights = meta_model(config).multiplied_weights()
        members.append(Member(weights, summary.tokens, summary.val_bpb, config, corpus))
    return sorted(members)


def loss_of(sizes, *law):
    """The loss of models of these (N, D). law: the logarithms of E, A, alpha, B, beta."""
    N, D = sizes
    E, A, alpha, B, beta = np.exp(law)
    return E + A / (N / 1e6) ** alpha + B / (D / 1e6) ** beta


def fit(members):
    """The law that fits best, see loss_of(); None if there are too few runs."""
    sizes = np.array([(member.N, member.D) for member in members]).T
    if len(members) < 7 or min(len(set(row)) for row in sizes) < 3:
        return None
    losses = [member.loss for member in members]
    return optimize.curve_fit(loss_of, sizes, losses, p0=[-1] * 5, sigma=losses, bounds=(-20, 5))[0]


def advice(law, config, flops):
    """The depth with the lowest loss after this many FLOPs, up to twice the largest depth trained."""
    rows = []
    for depth in range(1, 2 * config.depth + 1):
        shape = GPTConfig.from_depth(
            depth, config.vocab_size, config.seq_len, window_pattern=config.window_pattern
        )
        model = meta_model(shape)
        tokens = flops / model.estimate_flops()
        rows.append((loss_of((model.multiplied_weights(), tokens), *law), depth, tokens))
    loss, depth, tokens = min(rows)
    best = f"{flops:.3g} FLOPs: depth {depth} on {tokens:.3g} tokens, {loss:.4f} bits per byte by the law."
    return f"{best} Larger depths were not compared." if depth == rows[-1][1] else best


if __name__ == "__main__":
    run_command(main)
