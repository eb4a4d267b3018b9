"""What a step of MuonAdamW costs beside other Muons, on the parameters of a Llama.

    python -m scripts.peers_bench --sizes 10M 100M --peer "dion=adopt.py:dion" --peer "other=adopt.py:other"

--peer names a function of a file of yours that adopts an optimizer as a user would: it gets the model and
returns a list of optimizers, which take a step together. (The repo has none of their code.) One that cannot
be built is a row that says why.

All have the same parameters and gradients and take whole steps in turn, round after round, so that a busy
machine slows all of them. Printed are medians, the middle half of the rounds, the median of the ratio to the
first row in the same round, the processors' time of all threads, bytes of state for each parameter, the
first step, which may compile, and the lines of the adopting function without its first and last. On a CPU
without instructions for bf16 those that iterate in it would take minutes a step: they are rows that say so.
"""

import inspect
import os
import statistics
import time

import torch
from torch import nn

from nanomuon import sizing, user_file
from nanomuon.arguments import ArgumentParser
from nanomuon.runtime import InputError, check_at_least_1, run_command

VOCABULARY = 8192
SIZES = {
    "10M": {"width": 256, "mlp_width": 688, "layers": 8},
    "100M": {"width": 768, "mlp_width": 2048, "layers": 12},
}


# ---- how they are adopted, counted line by line


def nanomuon_as_shipped(model):
    from nanomuon import MuonAdamW

    optimizer = MuonAdamW.for_model(model, lr=3e-4)
    return [optimizer]


def nanomuon_compiled(model):
    from nanomuon import MuonAdamW

    optimizer = MuonAdamW.for_model(model, lr=3e-4, compile=True)
    return [optimizer]


def nanomuon_bfloat16(model):
    from nanomuon import MuonAdamW

    optimizer = MuonAdamW.for_model(model, lr=3e-4, ns_dtype=torch.bfloat16)
    return [optimizer]


def nanomuon_bfloat16_compiled(model):
    from nanomuon import MuonAdamW

    optimizer = MuonAdamW.for_model(model, lr=3e-4, ns_dtype=torch.bfloat16, compile=True)
    return [optimizer]


def torch_muon(model):
    matrices, others = [], []
    for name, param in model.named_parameters():
        is_matrix = param.ndim == 2 and "embed" not in name and "lm_head" not in name
        (matrices if is_matrix else others).append(param)
    muon = torch.optim.Muon(matrices, lr=3e-4, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.01)
    return [muon, adamw]


def torch_adamw(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.01)
    return [optimizer]


CONTESTANTS = {
    "nanomuon": nanomuon_as_shipped,
    "nanomuon, compile=True": nanomuon_compiled,
    "nanomuon, ns_dtype=bfloat16": nanomuon_bfloat16,
    "nanomuon, both": nanomuon_bfloat16_compiled,
    "torch.optim.Muon + AdamW": torch_muon,
    "torch.optim.AdamW alone": torch_adamw,
}
# torch.optim.Muon on every device
ITERATE_IN_BF16 = ("nanomuon, ns_dtype=bfloat16", "nanomuon, both", "torch.optim.Muon + AdamW")


# ---- the measurement


def main(argv=None):
    parser = ArgumentParser("python -m scripts.peers_bench", __doc__)
    add = parser.add_argument
    add("--sizes", nargs="+", default=list(SIZES), choices=SIZES, help="of the model (default: all)")
    add("--rounds", type=int, default=7, help="measured rounds (default: %(default)s)")
    add("--peer", action="append", default=[], help="NAME=FILE.py:FUNCTION, any number of times")
    args = parser.parse_args(argv)
    check_at_least_1(args, "rounds")
    if "NANOMUON_COMPILE" in os.environ:
        raise InputError("NANOMUON_COMPILE is set, which overrules what the rows say: unset it")
    contestants = dict(CONTESTANTS)
    for peer in args.peer:
        name, adopt = load_peer(peer)
        contestants[name] = adopt
    for size in args.sizes:
        compare(size, contestants, args.rounds)


def load_peer(peer):
    """(name, function) of NAME=FILE.py:FUNCTION."""
    name, _, place = peer.partition("=")
    file, _, function = place.rpartition(":")
    if not name or not file or not function:
        raise InputError(f"--peer {peer}: it is NAME=FILE.py:FUNCTION")
    module = user_file.run_file(file, user_file.read_source(file))
    adopt = user_file.own_function(file, module, function)
    if adopt is None:
        raise InputError(f"--peer {peer}: {file} has no function {function}")
    return name, adopt


