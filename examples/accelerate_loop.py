"""MuonAdamW with accelerate: prepare, save_state, load_state.

    PYTHONPATH=. python examples/accelerate_loop.py --folder accelerate_loop
    PYTHONPATH=. python examples/accelerate_loop.py --folder resumed --resume accelerate_loop/step_100

Both end with the same parameters, bit for bit. Under `accelerate launch` it is MuonAdamW as well:
accelerate averages the gradients itself and saves the optimizer's state of the first process, which has to be
all of it.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nanomuon import MuonAdamW, build_param_groups

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, required=True, help="where the checkpoints go")
parser.add_argument("--resume", type=Path, help="a checkpoint to start from")
args = parser.parse_args()

set_seed(0)
# The sampler's seed makes a resumed run shuffle as the uninterrupted one
accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))  # whom the model is to imitate
inputs = torch.randn(200 * 64, 32)
data = DataLoader(TensorDataset(inputs, teacher(inputs).detach()), batch_size=64, shuffle=True)
model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 8))
groups = build_param_groups(
    model.to(accelerator.device),  # the optimizer's state is made where the parameters are
    muon=dict(lr=0.02, momentum=0.95, ns_steps=5, beta2=0.95, weight_decay=0.01),
    adamw=dict(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0),
    skip_keys=["4"],
)
optimizer = MuonAdamW(groups)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
done = 0
if args.resume:
    accelerator.load_state(args.resume)
    done = int(args.resume.name.removeprefix("step_"))

for step, (x, y) in enumerate(skip_first_batches(data, done), start=done + 1):
    loss = nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if step % 20 == 0 or step == 1:
        accelerator.print(f"step {step} loss {loss.item():.5f}", flush=True)
    if step % 100 == 0:
        accelerator.save_state(args.folder / f"step_{step}")
