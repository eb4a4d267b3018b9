"""What a training step does to a GPU, without one: `scripts.base_train.train` on CUDA tensors that are faked.

    python -m tests.cuda_trace --form fsdp --world 8
    python -m tests.cuda_trace --form optimizer --world 1024 --rank 1023     # depth 24

The step is that of base_train, compiled by Dynamo and AOTAutograd; what Inductor and a GPU would make of it
is left out. Shapes, dtypes and branches are those of a GPU; the other ranks are imagined. The first step
compiles, the second is written down: operations that reach the dispatcher, calls of compiled graphs,
collectives and the bytes a rank sends in them, how much of that leaves before the last backward, and where
the host waits for the device. Attention is full, by `sdpa`: kernels are chosen by measurement, and there is
nothing to measure. Seconds, for 1,024 ranks as for one. Exit code 3, and the reason, where this PyTorch
cannot be made to take such tensors.
"""

import argparse
import collections
import contextlib
import json
import os
import sys
import traceback
from dataclasses import asdict, replace
from types import SimpleNamespace

# Flags of base_train
FORMS = {
    "replicated": [],
    "fsdp": ["--shard", "fsdp"],
    "tensor-parallel": ["--tensor-parallel", "2"],
    "fsdp-tensor-parallel": ["--shard", "fsdp", "--tensor-parallel", "2"],
    "experts": ["--experts", "4"],
    "qk-clip": ["--no-qk-norm", "--qk-clip", "100"],
    "fp8": ["--fp8"],
    "optimizer": [],  # its step alone, on gradients that are there
}
DEPTH = {"optimizer": 24}  # of other forms 2
VOCABULARY, SEQ_LEN = 32_768, 2048
ROWS, MICRO_STEPS = 2, 2  # sequences in a micro-step, micro-steps in a step


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tests.cuda_trace",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--form", choices=FORMS, default="replicated", help="(default: %(default)s)")
    parser.add_argument("--world", type=int, default=8, help="ranks, all but one of them imagined")
    parser.add_argument("--rank", type=int, default=0, help="which of them this is")
    parser.add_argument("--depth", type=int, help="of the model (default: 2, of the optimizer alone 24)")
    parser.add_argument(
        "--json",
        nargs="+",
        metavar="FORM:WORLD:RANK[:DEPTH]",
        help="these traces instead, one after the other, each a line of JSON",
    )
    args = parser.parse_args()
    os.environ["NANOMUON_COMPILE"] = "1"

    from tests.fake_gpu import load_stub, pretend_cuda

    load_stub()
    pretend_cuda()

    import torch

    from tests.step_recorder import StepRecorder

    recorder = StepRecorder()
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # where it would go on eagerly
    if args.json is None:
        show(trace(recorder, args.form, args.world, args.rank, args.depth))
        return
    torch._dynamo.config.recompile_limit *= len(args.json)  # all of them compile the same code
    for case in args.json:
        form, *numbers = case.split(":")
        try:
            found = trace(recorder, form, *map(int, numbers))
        except (Exception, SystemExit):  # of one trace: the others go on
            found = {"error": traceback.format_exc()}
        print(json.dumps({"case": case, **found}), flush=True)


