"""MuonAdamW in a LightningModule: configure_optimizers, and a checkpoint that Lightning writes and reads.

    PYTHONPATH=. python examples/lightning_module.py --folder lightning
    PYTHONPATH=. python examples/lightning_module.py --folder resumed --resume lightning/epoch=0.ckpt

With several devices it is MuonAdamW as well: Lightning averages the gradients itself and saves the
optimizer's state of the first process, which has to be all of it.
"""

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nanomuon import MuonAdamW, build_param_groups

MUON = dict(lr=0.02, momentum=0.95, ns_steps=5, beta2=0.95, weight_decay=0.01)
ADAMW = dict(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)


class Student(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 8)
        )

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        if index % 20 == 0:
            self.print(f"step {self.global_step} loss {loss.item():.5f}", flush=True)
        return loss

    def configure_optimizers(self):
        groups = build_param_groups(self.net, muon=MUON, adamw=ADAMW, skip_keys=["4"])
        optimizer = MuonAdamW(groups)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


parser = argparse.ArgumentParser()
parser.add_argument("--folder", required=True, help="where the checkpoints go")
parser.add_argument("--resume", help="a checkpoint to start from")
args = parser.parse_args()
lightning.seed_everything(0, verbose=False)
teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))  # whom the model is to imitate
inputs = torch.randn(100 * 64, 32)
data = DataLoader(TensorDataset(inputs, teacher(inputs).detach()), batch_size=64)
saving = ModelCheckpoint(args.folder, filename="{epoch}", every_n_epochs=1, save_top_k=-1)
settings = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(max_epochs=2, callbacks=[saving], **settings)
trainer.fit(Student(), data, ckpt_path=args.resume)
