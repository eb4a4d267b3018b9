"""Stages of scripts/gpu_check: training on several devices against one process.

A stage starts the ranks; each of them is scripts.gpu_stages again, with --rank-of and the name of the stage.
"""

import sys
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from nanomuon import parallel, runtime
from nanomuon.export import whole_tensor
from nanomuon.footprint import Layout
from nanomuon.gpt import GPTConfig
from nanomuon.optim import DistMuonAdamW, MuonAdamW, all_gather_single, reduce_scatter_single
from nanomuon.param_groups import build_param_groups
from nanomuon.runtime import Runtime
from scripts import base_train
from scripts.gpu_common import (
    FIRST_TEN,
    FLOAT64,
    LAST_TEN,
    Lines,
    Place,
    base_train_command,
    distance,
    largest,
    losses,
    mean_of_last_ten,
    run_to_end,
    seeded,
    training_flags,
    worst_of,
)

# By the name of their stage, with the fewest ranks that make sense
LAYOUTS = {
    "replicated": Layout(ranks=1),
    "fsdp": Layout(ranks=2, fsdp=True),
    "tensor_parallel": Layout(ranks=2, tensor_parallel=2),
    "fsdp_and_tensor_parallel": Layout(ranks=4, fsdp=True, tensor_parallel=2),
}


def replicated(place: Place, lines: Lines) -> None:
    """DistMuonAdamW on every device against one process: exactly, and in a run of base_train."""
    check_layout("replicated", place, lines)


def fsdp(place: Place, lines: Lines) -> None:
    """The same in pieces: FSDP2."""
    check_layout("fsdp", place, lines)


def tensor_parallel(place: Place, lines: Lines) -> None:
    """The same with matrices that two devices share."""
    check_layout("tensor_parallel", place, lines)


def fsdp_and_tensor_parallel(place: Place, lines: Lines) -> None:
    """The same with both, on a mesh."""
    check_layout("fsdp_and_tensor_parallel", place, lines)


def check_layout(name: str, place: Place, lines: Lines) -> None:
    needed, together = LAYOUTS[name].ranks, LAYOUTS[name].tensor_parallel
    if place.ranks < needed or place.ranks % together:
        kind = place.sized("GPUs", "processes")
        lines.skip(name, f"needs {needed} {kind} or a multiple of {together}, here are {place.ranks}")
        return
    if place.ranks > 1:
        one_process_run(place)  # before the ranks, which share its tokenizer
    command = [sys.executable, "-m", "scripts.gpu_stages", "--rank-of", name, "--lines", str(lines.file)]
    command += ["--device", place.device.type, "--ranks", str(place.ranks), "--folder", str(place.folder)]
    codes, output = run_to_end(place, command, ranks=place.ranks)
    print(output)
    lines.check("every process ends well", set(codes) == {0}, f"exit codes {codes}")


def steps_of_runs(place: Place) -> int:
    return place.sized(100, 30)


def one_process_run(place: Place) -> None:
    """The run `one`, which others are compared with: made by the first stage that needs it."""
    steps = steps_of_runs(place)
    if len(losses(place, "one")) == steps:
        return
    _, output = run_to_end(place, base_train_command(training_flags(place, "one", steps=steps)))
    print(output)


# ------------------------------------------------------------------------------------------------------------
# What each rank does


def rank_of_layout(name: str, place: Place, lines: Lines) -> None:
    """One rank of a stage. The first one compares."""
    here, layout = runtime.start(), LAYOUTS[name]
    if not dist.is_initialized():  # a single process trains without one
        dist.init_process_group("nccl" if place.on_gpu else "gloo", rank=0, world_size=1)
    mesh, data_rank = None, here.rank
    data_ranks = here.world_size // layout.tensor_parallel
    if layout.fsdp or layout.tensor_parallel > 1:
        mesh = parallel.device_mesh(here.device.type, data_ranks, layout.tensor_parallel)
        data_rank = mesh.get_local_rank("dp")
    check_collectives(here, lines)
    check_weights(here, layout, mesh, data_rank, data_ranks, lines)
    if here.world_size == 1:
        return
    run = f"layout-{name}"
    flags = training_flags(place, run, data_ranks, steps=steps_of_runs(place))
    if layout.fsdp:
        flags += ["--shard", "fsdp"]
    if layout.tensor_parallel > 1:
        flags += ["--tensor-parallel", str(layout.tensor_parallel)]
    with mock.patch.object(base_train, "start", lambda: here):  # whose process group is there already
        base_train.main(flags)
    if here.rank == 0:
        compare_losses(losses(place, run), losses(place, "one"), place, lines)


