"""The command on several ranks: what goes wrong is said once, and ends all of them."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import world as ranks


def test_under_mpirun_wrong_use_is_answered_once(mpirun, hybrid_cli) -> None:
    done = mpirun(2, hybrid_cli, "train", "--modle", "x")
    assert done.returncode != 0
    assert done.stderr.count("hybrid: error:") == 1
    assert done.stderr.count("--modle") == 1
    assert "Traceback" not in done.stderr


def test_blocks_that_are_not_as_many_as_the_ranks_are_refused_once(world, tmp_path) -> None:
    status, _, err = world.hybrid(2, "train", "--blocks", 3, "--out", tmp_path / "run")
    assert status == 1
    assert err.count("2 ranks cannot form a grid of 3 blocks") == err.count("hybrid: error:") == 1


def without_images(comm, words):
    """The command where the second rank's host has no data."""
    missing = FileNotFoundError("no images on this host")
    with mock.patch("hybrid.data.load", side_effect=missing) if comm.rank else nullcontext():
        return ranks.hybrid(comm, words)


def test_data_missing_on_one_rank_only_stops_all(world, tmp_path) -> None:
    words = ["train", "--sweeps", "1", "--out", str(tmp_path / "run")]
    statuses, _, err = zip(*world.run(2, f"{__name__}:without_images", words), strict=True)
    assert statuses == (1, 1)
    assert err == ("hybrid: error: no images on this host\n", "")


def test_under_mpirun_a_rank_that_fails_in_training_ends_the_job(mpirun, tmp_path) -> None:
    """The other one would wait for it for ever: no `links.timeout` is set."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from hybrid.cli.app import main\n"
        "from hybrid.rounds.base import Rounds\n"
        "run = Rounds.run\n"
        "def fails(self, *arguments):\n"
        "    if self.links.rank == 1:\n"
        "        raise RuntimeError('out of luck')\n"
        "    return run(self, *arguments)\n"
        "Rounds.run = fails\n"
        f"sys.argv = ['hybrid', 'train', '--sweeps', '1', '--out', '{tmp_path / 'run'}']\n"
        "main()\n"
    )
    done = mpirun(2, sys.executable, script)
    assert done.returncode != 0
    assert (
        done.stderr.count("hybrid: error: rank 1: RuntimeError: out of luck (script.py, line 7)")
        == 1
    )
    log = Path(done.stderr.split("details in ")[1].split(")")[0])
    assert "Traceback" not in done.stderr
    assert "in fails" in log.read_text()
    log.unlink()


def test_a_text_is_trained_on_ranks_of_which_one_reads_nothing_with_the_bits_of_threads(
    world, hybrid, tmp_path
) -> None:
    """On three, of which two read the text: all the same compare their texts."""
    text = tmp_path / "text"
    text.write_bytes(b"abcdefg" * 700)
    words = ["--model", "gpt-2-64", "--data", "text", "--data-dir", text, "--solver", "ddg"]
    words += ["--batch-size", 64, "--epochs", 1, "--set", "data.length=16", "--lr", 0.01]
    status, _, err = world.hybrid(3, "train", *words, "--out", tmp_path / "ranks")
    assert status == 0, err
    assert hybrid("train", *words, "--blocks", 3, "--out", tmp_path / "threads")[0] == 0
    for run in ("ranks", "threads"):
        assert hybrid("export", tmp_path / run, tmp_path / f"{run}.safetensors")[0] == 0
    one, other = ((tmp_path / f"{run}.safetensors").read_bytes() for run in ("ranks", "threads"))
    assert one == other
