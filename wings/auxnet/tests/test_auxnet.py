"""AuxNet: its iterates are those of its equations, and nothing is kept per sample."""

import io
from copy import deepcopy
from itertools import cycle

import pytest
import torch
from problems import Fixed, assert_weights_moved, make_problem
from setting_modes import windowed
from trainings import digits

from hybrid import Trainer, split
from hybrid.links import run_threads
from hybrid.solvers import Batch, Block, Setup, Window, registry
from hybrid.solvers.objective import Objective
from hybrid.solvers.state import State
from hybrid_auxnet import AuxNet
from hybrid_auxnet.auxnet import auxiliary_network
from tests import test_settings_act as act
from tests.hybrid.bench.plan import test_plan as plan
from tests.hybrid.rounds import test_host_reads as host_reads
from tests.hybrid.training import test_replicas as replicas
from tests.solvers import test_every_solver as every

pytestmark = pytest.mark.skipif(
    "auxnet" not in registry.names(), reason="the package is installed without its entry points"
)
CUTS: dict[int, list[int]] = {1: [], 2: [2], 3: [1, 3]}
UNRECORDED = {"rounds.window=1": "one sweep, and nothing recorded"}
IMPOSSIBLE = {
    "beta": float("nan"),
    "local_lr": -1.0,
    "aux_lr": 0.0,
    "lam_step": -0.1,
    "width": 0,
    "depth": 0,
    "momentum": -0.1,
}


@pytest.fixture(scope="module")
def modes():
    return [*windowed("auxnet", {}, UNRECORDED, tries={"solver.name": ["penalty"]})]


def test_what_every_method_keeps_to():
    for cuts in every.CUTS:
        every.check_resume_and_virtual_clocks(AuxNet(aux_lr=0.01), cuts, 4)
    every.check_where_weights_move(AuxNet(aux_lr=0.01))


@pytest.mark.parametrize("weighted", [False, True])
def test_a_step_reads_no_tensor(weighted):
    host_reads.test_a_step_of_no_solver_reads_a_tensor("auxnet", weighted)


def test_replicas_of_the_same_data_are_one(monkeypatch):
    monkeypatch.setitem(replicas.EVERY, "auxnet", AuxNet())
    replicas.test_replicas_of_the_same_data_are_one("auxnet", digits(4), monkeypatch)


def test_the_plan_has_its_row(hybrid):
    plan.test_the_command_prints_a_table_with_the_solvers_row_and_what_to_run(hybrid, "auxnet")


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_settings_name_the_value_in_one_line(name):
    every.test_impossible_settings_name_the_value_in_one_line(AuxNet, name, IMPOSSIBLE[name])


def test_every_setting_of_its_own_acts_or_is_refused(modes):
    """Each in one of the modes."""
    of_its_own = [s for s in sorted(act.settings_of(modes[0])) if s.startswith("solver.")]
    assert not act.faults(zip(of_its_own, cycle(modes), strict=False))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_setting_acts_or_is_refused_in_every_mode(modes):
    assert not act.faults((setting, mode) for mode in modes for setting in act.settings_of(mode))


def trained(problem, solver, sweeps=1, momentum=0.9):
    """Of each rank: its program after a window, and what the phase did."""

    def program(block, links):
        mine = solver.start(block, links, problem.setup(sweeps))
        return mine, mine.train(problem.window(sweeps))

    return problem.on_every_block(program, momentum)


class Simulation:
    """All blocks in one place, stepped by the equations; gradients are of scalar losses."""

    def __init__(self, problem, solver):
        self.solver = solver
        K = len(problem.blocks)
        self.f = [deepcopy(problem.blocks.module(k)).train() for k in range(K)]
        size = (1, 6, 6), (3, 6, 6), solver.width, solver.depth
        self.a = [None, *(auxiliary_network(*size, seed=k).double() for k in range(1, K))]
        adam = torch.optim.Adam
        self.adam = [None, *(adam(a.parameters(), solver.aux_lr) for a in self.a[1:])]
        self.squares = torch.zeros(K, 2)

    def visit(self, images, labels, rate):
        beta, K, N = self.solver.beta, len(self.f), len(images)
        generated = [images, *(a(images) for a in self.a[1:])]
        lam = [g.detach().requires_grad_(k > 0) for k, g in enumerate(generated)]
        x = [f(z) for f, z in zip(self.f, lam, strict=True)]
        for k in reversed(range(K)):
            if k == K - 1:
                local = torch.nn.functional.cross_entropy(x[k], labels)
            else:
                r = lam[k + 1].detach() - x[k]
                local = beta * r.square().sum() / N
            weights = list(self.f[k].parameters())
            inputs = [] if k == 0 else [lam[k]]
            gradients = torch.autograd.grad(local, weights + inputs)
            with torch.no_grad():
                for w, g in zip(weights, gradients, strict=False):
                    w -= self.solver.local_lr * rate * g
            if k:
                self._regress(k, generated[k], x[k - 1].detach(), N * gradients[-1])

    def _regress(self, k, generated, x, p_in):
        beta = self.solver.beta
        wanted = x - self.solver.lam_step / (2 * beta) * p_in
        loss = 0.5 * (generated - wanted).square().sum() / len(x)
        self.adam[k].zero_grad()
        loss.backward()
        self.adam[k].step()
        r, s = generated.detach() - x, 2 * beta * (generated.detach() - wanted)
        self.squares[k] += torch.stack((r.square().sum(), s.square().sum()))


