"""The kernels that compiled code has on a GPU, without one: Inductor and Triton, for sm_90 (an H100).

    pip install triton==3.8.0    # PyTorch's builds for CPUs come without
    python -m tests.cuda_compile
    python -m tests.cuda_compile --only model --backend flex

Pieces of a training step on CUDA tensors that are faked (fake_gpu.py): the kernels of the optimizer, for a
table and for six matrices of depth 12, the loss of the head for 16 rows of 2,048 tokens, and a model, forward
and backward. Dynamo, AOTAutograd and Inductor do their work, Triton compiles every kernel to a cubin, and the
code that Inductor has written around the kernels is executed, where a kernel is counted in place of being
launched. Printed for each piece: kernels launched, how many of these differ, matrix products and other
operations that Inductor leaves to PyTorch, and the most memory of what the piece has made, beside its inputs.

Nothing is launched: neither numbers nor times are checked, nothing is chosen by measurement, and what PyTorch
uses inside of its operations is not counted. Constant folding, Inductor's search for patterns of attention,
padded products, and copies of inputs that are not aligned are off, as they compute with tensors or look at
addresses. Exit code 1 where a piece or a kernel of it does not compile; 3, and the reason, without Triton or
where this PyTorch cannot be made to take such tensors. A minute or two.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial

from tests.fake_gpu import load_stub, pretend_cuda, pretend_h100, unavailable

VOCABULARY, SEQ_LEN, ROWS = 32_768, 2048, 16  # ROWS: sequences in a micro-step
WIDTH = 768  # of depth 12
MATRICES = 6  # in a batch of the optimizer
DIRECTION = {"coefficients": "polar_express", "ns_steps": 5, "row_equilibrate": False, "renormalize": False}
PARTS = ("optimizer", "loss", "model")


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tests.cuda_compile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", choices=PARTS, help="one part of the three")
    parser.add_argument(
        "--backend", choices=["varlen", "flex"], default="varlen", help="of attention (default: %(default)s)"
    )
    parser.add_argument("--depth", type=int, default=2, help="layers of the model (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="each piece a line of JSON")
    args = parser.parse_args()
    if importlib.util.find_spec("triton") is None:
        unavailable("no Triton, which compiles kernels for a GPU: pip install triton==3.8.0")
    os.environ["NANOMUON_COMPILE"] = "1"
    load_stub()
    pretend_cuda()
    pretend_h100()
    with tempfile.TemporaryDirectory() as folder:  # all is compiled now, whatever was compiled before
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TRITON_CACHE_DIR"] = folder
        failed = compile_parts(args)
    sys.exit(1 if failed else 0)


def compile_parts(args) -> list[str]:
    """Print what each piece is compiled to. Returns the names of those that are not."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tests.kernel_recorder import KernelRecorder

    recorder = KernelRecorder()
    if not args.json:
        print(f"{'':27} {'kernels':>7} {'differ':>6} {'products':>8} {'others':>6} {'peak MiB':>8}")
    failed = []
    # One thread, because a mode is a thread's own: the backward would run in another, without the recorder
    with FakeTensorMode(allow_non_fake_inputs=True), torch.autograd.set_multithreading_enabled(False):
        for name, forward, leaves in pieces(args):
            try:
                for found in compiled_piece(recorder, name, forward, leaves):
                    show(found, args.json)
            except Exception as error:  # of one piece: the others go on
                reason = " ".join(str(error).partition("\n\n")[0].split())  # without advice and traceback
                print(f"{name} does not compile: {reason}", file=sys.stderr, flush=True)
                failed.append(name)
    return failed


def compiled_piece(recorder, name, forward, leaves) -> list[dict]:
    """What a piece does when it has been compiled: forward, and backward where it has leaves."""
    import torch

    def backward(loss):
        torch.autograd.grad(loss, leaves)

    result = forward()
    if leaves:
        backward(result)
    del result
    recorder.start()
    with recorder:
        result = forward()
    if not leaves:
        return [{"piece": name, **recorder.found()}]
    found = [{"piece": f"{name}, forward", **recorder.found()}]
    recorder.start()
    with recorder:
        backward(result)
    return [*found, {"piece": f"{name}, backward", **recorder.found()}]


