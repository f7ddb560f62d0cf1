"""Mini-batches that a transform mixes are those of a loop written by hand, whatever the method."""

import pytest
import torch
from answers import refusal
from samples import trained
from torch import nn
from torch.utils.data import TensorDataset
from trainings import assert_same

from hybrid.data import Mapped
from hybrid.data.mixing import Mix, generator
from hybrid.data.sampling import epoch_order
from hybrid.solvers import DDG, AugmentedLagrangian, Backprop

SAMPLES, BATCH, CLASSES, RATE = 48, 8, 3, 0.1
X = torch.randn(SAMPLES, 2, 4, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(SAMPLES) % CLASSES
STEPS = SAMPLES // BATCH


def mixup(x, y, random):
    """Zhang et al., arXiv 1710.09412, its share uniform."""
    share = torch.rand((), generator=random)
    other = torch.randperm(len(x), generator=random)
    soft = nn.functional.one_hot(y, CLASSES).float()
    return share * x + (1 - share) * x[other], share * soft + (1 - share) * soft[other]


def cutmix(x, y, random):
    """Yun et al., arXiv 1905.04899, of a square of two pixels; the target a pair of classes."""
    top, left = torch.randint(0, 3, (2,), generator=random).tolist()
    other = torch.randperm(len(x), generator=random)
    x = x.clone()
    x[:, :, top : top + 2, left : left + 2] = x[other, :, top : top + 2, left : left + 2]
    return x, (y, y[other])


def paired(out, targets):
    """The loss of CutMix: a quarter of the pixels is of the second class."""
    first, second = (nn.functional.cross_entropy(out, y) for y in targets)
    return 0.75 * first + 0.25 * second


def hard(out, targets):
    """The same of test targets, which nothing has mixed."""
    return (paired if isinstance(targets, tuple | list) else nn.functional.cross_entropy)(
        out, targets
    )


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64, CLASSES)),
    ).to(memory_format=torch.channels_last)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


def run(train, blocks, solver=None, epochs=2, **more):
    return trained(
        train,
        solver or Backprop(),
        blocks,
        Mapped(TensorDataset(X, Y)),
        model=network(),
        sample=X[:4],
        settings={"epochs": epochs, "report_every": 2, **more.pop("settings", {})},
        optimizer=optimizer,
        schedule=lambda step: RATE,
        **more,
    )


def batches(epochs):
    """Sample numbers and step of every mini-batch."""
    order = [ids for epoch in range(epochs) for ids in epoch_order(0, epoch, SAMPLES).split(BATCH)]
    return zip(order, range(len(order)), strict=True)


def by_hand(mix, loss):
    """The weights of a plain loop over two epochs."""
    model = network()
    sgd = optimizer(model.parameters())
    for ids, step in batches(2):
        x, y = mix(X[ids].to(memory_format=torch.channels_last), Y[ids], generator(0, step))
        loss(model(x), y).backward()
        sgd.step()
        sgd.zero_grad()
    return dict(model.state_dict())


KINDS = {"mixup": (mixup, nn.functional.cross_entropy), "cutmix": (cutmix, hard)}


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_mixed_mini_batches_train_as_in_a_loop_written_by_hand(kind, blocks):
    mix, loss = KINDS[kind]
    found = run((X, Y), blocks, batch_transform=mix, loss=loss, metrics={})
    assert_same(found, by_hand(mix, loss))


SWEEPING = {"solver": AugmentedLagrangian()}
WAYS = {
    "alone": (1, SWEEPING),
    "two blocks": (2, SWEEPING),
    "waits": (2, {"solver": DDG(), "fill": "penalty", "local_budget": [(4, 0), (0, 6)]}),
    "windows": (2, {**SWEEPING, "window": 2}),
    "sweeps": (2, {**SWEEPING, "window": 3, "sweeps": 2}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_solver_on_mixed_mini_batches_equals_itself_on_samples_mixed_before(way):
    blocks, settings = WAYS[way]
    x, y = torch.zeros_like(X), torch.zeros(SAMPLES, CLASSES)
    for ids, step in batches(1):
        x[ids], y[ids] = mixup(X[ids], Y[ids], generator(0, step))
    entropy = {"loss": nn.functional.cross_entropy, "metrics": {}, "epochs": 1, **settings}
    mixed = run((X, Y), blocks, batch_transform=mixup, **entropy)
    assert_same(mixed, run((x, y), blocks, **entropy))


@pytest.mark.parametrize("workers", [0, 2])
def test_mixing_in_place_mixes_once(workers):
    def in_place(x, y, random):
        mixed, targets = mixup(x, y, random)
        return x.copy_(mixed), targets

    data = Mapped(TensorDataset(X, Y), workers=workers)
    found = run(data, 2, batch_transform=in_place, metrics={})
    assert_same(found, by_hand(mixup, nn.functional.cross_entropy))


@pytest.mark.parametrize("blocks", [1, 2])
def test_smoothed_labels_are_torchs(blocks):
    def smoothed(out, y):
        return nn.functional.cross_entropy(out, y, label_smoothing=0.1)

    found = run((X, Y), blocks, settings={"label_smoothing": 0.1})
    assert_same(found, by_hand(lambda x, y, random: (x, y), smoothed))


FAULTS = {
    "raises": (lambda x, y, g: {}["key"], "KeyError: 'key' (test_mixing.py, line"),
    "gives three things": (lambda x, y, g: (x, y, g), "must give (inputs, targets)"),
    "halves": (lambda x, y, g: (x[::2], y[::2]), "it must keep it"),
    "gives a number": (lambda x, y, g: (x, 3), "made targets of shape"),
    "widens": (
        lambda x, y, g: (x.double(), y),
        "inputs of torch.float64 of torch.float32",
    ),
    "rounds": (lambda x, y, g: (x.long(), y), "inputs of torch.int64 of torch.float32"),
    "gives an array": (lambda x, y, g: (x.numpy(), y), "inputs of ndarray of torch.float32"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_transform_that_does_not_fit_is_refused(fault):
    transform, part = FAULTS[fault]
    assert part in refusal(Mix.of, transform, Mapped(TensorDataset(X, Y)), 2)


@pytest.mark.parametrize("other", [lambda x, y: (x.float(), y), lambda x, y: (x, {"answer": y})])
def test_a_transform_that_gives_other_formats_later_is_refused(other):
    images = X.round().to(torch.uint8)
    calls = iter([lambda x, y: (x.double(), y), other])
    mix, inputs, _ = Mix.of(lambda x, y, g: next(calls)(x, y), Mapped(TensorDataset(images, Y)), 2)
    assert inputs.dtype is torch.float64
    assert "at step 3, other than of the first samples" in refusal(mix, images, Y, 0, 3)
