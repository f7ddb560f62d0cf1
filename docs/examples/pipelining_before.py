"""A GPT-2 in two stages by torch.distributed.pipelining, on data that are made here.

torchrun --nproc-per-node 2 docs/examples/pipelining_before.py
"""

import torch
import torch.distributed as dist
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
sizes = {"n_embd": 32, "n_layer": 4, "n_head": 2, "n_positions": 16}
no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
tokens = {"vocab_size": 64, "bos_token_id": None, "eos_token_id": None}
options = {"tie_word_embeddings": False, "use_cache": False}
model = GPT2LMHeadModel(GPT2Config(**tokens, **sizes, **no_dropout, **options))

ids = (torch.randint(64, (256, 1)) + 3 * torch.arange(16)) % 64
train = DataLoader(TensorDataset(ids, ids), batch_size=32)


def next_token_loss(logits, labels):
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


dist.init_process_group("gloo")
rank = dist.get_rank()
pipe = pipeline(model, (ids[:8],), split_spec={"transformer.h.2": SplitPoint.BEGINNING})
stage = pipe.build_stage(rank, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 4, loss_fn=next_token_loss)
optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=3e-3)
for epoch in range(3):
    for inputs, labels in train:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        else:
            losses = []
            schedule.step(target=labels, losses=losses)
        optimizer.step()
    if rank == 1:
        print(f"epoch {epoch + 1}: loss {torch.stack(losses).mean().item():.4f}")
torch.save(stage.submod.state_dict(), f"runs/pipelining-{rank}.pt")
dist.destroy_process_group()
