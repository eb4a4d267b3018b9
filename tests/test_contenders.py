"""Every file of contenders/ with param groups or a schedule trains the same on any number of ranks, in
pieces, and after a break. Their formulas are checked against SVDs and closed forms.
"""

import functools
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from nanomuon import checkpoint
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.orthogonalize import orthogonalize
from nanomuon.recipe import load_recipe, make_optimizer, run_file
from scripts.laboratory.contenders import Contender
from tests.layouts import assert_close, assert_same_everywhere, full
from tests.reference import local_gradient, mean_gradient
from tests.worlds import run_world

FOLDER = Path(__file__).parent.parent / "contenders"
DEFINED = {path.stem: run_file(path) for path in sorted(FOLDER.glob("*.py"))}
MODELS = [file for file, names in DEFINED.items() if "model" in names]
FILES = [file for file, names in DEFINED.items() if "param_groups" in names or "schedule" in names]
# These only set options and rates of the recipe, whose tests train on ranks and in pieces
ONLY_OPTIONS = {"adamw", "aux_adamw", "flat_momenta", "muon", "plain"}
STEPS, BREAK = 4, 2
# Bases turn every 10 steps by default, and momenta change after a third: with these options within STEPS
OPTIONS = {"soap": {"every": 2}, "soap_muon": {"every": 2}, "two_momenta": {"start": 1 / 3000}}
TOLERANCE = 1e-8


pytestmark = pytest.mark.usefixtures("eager")


def tiny_model():
    """Square, tall and wide matrices, and those that start at zero; in float64."""
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=24, seq_len=8, depth=1, width=8, heads=2, kv_heads=1))
    model = model.to_empty(device="cpu").double()
    model.init_weights(0)
    return model


class Training:
    """A contender at work on a tiny model, with made-up gradients."""

    def __init__(self, file, group=None, in_pieces=False):
        self.model = tiny_model()
        if in_pieces:
            fully_shard(self.model, mesh=dist.DeviceMesh.from_group(group, "cpu"))
        self.params = list(self.model.parameters())
        build, self.schedule, _ = load_recipe(FOLDER / f"{file}.py")
        world_size = dist.get_world_size(group) if group else 1
        with mock.patch.object(dist, "group", SimpleNamespace(WORLD=group)):  # the default in optim
            build = functools.partial(build, **OPTIONS.get(file, {}))
            self.optimizer = make_optimizer(build, self.model, 4096, 3_000, world_size)
        self.built = [dict(each) for each in self.optimizer.param_groups]

    def run(self, steps, gradient=mean_gradient):
        """gradient(number, shape, step): the whole gradient of a parameter."""
        for step in steps:
            for each, built in zip(self.optimizer.param_groups, self.built, strict=True):
                each.update(self.schedule(built, step, STEPS))
            for number, param in enumerate(self.params):
                param.grad = gradient(number, param.shape, step)
                if isinstance(param, DTensor) and param.grad is not None:
                    layout = param.device_mesh, param.placements
                    param.grad = distribute_tensor(param.grad, *layout, src_data_rank=None)
            self.optimizer.step()
        return self

    def result(self):
        return [p.clone() for p in full(self.params)], self.optimizer.full_state_dict()["state"]


def on_ranks(group, file):
    """Replicated parameters, with each rank's own gradients; then in pieces."""
    rank = dist.get_rank(group)
    replicated = Training(file, group)
    replicated.run(range(STEPS), lambda number, shape, step: local_gradient(number, shape, step, rank, 2))
    return replicated.result(), Training(file, group, in_pieces=True).run(range(STEPS)).result()


FILES_IN_TIME = [pytest.param(file, marks=[pytest.mark.slow] * (file in ONLY_OPTIONS)) for file in FILES]


SQUARED = """
import torch.nn.functional as F
from nanomuon.gpt import GPT, MLP

class Squared(MLP):
    def forward(self, x):
        return self.down(F.relu(self.up(x)).square() * FACTOR)

class model(GPT):
    def __init__(self, config, compute_dtype):
        super().__init__(config, compute_dtype)
        for block in self.blocks:
            block.mlp = Squared(config)

"""


@pytest.mark.parametrize("file", FILES_IN_TIME)
def test_ranks_pieces_breaks_and_gradients_that_are_not_finite_make_no_difference(file, tmp_path):
    training = Training(file)
    before = [p.clone() for p in training.params]
    expected = training.run(range(STEPS)).result()
    for start, end in zip(before, expected[0], strict=True):
        assert end.isfinite().all() and not torch.equal(start, end)

    for of_ranks in zip(*run_world(2, on_ranks, file), strict=True):
        assert_same_everywhere(of_ranks)
        assert_close(of_ranks[0], expected, TOLERANCE)

    first = Training(file).run(range(BREAK))
    checkpoint.save(tmp_path, BREAK, first.model, first.optimizer, {})
    second = Training(file)
    checkpoint.load(checkpoint.find(tmp_path), second.model, second.optimizer)
    second.run(range(BREAK, STEPS))
    assert_same_everywhere([expected, second.result()])

    training.params[0].grad.view(-1)[0] = torch.inf
    training.optimizer.step()
    assert_close(training.result(), expected, 1e-12)


