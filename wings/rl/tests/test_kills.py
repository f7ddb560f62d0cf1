"""A run that is killed leaves whole files and no process, and goes on as if it had not been."""

import signal
from random import Random
from time import sleep

import pytest
from rl_runs import kept, same, trained, words

from hybrid.folder import checkpoint
from tests.faults.processes import Job, send
from tests.faults.training import whole

LONG = {"steps": 300, "report_every": 10, "checkpoint_every": 20, "keep_last": 3, "width": 16}


def lines(run):
    """What a run has told so far."""
    file = run / "metrics.jsonl"
    return file.read_text().splitlines() if file.exists() else []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    trained(out, **LONG)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_killed_run_goes_on_to_the_bits_of_an_undisturbed_one(seed, undisturbed, tmp_path):
    """Processes start: one, or with every second seed three ranks, of which one or mpirun dies."""
    draw, out = Random(seed), tmp_path / "run"
    launcher = "mpirun" if seed % 2 else "threads"
    job = Job(["rl", *words(**LONG), "--out", str(out)], tmp_path / "err", 3, launcher)
    try:
        job.await_ranks(60)
        told = draw.randrange(len(lines(undisturbed)))
        while len(lines(out)) < told and job.status() is None:
            sleep(0.003)
        sleep(draw.random() * 0.1)
        send(draw.choice([job.pid, *job.ranks()]), signal.SIGKILL)
        assert job.wait(60), job.output()
        assert not job.left(10)
    finally:
        job.kill()
    left = whole(out)
    assert [*left] == [folder.name for folder in checkpoint.complete(out / "checkpoints")]
    out = out if left else tmp_path / "anew"
    trained(out, bool(left), **LONG)
    assert same(kept(out), kept(undisturbed))
    assert lines(out) == lines(undisturbed)
    assert {p.name for p in out.iterdir()} == {p.name for p in undisturbed.iterdir()}
