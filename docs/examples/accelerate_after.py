"""A BERT learns to classify in two blocks, on data that are made here.

mpirun -n 2 python docs/examples/accelerate_after.py
"""

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

from hybrid import Trainer, split

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
config = BertConfig(vocab_size=64, num_hidden_layers=4, **sizes, **no_dropout)
model = BertForSequenceClassification(config)

ids, lengths = torch.randint(64, (256, 16)), torch.randint(4, 17, (256, 1))
mask = (torch.arange(16) < lengths).long()
rows = [
    {"input_ids": row, "attention_mask": there, "labels": int(row[0] < 32)}
    for row, there in zip(ids, mask, strict=True)
]
train = DataLoader(rows, batch_size=32)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = get_linear_schedule_with_warmup(optimizer, 4, 24)

blocks = split(model, 2, sample=next(iter(train)))
trainer = Trainer(
    blocks, "backprop", optimizer=optimizer, schedule=(scheduler, "step"), out="runs/hybrid"
)
trainer.fit(train, epochs=3)
