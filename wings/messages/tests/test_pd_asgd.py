"""PD-ASGD: its table's formulas, a simulation of it, and threads in any order."""

from dataclasses import replace
from fractions import Fraction
from itertools import cycle, pairwise

import pytest
import torch
from conditions import check
from problems import copied
from setting_modes import Mode, alone
from torch import nn
from torch.func import functional_call
from trainings import (
    assert_same,
    digits,
    interrupted,
    lines,
    refused,
    trained_weights,
    trainer,
    weights,
)
from unit_steps import MOMENTUM, SGD, numbered, trained, trained_by_replicas, unit_problem

from hybrid.links import run_virtual
from hybrid.settings.config import CheckpointSettings
from hybrid.solvers import FDG, registry
from hybrid.solvers.base import Setup
from hybrid.solvers.sync import AllReduce, LocalSGD
from hybrid_messages import PDASGD
from hybrid_messages.by_unit.unit_passes import Units, unit_slices
from tests import test_settings_act as act
from tests.hybrid.rounds import test_host_reads as host_reads
from tests.solvers import test_every_solver as every

pytestmark = pytest.mark.skipif(
    "pd-asgd" not in registry.names(), reason="the package is installed without its entry points"
)
EXAMPLES = {
    "pd-asgd": PDASGD(backward_slots=0),
    "pd-asgd in parts": PDASGD(micro_batches=3, messages="int8"),
    "pd-asgd, clipped": PDASGD(clip_norm=0.1),
}
OTHER = {"solver.name": ["local-updates"]}
SLOTS = {
    "three slots": {},
    "two slots": {"solver.backward_slots": 1},
    "one slot": {"solver.backward_slots": 0, "solver.queue": 1},
}
MODES = [
    *alone("pd-asgd", tries=OTHER),
    *(Mode("pd-asgd", name, {"split.blocks": 1, **s}, {}, OTHER) for name, s in SLOTS.items()),
    Mode("pd-asgd", "replicas", {"split.blocks": 1, "split.replicas": 2}, {}, OTHER),
]
ONE_BLOCK = {
    "the paper's ratio": PDASGD(),
    "one backward slot": PDASGD(backward_slots=1),
    "one backward slot and a queue": PDASGD(backward_slots=1, queue=2),
    "one slot and a queue": PDASGD(backward_slots=0, queue=2),
    "in parts": PDASGD(micro_batches=3, clip_norm=0.1),
}


@pytest.mark.parametrize(("number", "name"), [*enumerate(EXAMPLES)], ids=[*EXAMPLES])
def test_what_every_method_keeps_to(number, name):
    every.check_resume_and_virtual_clocks(EXAMPLES[name], every.CUTS[number], 2 + number)
    every.check_where_weights_move(EXAMPLES[name])


def test_one_block_alone_is_plain_sgd_bit_for_bit():
    every.check_plain_sgd(EXAMPLES["pd-asgd"])


def test_a_step_reads_no_tensor():
    host_reads.test_a_step_of_no_solver_reads_a_tensor("pd-asgd", weighted=True)


@pytest.mark.parametrize(
    "wrong", [{"backward_slots": 3}, {"queue": -1}, {"clip_norm": -1.0}], ids=str
)
def test_impossible_settings_name_the_value_in_one_line(wrong):
    ((name, value),) = wrong.items()
    every.test_impossible_settings_name_the_value_in_one_line(PDASGD, name, value)


def test_every_setting_of_its_own_acts_or_is_refused():
    """Each in one of the modes."""
    of_its_own = [s for s in sorted(act.settings_of(MODES[0])) if s.startswith("solver.")]
    assert not act.faults(zip(of_its_own, cycle(MODES), strict=False))


@pytest.mark.slow
def test_every_setting_acts_or_is_refused_in_every_mode():
    assert not act.faults((setting, mode) for mode in MODES for setting in act.settings_of(mode))


