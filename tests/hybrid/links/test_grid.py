"""Which rank has which block of which replica, and which grids fit a number of ranks."""

import pytest
from answers import refusal

from hybrid.links.grid import Grid, factorizations, grids, share_size


def test_a_launcher_numbers_the_ranks_of_a_chain_or_peers_one_after_the_other():
    grid = Grid(3, 2)
    chains = [(p.block, p.replica) for p in map(grid.place, range(6))]
    assert chains == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    peers = [grid.place(rank, "peers") for rank in range(6)]
    assert [(p.block, p.replica) for p in peers] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [p.number for p in peers] == [0, 3, 1, 4, 2, 5]
    assert grid.place(4).peers == [1, 4]
    assert [number for number in range(-1, 7) if grid.place(4).in_chain(number)] == [3, 4, 5]


@pytest.mark.parametrize(("size", "replicas"), [(7, 3), (6, 3), (3, 3), (2, 3)])
def test_shares_of_a_mini_batch_are_all_of_it_and_differ_by_one_sample(size, replicas):
    shares = [share_size(size, replica, replicas) for replica in range(replicas)]
    assert sum(shares) == size
    assert max(shares) - min(shares) <= 1


def test_every_way_to_write_a_number_of_ranks_is_a_grid():
    assert factorizations(6, 6) == [(6, 1), (3, 2), (2, 3), (1, 6)]
    assert grids(6, 5, 32) == [(3, 2), (2, 3), (1, 6)]
    assert grids(6, 6, 2) == [(6, 1), (3, 2)], "a replica has a sample"
    assert grids(1, 5, 32) == [(1, 1)]


def test_ranks_that_are_no_grid_are_refused_with_a_number_that_is():
    said = refusal(grids, 17, 5, 8)
    assert all(part in said for part in ("17 ranks", "5 units", "8 samples", "take 16 ranks"))
    assert "take 40 ranks" in refusal(grids, 10**15, 5, 8)


def test_the_ranks_settle_what_was_not_asked_for():
    asked = (Grid(0, 0), Grid(3, 0), Grid(0, 3), Grid(2, 3))
    assert [grid.on(6) for grid in asked] == [(6, 1), (3, 2), (2, 3), (2, 3)]


WRONG = [
    (Grid(0, 2), 3, "3 ranks cannot form a grid of 2 replicas: choose mpirun -n 2 or a multiple"),
    (Grid(2, 4), 4, "choose mpirun -n 8, or 2 replicas, or 1 block"),
    (Grid(3, 0), 2, "a grid of 3 blocks: choose mpirun -n 3 or a multiple of it, or 2 blocks"),
    (Grid(2, 1), 1, "1 rank cannot form a grid of 2 blocks: choose mpirun -n 2, or 1 block"),
]


@pytest.mark.parametrize(("asked", "ranks", "reason"), WRONG)
def test_ranks_that_are_no_product_are_refused_with_what_would_do(asked, ranks, reason):
    assert reason in refusal(asked.on, ranks)


def test_a_run_goes_on_with_its_blocks_if_the_ranks_are_a_multiple_of_them():
    run, nothing = Grid(2, 3), Grid(0, 0)
    assert [run.resumed(nothing, ranks) for ranks in (4, 3)] == [(2, 2), (1, 3)]
    assert Grid(4).resumed(nothing, 6) == (6, 1)
    assert run.resumed(Grid(0, 5), 7) == (0, 5)
    assert "2 blocks x 3 replicas, and 5 ranks" in refusal(run.resumed, nothing, 5)
