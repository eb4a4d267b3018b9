"""A Llama from transformers under FSDP2: parameters, gradients and optimizer state stay sharded.

    PYTHONPATH=. torchrun --standalone --nproc_per_node=2 examples/fsdp2_llama.py --folder fsdp2_llama
    PYTHONPATH=. torchrun --standalone --nproc_per_node=2 examples/fsdp2_llama.py --folder resumed \
        --resume fsdp2_llama/step_20

Every process writes and reads its own shards. The number of processes may change between runs.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from nanomuon import DistMuonAdamW, build_param_groups

MUON = dict(lr=0.02, momentum=0.95, ns_steps=5, beta2=0.95, weight_decay=0.01)
ADAMW = dict(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--folder", type=Path, required=True, help="where the checkpoints go")
parser.add_argument("--resume", type=Path, help="a checkpoint to resume from")
args = parser.parse_args()
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**SIZES))
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
for module in (*model.model.layers, model):
    fully_shard(module, mesh=mesh)
# After fully_shard. embed_tokens and lm_head go to AdamW
optimizer = DistMuonAdamW(build_param_groups(model, muon=MUON, adamw=ADAMW))
done = 0
if args.resume:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=args.resume)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    done = int(args.resume.name.removeprefix("step_"))
for step in range(done + 1, 41):
    generator = torch.Generator().manual_seed(1000 * rank + step)  # every rank has its own rows
    rows = (torch.randint(64, (8, 1), generator=generator) + torch.arange(32)) % 64  # tokens that count up
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and (step % 10 == 0 or step == 1):
        print(f"step {step} loss {loss.item():.5f}", flush=True)
    if step % 20 == 0:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        checkpoint = {"model": model_state, "optimizer": optimizer_state}
        dcp.save(checkpoint, checkpoint_id=args.folder / f"step_{step}")
del model, optimizer  # gloo's threads end with the last reference to the process group
dist.destroy_process_group()
