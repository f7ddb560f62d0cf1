"""What cannot work is refused with one line that says what to change, before or while training."""

from functools import partial
from pathlib import Path

import misused
import pytest
import torch
from answers import refusal
from misused import Exiting, Items, X, Y, after, failing, fit, layers, leaving
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hybrid import Callback, Trainer, split
from hybrid.data import Mapped
from hybrid.errors import CodeError
from hybrid.folder import checkpoint
from hybrid.folder.runfolder import RunFolder
from hybrid.solvers import AugmentedLagrangian, Backprop, LocalUpdates, Penalty, Petra

pytestmark = pytest.mark.timeout(60)
entropy = nn.functional.cross_entropy


def changed(tensor, row, value):
    found = tensor.clone()
    found[row] = value
    return found


def regression(outputs):
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, outputs))


class Unsized(Items):
    def __len__(self):
        raise RuntimeError("not known")


NUMBERS = {"train": (X, Y, Y), "test": (X, Y, Y)}
NUMBERED = NUMBERS | {"model": misused.Numbered(), "sample": (X[:4], Y[:4])}
WORDS = (Y.repeat(5, 1).T, Y)

BEFORE = {
    "float labels": ({"train": (X, Y.float())}, "targets (2,) of float32", "Float"),
    "a label beyond the classes": (
        {"train": (X, changed(Y, 40, 3))},
        *("sample 40", "target 3", "3 classes, 0 to 2", "give the network more outputs"),
    ),
    "unequal rows": ({"train": (X, Y[:60])}, "64 and 60 rows", "give as many of each"),
    "a loss of another length": (
        {"loss": lambda out, y: out.sum(1)[:-1]},
        *("shape (1,) for 2 samples", "one row for each sample"),
    ),
    "a loss without a graph": (
        {"loss": lambda out, y: entropy(out, y).detach()},
        *("without a gradient", "without detach()"),
    ),
    "a loss that fails": ({"loss": failing}, "the loss fails", "output (2, 3)", "out of"),
    "a loss that is no function": ({"loss": "mse"}, "'str' object is not callable"),
    "inputs without numbers": ({"train": (X.to("meta"), Y)}, "has a tensor on the meta device"),
    "targets without numbers": ({"train": (X, Y.to("meta"))}, "has a tensor on the meta device"),
    "tests without numbers": ({"test": (X.to("meta"), Y)}, "has a tensor on the meta device"),
    "a regression's loss of two classes": (  # which torch would spread over the two samples tried
        {"settings": {"loss": "huber"}, "model": regression(2), "train": (X, Y % 2)},
        *("train.loss is 'huber'", "shape (2,) and its target ()", "choose cross-entropy"),
    ),
    "a regression's loss of flat targets": (
        {"loss": nn.functional.l1_loss, "model": regression(1), "train": (X, X[:, 0])},
        *("loss= is torch's 'l1'", "shape (1,) and its target ()", "choose targets of the"),
    ),
    "a metric that is a text": (
        {"metrics": {"luck": lambda out, y: "good"}},
        "a metric gave 'good': it must give a tensor or a number",
    ),
    "a batch transform of fewer targets": (
        {"batch_transform": lambda x, y, g: (x, y[:-1])},
        *("shape (1,) of 2 samples", "give each a row"),
    ),
    "a batch transform that gives one thing": (
        {"batch_transform": lambda x, y, g: x},
        *("gave a Tensor", "must give (inputs, targets)"),
    ),
    "a batch transform of the whole set": (
        {
            "batch_transform": lambda x, y, g: (x, y),
            "window": "all",
            "solver": AugmentedLagrangian(),
        },
        *("rounds.window is 'all'", "give a number of mini-batches"),
    ),
    "items of unequal shape": (
        {"train": Items(lambda i: (X[i][: 3 + i], Y[i]))},
        *("do not make a batch", "give tensors of one shape, or collate="),
    ),
    "a tensor": ({"train": X}, "an item is a Tensor", "give both"),
    "texts": ({"train": Items(lambda i: ("word", 1))}, "holds str", "convert it"),
    "dicts without a target": (
        {"train": Items(lambda i: {"image": X[i], "kind": Y[i]})},
        *("image, kind, of which none may be the target", "collate="),
    ),
    "no samples": ({"train": Items(count=0)}, "Items has 0 samples", "at least 1"),
    "an unknown number of samples": (
        {"train": Unsized()},
        *("len() of Unsized fails", "not known", "test_wrong_uses.py, line"),
    ),
    "a loader of another batch size": (
        {"train": DataLoader(TensorDataset(X, Y), 8)},
        *("train.batch_size is 16", "the DataLoader has a batch size of 8", "leave one"),
    ),
    "no data": ({"train": None}, "a NoneType is no data", "__getitem__", "an iterable"),
    "fewer samples than a mini-batch": (
        {"settings": {"batch_size": 100}},
        *("batch size is 100", "64 training samples", "at most 64"),
    ),
    "test inputs of another shape": (
        {"test": (torch.randn(16, 7), Y[:16])},
        *("(2, 6)", "(2, 7)", "give both alike"),
    ),
    "a large integer": (
        NUMBERED | {"train": (X, changed(Y, 0, 1 << 25), Y)},
        *("33554432", "2^24", "number them from 0"),
    ),
    "nothing to train": (
        {"model": nn.Sequential(nn.Flatten(), nn.ReLU()), "blocks": 1, "sample": None},
        *("Sequential has 0 parameters", "give it layers"),
    ),
    "nothing that may be trained": (
        {"model": layers().requires_grad_(False)},
        *("0 parameters to train", "require gradients"),
    ),
    "an optimizer of one's own": (
        {"optimizer": lambda groups: 3},
        *("factory gave a int", "let it return a torch.optim.Optimizer"),
    ),
    "an optimizer's factory that fails": ({"optimizer": failing}, "factory fails", "misused.py"),
    "a learning rate that is no number": (
        {"schedule": lambda step: float("nan") if step == 3 else 0.1},
        *("gives nan at step 3", "a finite learning rate"),
    ),
    "a schedule that fails": ({"schedule": failing}, "the schedule fails at step 0", "misused.py"),
    "a callback of another class": (
        {"callbacks": [3]},
        "callbacks is [3]",
        "that derive from hybrid.Callback",
    ),
    "a filter of tokens": (
        {
            "train": WORDS,
            "test": WORDS,
            "sample": WORDS[0][:4],
            "model": misused.Tokens(),
            "solver": Penalty(filter=2),
        },
        *("the filter is 2", "shape (5, 6)", "choose a filter"),
    ),
    "petra where several tensors go in": (NUMBERED | {"solver": Petra()}, "'petra'", "another"),
    "heads of a network with two outputs": (
        {
            "model": misused.Twofold(),
            "solver": LocalUpdates(),
            "metrics": {},
            "loss": lambda out, y: entropy(out[0], y),
        },
        *("the network gives one tensor", "choose another solver"),
    ),
}


