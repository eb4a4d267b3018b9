"""One model in every layout the optimizers train it in, for comparison with the formulas of reference.py."""

import contextlib
import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from nanomuon.optim import DistMuonAdamW, MuonAdamW, gradient_dtype
from nanomuon.orthogonalize import orthogonalize
from nanomuon.runtime import compile_enabled
from tests.reference import build, distance, equal, local_gradient, mean_gradient
from tests.worlds import run_world

ROWS, COLUMNS, COPY = Shard(0), Shard(1), Replicate()
STRIDED = _StridedShard(0, split_factor=2)  # what fully_shard makes of rows that are cut already
LAYOUTS = {  # ranks, dimensions of the device mesh, placements of matrices and of experts
    "one-process": (0, None, None, None),
    **{f"replicated-{size}": (size, None, None, None) for size in (1, 2, 3, 4)},
    **{f"fsdp-{size}": (size, "dp", [ROWS], [ROWS]) for size in (1, 2, 3, 4)},
    "fsdp-columns": (3, "dp", [COLUMNS], [ROWS]),
    "tp-rows": (2, "tp", [ROWS], [ROWS]),
    "tp-rows-uneven": (3, "tp", [ROWS], [ROWS]),
    "tp-columns": (4, "tp", [COLUMNS], [ROWS]),
    "copies": (2, "dp", [COPY], [COPY]),
    "fsdp-of-every-second": (3, "dp", [ROWS], [ROWS]),
    "hsdp": (4, "copies dp", [COPY, ROWS], [COPY, ROWS]),
    "fsdp-x-tp-rows": (4, "dp tp", [STRIDED, ROWS], [COPY, ROWS]),
    "fsdp-x-tp-columns": (4, "dp tp", [ROWS, COLUMNS], [COPY, ROWS]),
    "experts": (4, "ep", [ROWS], [ROWS]),
    "experts-tp-rows": (4, "ep tp", [ROWS, COPY], [ROWS, Shard(1)]),
    "experts-tp-columns": (4, "ep tp", [ROWS, COPY], [ROWS, Shard(2)]),
    "experts-fsdp": (4, "dp ep", [ROWS, COPY], [STRIDED, ROWS]),
}

# Banks of more matrices than ranks and of fewer, some that do not divide evenly, one with fewer rows than
# ranks; transposes, experts, convolutions; AdamW parameters of every size
MODEL = [("muon", shape) for shape in [(16, 16)] * 5 + [(24, 12), (12, 24), (24, 12), (10, 20), (3, 20)]]
MODEL += [("muon", shape) for shape in [(1, 8), (20, 3), (8, 3, 3, 3), (5, 12, 8), (2, 8, 10)]]
MODEL += [("adamw", shape) for shape in [(1019, 17), (3, 700), (1500,), (64, 32), (7,), (), (10, 10)]]


def whitened(U, buffers, ok, hyper):
    """The momentum times the inverse root of a running mean of its Gram matrix: one side of Shampoo.

    U: (k, m, n). buffers["gram"]: (k, m, m), updated in place. buffers["count"]: (k,), of the updates.
    """
    buffers["count"].add_(ok.view(-1))
    buffers["gram"].lerp_(U @ U.mT / U.size(2), hyper.one_minus_beta2 * ok)
    values, vectors = torch.linalg.eigh(buffers["gram"])  # (k, m), (k, m, m)
    roots = (values.clamp(min=0) + 1e-4).rsqrt().unsqueeze(1)  # (k, 1, m)
    return (vectors * roots) @ vectors.mT @ U, torch.full_like(ok, 0.2)  # (k, m, n), (k, 1, 1)


def buffers_of_whitened(m, n):
    return {"gram": (m, m), "count": ()}


whitened.buffers = buffers_of_whitened


def polar(U, buffers, ok, hyper):
    """A direction without state, whose gain has fewer digits than the parameters must keep."""
    assert not buffers
    return orthogonalize(U), torch.full_like(ok, 0.125, dtype=torch.bfloat16)


def half_the_width(m, n):
    return n / 2


OPTIONS = {
    "default": dict(),
    "plain": dict(beta2=None, nesterov=False, scale="spectral", momentum=0.8),
    "without averages": dict(momentum=None, beta2=None, scale="unit_rms_norm"),
    "more steps": dict(ns_steps=7, weight_decay=0.5, scale=half_the_width),
    "simple": dict(coefficients="simple", ns_steps=3, beta2=0.5),
    "own triples": dict(
        coefficients=((2, -1.5, 0.5),) * 4,
        ns_steps=None,
        weight_decay_form="decoupled",
        scale="match_rms_adamw",
    ),
    "averages of one step": dict(momentum=0.0, beta2=0.0, weight_decay=0.0),
    "direction": dict(direction=whitened),
    "direction without state": dict(direction=functools.partial(polar), weight_decay_form="decoupled"),
    "direction without momentum": dict(direction=functools.partial(whitened), momentum=None),
}

FUSED = [("muon", (48, 64)), *[("muon", (48, 20))] * 5, ("adamw", (5,))]  # of 3 ranks one owns 2 of a group
SPLITS = {  # of 48 rows: those of each part
    ("qkv", (4, 2, 2)): [[r for r in range(48) if r % 8 in part] for part in (range(4), (4, 5), (6, 7))],
    (30, 18): [slice(30), slice(30, 48)],
    (30, 10, 8): [slice(30), slice(30, 40), slice(40, 48)],
    6: [slice(8 * head, 8 * head + 8) for head in range(6)],
}


