"""A training step of several ranks on CUDA tensors that are faked: which gradients are sent while the
backward goes on. No GPU, no memory.

    python -m tests.overlap_trace --world 8 --depth 24

Prints JSON: for every transfer that is launched in the backward, how much of the backward is done then, by
FLOPs, and which share of the gradients' bytes is launched with it and before; and the collectives of a whole
step. The model is compiled as training compiles it, but its graphs run operation by operation (aot_eager).
cuda_trace.py says how tensors are faked, and what exit code 3 means.
"""

import argparse
import contextlib
import json
import os
import tempfile
from pathlib import Path
from unittest import mock

from tests.cuda_trace import counting, load_stub, pretend_cuda


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", type=int, default=8, help="ranks, all but the first imagined")
    parser.add_argument("--depth", type=int, default=24, help="of the model")
    args = parser.parse_args()
    os.environ["NANOMUON_COMPILE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        load_stub(Path(folder))
    print(json.dumps(trace(args.world, args.depth)))


def trace(world, depth):
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    pretend_cuda(torch)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)

    from nanomuon import optim, recipe
    from nanomuon.compilation import compile_model
    from nanomuon.gpt import GPT, GPTConfig
    from nanomuon.user_file import make_optimizer

    # Imagined ranks have nothing to compare and no values; and there is no stream to record an event on
    optim.Agreement.check_parameters = lambda agreement, groups: None
    optim.Agreement.notice = lambda agreement, difference: None
    optim.Agreement.of_rank_0 = lambda agreement, numbers: numbers
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor):
        return FakeTensor(mode, tensor.detach(), torch.device("cuda", 0))

    with torch.device("meta"):
        model = GPT(GPTConfig.from_depth(depth, 32768, 2048), torch.bfloat16)
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = torch.nn.Parameter(fake(param))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fake(buffer)
    tokens = fake(torch.zeros(2, 2048, dtype=torch.int64, device="meta"))
    with mode, torch.autograd.set_multithreading_enabled(False):
        optimizer = make_optimizer(recipe.param_groups, model, 2**19, world)
        forward = compile_model(model, None, backend="aot_eager")
        for _ in range(2):  # the first backward only shows the order
            model.zero_grad(set_to_none=True)
            launches = recorded_backward(forward(tokens, tokens), optimizer)
            with counting(torch, optim) as counts:
                optimizer.step()
    collectives = counts["collectives"] + len(launches)
    return dict(world=world, depth=depth, launches=launches, collectives=collectives)


def recorded_backward(loss, optimizer):
    """[share of the backward's FLOPs that are done, share of the gradients' bytes that are then launched]."""
    from torch.utils.flop_counter import FlopCounterMode

    everything = sum(param.nbytes for work in optimizer.works for param in work.collected)
    recorded, launched = [], 0

    def recording(work):
        collect = type(work).collect

        def call():
            nonlocal launched
            launched += sum(param.nbytes for param in work.collected)
            recorded.append((flops.get_total_flops(), launched))
            collect(work)

        return call

    with contextlib.ExitStack() as stack:
        for work in optimizer.works:
            stack.enter_context(mock.patch.object(work, "collect", recording(work)))
        flops = stack.enter_context(FlopCounterMode(display=False))
        with optimizer.overlap_backward():
            loss.backward()
    total = flops.get_total_flops()
    return [(round(done / total, 3), round(sent / everything, 3)) for done, sent in recorded]


if __name__ == "__main__":
    main()