@pytest.mark.parametrize("use", BEFORE)
def test_what_cannot_work_is_refused_before_anything_is_written(use, tmp_path):
    given, *parts = BEFORE[use]
    said = refusal(fit, tmp_path / "run", **given)
    assert [part for part in parts if part not in said] == []
    assert not (tmp_path / "run").exists()


SPLITS = {
    "control flow": (partial(split, misused.Choosing(), 2, sample=X), "Choosing", "misused.py"),
    "no folder to resume": (
        partial(Trainer, split(layers(), 2, sample=X[:4]), resume=True),
        "resume=True needs out=",
    ),
    "an unknown cut": (partial(split, layers(), cuts=["5"]), "no unit '5' among the 5 units"),
    "more blocks than units": (
        partial(split, layers(), 9, sample=X),
        *("9 blocks asked of 5 units", "ask for 1 to 5 blocks"),
    ),
    "no sample": (partial(split, misused.Choosing(), 2), "which needs sample="),
    "a sample that is no tensor": (partial(split, layers(), 2, sample=3), "sample is a int"),
    "a sample without numbers": (
        partial(split, layers(), 2, sample=X.to("meta")),
        *("a sample of the inputs is on the meta device", "make it on the CPU"),
    ),
    "weights without numbers": (
        partial(split, layers().to("meta"), 2, sample=X),
        *("'0.weight' of Sequential is on the meta device", "give weights="),
    ),
    "a sample of another shape": (
        partial(split, misused.Sharing(), 2, sample=torch.zeros(4, 7)),
        *("sample of shape (7,) does not fit Sharing", "(2x7 and 6x6)"),
    ),
    "a sample without an input": (
        partial(split, misused.Numbered(), 2, sample=X),
        *("does not fit Numbered, which says: ", "'number'"),
    ),
    "the name of a model": (
        partial(split, "resnet20", 2),
        "given 'resnet20': give a torch.nn.Module",
    ),
    "a data set that no process can be sent": (
        partial(Mapped, Items(), workers=1),
        *("cannot be sent to a worker process", "set data.workers=0"),
    ),
}


@pytest.mark.parametrize("use", SPLITS)
def test_what_cannot_be_made_is_refused(use):
    call, *parts = SPLITS[use]
    said = refusal(call)
    assert [part for part in parts if part not in said] == []


UNREAD = {"verify": "never"}  # or the proof would meet it before

