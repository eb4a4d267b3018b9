"""DistMuonAdamW under torchrun: it averages the gradients, and the ranks share the step's work and state.

    PYTHONPATH=. torchrun --standalone --nproc_per_node=2 examples/torchrun_loop.py \
        --folder torchrun_loop
    PYTHONPATH=. torchrun --standalone --nproc_per_node=2 examples/torchrun_loop.py \
        --folder resumed --resume torchrun_loop/step_50.pt

Any number of processes can resume a checkpoint.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from nanomuon import DistMuonAdamW, build_param_groups

MUON = dict(lr=0.02, momentum=0.95, ns_steps=5, beta2=0.95, weight_decay=0.01)
ADAMW = dict(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--folder", type=Path, required=True, help="where the checkpoints go")
parser.add_argument("--resume", type=Path, help="a checkpoint to resume from")
args = parser.parse_args()
args.folder.mkdir(parents=True, exist_ok=True)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))  # the model learns to imitate it
model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 8))
groups = build_param_groups(model, muon=MUON, adamw=ADAMW)
optimizer = DistMuonAdamW(groups)  # no DistributedDataParallel: this averages the gradients itself
done = 0
if args.resume:
    checkpoint = torch.load(args.resume)
    done = checkpoint["step"]
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
for step in range(done + 1, 101):
    generator = torch.Generator().manual_seed(1000 * rank + step)  # every rank has its own rows
    inputs = torch.randn(32, 32, generator=generator)
    loss = nn.functional.mse_loss(model(inputs), teacher(inputs).detach())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and (step % 20 == 0 or step == 1):
        print(f"step {step} loss {loss.item():.5f}", flush=True)
    if step % 50 == 0:
        checkpoint = {"step": step, "model": model.state_dict(), "optimizer": optimizer.full_state_dict()}
        if rank == 0:  # full_state_dict() has gathered the state of all ranks; only one writes it
            torch.save(checkpoint, args.folder / f"step_{step}.pt")
del optimizer  # gloo's threads end with the last reference to the process group
dist.destroy_process_group()
