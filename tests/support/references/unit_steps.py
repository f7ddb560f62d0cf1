"""Small problems that are trained by units, and how."""

from dataclasses import replace

from conditions import check
from problems import copied, make_problem
from trainings import assert_same

from hybrid.links import run_threads
from hybrid_messages import PDASGD

MOMENTUM = 0.9
SGD = PDASGD(backward_slots=0)


def unit_problem(K=1, batches=6, batch=6, units=4, cuts=None):
    problem = make_problem(5, units, cuts or [*range(1, K)], batch=batch, batches=batches)
    return replace(
        problem,
        batches=[replace(b, learning_rate=0.1 / (t + 1)) for t, b in enumerate(problem.batches)],
    )


def numbered(problem):
    steps = enumerate(problem.batches)
    return replace(problem, batches=[replace(b, step=t) for t, b in steps])


def trained(problem, solver, at=None, run=run_threads):
    """The network after all mini-batches; broken off and gone on with at mini-batch `at`."""

    def program(block, links):
        check(solver, problem.setup(window=0))
        mine = solver.start(block, links, problem.setup(window=0))
        if at is not None:
            mine.train(problem.window(1, 0, at))
            state = type(mine.state())(flight=copied(mine.state().flight))
            statistics = copied(dict(block.module.named_buffers()))
            block.module.zero_grad()
            mine = solver.start(block, links, problem.setup(window=0))
            mine.load_state(state)
            assert_same(copied(dict(block.module.named_buffers())), statistics)
        stats = mine.train(problem.window(1, at or 0))
        mine.drain()
        assert mine.state().flight == {}
        return stats

    problem.stats = problem.on_every_block(program, MOMENTUM, run)
    return problem.tensors()
