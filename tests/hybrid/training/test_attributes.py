"""Plain attributes of modules count what a plain loop counts, in every copy and after a resume."""

from copy import deepcopy

import pytest
import torch
from answers import refusal
from torch import nn
from torch.nn.functional import cross_entropy
from trainings import OFTEN, interrupted

from hybrid import Trainer, TrainSettings, split
from hybrid.solvers import DDG, AugmentedLagrangian, Backprop, FeaturesReplay


class Annealed(nn.Module):
    """A layer whose output shrinks with its passes, less what a running mean of it was."""

    def __init__(self, wide=6):
        super().__init__()
        self.layer, self.calls, self.mean, self.seen = nn.Linear(6, wide), 0, None, []

    def forward(self, x):
        x = torch.tanh(self.layer(x)) * 0.98**self.calls
        mean = x.detach().mean(0)
        before = torch.zeros_like(mean) if self.mean is None else self.mean
        if self.training:
            self.calls += 1
            self.mean = 0.9 * before + 0.1 * mean
            self.seen[:] = [*self.seen, self.calls][-3:]
        return x - before


class Net(nn.Module):
    """Annealed layers, cut between calls, with a count of its own."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out, self.passes = Annealed(), Annealed(), nn.Linear(6, 3), 0.0

    def forward(self, x):
        if self.training:
            self.passes += 0.5
        return self.out(self.b(self.a(x) * 0.99**self.passes) * 0.97**self.passes)


def chain():
    return nn.Sequential(Annealed(), Annealed(), nn.Linear(6, 3))


def made(kind):
    torch.manual_seed(0)
    return kind()


def data():
    torch.manual_seed(1)
    return torch.randn(64, 6), torch.randint(0, 3, (64,))


def loop(model, epochs=2):
    (x, y), sgd = data(), torch.optim.SGD(model.parameters(), lr=0.1)
    for i in [*range(0, 64, 8)] * epochs:
        sgd.zero_grad()
        cross_entropy(model(x[i : i + 8]), y[i : i + 8]).backward()
        sgd.step()
    return model


def trainer(model, solver, cuts=None, **settings):
    # in parts a counter counts more often than in a loop, which the proof would refuse
    whole = getattr(solver, "micro_batches", 1) == settings.get("replicas", 1) == 1
    verify = "auto" if whole else "never"
    cut = cuts or ["1" if isinstance(model, nn.Sequential) else "b"]
    return Trainer(
        split(model, cuts=cut, sample=data()[0][:4]),
        solver,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        schedule={"name": "constant", "warmup_steps": 0},
        train=TrainSettings(epochs=2, batch_size=8, threads=1, report_every=1, verify=verify),
        quiet=True,
        **settings,
    )


def fit(model, solver, **settings):
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), 8)
    trainer(model, solver, **settings).fit(loader)
    return model


def plain(model):
    """All numbers and tensors that a model has."""
    found = dict(model.state_dict())
    for path, m in model.named_modules():
        for name in {"calls", "mean", "seen", "passes"} & vars(m).keys():
            found[f"{path}.{name}"] = torch.as_tensor(vars(m)[name])
    return found


def assert_same(one, other):
    one, other = plain(one), plain(other)
    assert one.keys() == other.keys()
    for name, value in other.items():
        assert torch.equal(one[name], value), name


@pytest.mark.parametrize("kind", [chain, Net])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_counter_counts_what_a_loop_counts(kind, recompute):
    solver = Backprop(recompute=recompute)
    assert_same(fit(made(kind), solver), loop(made(kind)))


@pytest.mark.parametrize("solver", [DDG(micro_batches=1), FeaturesReplay(micro_batches=1)])
@pytest.mark.parametrize("kind", [chain, Net])
def test_a_pass_that_is_made_twice_counts_once(kind, solver):
    model = fit(made(kind), solver)
    a, b = [m for m in model.modules() if isinstance(m, Annealed)]
    assert (a.calls, b.calls, b.seen) == (16, 16, [14, 15, 16])


@pytest.mark.parametrize("kind", [chain, Net])
def test_a_delayed_pass_that_is_made_again_finds_what_it_had_found(kind):
    kept, again = (fit(made(kind), DDG(micro_batches=2, recompute=r)) for r in (False, True))
    assert_same(again, kept)


def test_sub_problems_and_trials_leave_attributes_as_they_are():
    model = fit(made(chain), AugmentedLagrangian(), window=4, sweeps=2)
    counts = [m.calls for m in model.modules() if isinstance(m, Annealed)]
    model = made(chain)
    trainer(model, Backprop()).evaluate(data())
    assert [m.calls for m in model.modules() if isinstance(m, Annealed)] == [0, 0]
    assert counts == [16, 16]


@pytest.mark.parametrize(
    ("solver", "settings"),
    [
        (Backprop(), {"replicas": 2}),
        (DDG(micro_batches=2), {}),
        (DDG(micro_batches=2, stash=False), {}),
        (FeaturesReplay(micro_batches=2), {}),
    ],
)
def test_a_resumed_run_counts_on(solver, settings, tmp_path):
    check_resumed(tmp_path / "run", solver, **settings)


def test_a_resumed_run_counts_on_on_another_grid(tmp_path):
    check_resumed(tmp_path / "run", Backprop(), cuts=["b", "out"])


def check_resumed(run, solver, cuts=None, **settings):
    whole = fit(made(Net), solver, **settings)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), 8)
    trainer(made(Net), solver, out=run, checkpoint=OFTEN, **settings).fit(loader)
    interrupted(run, 1)  # after 4 steps, within an epoch
    resumed = fit(made(Net), solver, cuts=cuts, out=run, resume=True, **settings)
    assert_same(resumed, whole)


def test_a_run_that_goes_back_to_a_checkpoint_goes_back_to_its_counts(tmp_path):
    class Spoilt(Annealed):
        spoils = True

        def forward(self, x):
            if self.training and self.calls == 10 and Spoilt.spoils:
                Spoilt.spoils = False
                return super().forward(x) * float("nan")
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(Spoilt(), Annealed(), nn.Linear(6, 3))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), 8)
    found = trainer(model, Backprop(), out=tmp_path / "run").fit(loader)
    assert (len(found["rollbacks"]), model[0].calls, model[1].calls) == (1, 16, 16)


def test_a_second_fit_begins_with_what_its_user_has_set():
    model, by_hand = made(Net), made(Net)
    made_once = trainer(model, Backprop())
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), 8)
    made_once.fit(loader)
    loop(by_hand)
    for each in (model, by_hand):
        each.passes = each.a.calls = 0
    made_once.fit(loader)
    assert_same(model, loop(by_hand))


def test_a_count_behind_a_cut_is_refused():
    class Late(Net):
        def forward(self, x):
            x = self.b(self.a(x) * 0.99**self.passes)
            self.passes += 0.5
            return self.out(x)

    message = refusal(lambda: fit(Late(), Backprop()))
    assert "Late changes its attribute 'passes' behind the cut before b" in message


class Frozen(dict):
    """As a configuration of diffusers: it cannot be changed."""

    def clear(self):
        raise RuntimeError("frozen")

    update = clear


class Collecting(nn.Module):
    """Collects what its layers give by hooks, which it installs in its first pass."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(2)), nn.Linear(6, 3)
        self.ready, self.found, self.config = False, [], Frozen(width=6)

    def forward(self, x):
        if not self.ready:
            self.ready = True
            for layer in self.layers:
                layer.register_forward_hook(lambda m, args, out: self.found.append(out))
        self.found.clear()
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(sum(self.found))


def test_hooks_of_a_first_pass_are_there_once():
    """A trial puts back the attribute that says they are there, and so takes the hooks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Collecting())
    expected = loop(deepcopy(model), 2)
    assert_same(fit(model, Backprop()), expected)
