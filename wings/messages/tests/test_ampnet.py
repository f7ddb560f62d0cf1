"""AMPNet on chains: the masked dense run, SGD, staleness by its formula, the same bits anywhere."""

import runpy
from collections import Counter
from dataclasses import replace
from itertools import cycle
from math import ceil
from pathlib import Path

import pytest
import random_layers
import torch
from answers import refusal
from conditions import check
from instance_paths import Masked, deep, setup_of, trained
from setting_modes import EXACT, Mode, alone
from trainings import assert_same, digits, interrupted, lines, trained_weights, trainer, weights
from unit_steps import trained as by_units

from hybrid import split
from hybrid.links import run_virtual
from hybrid.method.memory import saved_bytes
from hybrid.networks import models
from hybrid.settings.config import CheckpointSettings
from hybrid.solvers import Backprop, registry
from hybrid.solvers.base import Setup
from hybrid_messages import AMPNet
from hybrid_messages.chain import draw_path
from hybrid_messages.units import Nodes
from hybrid_samplers import SelectiveBackprop
from tests import test_settings_act as act
from tests.solvers import test_every_solver as every

pytestmark = pytest.mark.skipif(
    "ampnet" not in registry.names(), reason="the package is installed without its entry points"
)
OTHER = {
    "solver.name": ["pd-asgd"],
    "solver.max_active_keys": [1, 2],
    "solver.min_update_frequency": [2],
}
LATE = {
    "rounds.serial_epochs": "with one instance or one block no gradient is late in later epochs "
    "either"
}
ONE_KEY = dict.fromkeys(EXACT, "with one instance under way no gradient is late, whatever the cuts")
EXAMPLES = {
    "ampnet": AMPNet(micro_batches=1),
    "ampnet in parts": AMPNet(micro_batches=3, messages="int8", min_update_frequency=2),
    "ampnet, few keys": AMPNet(micro_batches=2, max_active_keys=5),
}
MODES = [
    *alone("ampnet", corrected={"solver.micro_batches": 4}, tries=OTHER),
    Mode("ampnet", "one block", {"split.blocks": 1}, LATE, OTHER),
    Mode("ampnet", "one key", {"solver.max_active_keys": 1}, {**LATE, **ONE_KEY}, OTHER),
]
CUTS = {1: [], 2: [3], 3: [2, 4], 4: [1, 3, 4]}
WAYS = {
    "as it is": AMPNet(micro_batches=4),
    "a step an instance": AMPNet(micro_batches=4, min_update_frequency=1),
    "few keys": AMPNet(micro_batches=3, max_active_keys=2, min_update_frequency=2),
    "single samples": AMPNet(micro_batches=12, min_update_frequency=5),
}


@pytest.mark.parametrize("solver", EXAMPLES.values(), ids=EXAMPLES)
def test_what_every_method_keeps_to(solver):
    for cuts, at in ([1, 3], 1), ([1, 2, 3], 2), ([2], 5):
        every.check_resume_and_virtual_clocks(solver, cuts, at)
    every.check_where_weights_move(solver)


def test_one_block_alone_is_plain_sgd_bit_for_bit():
    every.check_plain_sgd(EXAMPLES["ampnet"])


@pytest.mark.slow
def test_every_setting_of_its_own_acts_or_is_refused():
    """Each in one of the modes, and a tenth of the others."""
    known = sorted(act.settings_of(MODES[0]))
    some = [s for s in known if s.startswith("solver.")] + known[::10]
    assert not act.faults(zip(some, cycle(MODES), strict=False))


def test_layers_that_draw_have_the_same_bits_on_virtual_clocks_and_resumed(tmp_path):
    method = {"solver": AMPNet(micro_batches=2)}
    first = random_layers.trained(method, tmp_path / "first")
    assert random_layers.trained(method, tmp_path / "clock", "virtual", steps=0) == first
    interrupted(tmp_path / "first", 3)
    assert random_layers.trained(method, tmp_path / "first", resume=True) == first


@pytest.mark.parametrize(
    ("name", "K"), [*((name, 3) for name in WAYS), ("few keys", 2), ("few keys", 4)]
)
def test_unequal_paths_equal_the_masked_dense_run(name, K):
    solver, problem = WAYS[name], deep(CUTS[K])
    blocks = range(len(problem.blocks))
    survivals = [Nodes(problem.build(k), 0.0, 1, 1).survivals for k in blocks]
    m = solver.num_micro_batches(len(problem.batches[0]), K)
    firsts = [(b.step, int(ids[0])) for b in problem.batches for ids in b.ids.tensor_split(m)]
    paths = [draw_path(setup_of(problem).seed, *each, survivals) for each in firsts]
    assert len({str(path) for path in paths}) > 3
    expected = Masked(deep(CUTS[K]), solver, paths)
    versions = expected.train()
    trained(problem, solver)
    for theirs, (_, unit) in zip(versions, Masked(problem, solver, []).parts, strict=True):
        for name, mine in zip(theirs, unit.parameters(), strict=True):
            torch.testing.assert_close(mine.detach(), theirs[name], rtol=1e-11, atol=1e-12)
    assert sum((late for late, _ in problem.stats), Counter()) == expected.late


