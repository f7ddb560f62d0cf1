"""On MPI's ranks: the same replay buffer and weights as on threads, and failures told once."""

from rl_runs import kept, same, trained, words


def test_mpi_is_threads_bit_for_bit(world, tmp_path):
    """Four processes import torch, unless another test of ranks has started them."""
    trained(tmp_path / "threads", actors=2, blocks=4)
    out = tmp_path / "mpi"
    status, _, err = world.hybrid(4, "rl", "--out", out, *words(actors=2))
    assert status == 0, err
    assert same(kept(out), kept(tmp_path / "threads"))


def test_too_many_ranks_and_other_blocks_are_refused_once(world, tmp_path):
    status, _, err = world.hybrid(4, "rl", "--out", tmp_path / "run", *words())
    assert status == 1
    assert err.count("4 ranks are more than a representation, a learner and 1 actor(s)") == 1
    status, _, err = world.hybrid(2, "rl", "--blocks", 3, "--out", tmp_path / "run", *words())
    assert status == 1
    assert (
        err.count("rl.blocks is 3, and there are 2 MPI ranks") == err.count("hybrid: error:") == 1
    )
    status, _, err = world.hybrid(2, "rl", *words(), "--set", "links.kind=virtual")
    assert err.count("links.kind is 'virtual', which runs in one process") == 1
