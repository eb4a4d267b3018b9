"""MuonAdamW in transformers' Trainer: `optimizers=(optimizer, scheduler)`, save and resume.

    PYTHONPATH=. python examples/hf_trainer.py --folder hf_trainer
    PYTHONPATH=. python examples/hf_trainer.py --folder resumed --resume hf_trainer/checkpoint-20

Both end with the same parameters, bit for bit. Use MuonAdamW under torchrun, too: the Trainer averages the
gradients itself, and saves only the first process's optimizer state, so that state must be complete.
"""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from nanomuon import MuonAdamW, build_param_groups

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--folder", required=True, help="where the checkpoints go")
parser.add_argument("--resume", help="a checkpoint to resume from")
args = parser.parse_args()


class Counting(Dataset):
    """Rows of 32 tokens that count up, from different starts."""

    def __len__(self):
        return 320

    def __getitem__(self, i):
        row = (7 * i + torch.arange(32)) % 64
        return {"input_ids": row, "labels": row}


set_seed(0)
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
model = LlamaForCausalLM(LlamaConfig(**sizes))
training = TrainingArguments(
    args.folder, max_steps=40, save_steps=20, logging_steps=10, per_device_train_batch_size=8, report_to=[]
)
groups = build_param_groups(  # embed_tokens and lm_head go to AdamW
    model.to(training.device),
    muon=dict(lr=0.02, momentum=0.95, ns_steps=5, beta2=0.95, weight_decay=0.01),
    adamw=dict(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0),
)
optimizer = MuonAdamW(groups)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=training.max_steps)
trainer = Trainer(model, training, train_dataset=Counting(), optimizers=(optimizer, scheduler))
trainer.train(resume_from_checkpoint=args.resume)
