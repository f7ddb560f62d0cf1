"""A GPT-2 learns to continue sequences in two blocks, on data made here.

mpirun -n 2 python docs/examples/fabric_after.py
"""

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from hybrid import Trainer, split

torch.manual_seed(0)
sizes = {"n_embd": 32, "n_layer": 4, "n_head": 2, "n_positions": 16}
no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
tokens = {"vocab_size": 64, "bos_token_id": None, "eos_token_id": None}
model = GPT2LMHeadModel(GPT2Config(**tokens, **sizes, **no_dropout))

ids = (torch.randint(64, (256, 1)) + 3 * torch.arange(16)) % 64
train = DataLoader(TensorDataset(ids, ids), batch_size=32)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


def next_token_loss(output, labels):
    return cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


blocks, flat = split(model, 2, sample=ids), {"name": "constant", "warmup_steps": 0}
trainer = Trainer(
    blocks, "backprop", optimizer=optimizer, schedule=flat, loss=next_token_loss, out="runs/hybrid"
)
trainer.fit(train, epochs=3)