class Simulated:
    """One process, every unit's weights by version; nothing but the formulas.

    Unit u of mini-batch n meets the steps that have landed by the time it is read, by closed forms
    in ticks; it lands when those before it have. Replicas are sums over their shares.
    """

    def __init__(self, problem, solver, replicas=1):
        self.module, self.batches = problem.blocks.module(0).train(), problem.batches
        self.B, self.q, self.L, self.R = solver.backward_slots, solver.queue, solver.lag, replicas
        parts = [*self.module]
        weighty = [i for i, part in enumerate(parts) if [*part.parameters()]]
        starts = [0, *weighty[1:], len(parts)]
        self.units = [range(a, b) for a, b in pairwise(starts)]
        self.M = len(self.units)
        self.names = [
            [n for n, _ in self.module.named_parameters() if int(n.split(".")[0]) in unit]
            for unit in self.units
        ]
        w = copied(dict(self.module.named_parameters()))
        self.versions = [[{n: w[n] for n in names}] for names in self.names]
        self.momenta = {}

    def up_starts(self, n):
        if self.B == 2:
            return n
        if self.B == 1:
            return max(n, 2 * max(0, n - self.q) - 1)
        return n + 2 * max(0, n - self.q)

    def down_starts(self, n):
        return {2: n + 1, 1: 2 * n + 1, 0: 3 * n + self.q + 1}[self.B]

    def read(self, n, u):
        return self.up_starts(n) + Fraction(u, self.M)

    def landed(self, n, u):
        return self.down_starts(n) + 2 * (1 - Fraction(u, self.M)) + self.L

    def met(self, n, u):
        return sum(self.landed(t, u) <= self.read(n, u) for t in range(n))

    def run_unit(self, u, x, weights):
        for i in self.units[u]:
            own = {n.partition(".")[2]: w for n, w in weights.items() if n.startswith(f"{i}.")}
            x = functional_call(self.module[i], own, (x,))
        return x

    def train(self):
        statistics = [copied(dict(self.module.named_buffers())) for _ in range(self.R)]
        for n, batch in enumerate(self.batches):
            terms = []
            for r in range(self.R):
                self.module.load_state_dict(statistics[r], strict=False)
                terms.append(self.gradients(n, batch.of_replica(r, self.R)))
                statistics[r] = copied(dict(self.module.named_buffers()))
            for u in reversed(range(self.M)):
                assert len(self.versions[u]) == n + 1
                total = {k: sum(term[u][k] for term in terms) for k in terms[0][u]}
                self.versions[u].append(self.stepped(u, total, batch.learning_rate))
        found = {n: w for versions in self.versions for n, w in versions[-1].items()}
        shares = [self.batches[0].of_replica(r, self.R).share for r in range(self.R)]
        for name, first in statistics[0].items():
            means = sum(share * s[name] for share, s in zip(shares, statistics, strict=True))
            found[name] = means if first.is_floating_point() else first
        return {self.module.global_name(name): t for name, t in found.items()}

    def gradients(self, n, batch):
        """Those of each unit, by name, of the samples' term of the mini-batch's mean."""
        x, inputs, outs, met = batch.images(), [], [], []
        for u in range(self.M):
            w = self.versions[u][self.met(n, u)]
            met.append({k: v.clone().requires_grad_() for k, v in w.items()})
            inputs.append(x.detach().requires_grad_(u > 0))
            outs.append(self.run_unit(u, inputs[-1], met[-1]))
            x = outs[-1]
        out = x.detach().requires_grad_()
        (nn.functional.cross_entropy(out, batch.labels()) * batch.share).backward()
        p = out.grad
        for u in reversed(range(self.M)):
            outs[u].backward(p)
            p = inputs[u].grad
        return [{k: w.grad for k, w in unit.items()} for unit in met]

    def stepped(self, u, gradients, rate):
        new = {}
        for name, w in self.versions[u][-1].items():
            g, v = gradients[name], self.momenta.get(name)
            v = self.momenta[name] = g if v is None else v * MOMENTUM + g
            new[name] = w.add(g.add(v, alpha=MOMENTUM), alpha=-rate)
        return new