@pytest.mark.parametrize(("K", "m"), [(1, 5), (2, 1), (2, 3), (4, 5)])
def test_one_key_is_sgd_with_accumulated_gradients_bit_for_bit(K, m):
    """Mini-batches of 12 in 5 instances are of unequal sizes."""
    whole = (1.0,) * 4
    expected = by_units(deep(survivals=whole), Backprop(micro_batches=m))
    active = {} if K == 1 else {"max_active_keys": 1}
    assert_same(trained(deep(CUTS[K], whole), AMPNet(micro_batches=m, **active)), expected)


@pytest.mark.parametrize(("K", "often"), [(2, 1), (3, 2), (4, 1), (4, 2)])
def test_with_equal_paths_staleness_is_what_the_formula_says(K, often):
    """K blocks of a unit each, and K keys: ceil((K-1-k) / min_update_frequency) at most."""
    problem = deep([*range(1, K)], survivals=(1.0,) * (K - 2), batches=8)
    most = replace(WAYS["as it is"], max_active_keys=K, min_update_frequency=often)
    trained(problem, most)
    for k, (late, _) in enumerate(problem.stats):
        between = K - 1 - k
        assert max(late) == ceil(between / often)
        # the last contribution before a step has seen as few as fit between
        assert sum(late.values()) == 32
        if often == 1:
            assert late[between] >= 32 - between


@pytest.mark.parametrize(("name", "K"), [*zip(WAYS, [3, 2, 3, 4], strict=True)])
def test_virtual_links_pieces_and_a_resume_do_not_change_a_bit(name, K):
    solver = WAYS[name]
    expected = trained(deep(CUTS[K]), solver)
    assert_same(trained(deep(CUTS[K]), solver, run=run_virtual), expected)
    assert_same(trained(deep(CUTS[K]), solver, 2, pieces=[3, 5]), expected)


def test_mpi_ranks_train_to_the_bits_of_threads(world):
    """Starts the session's mpirun, which takes seconds."""
    solver = WAYS["a step an instance"]
    expected = trained(deep(CUTS[3]), solver)
    for at in (None, 2):
        ranks = world.run(3, "instance_paths:on_ranks", 3, solver, CUTS[3], at)
        found = {name: tensor for rank in ranks for name, tensor in rank.items()}
        assert found == {n: t.numpy().tobytes() for n, t in expected.items()}


def test_what_cannot_work_is_refused_in_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"works only where train\.precision is not 'float16'"):
        check(AMPNet(), Setup(((1,),)), precision="float16")
    with pytest.raises(ValueError, match="only where there is one replica"):
        check(AMPNet(), Setup(((1,),), replicas=2))
    with pytest.raises(ValueError, match=r"solver.max_active_keys is 3, .*several blocks"):
        check(AMPNet(max_active_keys=3), Setup())
    for name, value in {"max_active_keys": -1, "clip_norm": -1.0}.items():
        assert refusal(AMPNet, **{name: value}).startswith(f"{name} is {value!r}")
    learning = trainer(AMPNet(), sampler=SelectiveBackprop())
    with pytest.raises(ValueError, match="only where the solver reports the losses of all"):
        learning.fit(*digits(3))


def test_what_is_under_way_does_not_go_on_with_other_keys():
    problem, solver = deep(CUTS[2]), AMPNet(micro_batches=4)

    def program(block, links):
        mine = solver.start(block, links, setup_of(problem))
        mine.train(problem.window(1, 0, 2))
        changed = replace(solver, max_active_keys=3).start(block, links, setup_of(problem))
        with pytest.raises(ValueError, match=r"kept with solver\.max_active_keys=4: leave it"):
            changed.load_state(mine.state())

    problem.on_every_block(program)


def test_a_run_is_resumed_from_its_folder_bit_for_bit_and_tells_its_staleness(tmp_path):
    """Of stochastic depth, broken off within an epoch and at its end."""
    solver = AMPNet(micro_batches=4)
    loaded, often = digits(4), CheckpointSettings(steps=1, keep_last=0)

    def made(out=None, **settings):
        run = {"epochs": 2, "ema": 0.9, "report_every": 1}
        found = trainer(solver, out, train=run, **settings)
        models.stochastic_depth(found.blocks.model, 0.5)
        return found

    whole = trained_weights(made(), loaded)
    trained_weights(made(tmp_path / "run", checkpoint=often), loaded)
    assert_same(weights(tmp_path / "run"), whole)
    undisturbed = lines(tmp_path / "run")
    for after in (4, 1):
        interrupted(tmp_path / "run", after)
        again = made(tmp_path / "run", resume=True, checkpoint=often)
        assert_same(trained_weights(again, loaded), whole)
        assert lines(tmp_path / "run") == undisturbed
    told = [line["staleness"] for line in lines(tmp_path / "run") if "staleness" in line]
    assert told
    assert all(len(each) == 2 for each in told)


def test_a_block_holds_no_more_than_is_planned_for_and_not_much_less(monkeypatch):
    solver = AMPNet(4, max_active_keys=3)
    script = Path(__file__).parents[3] / "docs/benchmarks/held_memory.py"
    monkeypatch.syspath_prepend(str(script.parent))
    peaks = runpy.run_path(str(script))["peaks"]
    torch.manual_seed(0)
    blocks = split(models.build("resnet8", 10, 3, 32), 3, inside=False)
    lam = torch.zeros(16, 3, 32, 32)
    for k, measured in enumerate(peaks(solver, "resnet8", 3, 16)):
        module = blocks.module(k)
        planned = solver.held_bytes(module, lam, k, 3, saved_bytes)
        assert 0.95 * measured <= planned <= 1.3 * measured
        lam = module(lam).detach().requires_grad_()
