"""What every method keeps to: what it is alone, what a resume needs, where weights move."""

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from declared import declared
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import assert_same, exact_pass, handed_over, make_problem

from hybrid.links import run_threads, run_virtual
from solvers import Penalty, Petra, Solver, registry
from solvers.base import Recording
from solvers.exact.filling import BubbleFill
from solvers.exact.pipeline import Gaps

EVERY: dict[str, Solver] = {k: v for examples in declared("EXAMPLES") for k, v in examples.items()}
"""Of each solver, as its own test file gives them."""
ALONE = [name for names in declared("PLAIN") for name in names]
"""Those that are SGD alone, where there is one block."""
WRONG = [wrong for wrongs in declared("IMPOSSIBLE") for wrong in wrongs]
CUTS = st.sampled_from([[2], [1, 3], [1, 2, 3]])


@pytest.mark.parametrize("name", registry.OWN)
def test_the_test_file_of_every_solver_declares_examples(name):
    known = [solver for solver in EVERY.values() if solver.name == name]
    assert known, f"give a test file of {name} EXAMPLES, as CONTRIBUTING.md says"


def test_no_two_examples_have_one_name():
    assert len(EVERY) == sum(map(len, declared("EXAMPLES")))


def problem_for(solver, cuts, seed=1):
    petra, batches = isinstance(solver, Petra), 3 if solver.alternates else 8
    made = make_problem(seed, 3, cuts, batch=4, batches=batches, reversible=petra)
    # as in training: what a checkpoint gives back is laid out like this
    made.blocks.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return made.single_precision() if "16" in repr(solver) else made


def trained(problem, solver, at=4, goes_on="", run=run_threads, prepare=lambda block: None):
    """The network after two windows; `goes_on`: its state is asked for or moved in between."""
    parts = [problem.window(1, 0, at), problem.window(1, at)]
    windows = [problem.window(3)] * 2 if solver.alternates else parts

    def program(block, links):
        prepare(block)
        setup = problem.setup(3, carried=True)
        mine = solver.start(block, links, setup)
        if isinstance(mine, Recording):
            exact_pass(block, links).observe(problem.window(), mine)
        mine.train(windows[0])
        state = handed_over(links, mine) if goes_on else None
        if state is not None and goes_on == "moved":
            steps = {k: deepcopy(o.state_dict()) for k, o in block.optimizers.items()}
            block.module.zero_grad()
            mine = solver.start(block, links, setup)
            for kind in ("exact", "local"):
                block.optimizers[kind].load_state_dict(steps[kind])
            mine.load_state(state)
        mine.train(windows[1])
        mine.drain()
        assert not mine.state().flight

    problem.on_every_block(program, run=run)
    return problem.tensors()


@pytest.mark.parametrize("name", ALONE)
def test_one_block_alone_is_plain_sgd_bit_for_bit(name):
    problem, plain = (problem_for(EVERY[name], []) for _ in range(2))
    assert_same(trained(problem, EVERY[name]), plain.plain_loop())


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=2, deadline=None)
@given(CUTS, st.integers(1, 7), st.sampled_from(["asked", "moved"]))
def test_a_run_goes_on_with_what_was_kept_and_virtual_clocks_do_not_change_a_bit(
    name, cuts, at, goes_on
):
    solver = EVERY[name]
    found = trained(problem_for(solver, cuts), solver, at, goes_on)
    assert_same(found, trained(problem_for(solver, cuts), solver, run=run_virtual))


@pytest.mark.parametrize("empty", ["flatten", "frozen"])
@pytest.mark.parametrize("name", EVERY)
def test_a_block_without_trainable_parameters_takes_part(name, empty):
    solver, index = EVERY[name], 2 if empty == "flatten" else 1
    filtered = getattr(solver, "filter", 1) > 1
    if filtered and empty == "flatten":
        pytest.skip("a vector has no squares of pixels")
    problem = problem_for(solver, [2, 5, 6] if empty == "flatten" else [1, 3]).single_precision()
    frozen = problem.blocks.module(index)
    assert empty == "frozen" or not list(frozen.parameters())
    frozen.requires_grad_(False)
    before, after = problem.tensors(), trained(problem, solver)
    for k in range(len(problem.blocks)):
        module = problem.blocks.module(k)
        names = [module.global_name(name) for name, _ in module.named_parameters()]
        moved = [not torch.equal(before[name], after[name]) for name in names]
        assert any(moved) == (k != index)
    assert all(tensor.isfinite().all() for tensor in after.values())


class Watching:
    """A strategy that sees whether weights move outside of a step, and in one."""

    def __init__(self, module):
        self.module = module
        self.kinds: list[str] = []
        self._keep()

    def _keep(self):
        self.weights = [p.detach().clone() for p in self.module.parameters()]

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


@pytest.mark.parametrize("name", EVERY)
def test_replicas_are_asked_before_and_after_every_step(name):
    solver, blocks = EVERY[name], []

    def prepare(block):
        block.sync = Watching(block.module)
        blocks.append(block)

    trained(problem_for(solver, [1, 3]), solver, prepare=prepare)
    own = "exact" if solver.exact else "local"
    for block in blocks:
        block.sync.join()
        kinds = block.sync.kinds
        assert len(kinds) >= 3
        assert set(kinds) == {own, *(["auxiliary"] if "auxiliary" in block.optimizers else [])}


@pytest.mark.parametrize(("kind", "steps"), [("added", {"exact"}), ("own", {"exact", "local"})])
def test_replicas_are_asked_where_gaps_are_filled(kind, steps):
    problem = make_problem(1, 3, [2], batch=4, batches=4)

    def program(block, links):
        block.sync = watching = Watching(block.module)
        filling = Penalty().start(block, links, problem.setup(window=2))
        fill = BubbleFill(filling, [Gaps(4, 0), Gaps(0, 4)][block.index], 4, kind)
        exact_pass(block, links, micro_batches=2).train(problem.window(), None, fill)
        watching.join()
        return set(watching.kinds)

    assert problem.on_every_block(program) == [steps] * 2


@pytest.mark.parametrize(
    ("solver", "name", "value"),
    [(solver, *setting) for solver, wrong in WRONG for setting in wrong.items()],
)
def test_impossible_settings_name_the_value_in_one_line(solver, name, value):
    with pytest.raises(ValueError, match=rf"^{name} is {value!r}[^\n]*$"):
        solver(**{name: value})
