"""Code that is given to a training may fail, but not end the process as if all had gone well."""

import misused
import pytest
from answers import refusal
from misused import Exiting, Items, X, after, fit, layers, leaving
from torch import nn
from torch.utils.data import default_collate

from hybrid import Callback, Trainer, split
from hybrid.data import Mapped
from hybrid.errors import no_exit
from hybrid.solvers import Backprop

pytestmark = pytest.mark.timeout(60)
entropy = nn.functional.cross_entropy
ENDS = "would end the process: raise an error if the code fails, else return"
HERE = "SystemExit: 0 (misused.py, line "


class Unsized(Items):
    def __len__(self):
        leaving()


class Quitting(Callback):
    def on_epoch(self, epoch, results):
        leaving()


class Odd(BaseException):
    pass


def oddly(*given):
    raise Odd("of its\nown kind")


def network(passes):
    careless = misused.Careless(leaving, passes)
    return nn.Sequential(nn.Linear(6, 6), careless, nn.Linear(6, 3))


WHILE = {
    "an item": ({"train": Exiting()}, "sample 30 of the data set", HERE, ENDS),
    "a collate": (
        {"train": Mapped(Items(), collate=after(2, default_collate, leaving))},
        "do not make a batch: SystemExit: 0",
    ),
    "a data set's length": ({"train": Unsized()}, HERE, ENDS),
    "a loss": ({"loss": after(17, entropy, leaving)}, f"block 1: {HERE}", ENDS),
    "a loss of one block": ({"loss": after(17, entropy, leaving), "blocks": 1}, HERE, ENDS),
    "a metric": ({"metrics": {"accuracy": leaving}}, HERE, ENDS),
    "a forward pass": ({"model": network(4)}, f"block 1: {HERE}", ENDS),
    "a forward pass that is tried": ({"model": network(-1)}, HERE, ENDS),
    "a batch transform": ({"batch_transform": leaving}, HERE, ENDS),
    "a schedule": ({"schedule": leaving}, HERE, ENDS),
    "a callback": ({"callbacks": [Quitting()]}, "callback Quitting failed in on_epoch: SystemExit"),
    "an exception of its own": (
        {"loss": after(17, entropy, oddly)},
        *("block 1: Odd: of its own kind (test_exits.py, line ", ENDS),
    ),
}


@pytest.mark.parametrize("use", WHILE)
def test_an_exit_in_a_training_is_an_error(use, tmp_path):
    given, *parts = WHILE[use]
    said = refusal(fit, tmp_path / "run", **given)
    assert [part for part in parts if part not in said] == []
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.slow  # 3 s: a process begins with an import of torch
def test_an_exit_in_a_process_that_reads_ahead_is_an_error():
    read = Mapped(Exiting(), workers=1, worker_kind="forkserver")
    said = refusal(fit, train=read)
    assert f"sample 30 of the data set: {HERE}" in said
    assert ENDS in said


def test_an_exit_in_what_is_measured_is_an_error():
    made = Trainer(split(layers(), 2, sample=X[:4]), Backprop(), quiet=True)
    assert ENDS in refusal(made.evaluate, Items(lambda i: leaving()))


def test_an_interrupt_goes_on_as_it_is():
    with pytest.raises(KeyboardInterrupt), no_exit():
        raise KeyboardInterrupt
