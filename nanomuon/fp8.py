"""Matrix products of blocks and head in float8 while training: torchao's, one scale for each matrix.

Input and weight are rounded to e4m3 and the output's gradient to e5m2 (arXiv 2209.05433), each scaled so that
its largest entry is the largest number of its format; sums are float32, results in the dtype of the
activations. Nothing else changes: parameters, their names and the optimizer's state are those of a run
without it, and so is what is computed without gradients: evaluation and samples.

It has not run on a GPU.
"""

import importlib.metadata
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanomuon.gpt import GPT, Linear
from nanomuon.runtime import InputError, Runtime

MULTIPLE = 16  # of which every side of a product must be one (cuBLAS)
CAPABILITY = (8, 9)  # Ada; Hopper has 9.0
# Before this torchao, float8 kernels compiled by PyTorch 2.13 may write NaNs (triton-lang/triton#11111)
OLDEST_TORCHAO = (0, 18)


def check(runtime: Runtime, tensor_parallel: int) -> None:
    """InputError where a run cannot train in float8."""
    if runtime.device.type != "cuda" or torch.cuda.get_device_capability(runtime.device) < CAPABILITY:
        raise InputError("--fp8 needs a GPU of compute capability 8.9 or higher (Ada, Hopper or newer)")
    if tensor_parallel > 1:
        raise InputError("--fp8 and --tensor-parallel do not go together: leave one of them out")
    _torchao()


def train_in_fp8(model: GPT, emulate: bool = False) -> int:
    """Let the Linears of a GPT multiply in float8 while gradients are enabled; returns how many do.

    Those with a side that is not a multiple of 16 stay as they are, the gates of the value embeddings too:
    there is nothing to gain. emulate: round as a GPU would and multiply in float32, on any device.
    """
    product = training_product(emulate)
    count = 0
    for name, module in model.named_modules():
        if isinstance(module, Linear) and not name.endswith("value_gate"):
            if module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0:
                module.training_product = product
                count += 1
    return count


def training_product(emulate: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """(x (..., n), weight (m, n)) -> x weight^T (..., m), with gradients, in float8."""
    torchao = _torchao()
    config = torchao.Float8LinearConfig(emulate=emulate)  # tensorwise
    # torchao's module holds the parameter itself, and would take the place of ours in evaluation too. So only
    # its product is taken, with the settings of a module that it has converted
    converted = torchao.convert_to_float8_training(
        nn.Linear(MULTIPLE, MULTIPLE, bias=False, device="meta"), config=config
    )
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    def product(x: Tensor, weight: Tensor) -> Tensor:
        tokens = x.numel() // x.size(-1)
        if tokens % MULTIPLE:  # the side over which the weight's gradient sums
            return F.linear(x, weight.to(x.dtype))
        return matmul_with_hp_or_float8_args.apply(
            x, weight.t(), converted.linear_mm_config, converted.config
        )

    return product


def _torchao():
    """The module torchao.float8. InputError where there is none, or an old one."""
    install = "pip install 'torchao>=0.18'"
    try:
        import torchao.float8
    except ImportError as error:
        raise InputError(f"--fp8 needs torchao ({error}): {install}") from error
    version = importlib.metadata.version("torchao")
    major, minor = version.split(".")[:2]
    if (int(major), int(minor)) < OLDEST_TORCHAO:
        raise InputError(f"--fp8 needs a newer torchao than {version}: {install}")
    return torchao.float8
