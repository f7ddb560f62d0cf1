"""Small problems that are trained by units, and how."""

from copy import deepcopy
from dataclasses import replace

from conditions import check
from problems import copied, make_problem
from trainings import assert_same

from hybrid.links import run_threads
from hybrid.solvers.sync.all_reduce import AllReduce
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


def trained_by_replicas(problem, solver, replicas, at=None):
    """What each replica's network and state are at the end, or after a resume at `at`."""

    def program(links):
        mine = deepcopy(problem)
        replica = links.place.replica
        mine.batches = [b.of_replica(replica, replicas) for b in mine.batches]
        block = mine.build(0, momentum=MOMENTUM)
        setup = replace(mine.setup(window=0), replicas=replicas)

        def start():
            block.sync = AllReduce().start(block, links.peers, mine.batches[0].share)
            return solver.start(block, links, setup)

        program = start()
        if at is not None:
            program.train(mine.window(1, 0, at))
            state = type(program.state())(flight=copied(program.state().flight))
            block.module.zero_grad()
            program = start()
            program.load_state(state)
        program.train(mine.window(1, at or 0))
        program.drain()
        assert program.state().flight == {}
        return mine.tensors()

    return run_threads(1, program, replicas=replicas)