@pytest.mark.parametrize("name", [n for n in ONE_BLOCK if n != "in parts"])
def test_one_block_equals_a_simulation_by_the_formulas(name):
    simulated = Simulated(unit_problem(batches=8), ONE_BLOCK[name]).train()
    found = trained(unit_problem(batches=8), ONE_BLOCK[name])
    assert_same(found, simulated)
    plain = unit_problem(batches=8).plain_loop()
    assert not all(torch.equal(found[n], plain[n]) for n in plain)


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("name", [n for n in ONE_BLOCK if n != "in parts"])
def test_replicas_equal_a_simulation_by_the_formulas(name, lag, replicas):
    solver = replace(ONE_BLOCK[name], lag=lag)
    simulated = Simulated(unit_problem(batches=8, batch=7), solver, replicas).train()
    found = trained_by_replicas(unit_problem(batches=8, batch=7), solver, replicas)
    for tensors in found:
        assert_same(tensors, found[0])
        for key, tensor in simulated.items():
            torch.testing.assert_close(tensors[key], tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("name", ONE_BLOCK)
def test_resumed_replicas_go_on_to_the_same_bits(name, lag):
    solver = replace(ONE_BLOCK[name], lag=lag)
    whole = trained_by_replicas(unit_problem(batches=8, batch=7), solver, 2)
    resumed = trained_by_replicas(unit_problem(batches=8, batch=7), solver, 2, at=4)
    for tensors, expected in zip(resumed, whole, strict=True):
        assert_same(tensors, expected)


@pytest.mark.parametrize(("K", "m"), [(2, 3), (4, 1)])
def test_where_a_block_s_units_have_one_delay_it_is_delayed_by_that_bit_for_bit(K, m):
    expected = trained(unit_problem(K), FDG(micro_batches=m))
    assert_same(trained(unit_problem(K), PDASGD(micro_batches=m)), expected)


@pytest.mark.parametrize("name", ONE_BLOCK)
def test_resumed_it_goes_on_to_the_same_bits(name):
    solver = ONE_BLOCK[name]
    expected = trained(unit_problem(batches=7), solver)
    assert_same(trained(unit_problem(batches=7), solver, at=4), expected)


def test_what_other_settings_left_under_way_is_completed_at_once():
    problem = unit_problem()

    def program(block, links):
        mine = PDASGD().start(block, links, problem.setup(window=0))
        mine.train(problem.window(1, 0, 4))
        other = SGD.start(block, links, problem.setup(window=0))
        other.load_state(mine.state())
        assert other.state().flight == {}
        other.train(problem.window(1, 4))

    problem.on_every_block(program)


def test_every_sample_is_applied_once_to_every_unit(monkeypatch):
    landed = []
    land = Units._apply

    def counted(self, flight, unit, gradients):
        landed.append((flight.part.step, flight.part.number, unit))
        return land(self, flight, unit, gradients)

    monkeypatch.setattr(Units, "_apply", counted)
    for solver in (ONE_BLOCK["in parts"], PDASGD(any_order=True)):
        landed.clear()
        problem = unit_problem()
        trained(numbered(problem), solver)
        count = len(unit_slices(problem.blocks.module(0)))
        parts = solver.num_micro_batches(6, 1)
        wanted = [(t, i, u) for t in range(6) for i in range(parts) for u in range(count)]
        assert sorted(landed) == wanted


@pytest.mark.parametrize("name", ["the paper's ratio", "one backward slot and a queue"])
def test_a_unit_has_as_many_older_versions_as_steps_its_gradients_are_late(name, monkeypatch):
    flights, most, begin, land = [], {}, Units.new_flight, Units._apply

    def begun(self, part, lam):
        flights.append(begin(self, part, lam))
        return flights[-1]

    def watched(self, flight, unit, gradients):
        for u, own in enumerate(self.parameters):
            met = {f.versions[u][n].data_ptr() for f in flights if len(f.versions) > u for n in own}
            older = len(met - {p.data_ptr() for p in own.values()}) / len(own)
            most[u] = max(most.get(u, 0), older)
        land(self, flight, unit, gradients)

    monkeypatch.setattr(Units, "new_flight", begun)
    monkeypatch.setattr(Units, "_apply", watched)
    solver = ONE_BLOCK[name]
    trained(unit_problem(batches=12), solver)
    table = solver.table(len(most), 0, 1)
    assert [*most.values()] == [table.delay(u) for u in most]


@pytest.mark.parametrize("slots", [1, 3])
def test_in_any_order_the_loss_falls_and_a_resume_loses_nothing(slots):
    problem = unit_problem(batches=2, batch=16)
    # a rate that is stable whatever the delays: those of 0.05 are too large on a busy machine
    problem.batches = [replace(problem.batches[0], learning_rate=0.01, step=t) for t in range(60)]
    solver = PDASGD(any_order=True, backward_slots=slots, queue=1)
    trained(problem, solver)
    losses = torch.stack(problem.stats[0].losses)
    assert losses.isfinite().all()
    assert len(losses) == 60
    assert losses[-5:].mean() < 0.95 * losses[:5].mean()
    assert all(t.isfinite().all() for t in trained(problem, solver, at=30).values())


@pytest.mark.parametrize("any_order", [False, True])
def test_a_run_in_any_order_says_so(any_order, capsys):
    run = trainer(PDASGD(any_order=any_order), blocks=1, quiet=False, model="plain")
    run.fit(*digits(3))
    assert ("not reproducible" in capsys.readouterr().out) == any_order


def test_a_failing_thread_ends_the_run_with_its_reason(monkeypatch):
    def fail(self, flight, unit, gradients):
        raise ValueError("no")

    monkeypatch.setattr(Units, "_apply", fail)
    with pytest.raises(ValueError, match=r"^no$"):
        trained(unit_problem(), PDASGD(any_order=True))


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match=r"any_order is true, but links\.kind is 'virtual'"):
        trained(unit_problem(), PDASGD(any_order=True), run=run_virtual)
    with pytest.raises(ValueError, match=r"works only where train\.precision is not 'float16'"):
        check(PDASGD(), Setup(), precision="float16")
    loaded = digits(2)
    for sync, solver, why in (
        (None, PDASGD(lag=1), "solver.lag is 1"),
        (LocalSGD(), PDASGD(), "replicas sum every gradient in float32"),
        (AllReduce(messages="int8"), PDASGD(), "replicas sum every gradient in float32"),
        (AllReduce(), PDASGD(any_order=True), "there is one replica"),
    ):
        settings = {} if sync is None else {"replicas": 2, "sync": sync}
        assert why in refused(trainer(solver, blocks=1, model="plain", **settings), loaded)


