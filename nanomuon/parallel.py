"""Shard a model over a device mesh ("dp", "tp"), and compile it, both by PyTorch's own means.

FSDP2 (`fully_shard`) cuts every parameter by rows over "dp", and gathers a block's parameters when the block
runs. Tensor parallelism (arXiv 1909.08053) cuts the heads and the MLP's channels over "tp": q, k, v and up by
rows, o and down by columns, so that a block needs one all_reduce after its attention and one after its MLP,
and two in its backward pass. The gates are cut like the key heads; token embedding, head and vectors are
whole on every "tp" rank. Ranks with the same "dp" coordinate see the same rows of data. Cut parameters are
DTensors.
"""

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)

from nanomuon import head_loss
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.optim_state import local
from nanomuon.runtime import InputError, Runtime

# By `Linear.cut`: the dimension of the weight to cut, and how PyTorch cuts the product
CUTS = {"outputs": (0, ColwiseParallel()), "inputs": (1, RowwiseParallel())}


def cut_dim(module: torch.nn.Module) -> int | None:
    """The dimension of a module's weight that tensor parallelism cuts."""
    cut = getattr(module, "cut", None)
    return None if cut is None else CUTS[cut][0]


def data_parallel_size(world_size: int, tensor_parallel: int, config: GPTConfig) -> int:
    """How many ranks see different rows. InputError if the ranks, or the model's heads, cannot be divided."""
    if world_size % tensor_parallel:
        raise InputError(
            f"--tensor-parallel {tensor_parallel} needs a multiple of {tensor_parallel} processes, not "
            f"{world_size}: start them with torchrun"
        )
    if config.kv_heads % tensor_parallel:
        raise InputError(
            f"--tensor-parallel {tensor_parallel} does not divide {config.kv_heads} key-value heads: choose "
            "one that does, or another --depth"
        )
    return world_size // tensor_parallel


def device_mesh(device_type: str, data_parallel: int, tensor_parallel: int) -> DeviceMesh:
    """("dp", "tp"): consecutive ranks, which share a machine, are one tensor-parallel group."""
    return init_device_mesh(device_type, (data_parallel, tensor_parallel), mesh_dim_names=("dp", "tp"))


def build_model(
    config: GPTConfig, runtime: Runtime, seed: int, mesh: DeviceMesh | None = None, fsdp=False
) -> GPT:
    """The initial model, whole or cut over a mesh ("dp", "tp"), with the same weights either way."""
    with torch.device("meta"):
        model = GPT(config, runtime.compute_dtype)
    if mesh:
        parallelize(model, mesh, fsdp)
    model.to_empty(device=runtime.device)
    model.init_weights(seed, fill_shard)  # one whole parameter at a time
    return model


def parallelize(gpt: GPT, mesh: DeviceMesh, fsdp: bool) -> None:
    """Cut the parameters of a GPT on the meta device, in place."""
    if mesh["tp"].size() > 1:
        cut_heads_and_channels(gpt, mesh["tp"])
    if fsdp:
        # Blocks are gathered in the compute dtype, and their gradients are averaged in float32
        policy = MixedPrecisionPolicy()
        if gpt.compute_dtype.itemsize < 4:
            policy = MixedPrecisionPolicy(param_dtype=gpt.compute_dtype, reduce_dtype=torch.float32)
        for block in gpt.blocks:
            fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
        # with tensor parallelism an embedding's output is a view, which only matters to in-place operations
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        if gpt.wte.weight is not gpt.lm_head.weight:
            fully_shard(gpt.wte, mesh=mesh["dp"])
            gpt.wte.set_unshard_in_backward(False)  # its gradient needs only the tokens
        fully_shard(gpt, mesh=mesh["dp"])


def cut_heads_and_channels(gpt: GPT, mesh: DeviceMesh) -> None:
    """Tensor parallelism: cut each Linear of the blocks along its `cut` side. InputError for a matrix that
    cannot be cut, and for a vector inside a module whose matrices are cut.
    """
    # From the head's rows, a rank takes the channels of its own key-value heads
    styles = {
        "value_channels": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(-1))
    }
    for name, module in gpt.blocks.named_modules():
        if any(cut_dim(child) is not None for child in module.children()):
            for key in [key for key, parameter in module.named_parameters() if parameter.ndim < 2]:
                raise InputError(
                    f"--tensor-parallel {mesh.size()} cannot train blocks.{name}.{key}: each rank would have "
                    "the gradient of its own heads or channels alone; move it into Block"
                )
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.ndim < 2:
                continue
            dim = cut_dim(module)
            if dim is None or parameter.size(dim) % mesh.size():
                raise InputError(
                    f"--tensor-parallel {mesh.size()} cannot divide blocks.{name}.{key}, "
                    f"{tuple(parameter.shape)}: in gpt.py each Linear of a block says which side to cut, "
                    'cut="outputs" or cut="inputs"'
                )
            styles[f"blocks.{name}"] = CUTS[module.cut][1]
    # q, k, v and the gate read the same DTensor, so that the partial sums of its gradient are added up before
    # they are sent
    layouts = (Replicate(), None, None, None)
    reads_one = PrepareModuleInput(input_layouts=layouts, desired_input_layouts=layouts)
    parallelize_module(gpt, mesh, styles | {"blocks.*.attn": reads_one})


def fill_shard(param: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy a tensor that every rank has into a parameter, or this rank's shard of it into a cut parameter."""
    if isinstance(param, DTensor):  # without communication
        whole = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
    local(param).copy_(local(whole))


def average_tensor_parallel_gradients(gpt: GPT, mesh: DeviceMesh) -> None:
    """Average the gradients of tensor-parallel parameters over "dp". Without FSDP2 nothing else does it."""
    for parameter in gpt.parameters():
        if isinstance(parameter, DTensor) and parameter.grad is not None:
            dist.all_reduce(parameter.grad.to_local(), dist.ReduceOp.AVG, group=mesh["dp"].get_group())


def average_whole_gradients(gpt: GPT) -> None:
    """Average the gradients of whole parameters over all ranks, for an optimizer that does not do it. A
    missing gradient counts as zero.
    """
    if not dist.is_initialized():
        return
    for parameter in gpt.parameters():
        if not isinstance(parameter, DTensor):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)


def gradients_finite(gpt: GPT) -> torch.Tensor:
    """Whether every gradient on this rank is finite: a 0-D bool on the device."""
    grads = [local(parameter.grad) for parameter in gpt.parameters() if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(grads).isfinite()


def compile_model(gpt: GPT, mesh: DeviceMesh | None) -> Callable:
    """The function that computes the model's loss from now on. mesh: the parameters' mesh, if they are cut.

    Embedding lookup is not compiled, because the gradient of PyTorch's own kernel is the same in every run: a
    compiled kernel adds it up atomically, in whatever order the threads arrive.
    """
    if mesh is not None:
        for block in gpt.blocks:  # FSDP2's work between blocks is not compiled
            block.compile(dynamic=False)
        gpt.mean_loss = torch.compile(head_loss.mean_loss, dynamic=False)
        return gpt
    gpt.look_up = torch.compiler.disable(gpt.look_up)
    return torch.compile(gpt, dynamic=False)
