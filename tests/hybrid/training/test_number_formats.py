"""Complex weights and activations, a base in 16 bits, sparse gradients: right, or one line."""

from copy import deepcopy

import pytest
import torch
from answers import refusal
from torch import nn
from torch.nn import functional as F
from trainings import assert_same

from hybrid import Trainer, split
from hybrid.data.sampling import epoch_order
from hybrid.solvers import Backprop

WIDTH, SAMPLES, BATCH, RATE, CLIP = 6, 16, 8, 0.1, 0.1
RANDOM = torch.Generator().manual_seed(0)
X = torch.randn(SAMPLES, WIDTH, generator=RANDOM)
Y = torch.randint(3, (SAMPLES,), generator=RANDOM)


class Spectrum(nn.Module):
    """A spectrum times complex weights; `ends`: of real numbers, which it gives."""

    def __init__(self, ends=False, dtype=torch.complex64):
        super().__init__()
        self.weight, self.ends = nn.Parameter(torch.randn(4, dtype=dtype)), ends

    def forward(self, x):
        if self.ends:
            return torch.fft.irfft(x * self.weight, n=WIDTH)
        return torch.fft.rfft(x) * self.weight


def spectral(dtype=torch.complex64):
    torch.manual_seed(0)
    parts = Spectrum(dtype=dtype), Spectrum(True, dtype)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *parts, nn.Linear(WIDTH, 3))


class Adapter(nn.Module):
    """A frozen layer in bfloat16 and a trained one in float32, of which the numbers are."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16).requires_grad_(False)
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.base(x.bfloat16()).float() + self.own(x))


def adapted():
    torch.manual_seed(0)
    return nn.Sequential(Adapter(), Adapter(), nn.Linear(WIDTH, 3))


def trainer(model, cuts, solver, x=X, **settings):
    options = {
        "train": {"epochs": 2, "batch_size": BATCH, "threads": 1},
        "optimizer": {"name": "sgd", "lr": RATE, "momentum": 0.0, "weight_decay": 0.0},
        "schedule": {"name": "constant", "warmup_epochs": 0},
        "metrics": {},
    }
    blocks = split(model, cuts=cuts, sample=x[:2])
    return Trainer(blocks, solver, quiet=True, **{**options, **settings})


def plain_loop(model, crossing=lambda x: x, cut=0, clip=0.0):
    model = deepcopy(model).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    for epoch in range(2):
        for rows in epoch_order(0, epoch, SAMPLES).split(BATCH):
            optimizer.zero_grad()
            out = model[cut:](crossing(model[:cut](X[rows])))
            F.cross_entropy(out, Y[rows]).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return model.state_dict()


class Narrow(torch.autograd.Function):
    """Numbers and their adjoints as messages in bfloat16 have them."""

    @staticmethod
    def forward(ctx, x):
        return x.bfloat16().to(x.dtype)

    @staticmethod
    def backward(ctx, p):
        return p.bfloat16().to(p.dtype)


def narrow(x):
    if x.is_complex():
        return torch.view_as_complex(Narrow.apply(torch.view_as_real(x)))
    return Narrow.apply(x)


@pytest.mark.parametrize("make", [spectral, adapted])
@pytest.mark.parametrize("cut", [1, 2])
def test_messages_in_16_bits_unpack_to_the_format_of_what_crosses(make, cut):
    model = make()
    expected = plain_loop(model, narrow, cut)
    trainer(model, [str(cut)], Backprop(messages="bfloat16")).fit((X, Y))
    assert_same(model.state_dict(), expected)


@pytest.mark.parametrize("cuts", [[], ["2"]])
def test_gradients_of_several_formats_are_clipped_together(cuts):
    model = spectral()
    expected = plain_loop(model, clip=CLIP)
    trainer(model, cuts, Backprop(clip_norm=CLIP)).fit((X, Y))
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6)


def test_complex_numbers_that_nothing_holds_or_steps_are_refused(tmp_path):
    wide = spectral(torch.complex128).double()
    said = refusal(trainer(wide, ["2"], Backprop(), X.double(), out=tmp_path).fit, (X.double(), Y))
    assert said.startswith("'1.weight' is complex128, which safetensors files of a run folder")
    muon = trainer(spectral(), ["2"], Backprop(), optimizer={"name": "muon"})
    assert "has no rule for complex weights: choose sgd or adamw" in refusal(muon.fit, (X, Y))


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, WIDTH))

    def forward(self, tokens):
        return F.embedding(tokens, self.weight, sparse=True)


@pytest.mark.parametrize(
    ("embedding", "said"),
    [
        (
            nn.Embedding(9, WIDTH, sparse=True),
            "a gradient is sparse, as embeddings with sparse=True have it",
        ),
        (Rows(), "a gradient is sparse, as embeddings with sparse=True have it"),
    ],
)
def test_sparse_gradients_are_refused(embedding, said):
    tokens = torch.randint(9, (SAMPLES, 2))
    model = nn.Sequential(embedding, nn.Flatten(), nn.Linear(2 * WIDTH, 3))
    assert said in refusal(trainer(model, ["2"], Backprop(), tokens).fit, (tokens, Y))


def test_a_deterministic_training_uses_torchs_deterministic_algorithms_meanwhile(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    cudnn, found = torch.backends.cudnn, set()

    def flags():
        uses = torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark
        return *uses, torch.utils.deterministic.fill_uninitialized_memory

    def loss(out, y):
        found.add(flags())
        return F.cross_entropy(out, y)

    monkeypatch.setattr(cudnn, "benchmark", True)
    before, results = flags(), []
    for wanted, seen in ((True, (True, True, False, False)), (False, before)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
        train = {"epochs": 1, "batch_size": BATCH, "deterministic": wanted, "verify": "never"}
        blocks = split(model, 2, balance="even")
        trainer = Trainer(blocks, Backprop(), train=train, loss=loss, quiet=True)
        found.clear()
        trainer.fit((X, Y))
        assert seen in found
        assert flags() == before
        results.append(model.state_dict())
    assert_same(*results)
