"""Every file of contenders/ trains the same on any number of ranks, in pieces, and after a break. Their
mathematics is checked against SVDs and closed forms.
"""

import functools
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

from nanomuon import checkpoint, recipe
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.orthogonalize import orthogonalize
from nanomuon.recipe import load_recipe, make_optimizer, run_file
from scripts.laboratory.contenders import Contender
from tests.layouts import assert_close, assert_same_everywhere, full
from tests.worlds import run_world

FOLDER = Path(__file__).parent.parent / "contenders"
MODELS = {"no_convolution", "no_head_rows", "no_key_offset", "no_value_gate", "no_x0_scalars", "value_tables"}
FILES = sorted({path.stem for path in FOLDER.glob("*.py")} - MODELS)
# These only set options and rates of the recipe, whose tests train on ranks and in pieces
ONLY_OPTIONS = {"adamw", "aux_adamw", "flat_momenta", "muon", "plain"}
STEPS, BREAK = 4, 2
# Bases turn every 10 steps by default: with these options they turn within STEPS
OPTIONS = {"soap": {"every": 2}, "soap_muon": {"every": 2}}
TOLERANCE = 1e-8


pytestmark = pytest.mark.usefixtures("eager")


def tiny_model(batches=False):
    """Square, tall and wide matrices, batches of them if asked for, and those that start at zero; in
    float64.
    """
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=24, seq_len=8, depth=1, width=8, heads=2, kv_heads=1))
    model = model.to_empty(device="cpu").double()
    model.init_weights(0)
    if batches:  # such as a layer's experts
        model.batches = torch.nn.ParameterList([random_matrices(2, 32, 8), random_matrices(2, 8, 32)])
    return model


@functools.cache
def mesh_over(group):
    """One for all contenders: the process groups of a mesh live as long as the process."""
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))