WHILE = {
    "a label beyond the classes": (
        {"train": Items(lambda i: (X[i], 9 if i == 30 else 1))},
        *("sample 30", "target 9", "3 classes", "give the network more outputs"),
    ),
    "a loss of another length": (
        {"loss": after(2, entropy, lambda out, y: out[:-1, 0])},
        *("shape (15,) for 16 samples", "one row for each sample"),
    ),
    "a loss that is not a number": (
        {"loss": lambda out, y: entropy(out, y) * torch.nan},
        *("the loss is not finite at serial step 0", "lower the learning rate"),
    ),
    "a loss that fails": (
        {"loss": after(2, entropy, failing)},
        *("block 1: the loss fails on output (16, 3)", "KeyError", "misused.py, line"),
    ),
    "a batch transform that fails": (
        {"batch_transform": after(3, lambda x, y, g: (x, y), failing)},
        *("batch_transform fails on 16 samples", "misused.py, line"),
    ),
    "an item that fails": (
        {"train": Items(lambda i: failing() if i == 33 else (X[i], Y[i])), "settings": UNREAD},
        *("sample 33 of the data set", "KeyError", "misused.py, line"),
    ),
    "an item of another shape": (
        {"train": Items(lambda i: (X[i][: 3 if i == 33 else 6], Y[i])), "settings": UNREAD},
        *("do not make a batch", "give tensors of one shape"),
    ),
    "nan in all inputs": ({"train": (X * torch.nan, Y)}, "sample ", "has nan", "leave it out"),
    "nan in the inputs": (
        {"train": (changed(X, 5, torch.nan), Y)},
        *("the loss is not finite", "sample 5 has nan", "leave it out"),
    ),
    "a forward pass that fails": (
        {"model": nn.Sequential(nn.Linear(6, 6), misused.Careless(), nn.Linear(6, 3))},
        *("the forward pass fails on input (16, 6)", "KeyError", "misused.py, line"),
    ),
    "a worker process that ends": (  # 5 s: a process begins with an import of torch
        {"train": Mapped(misused.Deadly(), workers=1)},
        *("a worker process of the data set ended", "set data.workers=0"),
    ),
}


ENDS = "would end the process: raise an error if the code fails, else return"
HERE = "SystemExit: 0 (misused.py, line "


class Quitting(Callback):
    def on_epoch(self, epoch, results):
        leaving()


class Odd(BaseException):
    pass


def oddly(*given):
    raise Odd("of its\nown kind")


EXITS = {
    "an item": ({"train": Exiting()}, "sample 30 of the data set", HERE, ENDS),
    "a loss": ({"loss": after(2, entropy, leaving)}, f"block 1: {HERE}", ENDS),
    "a forward pass": (
        {"model": nn.Sequential(nn.Linear(6, 6), misused.Careless(leaving), nn.Linear(6, 3))},
        *(f"block 1: {HERE}", ENDS),
    ),
    "a callback": ({"callbacks": [Quitting()]}, "callback Quitting failed in on_epoch: SystemExit"),
    "an exception of its own": (
        {"loss": after(2, entropy, oddly)},
        *("block 1: Odd: of its own kind (test_wrong_uses.py, line ", ENDS),
    ),
}


@pytest.mark.parametrize("use", EXITS)
def test_an_exit_in_a_training_is_an_error(use, tmp_path):
    given, *parts = EXITS[use]
    said = refusal(fit, tmp_path / "run", **given)
    assert [part for part in parts if part not in said] == []
    assert not (tmp_path / "run" / "summary.json").exists()


def test_an_exit_in_what_is_measured_is_an_error():
    made = Trainer(split(layers(), 2, sample=X[:4]), Backprop(), quiet=True)
    assert ENDS in refusal(made.evaluate, Items(lambda i: leaving()))


@pytest.mark.parametrize("use", WHILE)
def test_what_fails_while_training_leaves_whole_checkpoints_and_a_free_folder(use, tmp_path):
    given, *parts = WHILE[use]
    out = tmp_path / "run"
    said = refusal(fit, out, **given)
    assert [part for part in parts if part not in said] == []
    assert_whole(out)


def assert_whole(out: Path) -> None:
    """Nothing is half-written, and another run may go on."""
    assert not (out / "summary.json").exists()
    kept = [folder for folder in (out / "checkpoints").iterdir() if folder.is_dir()]
    assert checkpoint.complete(out / "checkpoints") == kept != []
    folder = RunFolder(out)
    folder.claim()
    folder.release()


def test_the_error_of_a_users_code_is_kept_as_the_cause():
    with pytest.raises(CodeError) as caught:
        fit(loss=after(2, entropy, failing))
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__cause__.__traceback__.tb_next is not None


def test_an_error_of_this_package_is_not_taken_for_a_users(monkeypatch):
    home = {"__name__": "hybrid.solvers.exact.exact_pass"}
    exec("def step(self, part): raise RuntimeError('a defect')", home)
    monkeypatch.setattr("hybrid.solvers.exact.exact_pass.ExactPass.step", home["step"])
    with pytest.raises(RuntimeError, match=r"^a defect$"):
        fit()


def test_a_network_that_is_not_cut_is_refused():
    with pytest.raises(ValueError, match=r"blocks is a Linear: split\(network, K\) first"):
        Trainer(nn.Linear(2, 2))


class Many(nn.Module):
    """Works on at least three samples."""

    def forward(self, x):
        if self.training and len(x) < 3:
            raise RuntimeError(f"{len(x)} are too few")
        return x


def test_a_module_that_fails_on_two_samples_is_named_by_its_block():
    net = nn.Sequential(nn.Linear(4, 4), Many(), nn.Linear(4, 2))
    x, y = torch.randn(128, 4), torch.zeros(128).long()
    said = refusal(Trainer(split(net, cuts=["1"], sample=x)).fit, (x, y))
    assert said == "block 1 fails on 2 samples in training mode: RuntimeError: 2 are too few"