def test_on_a_grid_of_blocks_and_replicas_it_is_delayed_by_that_bit_for_bit(tmp_path):
    """Weights and losses; the means of running statistics are not taken in every step."""
    loaded, grid = digits(4), {"blocks": 2, "replicas": 2, "serial_epochs": 1}
    expected, found = (
        trained_weights(trainer(solver(micro_batches=2), tmp_path / solver.name, **grid), loaded)
        for solver in (FDG, PDASGD)
    )
    losses = [
        [line["loss"] for line in lines(tmp_path / solver.name) if line["phase"] == "parallel"]
        for solver in (FDG, PDASGD)
    ]
    assert losses[0]
    torch.testing.assert_close(losses[1], losses[0])
    for name, tensor in expected.items():
        if "running" in name:
            torch.testing.assert_close(found[name], tensor)
        else:
            assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("m", [1, 2])
def test_threads_and_the_virtual_clock_give_replicas_the_same_bits(m, tmp_path):
    """Broken off within an epoch as well; shares of 32 samples are uneven."""
    solver, loaded = PDASGD(lag=1, micro_batches=m), digits(6)
    often = CheckpointSettings(steps=1, keep_last=0)
    grid = {"blocks": 1, "replicas": 3, "train": {"epochs": 1, "report_every": 1}}
    whole = trained_weights(trainer(solver, tmp_path / "run", checkpoint=often, **grid), loaded)
    virtual = trainer(solver, links={"kind": "virtual"}, **grid)
    assert_same(trained_weights(virtual, loaded), whole)
    interrupted(tmp_path / "run", after=3)
    resumed = trainer(solver, tmp_path / "run", resume=True, checkpoint=often, **grid)
    assert_same(trained_weights(resumed, loaded), whole)


def test_a_run_is_resumed_from_its_folder_bit_for_bit(tmp_path):
    """ResNet-8 with channels_last weights and a kept average, broken off within an epoch."""
    loaded, often = digits(6), CheckpointSettings(steps=1, keep_last=0)
    settings = {"blocks": 1, "train": {"epochs": 1, "ema": 0.9, "report_every": 1}}
    whole = trained_weights(trainer(PDASGD(), **settings), loaded)
    trained_weights(trainer(PDASGD(), tmp_path / "run", checkpoint=often, **settings), loaded)
    assert_same(weights(tmp_path / "run"), whole)
    interrupted(tmp_path / "run", after=1)
    resumed = trainer(PDASGD(), tmp_path / "run", resume=True, **settings)
    assert_same(trained_weights(resumed, loaded), whole)