def trace(recorder, form: str, world: int, rank: int, depth: int | None = None) -> dict:
    """The second step of rank `rank` in a world of so many."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from nanomuon.runtime import Runtime

    runtime = Runtime(torch.device("cuda", 0), torch.bfloat16, rank, world)
    depth = depth or DEPTH.get(form, 2)
    recorder.graphs = 0
    # One thread, because a mode is a thread's own: the backward would run in another, without the recorder
    with imagined_ranks(world, rank), torch.autograd.set_multithreading_enabled(False):
        with FakeTensorMode(allow_non_fake_inputs=True), recorder:
            if form == "optimizer":
                optimizer_steps(recorder, depth, runtime)
            else:
                training_steps(recorder, FORMS[form], depth, runtime)
    return {
        "form": form,
        "world": world,
        "rank": rank,
        "depth": depth,
        "operations": recorder.operations.total(),
        "compiled_calls": recorder.compiled_calls,
        "compiled_graphs": recorder.graphs,
        "from_host": recorder.from_host,
        "backwards": recorder.backwards,
        "waits": [asdict(wait) for wait in recorder.waits],
        "collectives": [asdict(collective) for collective in recorder.collectives],
        "most_common": dict(recorder.operations.most_common(12)),
    }


def like_larger_models(config):
    """With value embeddings in every second layer: the layers that are traced stand for those of depths that
    GPUs train.
    """
    return replace(config, value_embed_every=2)


def training_steps(recorder, flags: list[str], depth: int, runtime) -> None:
    """base_train.train for two steps, with stand-ins for data, checkpoints, and the watchdog, which hears
    where a step begins and ends.
    """
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    from nanomuon import guards, parallel
    from nanomuon.compilation import compile_model
    from nanomuon.fp8 import train_in_fp8
    from nanomuon.gpt import GPT
    from nanomuon.launch import build_optimizer
    from nanomuon.planning import plan_run
    from nanomuon.qk_clip import watch_
    from scripts import base_train

    flags = ["--depth", str(depth), "--compile", "--max-seq-len", str(SEQ_LEN), *flags]
    flags += ["--window-pattern", "L", "--device-batch-size", str(ROWS), "--num-iterations", "2"]
    args = base_train.parse_arguments(flags, {})
    data_parallel = runtime.world_size // args.tensor_parallel
    args.total_batch_size = ROWS * MICRO_STEPS * SEQ_LEN * data_parallel  # tokens
    plan = plan_run(args, VOCABULARY, runtime, {})
    plan = replace(plan, config=like_larger_models(plan.config))

    # As nanomuon.launch.start_run makes them
    mesh = None
    if runtime.world_size > 1 and (args.shard == "fsdp" or args.tensor_parallel > 1):
        with unset_fake_temporarily():
            mesh = parallel.device_mesh("cuda", plan.data_parallel, args.tensor_parallel)
    # As parallel.build_model does, but not by way of the meta device, which faked tensors cannot leave
    with runtime.device:
        model = GPT(plan.config, runtime.compute_dtype)
    if args.fp8:
        train_in_fp8(model)
    if mesh is not None:
        parallel.parallelize(model, mesh, args.shard == "fsdp")
    parallel.init_weights(model, args.seed)
    if args.qk_clip:
        watch_(model, args.qk_clip)
    optimizer, schedule = build_optimizer(args, model, plan, runtime)

    rows = torch.zeros(ROWS, plan.config.seq_len, dtype=torch.int64, device=runtime.device)
    run = SimpleNamespace(
        args=args,
        runtime=runtime,
        plan=plan,
        mesh=mesh,
        model=model,
        forward=compile_model(model, mesh, recorder.backend()),
        optimizer=optimizer,
        schedule=schedule,
        initial_groups=[dict(group) for group in optimizer.param_groups],
        loader=SameRows(rows),
        save=lambda: None,
        checkpoints=SimpleNamespace(wait=lambda: None),
        log=None,
        evaluations={},
        recent_losses=collections.deque(),
        step=0,
        skipped=0,
    )
    watchdog = SimpleNamespace(
        begin=lambda step: recorder.start(),
        end=lambda milliseconds: recorder.finish(),
        median=lambda: 0.0,
        times=[],
    )
    with contextlib.redirect_stdout(sys.stderr):  # what it prints of its progress
        base_train.train(run, watchdog, guards.Requests())


class SameRows:
    """A loader of (inputs, targets) without end."""

    def __init__(self, rows):
        self.rows = rows

    def __next__(self):
        return self.rows, self.rows

    def state_dict(self):
        return {}


def optimizer_steps(recorder, depth: int, runtime) -> None:
    """Two steps of the optimizer alone, of replicated parameters."""
    import torch

    from nanomuon import recipe
    from nanomuon.gpt import GPT, GPTConfig
    from nanomuon.user_file import make_optimizer

    with runtime.device:
        model = GPT(GPTConfig.from_depth(depth, VOCABULARY, SEQ_LEN), runtime.compute_dtype)
    optimizer = make_optimizer(recipe.param_groups, model, 2**19, 10_000, runtime.world_size)
    for param in model.parameters():
        param.grad = torch.empty_like(param)
    for _ in range(2):
        recorder.start()
        optimizer.step()
        recorder.finish()


@contextlib.contextmanager
def imagined_ranks(world: int, rank: int):
    """A process group in which every collective is done at once, and nothing is sent."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed.device_mesh import DeviceMesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from nanomuon.optim import Agreement

    if world == 1:
        yield
        return
    make_mesh, ask_rank_0 = DeviceMesh.__init__, Agreement.of_rank_0

    def make_real_mesh(*args, **settings):  # of the ranks' numbers, which it looks at
        with unset_fake_temporarily():
            make_mesh(*args, **settings)

    def answer_as_rank_0(agreement, numbers):  # what it would answer, as all ranks are alike
        ask_rank_0(agreement, numbers)
        return numbers

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    DeviceMesh.__init__, Agreement.of_rank_0 = make_real_mesh, answer_as_rank_0
    try:
        yield
    finally:
        DeviceMesh.__init__, Agreement.of_rank_0 = make_mesh, ask_rank_0
        dist.destroy_process_group()


def sent_early(found: dict) -> float:
    """Share of the bytes of gradients, as the optimizer sends them, that leaves before the last compiled
    backward.
    """
    launches = []  # (how many backwards were over, bytes)
    for collective in found["collectives"]:
        reduces = collective["operation"] in ("reduce_scatter", "reduce", "all_reduce")
        if collective["asked_by"].startswith("optim.") and reduces:
            launches.append((collective["backwards"], collective["sent"]))
    total = sum(sent for _, sent in launches)
    if total == 0:
        return 0.0
    return sum(sent for backwards, sent in launches if backwards < found["backwards"]) / total


def show(found: dict) -> None:
    print(
        f"{found['form']}, rank {found['rank']} of {found['world']}, depth {found['depth']}: "
        f"{found['operations']} operations, {found['compiled_calls']} calls of {found['compiled_graphs']} "
        f"compiled graphs, {len(found['collectives'])} collectives, {found['from_host']} copies from the host"
    )
    print(f"{100 * sent_early(found):.0f}% of the gradients' bytes leave before the last compiled backward")
    for wait in found["waits"]:
        print(f"waits for the device: {wait['reason']} in {wait['asked_by']}")
    count, sent = collections.Counter(), collections.Counter()
    for collective in found["collectives"]:
        key = tuple(collective[name] for name in ("asked_by", "operation", "dtype", "device", "ranks"))
        count[key] += 1
        sent[key] += collective["sent"]
    print(f"{'asked by':32} {'operation':14} {'dtype':9} {'ranks':>5} {'count':>5} {'bytes sent':>14}")
    for key, number in count.items():
        asked_by, operation, dtype, _, ranks = key
        print(f"{asked_by:32} {operation:14} {dtype:9} {ranks:5} {number:5} {round(sent[key]):14,}")
    print(f"{'':69} {round(sum(sent.values())):14,}")
    print(", ".join(f"{name} {number}" for name, number in found["most_common"].items()))


if __name__ == "__main__":
    main()
