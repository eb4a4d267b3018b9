"""Sharded models: FSDP2, tensor parallelism and both train the same as one process, and a checkpoint loads in
any layout.
"""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from nanomuon import checkpoint, hf_export, parallel
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.optim import DistMuonAdamW, MuonAdamW
from nanomuon.optim_fsdp import local
from nanomuon.optim_groups import build_param_groups
from nanomuon.parallel import build_model
from nanomuon.qk_clip import watch_
from nanomuon.runtime import Runtime, read_json
from scripts.base_train import training_step
from tests.reference import distance
from tests.training import QUIET, losses, train_on
from tests.worlds import run_world

# On 4 ranks the rows of embeddings are uneven, and some ranks have no row of the gates
CONFIG = GPTConfig(vocab_size=67, seq_len=32, depth=3, width=16, heads=4, kv_heads=2)
# data parallel, tensor parallel, fsdp
REPLICATED, FSDP, TP, BOTH = (4, 1, False), (4, 1, True), (2, 2, False), (2, 2, True)
# The sign mask of cautious decay flips on rounding
MATRICES = dict(
    lr=0.02, momentum=0.9, ns_steps=5, beta2=0.95, weight_decay=0.1, weight_decay_form="decoupled"
)
TAU = 0.1  # of QK-clip
pytestmark = pytest.mark.usefixtures("environment")  # eager, as in the worlds


def batch(step, rank=0, ranks=1):
    """This rank's rows of a step. Enough tokens that no hidden unit is nearly dead: dividing by the second
    moment would amplify the rounding of its gradient 1e5 times.
    """
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(67, (8, 33), generator=generator).chunk(ranks)[rank]
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Trained:
    """A model and its optimizer in one layout. Muon trains the gates, too, which have fewer rows than there
    are ranks.
    """

    def __init__(self, layout=None, seed=0, tau=None):
        torch.set_default_dtype(torch.float64)
        self.mesh, self.tau, fsdp = None, tau, False
        if layout is not None:
            data, tensor, fsdp = layout
            self.mesh = parallel.device_mesh("cpu", data, tensor)
        config, runtime = replace(CONFIG, qk_norm=tau is None), Runtime(torch.device("cpu"), torch.float64)
        self.model = build_model(config, runtime, seed, self.mesh, fsdp)
        if tau:
            watch_(self.model, tau)
        torch.set_default_dtype(torch.float32)
        adamw = dict(lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.0)
        groups = build_param_groups(self.model, muon=MATRICES, adamw=adamw)
        self.optimizer = DistMuonAdamW(groups) if self.mesh else MuonAdamW(groups)

    def train(self, steps):
        place = (self.mesh.get_local_rank("dp"), self.mesh["dp"].size()) if self.mesh else (0, 1)
        batches = (batch(step, *place) for step in steps)
        for _ in steps:
            training_step(self.model, self.model, self.optimizer, batches, 1, self.mesh, self.tau)
        return self

    def weights(self):
        state = self.model.state_dict().items()
        return {name: t.full_tensor() if local(t) is not t else t.clone() for name, t in state}


def assert_close(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert distance(ours[name], theirs[name]) < 1e-9, name


def hand_on(group, layout, before, step, folder):
    """Two more steps in this layout, from a checkpoint of another or from the start; saved and exported."""
    run = Trained(layout, seed=step)
    if before:
        assert checkpoint.load(checkpoint.find(before), run.model, run.optimizer) == {"step": step}
    run.train(range(step, step + 2))
    checkpoint.save(folder, step + 2, run.model, run.optimizer, {"step": step + 2})
    hf_export.write_weights(folder, run.model, torch.float64)
    return run.weights()


def test_a_checkpoint_of_one_layout_goes_on_in_the_next(tmp_path):
    one_process, before = Trained(), None
    for i, layout in enumerate([BOTH, FSDP, TP, None, REPLICATED, BOTH]):
        expected = one_process.train(range(2 * i, 2 * i + 2)).weights()
        arguments = layout, before, 2 * i, tmp_path / str(i)
        found = run_world(4, hand_on, *arguments) if layout else [hand_on(None, *arguments)]
        before = tmp_path / str(i)
        for weights in (*found, load_file(before / "model.safetensors")):
            assert_close(weights, expected)


class Tied(GPT):
    def __init__(self, config, compute_dtype):
        super().__init__(config, compute_dtype)
        self.lm_head.weight = self.wte.weight


def trained_tied(group, layout):
    with mock.patch.object(parallel, "GPT", Tied):
        run = Trained(layout).train(range(4))
    assert run.model.lm_head.weight is run.model.wte.weight
    return run.weights()


def test_a_tied_head_stays_tied():
    """In a fork that ties it, as docs/running.md shows."""
    expected = trained_tied(None, None)
    for layout in (FSDP, TP):
        for found in run_world(4, trained_tied, layout):
            assert_close(found, expected)


def trained_by_a_muon_of_one_process(group):
    with mock.patch(f"{__name__}.DistMuonAdamW", MuonAdamW):
        return Trained(REPLICATED).train(range(3)).weights()


def test_a_muon_of_one_process_trains_the_same_on_four():
    """The step averages the gradients for it, as for every optimizer but DistMuonAdamW."""
    expected = Trained().train(range(3)).weights()
    for found in run_world(4, trained_by_a_muon_of_one_process):
        assert_close(found, expected)


LAYOUTS = {  # run: processes, flags
    "one": (1, []),
    "two": (2, []),
    "rounded": (2, ["--comm-dtype", "bfloat16"]),
    "tensor-parallel": (4, ["--tensor-parallel", "2"]),  # two see different rows
    "fsdp": (2, ["--shard", "fsdp"]),
    "both": (4, ["--shard", "fsdp", "--tensor-parallel", "2"]),
}


def test_base_train_in_every_layout_is_the_run_of_one_process(base):
    """With evaluation, export and samples. Rounded gradients change all losses except the first."""
    val_bpb = {}
    for run, (processes, flags) in LAYOUTS.items():
        train_on(processes, base, run, 6, *QUIET, *flags)
        val_bpb[run] = read_json(base / "runs" / run / "summary.json")["val_bpb"]
    expected, in_bf16 = losses(base, "one"), losses(base, "rounded")
    assert len(expected) == 6 and expected[-1] < expected[0] - 0.5
    for run in LAYOUTS.keys() - {"rounded"}:
        assert losses(base, run) == pytest.approx(expected, abs=1e-4), run
        assert val_bpb[run] == pytest.approx(val_bpb["one"], abs=2e-4)
    # A mean of two gradients is off by up to 2^-8 of them: each is rounded by 2^-9, and their sum once more.
    # The gain of the updates is off by no larger a fraction, since the errors of elements average out
    two = losses(base, "two")
    assert in_bf16[0] == two[0] and in_bf16[1:] != two[1:]
    assert in_bf16 == pytest.approx(two, abs=2**-8 * (two[0] - two[5]))


def clipped(group, layout, tau):
    return Trained(layout, tau=tau).train(range(4)).weights()


def test_qk_clip_in_pieces():
    expected, loose = clipped(None, None, TAU), clipped(None, None, 1e9)
    queries = "blocks.1.attn.q.weight"
    assert expected[queries].norm() < 0.7 * loose[queries].norm()
    for layout in (TP, BOTH):
        for found in run_world(4, clipped, layout, TAU):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # the logits are in float32