@functools.cache  # each mesh of two dimensions has process groups of its own
def mesh_of(group, names):
    """All ranks of the group in a mesh of these dimensions; two dimensions are 2 x 2, three 1 x 2 x 2."""
    names = names.split()
    if len(names) == 1:
        return DeviceMesh.from_group(group, "cpu", mesh_dim_names=names)
    ranks = torch.arange(4).view((2, 2) if len(names) == 2 else (1, 2, 2))
    return DeviceMesh("cpu", ranks, mesh_dim_names=names)


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(params):
    return [p.full_tensor().detach().clone() if isinstance(p, DTensor) else p.detach() for p in params]


class Run:
    """A model and its optimizer on one rank of a layout.

    settings: keywords of the optimizer. regroup: groups and parameters in reverse order.
    """

    def __init__(
        self, group, layout, model=MODEL, dtype=torch.float64, settings=None, regroup=False, **options
    ):
        _, names, self.of_matrices, self.of_experts = LAYOUTS[layout]
        self.layout, self.model = layout, model
        # Dynamo takes twice as long under another default device, and compiles again for a frozen parameter
        self.compiles = compile_enabled(default=False)
        self.rank, self.size = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
        self.mesh = mesh_of(group, names) if names else None
        seed = 0 if names else self.rank  # plain parameters become one model by the broadcast from rank 0
        whole, groups = build(model, dtype, seed, **options)
        pieces = {}
        for i, param in enumerate(whole):
            is_plain = layout == "fsdp-of-every-second" and i % 2
            pieces[param] = param if is_plain else nn.Parameter(self.cut(param.detach()))
        self.params = list(pieces.values())
        for param in self.params:
            if param.dtype == torch.bfloat16 and hasattr(param, "grad_dtype"):  # in newer PyTorch
                param.grad_dtype = torch.float32
        for each in groups:
            each["params"] = [pieces[param] for param in each["params"]]
            if regroup:
                each["params"].reverse()
                each["names"].reverse()
        if regroup:
            groups.reverse()
        settings = settings or {}
        with torch.device("meta"):  # must make no difference, see `train`
            if group:
                self.optimizer = DistMuonAdamW(groups, group, **settings)
            else:
                self.optimizer = MuonAdamW(groups, **settings)

    def cut(self, tensor):
        """The tensor cut as the layout says; vectors and convolutions by rows over the last dimension of the
        mesh. Convolutions that are not cut are channels_last.
        """
        if self.mesh is None:
            return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
        placements = [COPY] * (self.mesh.ndim - 1) + [ROWS if tensor.ndim else COPY]
        if tensor.ndim == 2:
            placements = self.of_matrices
        elif tensor.ndim == 3 or self.of_matrices == [COPY]:
            placements = self.of_experts
        return distribute_tensor(tensor, self.mesh, placements, src_data_rank=None)

    def placed(self, i, grad):
        """A gradient cut like its parameter. In one layout others are what tensor parallelism may leave:
        partial sums, or whole on every rank.
        """
        if self.layout != "tp-rows-uneven" or i % 3 == 0:
            return self.cut(grad)
        if i % 3 == 1:
            return DTensor.from_local(grad / self.size, self.mesh, [Partial()])
        return DTensor.from_local(grad, self.mesh, [COPY])

    def set_gradients(self, step):
        """In eager steps, half of the parameters without a gradient are frozen, and keep an old one."""
        for i, (param, (_, shape)) in enumerate(zip(self.params, self.model, strict=True)):
            if isinstance(param, DTensor):  # averaged by FSDP2, or exact
                grad = mean_gradient(i, shape, step)
                grad = None if grad is None else self.placed(i, grad)
            else:
                grad = local_gradient(i, shape, step, self.rank, self.size)
            is_frozen = grad is None and i % 2 == 0 and not self.compiles
            param.requires_grad_(not is_frozen)
            if not is_frozen:
                param.grad = None if grad is None else grad.to(gradient_dtype(param))

    def train(self, steps):
        for step in steps:
            self.set_gradients(step)
            before = [None if p.grad is None else local(p.grad).clone() for p in self.params]
            # Neither the default device ("meta" holds no numbers) nor autocast must make a difference
            elsewhere = contextlib.nullcontext() if self.compiles else torch.device("meta")
            with elsewhere, torch.autocast("cpu", dtype=torch.bfloat16):
                self.optimizer.step()
            for param, grad in zip(self.params, before, strict=True):
                assert param.grad is None and grad is None or torch.equal(local(param.grad), grad)
        return self

    def result(self):
        """([whole parameter], {name: {key: whole tensor}})"""
        params = [param.clone() for param in full(self.params)]
        return params, self.optimizer.full_state_dict()["state"]


def run_layout(layout, function, *args):
    """Call function(group, layout, *args) on every rank of a layout; return all results."""
    size = LAYOUTS[layout][0]
    return run_world(size, function, layout, *args) if size else [function(None, layout, *args)]


def trained(group, layout, steps, model=MODEL, dtype=torch.float64, settings=None, options=None):
    return Run(group, layout, model, dtype, settings, **(options or {})).train(range(steps)).result()


def assert_same_everywhere(results):
    """All ranks have the same bits."""
    for params, state in results[1:]:
        assert equal(params, results[0][0])
        for name, entry in results[0][1].items():
            assert all(torch.equal(value, state[name][key]) for key, value in entry.items()), name


def assert_close(result, expected, tolerance):
    for i, (p, q) in enumerate(zip(result[0], expected[0], strict=True)):
        assert distance(p, q) < tolerance, f"p{i}"
    assert result[1].keys() == expected[1].keys()
    for name, entry in expected[1].items():
        for key, value in entry.items():
            found = result[1][name][key]
            assert found.shape == value.shape, (name, key)
            assert distance(found, value) < max(tolerance, 1e-9), (name, key)
