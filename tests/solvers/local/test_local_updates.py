"""Local updates: which gradients cross which cut, and nothing of the heads in the network."""

from copy import deepcopy
from time import sleep

import pytest
import torch
from problems import copied, make_problem
from torch import nn
from trainings import assert_same

from hybrid import Trainer, data, split
from hybrid.method.optimizers import make_optimizer
from hybrid.networks import models
from hybrid.settings.config import OptimizerSettings, TrainSettings
from hybrid.solvers import LocalUpdates
from hybrid.solvers.local.heads import Head, Pooled
from hybrid.solvers.local.local_updates import PROGRESS_INTERVAL, LocalUpdatesProgram
from hybrid.solvers.state import State, Tensors


def four_blocks(batches=1):
    return make_problem(3, units=3, cuts=[1, 2, 3], batch=4, batches=batches)


def gradients(solver, problem):
    """Every block's gradients of one mini-batch, and the heads."""

    def program(block, links):
        found: Tensors = {}
        mine = solver.start(block, links, problem.setup(window=0))

        def keep(*arguments):
            found.update({n: p.grad.clone() for n, p in block.module.named_parameters()})

        block.step = keep
        mine._make_head(problem.batches[0])
        head = deepcopy(mine._head.module) if mine._head else None
        mine.train(problem.window())
        return found, head

    ranks = problem.on_every_block(program)
    return [found for found, _ in ranks], [head for _, head in ranks]


def local_losses(problem, heads, detached):
    """Each block's loss where it has one, the chain cut before the blocks of `detached`."""
    batch = problem.batches[0]
    x, losses = batch.images(), []
    for k in range(4):
        x = problem.blocks.module(k).train()(x.detach() if k in detached else x)
        pools = k < 3 and isinstance(heads[k], Pooled)
        out = x.mean((2, 3)) if pools else x
        if k == 3 or heads[k] is not None:
            out = out if k == 3 else heads[k](out)
            losses.append(nn.functional.cross_entropy(out, batch.labels()))
        else:
            losses.append(torch.zeros(()))
    return losses


def expected(problem, losses, k):
    parameters = list(problem.blocks.module(k).parameters())
    total = sum(losses, torch.zeros((), dtype=torch.float64))
    return list(torch.autograd.grad(total, parameters, retain_graph=True))


EVERY = [0, 1, 2, 3]
WHOLE = LocalUpdates(style="chunked", chunks=1)
CHUNKED = LocalUpdates(style="chunked", chunks=2)
OVERLAPPING = LocalUpdates(style="overlapping", head="mlp:5")
NORMED = LocalUpdates(head="user_heads:normed")


@pytest.mark.parametrize(
    ("solver", "headed", "detached", "losses"),
    [
        (LocalUpdates(), EVERY, [EVERY] * 4, [[0], [1], [2], [3]]),
        (NORMED, EVERY, [EVERY] * 4, [[0], [1], [2], [3]]),
        (CHUNKED, [1, 3], [[2]] * 4, [[1], [1], [3], [3]]),
        (WHOLE, [3], [[]] * 4, [[3]] * 4),
        # the chain is cut before a block and behind the next
        (OVERLAPPING, [1, 2, 3], [[k, k + 2] for k in EVERY], [[0, 1], [1, 2], [2, 3], [3]]),
    ],
    ids=["greedy", "a user's head", "two chunks", "one chunk", "overlapping"],
)
def test_gradients_cross_the_cuts_of_their_style_and_no_others(solver, headed, detached, losses):
    problem = four_blocks()
    found, heads = gradients(solver, problem)
    assert [k for k in EVERY if heads[k] is not None or k == 3] == headed
    for k in EVERY:
        every = local_losses(problem, heads, detached[k])
        wanted = expected(problem, [every[i] for i in losses[k]], k)
        torch.testing.assert_close(list(found[k].values()), wanted)


