"""A BERT learns to classify in two blocks by transformers' Trainer, on data that are made here.

mpirun -n 2 python docs/examples/trainer_after.py
"""

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from hybrid_transformers import BlockTrainer

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
config = BertConfig(vocab_size=64, num_hidden_layers=4, **sizes, **no_dropout)
model = BertForSequenceClassification(config)

ids = torch.randint(64, (320, 16))
rows = [{"input_ids": row, "labels": int(row[0] < 32)} for row in ids]
train, test = rows[:256], rows[256:]

arguments = TrainingArguments(
    output_dir="runs/trainer",
    num_train_epochs=3,
    per_device_train_batch_size=32,
    learning_rate=3e-3,
    warmup_steps=4,
    train_sampling_strategy="sequential",
    eval_strategy="epoch",
)
trainer = BlockTrainer(
    model, arguments, train_dataset=train, eval_dataset=test, blocks=2, solver="backprop"
)
trainer.train()