def check_collectives(here: Runtime, lines: Lines) -> None:
    """The transfers that the optimizer uses, with results that are known beforehand."""
    ranks = here.world_size
    ones = torch.ones(ranks, 1000, device=here.device)
    mine = ones * (here.rank + 1)
    total = ranks * (ranks + 1) / 2
    mean = mine.clone()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    part = torch.zeros_like(ones[:1])
    reduce_scatter_single(part, mine.clone())
    gathered = torch.zeros_like(ones)
    all_gather_single(gathered, mine[:1].clone())
    expected_rows = torch.arange(1.0, ranks + 1, device=here.device)[:, None] * ones
    right = {
        "all_reduce": bool((mean == total / ranks).all()),
        "reduce_scatter": bool((part == total).all()),
        "all_gather": torch.equal(gathered, expected_rows),
    }
    wrong = [name for name, is_right in right.items() if not is_right]
    wrong_by_rank = [None] * ranks
    dist.all_gather_object(wrong_by_rank, wrong)
    if here.rank == 0:
        all_right = not any(wrong_by_rank)
        words = "right on every rank" if all_right else f"wrong by rank: {wrong_by_rank}"
        lines.check(f"{dist.get_backend()}: {', '.join(right)}", all_right, words)


def check_weights(
    here: Runtime, layout: Layout, mesh: DeviceMesh | None, data_rank: int, data_ranks: int, lines: Lines
) -> None:
    """Five steps in float64 on all ranks against the same on the first one alone."""
    # Rows of embeddings and matrices do not divide by the ranks; heads do by tensor_parallel
    config = GPTConfig(vocab_size=67, seq_len=32, depth=3, width=18, heads=3, kv_heads=3)
    if layout.tensor_parallel > 1:
        config = GPTConfig(vocab_size=67, seq_len=32, depth=3, width=16, heads=4, kv_heads=2)
    batches = []
    for step in range(5):
        batches.append(torch.randint(67, (4 * here.world_size, 33), generator=seeded(step)).to(here.device))
    mine = [batch.chunk(data_ranks)[data_rank] for batch in batches]
    found = trained_exactly(config, here.device, mine, DistMuonAdamW, mesh, layout.fsdp)
    if here.rank == 0:
        alone = trained_exactly(config, here.device, batches, MuonAdamW)
        errors = {key: distance(found[key], alone[key]) for key in alone}
        worst, error = worst_of(errors)
        words = f"5 steps in float64, {here.world_size} processes against one, worst {worst}"
        lines.at_most(words, error, FLOAT64)


def trained_exactly(
    config: GPTConfig,
    device: torch.device,
    batches: list[torch.Tensor],
    optimizer_class: type,
    mesh: DeviceMesh | None = None,
    fsdp: bool = False,
) -> dict[str, torch.Tensor]:
    """{name: whole weight} after steps in float64. batches: a step's rows (rows, 33) of this rank."""
    torch.set_default_dtype(torch.float64)
    gpt = parallel.build_model(config, Runtime(device, torch.float64), 0, mesh, fsdp)
    torch.set_default_dtype(torch.float32)
    # The sign mask of cautious decay would turn a rounding into a difference
    muon = dict(lr=0.02, momentum=0.9, ns_steps=5, beta2=0.95, weight_decay=0.1)
    muon["weight_decay_form"] = "decoupled"
    adamw = dict(lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.0)
    optimizer = optimizer_class(build_param_groups(gpt, muon=muon, adamw=adamw))
    for batch in batches:
        gpt(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()).backward()
        if mesh is not None and not fsdp:
            parallel.average_gradients(gpt, mesh)
        optimizer.step()
        optimizer.zero_grad()
    weights = {}
    for key, value in gpt.state_dict().items():
        weights[key] = whole_tensor(value) if isinstance(value, DTensor) else value.clone()
    return weights


def compare_losses(found: list[float], expected: list[float], place: Place, lines: Lines) -> None:
    """Two runs of a layout's steps: the first ten one by one, the last ten on average."""
    steps, device_type = steps_of_runs(place), place.device.type
    if len(found) != steps or len(expected) != steps:
        lines.check(f"{steps} steps", False, f"{len(found)} steps, of one process {len(expected)}")
        return
    first_ten = largest(abs(a - b) for a, b in zip(found[:10], expected[:10], strict=True))
    lines.at_most("losses of the first ten steps against one process", first_ten, FIRST_TEN[device_type])
    last_ten = abs(mean_of_last_ten(found) - mean_of_last_ten(expected))
    lines.at_most("mean loss of the last ten against one process", last_ten, LAST_TEN[device_type])
