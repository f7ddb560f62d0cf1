"""Blocks that draw random numbers: the same bits on every kind of links, run after run, resumed."""

import shutil

import pytest
from random_layers import METHODS, trained

from hybrid.folder import checkpoint


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_runs_on_threads_virtual_clocks_and_ranks_and_resumed_have_the_same_bits(
    method, world, tmp_path
):
    first = trained(method, tmp_path / "first")
    assert trained(method, tmp_path / "virtual", "virtual", steps=0) == first
    ranks = tmp_path / "ranks", "auto", False, 0.0
    assert world.train(2, "random_layers:trained", method, *ranks) == [first, first]
    found = checkpoint.complete(tmp_path / "first" / "checkpoints")
    assert 0 < int(found[1].name) < 12
    for folder in found[2:]:
        shutil.rmtree(folder)
    assert trained(method, tmp_path / "first", resume=True) == first
