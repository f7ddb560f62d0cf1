"""A BERT learns to classify in a loop with Hugging Face accelerate, on data that are made here.

accelerate launch docs/examples/accelerate_before.py
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

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

accelerator = Accelerator()
model, optimizer, train, scheduler = accelerator.prepare(model, optimizer, train, scheduler)
for epoch in range(3):
    for batch in train:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.4f}")
accelerator.save_model(model, "runs/accelerate")