def show(found: dict, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found), flush=True)
        return
    kernels, peak = found["kernels"], found["peak"] / 2**20
    print(
        f"{found['piece']:27} {sum(kernels.values()):7} {len(kernels):6} {found['products']:8} "
        f"{sum(found['others'].values()):6} {peak:8.0f}",
        flush=True,
    )


def pieces(args) -> Iterator[tuple[str, Callable, list]]:
    """(name, what is called, leaves of its gradients) of each piece."""
    if args.only in (None, "optimizer"):
        yield from optimizer_pieces()
    if args.only in (None, "loss"):
        yield loss_piece()
    if args.only in (None, "model"):
        yield model_piece(args.depth, args.backend)


def optimizer_pieces():
    import torch

    from nanomuon.optim import adamw_update, muon_direction, muon_momentum, muon_update, run
    from nanomuon.orthogonalize import newton_schulz_form

    def made(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="cuda")

    number, table = made(), [made(VOCABULARY, WIDTH) for _ in range(4)]
    names = ("step_size", "rescale", "grad_weight", "square_weight", "decay", "eps")
    yield "AdamW", partial(run, adamw_update, *table, number, **dict.fromkeys(names, number)), []
    each = made(MATRICES, 1, 1)
    for m in (WIDTH, 4 * WIDTH):
        gram, iteration_dtype = newton_schulz_form(m, WIDTH, DIRECTION["ns_steps"], "cuda")
        batch = f"{m} x {WIDTH}"
        param, grad, momentum_buffer = (made(MATRICES, m, WIDTH) for _ in range(3))
        X, gain = made(MATRICES, m, WIDTH, dtype=iteration_dtype), made(MATRICES, m, 1)
        rates = {"momentum": each, "grad_weight": each}
        momentum = partial(run, muon_momentum, grad, momentum_buffer, each, nesterov=True, **rates)
        yield f"momentum {batch}", momentum, []
        form = "Gram" if gram else "plain"
        yield f"direction {batch}, {form}", partial(run, muon_direction, grad, gain, each, **DIRECTION), []
        rates = {"lr": each, "scale": each, "weight_decay": each}
        yield f"update {batch}", partial(run, muon_update, param, X, gain, each, cautious=True, **rates), []


def loss_piece():
    import torch

    from nanomuon import head_loss

    tokens = ROWS * SEQ_LEN
    hidden = torch.empty(tokens, WIDTH, dtype=torch.bfloat16, device="cuda").requires_grad_()
    weight = torch.empty(VOCABULARY, WIDTH, device="cuda").requires_grad_()
    targets = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    compiled = torch.compile(head_loss.mean_loss, dynamic=False)  # as compile_model does
    return "loss", partial(compiled, hidden, weight, targets), [hidden, weight]


def model_piece(depth: int, backend: str):
    import torch

    from nanomuon import attention
    from nanomuon.compilation import compile_model
    from nanomuon.gpt import GPT, GPTConfig

    device = torch.device("cuda", 0)
    depth_12 = GPTConfig.from_depth(12, VOCABULARY, SEQ_LEN, window_pattern="SL")
    config = dataclasses.replace(depth_12, depth=depth)
    with device:
        model = GPT(config, torch.bfloat16)
    backends = {config.window(layer): backend for layer in range(depth)}
    shape = (config.seq_len, config.heads, config.kv_heads, config.head_dim)
    attention.use(*shape, None, backends, device, torch.bfloat16)
    rows = torch.zeros(ROWS, SEQ_LEN, dtype=torch.int64, device=device)
    forward = partial(compile_model(model, None), rows, rows)
    return f"model of {depth}, {backend}", forward, list(model.parameters())


if __name__ == "__main__":
    main()
