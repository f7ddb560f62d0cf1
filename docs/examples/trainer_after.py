"""A BERT learns to classify in two blocks, on data that are made here.

mpirun -n 2 python docs/examples/trainer_after.py
"""

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

from hybrid import Trainer, split
from hybrid.solvers import Backprop

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
config = BertConfig(vocab_size=64, num_hidden_layers=4, **sizes, **no_dropout)
model = BertForSequenceClassification(config)

ids = torch.randint(64, (320, 16))
rows = [{"input_ids": row, "labels": int(row[0] < 32)} for row in ids]
train, test = rows[:256], rows[256:]

train, test = DataLoader(train, batch_size=32), DataLoader(test, batch_size=64)
trainer = Trainer(
    split(model, 2, sample=next(iter(train))),
    Backprop(clip_norm=1.0),
    optimizer={"name": "AdamW", "lr": 3e-3, "weight_decay": 0.0},
    schedule=(lambda optimizer: get_linear_schedule_with_warmup(optimizer, 4, 24), "step"),
    out="runs/hybrid",
)
trainer.fit(train, test, epochs=3)