@pytest.mark.parametrize("style", ["greedy", "chunked"])
def test_a_fast_block_waits_for_a_slow_one(style):
    problem = four_blocks(8 * PROGRESS_INTERVAL)
    done = [0] * 4
    ahead = []

    def program(block, links):
        stepped = block.step

        def step(*arguments):
            if links.rank == 2:
                sleep(0.002)
            stepped(*arguments)
            done[links.rank] += 1
            ahead.append(done[1] - done[2])

        block.step = step
        mine = LocalUpdates(style=style).start(block, links, problem.setup(window=0))
        mine.train(problem.window())
        mine.drain()

    problem.on_every_block(program)
    assert PROGRESS_INTERVAL < max(ahead) <= 2 * PROGRESS_INTERVAL + 1
    assert done == [8 * PROGRESS_INTERVAL] * 4


def test_heads_of_another_style_are_refused():
    problem = four_blocks()

    def program(block, links):
        chunked, greedy = LocalUpdates(style="chunked"), LocalUpdates()
        mine = greedy.start(block, links, problem.setup(window=0))
        mine.train(problem.window())
        state = State(block=mine.state().block)
        if links.rank in (0, 2):
            with pytest.raises(ValueError, match="resume with the style and chunks it was made"):
                chunked.start(block, links, problem.setup(window=0)).load_state(state)
        else:
            chunked.start(block, links, problem.setup(window=0)).load_state(state)

    problem.on_every_block(program)


def test_trained_heads_are_taken_back_where_a_block_ends_at_the_same_unit(tmp_path, monkeypatch):
    kept: dict[str, Tensors] = {}
    given: dict[str, Tensors] = {}
    state, load_state = LocalUpdatesProgram.state, LocalUpdatesProgram.load_state

    def last_unit(mine):
        name, _ = list(mine.block.module.named_parameters())[-1]
        return mine.block.module.global_name(name).rsplit(".", 2)[0]

    def keep(mine):
        found = state(mine)
        kept[last_unit(mine)] = copied(found.block)
        return found

    def give(mine, found):
        load_state(mine, found)
        given[last_unit(mine)] = copied(found.block)
        if found.block:
            assert_same(state(mine).block, found.block)

    monkeypatch.setattr(LocalUpdatesProgram, "state", keep)
    monkeypatch.setattr(LocalUpdatesProgram, "load_state", give)
    train, test = data.load("digits", limit=64)

    def fit(cuts, epochs):
        torch.manual_seed(0)
        blocks = split(models.build("resnet8", classes=10, channels=1, image_size=8), cuts=cuts)
        settings = TrainSettings(epochs=epochs, batch_size=32, threads=1)
        made = Trainer(blocks, LocalUpdates(), train=settings, out=tmp_path, quiet=True)
        made.options.resume = epochs > 1
        made.fit(train, test)

    fit(["layer1.0", "layer3.0"], 1)
    trained = dict(kept)
    assert sum(map(bool, trained.values())) == 2
    fit(["layer2.0", "layer3.0"], 2)
    assert given["layer1.0"] == {}
    assert_same(given["layer2.0"], trained["layer2.0"])


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_heads_step_with_the_settings_of_their_block(name):
    settings = OptimizerSettings(name=name, lr=0.2, momentum=0.8, weight_decay=0.01)
    block = four_blocks().build(0)
    block.optimizers["exact"] = make_optimizer(block.module, settings)
    head = Head("mlp:3", block, (4, 2, 2), (10,))
    exact = block.optimizers["exact"]
    assert type(head.optimizer) is type(exact)
    assert [g["weight_decay"] for g in head.optimizer.param_groups] == [0.01, 0.0]
    given, found = exact.param_groups[0], head.optimizer.param_groups[0]
    changing = ("params", "weight_decay", "lr_index")  # the last is a place among the groups
    assert {k: v for k, v in found.items() if k not in changing} == {
        k: v for k, v in given.items() if k not in changing
    }