def llama(width, mlp_width, layers):
    """Modules with the parameters of a Llama, by the names that transformers gives them."""

    def linear(inputs, outputs):
        return nn.Linear(inputs, outputs, bias=False)

    blocks = []
    for _ in range(layers):
        attention = {name: linear(width, width) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
        mlp = {
            "gate_proj": linear(width, mlp_width),
            "up_proj": linear(width, mlp_width),
            "down_proj": linear(mlp_width, width),
        }
        block = {
            "self_attn": nn.ModuleDict(attention),
            "mlp": nn.ModuleDict(mlp),
            "input_layernorm": nn.RMSNorm(width),
            "post_attention_layernorm": nn.RMSNorm(width),
        }
        blocks.append(nn.ModuleDict(block))
    model = nn.ModuleDict(
        {
            "embed_tokens": nn.Embedding(VOCABULARY, width),
            "layers": nn.ModuleList(blocks),
            "norm": nn.RMSNorm(width),
        }
    )
    return nn.ModuleDict({"model": model, "lm_head": linear(width, VOCABULARY)})


def compare(size, contestants, rounds):
    """Time the contestants on a model of this size and print the table."""
    torch.manual_seed(0)
    model = llama(**SIZES[size])
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    parameters = sum(param.numel() for param in model.parameters())

    optimizers, first_step, failed = {}, {}, {}
    for name, adopt in contestants.items():
        if name in ITERATE_IN_BF16 and not sizing.cpu_has_bf16():
            failed[name] = "it iterates in bf16, for which this CPU has no instructions"
            continue
        try:
            optimizers[name] = adopt(model)
            first_step[name], _ = timed_step(optimizers[name])
        except Exception as error:  # of a stranger's code
            optimizers.pop(name, None)
            failed[name] = f"{type(error).__name__}: {error}"
    for built in optimizers.values():
        timed_step(built)  # a second one may compile as well
    seconds = {name: [] for name in optimizers}
    cpu_seconds = {name: [] for name in optimizers}
    for _ in range(rounds):
        for name, built in optimizers.items():
            wall, cpu = timed_step(built)
            seconds[name].append(wall)
            cpu_seconds[name].append(cpu)

    print(
        f"\n{size}: {parameters / 1e6:.1f} M parameters, {torch.get_num_threads()} threads, {rounds} rounds"
    )
    print("\n| | step ms | middle half | ratio | CPU ms | first step s | state bytes a parameter | lines |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    baseline = next(iter(seconds))
    for name, adopt in contestants.items():
        if name in failed:
            print(f"| {name} | not measured: {failed[name]} |")
            continue
        ratios = [wall / ours for wall, ours in zip(seconds[name], seconds[baseline], strict=True)]
        cells = [
            name,
            milliseconds(statistics.median(seconds[name])),
            middle_half(seconds[name]),
            f"{statistics.median(ratios):.2f}",
            milliseconds(statistics.median(cpu_seconds[name])),
            f"{first_step[name]:.1f}",
            f"{state_bytes(optimizers[name]) / parameters:.2f}",
            str(lines_of(adopt)),
        ]
        print(f"| {' | '.join(cells)} |")


def timed_step(optimizers):
    """Seconds by the clock and of the processors, all threads together."""
    wall, cpu = time.perf_counter(), time.process_time()
    for optimizer in optimizers:
        optimizer.step()
    return time.perf_counter() - wall, time.process_time() - cpu


def milliseconds(seconds):
    return f"{1e3 * seconds:.0f}"


def middle_half(seconds):
    if len(seconds) == 1:
        return milliseconds(seconds[0])
    low, _, high = statistics.quantiles(seconds, n=4)
    return f"{milliseconds(low)}-{milliseconds(high)}"


def state_bytes(optimizers):
    """Bytes of all tensors that they keep for parameters."""
    total = 0
    for optimizer in optimizers:
        for entry in optimizer.state.values():
            total += sum(value.nbytes for value in entry.values() if torch.is_tensor(value))
    return total


def lines_of(function):
    """Lines of a function that are not empty, without `def` and `return`."""
    lines = [line for line in inspect.getsource(function).splitlines() if line.strip()]
    return len(lines) - 2


if __name__ == "__main__":
    run_command(main)
