"""Twenty seeded faults, one of each kind, and a harness that notices what it is there to notice."""

from __future__ import annotations

import signal
from time import sleep

import pytest

from tests.faults.campaign import KINDS, LIMIT, one, reasons
from tests.faults.kinds import Fault
from tests.faults.processes import Job, send
from tests.faults.training import References, Training


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_job_ends_with_a_reason_and_resumes_to_the_same_bits(
    kind: type[Fault], references, tmp_path
) -> None:
    outcome = one(KINDS.index(kind), kind(), tmp_path, references)
    busy = outcome.load > 1.5  # others take the cores: ten seconds are not ten
    broken = [word for word in outcome.problems if not (busy and word.startswith("late"))]
    assert not broken, outcome


@pytest.mark.parametrize("launcher", ["threads", "mpirun"])
def test_a_signal_before_training_begins_is_a_request_to_stop(launcher: str, tmp_path) -> None:
    training = Training("serial", launcher, 2)
    job = Job(training.words(tmp_path / "run"), tmp_path / "err", 2, launcher, fresh=True)
    job.await_ranks(20)
    sleep(0.5)
    send(job.pid, signal.SIGUSR1)
    assert job.wait(3 * LIMIT)
    assert job.status() == 75
    said = reasons(job.output())
    assert said == [
        "hybrid: stopped by SIGUSR1 before training began; nothing has been done or changed"
    ]
    assert not (tmp_path / "run").exists()
