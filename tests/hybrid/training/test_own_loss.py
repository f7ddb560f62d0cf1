"""A network that computes its loss itself trains as in a loop of its own, in any parts."""

import pytest
import torch
from answers import refusal
from texts import network, plain_loop, sentences
from texts_program import KIND, LENGTHS, PADDED, prepared
from torch import nn
from torch.nn import functional as F
from trainings import metrics_of
from zoo_packages import installed

from hybrid import data
from hybrid.data.sampling import epoch_order
from hybrid.solvers import Backprop

pytestmark = pytest.mark.skipif(not installed("transformers"), reason="needs transformers")

BATCH = 5
SHORT = [3, 9, 4, 2, 12, 5, 7, 2, 10, 6]


@pytest.mark.parametrize(
    ("kind", "parts"),
    [  # micro-batches and replicas, whose shares of 5 samples are uneven
        pytest.param("BertForTokenClassification", ((3, 1), (1, 2)), marks=pytest.mark.slow),
        pytest.param("BertForSequenceClassification", ((2, 2),), marks=pytest.mark.slow),
        ("GPT2LMHeadModel", ((2, 2),)),
    ],
)
def test_a_step_has_the_gradient_of_the_undivided_mini_batch(kind, parts):
    items = sentences(kind, SHORT)
    expected = plain_loop(network(kind), items, epoch_order(0, 0, 10).split(BATCH), PADDED)
    start = network(kind).state_dict()
    wanted = torch.cat([(x - start[name]).flatten() for name, x in expected.items()])
    for micro_batches, replicas in parts:
        solver = Backprop(micro_batches=micro_batches)
        more = {"lengths": SHORT, "make": PADDED, "batch_size": BATCH, "replicas": replicas}
        trainer, texts = prepared(solver, kind, **more)
        summary = trainer.fit(texts, texts)
        found = trainer.blocks.model.state_dict()
        moved = torch.cat([(found[name] - start[name]).flatten() for name in expected])
        assert (moved - wanted).norm() <= 1e-12 * wanted.norm(), (micro_batches, replicas)
    assert list(metrics_of(summary)) == (["accuracy"] if "Sequence" in kind else [])
    assert trainer.options.train.loss == "model"


class Masked(nn.Module):
    """A mean over the tokens of its mask, or their sum."""

    def __init__(self, mean=True):
        super().__init__()
        self.bert, self.mean = network(KIND, False), mean

    def forward(self, input_ids, attention_mask, labels):
        logits = self.bert(input_ids=input_ids, attention_mask=attention_mask).logits
        each = F.cross_entropy(logits.transpose(1, 2), labels.clamp_min(0), reduction="none")
        total = (each * attention_mask).sum()
        return {"loss": total / attention_mask.sum() if self.mean else total, "logits": logits}


def tokens(output, targets):
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


HALVES = Backprop(micro_batches=2)


@pytest.mark.parametrize(
    ("solver", "more", "said"),
    [
        (HALVES, {"model": Masked}, "2 micro-batches, 1 replica); usual causes: a loss or a net"),
        (Backprop(), {"model": Masked, "replicas": 2}, "1 micro-batch, 2 replicas); usual causes"),
        (HALVES, {"loss": tokens}, "(give denominator=, or train undivided, with 1 micro-batch"),
        (HALVES, {"model": lambda: Masked(False)}, "its loss is "),
        (Backprop(), {"train": {"label_smoothing": 0.1}}, "'model', which has no smoothing"),
        (Backprop(), {"metrics": {"n": lambda out, _: out.logits.mean()}}, "have several lengths"),
    ],
)
def test_what_would_train_on_another_loss_is_refused(solver, more, said):
    if "model" in more:
        more = {**more, "model": more["model"]()}
        more["cuts"] = ["bert.bert.encoder.layer.1"]
    trainer, texts = prepared(solver, **more)
    assert said in refusal(trainer.fit, texts, texts)


@pytest.mark.slow
def test_it_is_trained_undivided():
    trainer, texts = prepared(Backprop(), model=Masked(), cuts=["bert.bert.encoder.layer.1"])
    trainer.fit(texts)
    trainer, texts = prepared(Backprop(), loss=tokens)
    trainer.fit(texts, texts)


def test_inputs_by_other_names_than_those_of_the_sample_are_refused():
    trainer, _ = prepared(Backprop())
    texts = data.Mapped(sentences(KIND, LENGTHS), collate=PADDED)
    said = refusal(trainer.fit, texts)
    assert said.startswith("the inputs are attention_mask, input_ids, and those of the sample= ")
    assert "labels_are_inputs=True" in said
