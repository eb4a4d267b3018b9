"""MuonAdamW in your own training loop: param groups, a scheduler, a checkpoint to resume from.

    PYTHONPATH=. python examples/plain_loop.py --folder plain_loop
    PYTHONPATH=. python examples/plain_loop.py --folder resumed --resume plain_loop/step_100.pt

Both end with the same parameters, bit for bit.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

from nanomuon import MuonAdamW, build_param_groups

STEPS = 200

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--folder", type=Path, required=True, help="where the checkpoints go")
parser.add_argument("--resume", type=Path, help="a checkpoint to resume from")
args = parser.parse_args()
args.folder.mkdir(parents=True, exist_ok=True)

torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))  # the model learns to imitate it
model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 8))

groups = build_param_groups(  # matrices go to Muon; biases, and any name in skip_keys, to AdamW
    model,
    muon=dict(lr=0.02, momentum=0.95, ns_steps=5, beta2=0.95, weight_decay=0.01),
    adamw=dict(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0),
    skip_keys=["4"],  # the last layer
)
optimizer = MuonAdamW(groups)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)

done = 0
if args.resume:
    checkpoint = torch.load(args.resume)
    done = checkpoint["step"]
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])

for step in range(done + 1, STEPS + 1):
    inputs = torch.randn(64, 32, generator=torch.Generator().manual_seed(step))
    loss = nn.functional.mse_loss(model(inputs), teacher(inputs).detach())
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if step % 20 == 0 or step == 1:
        print(f"step {step} loss {loss.item():.5f}", flush=True)
    if step % 100 == 0:
        checkpoint = {
            "step": step,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        }
        torch.save(checkpoint, args.folder / f"step_{step}.pt")