# ---- the mathematics of single files


def random_matrices(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def polar(M, ns_dtype=None):
    U, _, Vh = torch.linalg.svd(M, full_matrices=False)
    return U @ Vh


class Matrix:
    """One matrix with the direction of a file and its buffers, without an optimizer."""

    def __init__(self, file, m, n, **options):
        groups = DEFINED[file]["param_groups"](tiny_model(), batch=4096, steps=300, **options)
        self.direction = next(group["direction"] for group in groups if group["kind"] == "muon")
        self.buffers = {}
        if hasattr(self.direction, "buffers"):
            for name, shape in self.direction.buffers(m, n).items():
                self.buffers[name] = torch.zeros(1, *shape, dtype=torch.float64)

    def ask(self, U):
        one, hyper = torch.ones(1, 1, 1, dtype=torch.float64), SimpleNamespace(one_minus_beta2=0.05)
        X, gain = self.direction(U, self.buffers, one, hyper)
        return X * gain


def test_contra_muon_takes_from_strong_directions():
    # a gap, so that the power iteration converges
    singular_values = torch.tensor([8.0, 2.0, 0.5], dtype=torch.float64)
    U, _, Vh = torch.linalg.svd(random_matrices(1, 3, 5), full_matrices=False)
    M = U * singular_values @ Vh
    P = orthogonalize(M)
    expected = P - U * (0.4 / 2 * singular_values / 8.0) @ Vh
    expected *= P.norm() / expected.norm()
    X = Matrix("contra_muon", 3, 5, c=0.4).ask(M)
    torch.testing.assert_close(X, expected, rtol=1e-4, atol=1e-6)


def test_aurora_evens_the_norms_of_the_long_side_and_stays_orthogonal():
    names = run_file(FOLDER / "aurora.py")
    aurora = names["aurora"]
    # exact, so that only the convergence of aurora itself is seen
    names["even_rows"].__globals__["orthogonalize"] = polar
    M = random_matrices(1, 32, 8) * torch.linspace(0.1, 3, 32, dtype=torch.float64).view(1, 32, 1)
    spread = []
    for iterations in (1, 2, 100):
        X = aurora(M, iterations)
        torch.testing.assert_close(X.mT @ X, torch.eye(8, dtype=torch.float64)[None])
        torch.testing.assert_close(aurora(M.mT, iterations), X.mT)
        spread.append(X.norm(dim=2).std())
    assert spread[2] < 1e-6 < spread[1] < spread[0]


def test_soap_is_adam_in_the_basis_of_the_first_gradient():
    matrix = Matrix("soap", 5, 7, every=100)
    assert not matrix.ask(random_matrices(1, 5, 7, seed=99)).any()
    left, right = matrix.buffers["left"][0], matrix.buffers["right"][0]
    rotated = torch.nn.Parameter(torch.zeros(5, 7, dtype=torch.float64))
    adam = torch.optim.Adam([rotated], lr=1.0, betas=(0.95, 0.95), eps=1e-8)
    W = torch.zeros(5, 7, dtype=torch.float64)
    for G in random_matrices(5, 1, 5, 7):
        W -= matrix.ask(G)[0]
        rotated.grad = left.T @ G[0] @ right
        adam.step()
    torch.testing.assert_close(W, left @ rotated.detach() @ right.T)


def test_soap_muon_orthogonalizes_what_soap_would_do():
    matrix = Matrix("soap_muon", 5, 7, every=100)
    buffers = matrix.buffers
    for G in random_matrices(4, 1, 5, 7):
        X = matrix.ask(G)
    N = buffers["left"].mT @ buffers["exp_avg"] @ buffers["right"] / buffers["exp_avg_sq"].sqrt()
    torch.testing.assert_close(X, orthogonalize(buffers["left"] @ N @ buffers["right"].mT))


@pytest.mark.parametrize("file", ["soap", "soap_muon"])
def test_the_bases_of_soap_turn_to_the_eigenvectors(file):
    matrix = Matrix(file, 5, 7, every=1)
    for _ in range(100):
        for G in random_matrices(2, 1, 5, 7):
            matrix.ask(G)
    for side in ("left", "right"):
        Q, gram = matrix.buffers[side][0], matrix.buffers[f"{side}_gram"][0]
        rotated = Q.T @ gram @ Q
        assert (rotated - rotated.diag().diag()).norm() < 0.02 * rotated.norm()


def even(X, v, dim):
    """X with even rows or columns and the same norm; the second moments after it."""
    v = 0.95 * v + 0.05 * X.square().mean(dim=dim, keepdim=True)
    scaled = X / v.sqrt()
    return scaled * X.norm() / scaled.norm(), v


def lion(G, m):
    return torch.sign(0.9 * m + 0.1 * G), 0.99 * m + 0.01 * G


def normuon_rows(G, v):
    return even(orthogonalize(G), v, dim=2)


def muon_eq(M, v):
    norms = M.norm(dim=2, keepdim=True)
    X = orthogonalize(M / norms * norms.mean())
    return even(X * 2 / X.norm(), v, dim=1)  # 2: ||X||_F of an exact polar factor of 4 x 6


@pytest.mark.parametrize(
    "formula, options",
    [(lion, {}), (normuon_rows, {}), (muon_eq, dict(equilibrate=True, renormalize=True))],
)
def test_a_direction_follows_its_formula(formula, options):
    matrix, kept = Matrix(formula.__name__, 4, 6, **options), 0
    for G in random_matrices(4, 1, 4, 6):
        direction, kept = formula(G, kept)
        torch.testing.assert_close(matrix.ask(G), direction)


def test_nanochat_muon_has_the_momentum_of_nanochat():
    """By hand from `get_muon_momentum`: 5,000 steps, rates fall from step 1,750 on."""
    schedule, muon = DEFINED["nanochat_muon"]["schedule"], dict(kind="muon", lr=1.0, weight_decay=1.0)
    for step, momentum in ((0, 0.85), (200, 0.91), (400, 0.97), (1750, 0.97), (3375, 0.935)):
        assert schedule(muon, step, 5000)["momentum"] == pytest.approx(momentum)


def test_hyperball_stays_on_its_sphere_and_lets_matrices_of_zeros_grow():
    training = Training("hyperball")
    mlp = training.model.blocks[0].mlp
    radius = 32**0.5  # of 32 x 8 and 8 x 32, in a model of width 8
    mlp.up.weight.data *= radius / mlp.up.weight.norm()
    training.run(range(STEPS))
    assert mlp.up.weight.norm().item() == pytest.approx(radius) and 0 < mlp.down.weight.norm() < radius


# ---- models


SETUP = {
    "model": dict(vocab_size=24, seq_len=8, depth=3, width=32, heads=2, kv_heads=2),
    "dtype": "float32",
    "rows": 2,
    "steps": 10,
}


def logits_of(contender, change):
    """Logits of a model whose parameters, drawn by name, change(model) has changed, and its own model."""
    model = Contender(contender).initial_model(SETUP, "cpu", 0)
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


def without_additions(model):
    without_taps(model)
    without_x0_scalars(model)
    without_offsets(model)
    embed_and_rows = model.look_up
    model.look_up = lambda tokens: (embed_and_rows(tokens)[0], torch.zeros(*tokens.shape, 32))


@pytest.mark.parametrize(
    "file, off",
    [
        ("no_convolution", without_taps),
        ("no_x0_scalars", without_x0_scalars),
        ("no_value_gate", without_gates),
        ("no_key_offset", without_offsets),
        ("no_additions", without_additions),
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


def test_a_model_from_a_file_in_any_folder_compiles(tmp_path):
    """torch.compile finds the globals of the file's functions, and those of the newest file of this name."""
    for factor in (1, 2):
        file = tmp_path / str(factor) / "squared.py"
        file.parent.mkdir()
        file.write_text(f"{SQUARED}FACTOR = {factor}\n")
        model = Contender(str(file)).initial_model(SETUP, "cpu", 0)
        with torch.no_grad():
            for param in model.parameters():
                param.normal_()
        tokens = torch.arange(16).view(2, 8) % 24
        compiled = torch.compile(model, backend="eager")
        torch.testing.assert_close(compiled(tokens, tokens), model(tokens, tokens))
        torch._dynamo.reset()


@pytest.mark.parametrize("file", MODELS)
def test_every_parameter_of_a_model_gets_a_gradient_and_learns(file):
    contender = Contender(f"{FOLDER / file}.py")
    model = contender.initial_model(SETUP, "cpu", 0)
    optimizer, _ = contender.prepare(model, SETUP)
    tokens = torch.arange(16).view(2, 8) % 24
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = model(tokens, tokens.roll(-1, dims=1))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert losses[-1] < losses[0] - 0.1
    untrained = "value_gate" if file in ("no_head_rows", "no_additions") else "nothing"
    for name, param in model.named_parameters():
        assert param.grad is not None or untrained in name, name