def cut_over(model, mesh):
    """Cut every parameter into pieces by rows, as FSDP2 does."""
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            piece = distribute_tensor(param.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(module, name, torch.nn.Parameter(piece))


def local_gradient(number, shape, step, rank):
    generator = torch.Generator().manual_seed(10_000 * number + 100 * step + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def mean_gradient(number, shape, step, ranks):
    return sum(local_gradient(number, shape, step, rank) for rank in range(ranks)) / ranks


class Training:
    """A contender at work on a tiny model, with made-up gradients."""

    def __init__(self, file, batches=False, group=None, in_pieces=False):
        self.model = tiny_model(batches)
        self.mesh = None
        if in_pieces:
            self.mesh = mesh_over(group)
            cut_over(self.model, self.mesh)
        self.params = list(self.model.parameters())
        build, self.schedule, _ = load_recipe(FOLDER / f"{file}.py")
        world_size = dist.get_world_size(group) if group else 1
        with mock.patch.object(dist, "group", SimpleNamespace(WORLD=group)):  # the default in optim
            build = functools.partial(build, **OPTIONS.get(file, {}))
            self.optimizer = make_optimizer(build, self.model, 4096, 3_000, world_size)
        self.built = [dict(each) for each in self.optimizer.param_groups]

    def run(self, steps, gradient):
        """gradient(number, shape, step): the whole gradient of a parameter."""
        for step in steps:
            for each, built in zip(self.optimizer.param_groups, self.built, strict=True):
                each.update(self.schedule(built, step, STEPS))
            for number, param in enumerate(self.params):
                param.grad = gradient(number, param.shape, step)
                if self.mesh:
                    param.grad = distribute_tensor(param.grad, self.mesh, [Shard(0)], src_data_rank=None)
            self.optimizer.step()
        return self

    def result(self):
        return full(self.params), self.optimizer.full_state_dict()["state"]


def on_ranks(group, file):
    """Replicated parameters, with each rank's own gradients; then with batches of matrices, in pieces."""
    rank = dist.get_rank(group)
    replicated = Training(file, group=group)
    replicated.run(range(STEPS), lambda number, shape, step: local_gradient(number, shape, step, rank))
    in_pieces = Training(file, True, group, in_pieces=True)
    in_pieces.run(range(STEPS), lambda number, shape, step: mean_gradient(number, shape, step, 3))
    return replicated.result(), in_pieces.result()


def in_one_process(file, steps, batches=False):
    training = Training(file, batches)
    return training.run(steps, lambda number, shape, step: mean_gradient(number, shape, step, 3))


FILES_IN_TIME = [pytest.param(file, marks=[pytest.mark.slow] * (file in ONLY_OPTIONS)) for file in FILES]


@pytest.mark.parametrize("file", FILES_IN_TIME)
def test_ranks_pieces_and_breaks_make_no_difference(file, tmp_path):
    expected = in_one_process(file, range(STEPS)).result()
    assert all(weights.isfinite().all() for weights in expected[0])
    before = list(tiny_model().parameters())
    moved = [not torch.equal(p, q) for p, q in zip(before, expected[0], strict=True)]
    assert all(moved)

    replicated, in_pieces = zip(*run_world(3, on_ranks, file), strict=True)
    assert_same_everywhere(replicated)
    assert_close(replicated[0], expected, TOLERANCE)
    assert_same_everywhere(in_pieces)
    assert_close(in_pieces[0], in_one_process(file, range(STEPS), batches=True).result(), TOLERANCE)

    first = in_one_process(file, range(BREAK))
    checkpoint.save(tmp_path, BREAK, first.model, first.optimizer, {})
    second = Training(file)
    checkpoint.load(checkpoint.find(tmp_path), second.model, second.optimizer)
    second.run(range(BREAK, STEPS), lambda number, shape, step: mean_gradient(number, shape, step, 3))
    assert_same_everywhere([expected, second.result()])


@pytest.mark.parametrize("file", FILES)
def test_lr_scale_multiplies_every_rate(file):
    setup = {"rows": 4, "steps": 10, "model": {"seq_len": 8}}
    _, scaled = Contender(f"{FOLDER / file}.py:lr_scale=0.5").prepare(tiny_model(), setup)
    _, unscaled = Contender(f"{FOLDER / file}.py").prepare(tiny_model(), setup)
    assert [group["lr"] for group in scaled] == [group["lr"] / 2 for group in unscaled]


@pytest.mark.parametrize("file", FILES)
def test_a_gradient_that_is_not_finite_leaves_weights_and_state_as_they_were(file):
    training = in_one_process(file, range(2))
    weights, state = training.result()
    before = [weight.clone() for weight in weights], state
    training.params[0].grad.view(-1)[0] = torch.inf
    training.optimizer.step()
    assert_close(training.result(), before, 1e-12)


# ---- the mathematics of single files


def module(file):
    return SimpleNamespace(**run_file(FOLDER / f"{file}.py"))


def direction_of(file, **options):
    groups = module(file).param_groups(tiny_model(), **options)
    return next(group["direction"] for group in groups if group["kind"] == "muon")


def random_matrices(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_singular_values(values, m, n):
    """(1, m, n) with random singular vectors."""
    U, _, Vh = torch.linalg.svd(random_matrices(m, n), full_matrices=False)
    return (U * torch.tensor(values, dtype=torch.float64) @ Vh).unsqueeze(0)


def polar(M, ns_dtype=None):
    U, _, Vh = torch.linalg.svd(M, full_matrices=False)
    return U @ Vh


class Matrix:
    """One matrix with its direction and buffers, without an optimizer."""

    def __init__(self, direction, m, n):
        self.direction, self.buffers = direction, {}
        if hasattr(direction, "buffers"):
            for name, shape in direction.buffers(m, n).items():
                self.buffers[name] = torch.zeros(1, *shape, dtype=torch.float64)

    def ask(self, U):
        one, hyper = torch.ones(1, 1, 1, dtype=torch.float64), SimpleNamespace(one_minus_beta2=0.05)
        X, gain = self.direction(U, self.buffers, one, hyper)
        return X * gain


def test_contra_muon_takes_from_strong_directions():
    M = with_singular_values([8.0, 2.0, 0.5], 3, 5)  # a gap, so that the power iteration converges
    X = Matrix(direction_of("contra_muon", c=0.4), 3, 5).ask(M)
    P = orthogonalize(M)
    U, _, Vh = torch.linalg.svd(M, full_matrices=False)
    expected = P - U * torch.tensor([0.2, 0.05, 0.0125], dtype=torch.float64) @ Vh
    expected *= P.norm() / expected.norm()
    torch.testing.assert_close(X, expected, rtol=1e-4, atol=1e-6)


def test_aurora_evens_the_norms_of_the_long_side_and_stays_orthogonal():
    aurora = module("aurora")
    # exact, so that only the convergence of aurora itself is seen
    aurora.even_rows.__globals__["orthogonalize"] = polar
    M = random_matrices(1, 32, 8) * torch.linspace(0.1, 3, 32, dtype=torch.float64).view(1, 32, 1)
    spread = []
    for iterations in (1, 2, 100):
        X = aurora.aurora(M, iterations)
        torch.testing.assert_close(X.mT @ X, torch.eye(8, dtype=torch.float64)[None])
        torch.testing.assert_close(aurora.aurora(M.mT, iterations), X.mT)
        spread.append(X.norm(dim=2).std())
    assert spread[2] < 1e-6 < spread[1] < spread[0]
    square = random_matrices(1, 5, 5)
    torch.testing.assert_close(aurora.aurora(square, 2), polar(square))


def test_soap_is_adam_in_the_basis_of_the_first_gradient():
    matrix = Matrix(direction_of("soap", every=100), 5, 7)
    assert not matrix.ask(random_matrices(1, 5, 7, seed=99)).any()
    left, right = matrix.buffers["left"][0], matrix.buffers["right"][0]
    torch.testing.assert_close(left.T @ left, torch.eye(5, dtype=torch.float64))
    torch.testing.assert_close(right.T @ right, torch.eye(7, dtype=torch.float64))
    rotated = torch.nn.Parameter(torch.zeros(5, 7, dtype=torch.float64))
    adam = torch.optim.Adam([rotated], lr=1.0, betas=(0.95, 0.95), eps=1e-8)
    W = torch.zeros(5, 7, dtype=torch.float64)
    for step in range(5):
        G = random_matrices(1, 5, 7, seed=step)
        W -= matrix.ask(G)[0]
        rotated.grad = left.T @ G[0] @ right
        adam.step()
    torch.testing.assert_close(W, left @ rotated.detach() @ right.T)


def test_the_bases_of_soap_turn_to_the_eigenvectors_and_the_second_moments_with_them():
    for file in ("soap", "soap_muon"):
        factor = random_matrices(1, 6, 6)
        gram = factor @ torch.diag(2.0 ** torch.arange(0, -12, -2, dtype=torch.float64)) @ factor.mT
        Q = torch.eye(6, dtype=torch.float64)[None].flip(2).clone()
        V = Q.mT.clone()  # a mark for each direction: row i marks column i of Q
        due, first = torch.ones(1, 1, 1, dtype=torch.bool), torch.zeros(1, 1, 1, dtype=torch.bool)
        sizes = (Q * (gram @ Q)).sum(dim=1)[0]
        module(file).turn_basis(Q, gram, V, first, due)
        marks = V[0].argmax(dim=1)
        assert marks.tolist() == (5 - sizes.argsort(descending=True)).tolist()
        for _ in range(60):
            module(file).turn_basis(Q, gram, V, first, due)
        expected = torch.linalg.eigh(gram).eigenvectors.flip(2)
        overlap = (Q * expected).sum(dim=1).abs()
        assert (overlap > 0.999).all()


def test_soap_muon_orthogonalizes_what_soap_would_do():
    matrix = Matrix(direction_of("soap_muon", every=100), 5, 7)
    buffers = matrix.buffers
    for step in range(4):
        X = matrix.ask(random_matrices(1, 5, 7, seed=step))
    N = buffers["left"].mT @ buffers["exp_avg"] @ buffers["right"] / buffers["exp_avg_sq"].sqrt()
    torch.testing.assert_close(X, orthogonalize(buffers["left"] @ N @ buffers["right"].mT))
    assert (torch.linalg.svdvals(X) - 1).abs().max() < 0.2


def test_lion_follows_its_two_lines():
    matrix, m = Matrix(direction_of("lion"), 3, 5), 0
    for step in range(4):
        G = random_matrices(1, 3, 5, seed=step)
        assert torch.equal(matrix.ask(G), torch.sign(0.9 * m + 0.1 * G))
        m = 0.99 * m + 0.01 * G


def test_normuon_rows_evens_the_rows_of_a_wide_matrix():
    matrix, v = Matrix(direction_of("normuon_rows"), 4, 6), 0
    for step in range(3):
        G = random_matrices(1, 4, 6, seed=step)
        X = orthogonalize(G)
        v = 0.95 * v + 0.05 * X.square().mean(dim=2, keepdim=True)
        scaled = X / v.sqrt()
        torch.testing.assert_close(matrix.ask(G), scaled * X.norm() / scaled.norm())


@pytest.mark.parametrize("equilibrate, renormalize", [(True, False), (False, True), (True, True)])
def test_muon_eq_evens_rows_before_and_restores_the_norm_after(equilibrate, renormalize):
    matrix = Matrix(direction_of("muon_eq", equilibrate=equilibrate, renormalize=renormalize), 4, 6)
    v = torch.zeros(1, 6, dtype=torch.float64)
    for step in range(3):
        M = random_matrices(1, 4, 6, seed=step)[0]
        U, norms = M, [row.norm() for row in M]
        if equilibrate:
            U = torch.stack([row * sum(norms) / 4 / norm for row, norm in zip(M, norms, strict=True)])
        X = orthogonalize(U)
        if renormalize:
            X = X * 2 / X.norm()  # ||X||_F of an exact polar factor of 4 x 6
        v = 0.95 * v + 0.05 * X.square().mean(dim=0, keepdim=True)
        scaled = X / v.sqrt()
        torch.testing.assert_close(matrix.ask(M[None])[0], scaled * X.norm() / scaled.norm())


def test_hyperball_stays_on_its_sphere_and_lets_matrices_of_zeros_grow():
    training = Training("hyperball")
    before = {}
    for group in training.optimizer.param_groups:
        for param in group["params"] if group["kind"] == "muon" else []:
            radius = (param.numel() / training.model.config.width) ** 0.5
            param.data *= radius / param.norm().clamp(min=1e-20)
            before[param] = radius, param.detach().clone()
    training.run([0], functools.partial(mean_gradient, ranks=1))
    for param, (radius, old) in before.items():
        direction = orthogonalize(param.grad)
        expected = old - 0.018 * radius * direction / direction.norm()
        if old.any():
            expected *= radius / expected.norm()
        torch.testing.assert_close(param.detach(), expected, rtol=1e-3, atol=1e-6)
        assert param.norm() <= radius * (1 + 1e-12)
    assert {bool(old.any()) for _, old in before.values()} == {True, False}


# ---- models


SETUP = {
    "model": dict(vocab_size=24, seq_len=8, depth=3, width=32, heads=2, kv_heads=2),
    "dtype": "float32",
    "rows": 2,
    "steps": 10,
}


def logits_of(contender, change):
    """Logits of a model whose parameters, drawn by name, change(model) has changed, and its own model."""
    model, _ = Contender(contender).initial_model(SETUP, "cpu", 0)
    for name, param in model.named_parameters():
        generator = torch.Generator().manual_seed(sum(name.encode()))
        param.data = 0.3 * torch.randn(param.shape, generator=generator)
    with torch.no_grad():
        change(model)
        return model(torch.arange(16).view(2, 8) % 24)


def without_taps(model):
    for block in model.blocks:
        block.conv.taps.zero_()


def without_x0_scalars(model):
    model.x0_scalars.zero_()


def without_gates(model):
    for block in model.blocks:
        block.attn.value_gate.weight.zero_()


def without_offsets(model):
    for block in model.blocks:
        block.attn.offset_half = lambda k, cache: k


@pytest.mark.parametrize(
    "file, off",
    [
        ("no_convolution", without_taps),
        ("no_x0_scalars", without_x0_scalars),
        ("no_value_gate", without_gates),
        ("no_key_offset", without_offsets),
    ],
)
def test_a_model_without_an_addition_is_the_default_with_the_addition_off(file, off):
    without = logits_of(f"{FOLDER / file}.py", lambda model: None)
    torch.testing.assert_close(without, logits_of("default", off))
    assert (without - logits_of("default", lambda model: None)).abs().max() > 1e-3


def test_without_the_heads_rows_the_head_only_multiplies():
    """Its logits are odd in the head's weights; the default's, whose values contain them, are not."""

    def odd(contender):
        plus = logits_of(contender, lambda model: None)
        minus = logits_of(contender, lambda model: model.lm_head.weight.neg_())
        return torch.allclose(plus, -minus, atol=1e-4)

    assert odd(f"{FOLDER}/no_head_rows.py") and odd(f"{FOLDER}/value_tables.py") and not odd("default")


def test_value_tables_with_the_rows_of_the_head_are_the_default_in_their_layers():
    """The last layer and every second before it have one."""

    def give_rows(model):
        for table in model.values["wte"].values():
            table.weight.copy_(torch.nn.functional.rms_norm(model.lm_head.weight, (32,)))

    def without_second_layer(model):
        forward = model.blocks[1].attn.forward
        model.blocks[1].attn.forward = lambda x, rows, *rest: forward(x, 0 * rows, *rest)

    expected = logits_of("default", without_second_layer)
    torch.testing.assert_close(logits_of(f"{FOLDER}/value_tables.py", give_rows), expected)
    contender = Contender(f"{FOLDER}/value_tables.py")
    model, _ = contender.initial_model(SETUP, "cpu", 0)
    assert all(0.1 < table.weight.std() < 0.25 for table in model.values["wte"].values())  # 32^-1/2
    _, groups = contender.prepare(model, SETUP)
    rates = {name: group["lr"] for group in groups for name in group["names"]}
    assert rates["values.wte.0.weight"] == rates["values.wte.2.weight"] == rates["wte.weight"]


@pytest.mark.parametrize("file", sorted(MODELS))
def test_every_parameter_of_a_model_gets_a_gradient_and_learns(file):
    contender = Contender(f"{FOLDER / file}.py")
    model, _ = contender.initial_model(SETUP, "cpu", 0)
    optimizer, _ = contender.prepare(model, SETUP)
    tokens = torch.arange(16).view(2, 8) % 24
    losses = []
    for _ in range(6):
        loss = model(tokens, tokens.roll(-1, dims=1))
        loss.backward()
        losses.append(loss.item())
        untouched = [name for name, param in model.named_parameters() if param.grad is None]
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.1
    assert all("value_gate" in name for name in untouched) and (not untouched or file == "no_head_rows")


def test_flat_momenta_are_those_of_long_runs():
    build, _, _ = load_recipe(FOLDER / "flat_momenta.py")
    flat, long = build(tiny_model(), batch=4096, steps=300), recipe.param_groups(tiny_model(), 4096, 10_000)
    for short, longer in zip(flat, long, strict=True):
        for key in ("momentum", "betas"):
            assert short.get(key) == longer.get(key)
