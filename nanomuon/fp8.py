"""Float8 matrix products in the blocks during training: torchao's, one scale per matrix.

Input and weight are rounded to e4m3 and the output's gradient to e5m2 (arXiv 2209.05433), each scaled so that
its largest entry is the largest number of its format; sums are float32, results in the dtype of the
activations. The head does not change, as in DeepSeek-V3 (arXiv 2412.19437), nor do parameters, their names,
the optimizer's state, evaluation and samples.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanomuon.gpt import GPT, Linear
from nanomuon.runtime import InputError, Runtime

MULTIPLE = 16  # every side of a product must be a multiple of it (cuBLAS)


def check(runtime: Runtime, tensor_parallel: int) -> None:
    """InputError if a run cannot train in float8."""
    if runtime.device.type != "cuda" or torch.cuda.get_device_capability(runtime.device) < (8, 9):
        raise InputError("--fp8 needs a GPU of compute capability 8.9 or higher (Ada, Hopper or newer)")
    if tensor_parallel > 1:
        raise InputError("--fp8 and --tensor-parallel do not go together: leave one of them out")
    try:
        import torchao.float8  # noqa: F401
    except ImportError as error:
        # With an older torchao, kernels compiled by PyTorch 2.13 may write NaNs (triton-lang/triton#11111)
        raise InputError(f"--fp8 needs torchao ({error}): pip install 'torchao>=0.18'") from error


def train_in_fp8(model: GPT, emulate: bool = False) -> None:
    """Let the Linears of the blocks multiply in float8 while gradients are enabled.

    Those with a side that is not a multiple of 16 do not change: most gates of the values. emulate:
    round as a GPU would and multiply in float32, on any device.
    """
    product = training_product(emulate)
    for module in model.blocks.modules():
        if isinstance(module, Linear):
            if module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0:
                module.training_product = product


def training_product(emulate: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """(x (..., n), weight (m, n)) -> x weight^T (..., m), with gradients, in float8."""
    from torchao import float8
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    # torchao's module would hold the parameter, and use float8 in evaluation too. So take only its product,
    # with the settings of a module that it has converted
    linear = nn.Linear(MULTIPLE, MULTIPLE, bias=False, device="meta")
    config = float8.Float8LinearConfig(emulate=emulate)  # one scale per matrix
    converted = float8.convert_to_float8_training(linear, config=config)

    def product(x: Tensor, weight: Tensor) -> Tensor:
        if x[..., 0].numel() % MULTIPLE:  # tokens: the weight's gradient sums over them
            return F.linear(x, weight.to(x.dtype))
        return matmul_with_hp_or_float8_args.apply(
            x, weight.t(), converted.linear_mm_config, converted.config
        )

    return product
