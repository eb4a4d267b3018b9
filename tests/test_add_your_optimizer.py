"""The patch in docs/add_your_optimizer.md applies to this source and makes an optimizer for any world; the
pages about the optimizer name what exists.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

TRAIN = """
import os
import sys
import torch
import torch.distributed as dist
from nanomuon.optim import DistMuonAdamW

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
lone = dist.new_group([0]), dist.new_group([1])

def train(group):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in [(1030, 3), (7,), (8, 8)]]
    groups = [dict(kind="lion", params=params[:2], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1),
              dict(kind="muon", params=params[2:], lr=0.02, momentum=0.95, ns_steps=5, beta2=0.95,
                   weight_decay=0.0)]
    optimizer = DistMuonAdamW(groups, group)
    expected = [(p.detach().clone(), torch.zeros_like(p)) for p in params[:2]]
    for step in range(5):
        for i, p in enumerate(params):
            seeds = [torch.Generator().manual_seed(97 * step + 7 * i + r) for r in (0, 1)]
            grads = [torch.randn(p.shape, generator=seed) for seed in seeds]
            mean = (grads[0] + grads[1]) / 2
            p.grad = mean if group is lone[rank] else grads[rank]
            if i < 2:
                P, M = expected[i]
                P -= 0.01 * (torch.sign(0.9 * M + 0.1 * mean) + 0.1 * P)
                M.mul_(0.99).add_(mean, alpha=0.01)
        optimizer.step()
    for p, (P, M), name in zip(params, expected, ("group0.0", "group0.1")):
        torch.testing.assert_close(p.detach(), P, rtol=1e-5, atol=1e-6)
        exp_avg = optimizer.full_state_dict()["state"][name]["exp_avg"]
        torch.testing.assert_close(exp_avg, M, rtol=1e-5, atol=1e-6)

train(lone[rank])
train(dist.group.WORLD)
dist.barrier()
dist.destroy_process_group()
print("trained", flush=True)
# As runtime.leave() ends a rank: gloo's threads outlive the group, and now and then abort the end
os._exit(0)
"""


def test_the_documented_patch_makes_lion(tmp_path):
    (patch,) = re.findall(r"```diff\n(.*?)```", (ROOT / "docs/add_your_optimizer.md").read_text(), re.DOTALL)
    shutil.copytree(ROOT / "nanomuon", tmp_path / "nanomuon", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=patch, text=True, check=True)
    (tmp_path / "train.py").write_text(TRAIN)
    env = {**os.environ, "NANOMUON_COMPILE": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "train.py", str(rank), str(tmp_path / "store")],
            cwd=tmp_path,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        output, _ = rank.communicate(timeout=100)
        assert rank.returncode == 0 and "trained" in output, output


@pytest.mark.parametrize("page", ["optimizer.md", "add_your_optimizer.md"])
def test_the_page_names_what_exists(page):
    text = (ROOT / "docs" / page).read_text()
    known = set()
    for folder in ("nanomuon", "scripts", "tests"):
        for file in (ROOT / folder).glob("*.py"):
            known |= {file.name, file.stem, folder, *re.findall(r"\w+", file.read_text())}
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    known |= set(re.findall(r"\w+", "".join(re.findall(r"```.*?```", text, re.DOTALL))))  # its own examples
    for quoted in re.findall(r"`([^`\n]+)`", prose):
        for word in re.findall(r"[A-Za-z_]\w{2,}", quoted):
            assert word in known, quoted
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("http") or (ROOT / "docs" / target).exists(), target