@pytest.mark.parametrize(
    ("K", "sweeps", "lam_step"), [(1, 1, 1.0), (2, 2, 0.3), (3, 1, 1.0), (3, 2, 0.3)]
)
def test_its_iterates_are_those_of_its_equations(K, sweeps, lam_step):
    problem = make_problem(seed=1, units=3, cuts=CUTS[K], batch=4, batches=2)
    own = {"momentum": None, "beta": 0.05, "local_lr": 0.5}
    network = {"width": 4, "depth": 2, "aux_lr": 0.02}
    solver = AuxNet(lam_step=lam_step, **own, **network)
    simulation = Simulation(problem, solver)
    ranks = trained(problem, solver, sweeps, momentum=0.0)
    for _ in range(sweeps):
        simulation.squares.zero_()
        for batch in problem.batches:
            simulation.visit(batch.images(), batch.labels(), batch.learning_rate)
    close = {"rtol": 0, "atol": 1e-9}
    for k, (mine, stats) in enumerate(ranks):
        state, norms = mine.state().cut, stats.residual_norms()
        expected = dict(simulation.f[k].named_parameters())
        for name, parameter in problem.blocks.module(k).named_parameters():
            torch.testing.assert_close(parameter, expected[name], **close)
        if k == 0:
            assert state == {}
            assert norms is None
            continue
        for name, value in simulation.a[k].state_dict().items():
            torch.testing.assert_close(state[f"weights.{name}"], value, **close)
        for i, moments in enumerate(simulation.adam[k].state.values()):
            for name in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(state[f"adam.{i}.{name}"], moments[name], **close)
        assert norms == pytest.approx(simulation.squares[k].sqrt().tolist(), rel=1e-6)


def test_what_is_kept_does_not_grow_with_the_window():
    def held(batches):
        problem = make_problem(seed=1, units=3, cuts=[1, 3], batch=4, batches=batches)
        sizes = []
        for mine, _ in trained(problem, AuxNet(), sweeps=2):
            buffer = io.BytesIO()
            known = {"solver", "block", "links", "setup"}
            torch.save({k: v for k, v in vars(mine).items() if k not in known}, buffer)
            sizes.append(len(buffer.getvalue()))
        return sizes

    assert held(1) == held(8)
    problem = make_problem(seed=1, units=3, cuts=[1, 3], batch=4, batches=8)
    assert AuxNet().memory(problem.setup(sweeps=2), 1) == 0


def test_blocks_train_statistics_stay_and_messages_are_lam_down_and_x_up():
    problem = make_problem(seed=1, units=3, cuts=[1, 3], batch=4, batches=2)
    before = problem.tensors()
    ranks = trained(problem, AuxNet())
    one = problem.samples * 3 * 6 * 6 * 8
    sent = [mine.links.traffic.total_bytes for mine, _ in ranks]
    assert sent == [one, 2 * one, one]
    assert_weights_moved(problem, before)


def test_a_network_of_another_size_is_refused_in_one_line():
    problem = make_problem(seed=1, units=3, cuts=[2], batch=4)
    mine, _ = trained(problem, AuxNet(width=4))[1]
    mine.solver = AuxNet(width=8)
    mine.load_state(mine.state())
    with pytest.raises(ValueError, match=r"^[^\n]* is not of width 8 and depth 1: resume with .*$"):
        mine._generate(problem.batches[0].images())


def test_integers_that_would_cross_a_cut_are_refused():
    class Tokens(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5)

        def forward(self, ids):
            return self.out(self.embed(ids)).mean(1) + torch.nn.functional.one_hot(ids, 5).sum(1)

    ids = torch.arange(5).repeat(8, 1)
    blocks = split(Tokens(), cuts=["out"], sample=ids)
    trainer = Trainer(blocks, AuxNet(), train={"epochs": 1, "batch_size": 4}, quiet=True)
    with pytest.raises(ValueError, match=r"^[^\n]*cross the cut before out, and 'auxnet'[^\n]*$"):
        trainer.fit((ids, ids[:, 0]))


@pytest.mark.parametrize("shape", [(4,), (3, 4)], ids=["vectors", "tokens"])
def test_what_it_generates_goes_on_from_its_state_whatever_its_rank(shape):
    torch.manual_seed(0)
    network = torch.nn.Sequential(*(torch.nn.Linear(4, 4).double() for _ in range(2)))
    x = torch.randn(6, *shape, dtype=torch.float64)
    blocks = split(network, cuts=["1"])
    batch = Batch(torch.arange(6), 0.1, Fixed(x, torch.arange(6) % 3))
    objective = Objective(lambda out, y: out.square().mean(), {})

    def program(links):
        module = blocks.module(links.rank)
        sgd = torch.optim.SGD(module.parameters(), lr=0.1)
        made = Block(module, links.rank, 2, {"exact": sgd, "local": sgd}, objective=objective)
        mine = AuxNet(momentum=None).start(made, links, Setup((shape,), 6, stored_batches=1))
        mine.train(Window([batch]))
        kept = {k: v.clone() for k, v in mine.state().cut.items()}
        mine.load_state(State(cut=kept))
        if links.rank:
            mine._generate(batch.images())
        again = mine.state().cut
        return kept.keys() == again.keys() and all(torch.equal(kept[k], again[k]) for k in kept)

    assert all(run_threads(2, program))
