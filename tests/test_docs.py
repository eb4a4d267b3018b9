"""docs/optimizer.md is true: its examples run, its names exist. test_optim.py runs its rule."""

import re

import torch

from nanomuon import recipe
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.optim import MuonAdamW
from nanomuon.orthogonalize import orthogonalize
from tests.reference import distance
from tests.training import ROOT

PAGE = (ROOT / "docs/optimizer.md").read_text()
RULE, IDEA, TWO_MOMENTS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def group_of_muon(code):
    """The group of matrices that the page's code builds."""
    names = {}
    exec(code, names)
    model = GPT(GPTConfig.from_depth(1, vocab_size=64, seq_len=16))
    groups = names["param_groups"](model, recipe.REFERENCE_BATCH, recipe.REFERENCE_STEPS)
    return next(dict(group, names=["w"]) for group in groups if group["kind"] == "muon")


def trained(group):
    """A parameter before and after five steps of MuonAdamW, and its gradients."""
    torch.manual_seed(0)
    start, *grads = torch.randn(6, 6, 9, dtype=torch.float64)
    param = torch.nn.Parameter(start.clone())
    optimizer = MuonAdamW([dict(group, params=[param])], compile=False)
    for grad in grads:
        param.grad = grad
        optimizer.step()
    return start, param.detach(), grads


def test_the_idea_on_the_page_is_lion():
    P, expected, grads = trained(group_of_muon(IDEA))
    M = torch.zeros_like(P)
    for grad in grads:
        P -= 3e-4 * (torch.sign(0.9 * M + 0.1 * grad) + 0.1 * P)
        M = 0.99 * M + 0.01 * grad
    assert distance(P, expected) < 1e-12


def test_the_rule_with_two_moments_is_adams_update_orthogonalized():
    group = group_of_muon(TWO_MOMENTS)
    P, expected, grads = trained(dict(group, weight_decay=0.0, scale=lambda m, n: 1.0))
    adam = torch.nn.Parameter(torch.zeros_like(P))
    theirs = torch.optim.Adam([adam], lr=1.0, betas=(0.9, 0.95))
    for grad in grads:
        adam.grad, before = grad, adam.detach().clone()
        theirs.step()
        P -= group["lr"] * orthogonalize(before - adam.detach())
    assert distance(P, expected) < 1e-9


def test_the_page_names_what_exists():
    known = set(re.findall(r"\w+", RULE + IDEA + TWO_MOMENTS))
    for folder in ("nanomuon", "scripts", "contenders"):
        for file in (ROOT / folder).glob("*.py"):
            known |= {file.name, file.stem, folder, *re.findall(r"\w+", file.read_text())}
    before, after = PAGE.split("## Options that match other optimizers")  # that section has names of others
    prose = re.sub(r"```.*?```", "", before + after.split("## ")[1], flags=re.DOTALL)
    for quoted in re.findall(r"`([^`\n]+)`", prose):
        for word in re.findall(r"[A-Za-z_]\w{2,}", quoted):
            assert word in known, quoted
