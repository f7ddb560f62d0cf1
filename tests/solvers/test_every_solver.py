"""What every method keeps to: what it is alone, what a resume needs, where weights move."""

from contextlib import nullcontext
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from method_examples import EXAMPLES, IMPOSSIBLE, PLAIN
from problems import exact_pass, handed_over, make_problem
from trainings import assert_same

from hybrid.links import run_threads, run_virtual
from hybrid.solvers import DDG, Penalty, Petra, registry
from hybrid.solvers.base import Recording
from hybrid.solvers.local_work.budget import LocalBudget
from hybrid.solvers.local_work.work import LocalWork

CUTS = [[1, 3], [1, 2, 3], [2]]


@pytest.mark.parametrize("name", registry.OWN)
def test_every_solver_has_an_example(name):
    names = {solver.name for solver in EXAMPLES.values()}
    assert name in names, f"give tests/support/methods/method_examples.py an instance of {name}"


def problem_for(solver, cuts, seed=1):
    petra, batches = isinstance(solver, Petra), 3 if solver.alternates else 8
    made = make_problem(seed, 3, cuts, batch=4, batches=batches, reversible=petra)
    # as in training: what a checkpoint gives back is laid out like this
    made.blocks.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return made.single_precision() if "16" in repr(solver) else made


def trained(problem, solver, at=4, resumed=False, run=run_threads, prepare=lambda block: None):
    """The network after three windows.

    `resumed`: its state is read after the first, and taken by a new program after the second.
    """
    windows = [problem.window(1, 0, at), problem.window(1, at, 6), problem.window(1, 6)]
    if solver.alternates:
        windows = [problem.window(2)] * 3

    def program(block, links):
        prepare(block)
        setup = problem.setup(2, carried=True)
        mine = solver.start(block, links, setup)
        if isinstance(mine, Recording):
            exact_pass(block, links).observe(problem.window(), mine)
        mine.train(windows[0])
        if resumed:
            handed_over(links, mine)
        mine.train(windows[1])
        if resumed:
            state = handed_over(links, mine)
            steps = {k: deepcopy(o.state_dict()) for k, o in block.optimizers.items()}
            block.module.zero_grad()
            mine = solver.start(block, links, setup)
            for kind in ("exact", "local"):
                block.optimizers[kind].load_state_dict(steps[kind])
            mine.load_state(state)
        mine.train(windows[2])
        mine.drain()
        assert not mine.state().flight

    problem.on_every_block(program, run=run)
    return problem.tensors()


@pytest.mark.parametrize("name", PLAIN)
def test_one_block_alone_is_plain_sgd_bit_for_bit(name):
    check_plain_sgd(PLAIN[name])


def check_plain_sgd(solver):
    problem, plain = (problem_for(solver, []) for _ in range(2))
    assert_same(trained(problem, solver), plain.plain_loop())


@pytest.mark.parametrize(("number", "name"), [*enumerate(EXAMPLES)], ids=[*EXAMPLES])
def test_a_run_goes_on_with_what_was_kept_and_virtual_clocks_do_not_change_a_bit(number, name):
    check_resume_and_virtual_clocks(EXAMPLES[name], CUTS[number % len(CUTS)], 1 + number % 5)


def check_resume_and_virtual_clocks(solver, cuts, at):
    found = trained(problem_for(solver, cuts), solver, at, resumed=True)
    assert_same(found, trained(problem_for(solver, cuts), solver, run=run_virtual))


@pytest.mark.parametrize("name", registry.CODECS.places)
def test_messages_of_every_codec_go_on_and_arrive_with_the_same_bits(name):
    check_resume_and_virtual_clocks(DDG(micro_batches=2, messages=name), CUTS[1], 3)


class Watching:
    """A strategy that sees whether weights move outside of a step, and in one."""

    peers = SimpleNamespace(replica=0)

    def __init__(self, module):
        self.module = module
        self.kinds: list[str] = []
        self._keep()

    def _keep(self):
        self.weights = [p.detach().clone() for p in self.module.parameters()]

    def total(self, own):
        return own

    def begin_sum(self, parameters):
        return lambda: None

    def before_step(self, kind, rate):
        self.join()
        self.kinds.append(kind)
        return True

    def last_pass(self, kind):
        return nullcontext()

    def after_step(self, kind):
        assert self.kinds[-1] == kind
        self._keep()

    def join(self):
        assert all(map(torch.equal, self.weights, self.module.parameters()))


@pytest.mark.parametrize("name", EXAMPLES)
def test_weights_move_in_steps_that_replicas_know_of_and_only_where_they_can_be_trained(name):
    check_where_weights_move(EXAMPLES[name])


def check_where_weights_move(solver):
    """The second block is frozen, and another has nothing but a flattening of pixels."""
    cuts, idle = [1, 3, 5, 6], {1, 3}
    if getattr(solver, "filter", 1) > 1:  # a vector has no squares of pixels
        cuts, idle = [1, 3], {1}
    problem, blocks = problem_for(solver, cuts).single_precision(), []
    problem.blocks.module(1).requires_grad_(False)
    assert 3 not in idle or not list(problem.blocks.module(3).parameters())

    def prepare(block):
        block.sync = Watching(block.module)
        blocks.append(block)

    before, after = problem.tensors(), trained(problem, solver, prepare=prepare)
    for block in blocks:
        block.sync.join()
        module = block.module
        names = [module.global_name(name) for name, _ in module.named_parameters()]
        moved = [not torch.equal(before[name], after[name]) for name in names]
        assert any(moved) == (block.index not in idle)
        if any(moved):
            kinds = {"exact" if solver.exact else "local", "auxiliary"} & {*block.optimizers}
            assert len(block.sync.kinds) >= 3
            assert {*block.sync.kinds} == kinds
    assert all(tensor.isfinite().all() for tensor in after.values())


def test_replicas_are_asked_once_a_step_where_waits_are_filled():
    problem = make_problem(1, 3, [2], batch=4, batches=4)

    def program(block, links):
        block.sync = watching = Watching(block.module)
        mine = DDG(micro_batches=2).start(block, links, problem.setup(window=0))
        local = Penalty().start(block, links, problem.setup(window=2))
        mine.local_work = LocalWork(local, LocalBudget(0, 2))
        mine.train(problem.window())
        mine.drain()
        watching.join()
        return watching.kinds

    assert problem.on_every_block(program) == [["local"] * 4] * 2


@pytest.mark.parametrize(
    ("solver", "name", "value"),
    [(solver, *setting) for solver, wrong in IMPOSSIBLE for setting in wrong.items()],
)
def test_impossible_settings_name_the_value_in_one_line(solver, name, value):
    with pytest.raises(ValueError, match=rf"^{name} is {value!r}[^\n]*$"):
        solver(**{name: value})
