"""Seeded faults, and a harness that notices what it is there to notice.

`make test` strikes with a few kinds, `make test-slow` with all others.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.faults.campaign import KINDS, LIMIT, load, one, reasons
from tests.faults.kinds import Fault
from tests.faults.processes import Job, send
from tests.faults.storage import can_mount
from tests.faults.training import References, Training, whole

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("undisturbed"))


ON_RANKS = ("USR1, USR2", "TERM", "the disk is full")
"""Kinds that both threads and ranks may meet, and that ranks meet here."""


DAILY = ("kill -9 of a rank", "kill -9 of the launcher", "a damaged checkpoint")
EACH = [
    pytest.param(kind, id=kind.name, marks=() if kind.name in DAILY else pytest.mark.slow)
    for kind in KINDS
]


@pytest.mark.parametrize("kind", EACH)
def test_a_job_ends_with_a_reason_and_resumes_to_the_same_bits(
    kind: Fault, references, tmp_path
) -> None:
    launcher = "mpirun" if kind.name in ON_RANKS else kind.launchers[0]
    _strike(KINDS.index(kind), kind, tmp_path, references, launcher)


IN_A_ROUND = 16
"""A seed of serial passes kept together by diloco, struck while it trains."""


@pytest.mark.slow  # four ranks import torch
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_grid_ends_with_a_reason_and_resumes_to_the_same_bits(
    kind: Fault, references, tmp_path
) -> None:
    _strike(IN_A_ROUND, kind, tmp_path, references, replicas=2)


def _strike(seed: int, kind: Fault, *where: Any, **how: Any) -> None:
    if kind.mounts and not can_mount():
        pytest.skip("this process may not mount a file system")
    outcome = one(seed, kind, *where, **how)
    busy = outcome.load > 1.5  # others take the cores: ten seconds are not ten
    broken = [word for word in outcome.problems if not (busy and word.startswith("late"))]
    assert not broken, outcome


def test_a_damaged_checkpoint_does_not_count_as_kept(references, tmp_path) -> None:
    training = Training("serial", "threads", 2)
    references.stopped(training, tmp_path / "run", 2)
    steps = sorted(whole(tmp_path / "run"))
    unit = next((tmp_path / "run" / "checkpoints" / steps[-1]).glob("*.safetensors"))
    content = bytearray(unit.read_bytes())
    content[-1] ^= 1
    unit.write_bytes(content)
    assert sorted(whole(tmp_path / "run")) == steps[:-1]


@pytest.mark.slow  # a training and its resume, which show what the harness sees
def test_an_end_of_the_wrong_kind_is_noticed(references, tmp_path) -> None:
    nothing = Fault("none", lambda _: (yield {}), launchers=("threads",), timed=False)
    outcome = one(0, nothing, tmp_path, references)
    assert [problem.split(":")[0] for problem in outcome.problems] == ["status"]


@pytest.mark.parametrize("launcher", [pytest.param("threads", marks=pytest.mark.slow), "mpirun"])
def test_a_signal_before_training_begins_is_a_request_to_stop(launcher: str, tmp_path) -> None:
    training = Training("serial", launcher, 2)
    job = Job(training.words(tmp_path / "run"), tmp_path / "err", 2, launcher, fresh=True)
    job.await_listeners(20 * max(1.0, load()))
    send(job.pid, signal.SIGUSR1)
    assert job.wait(3 * LIMIT * max(1.0, load()))
    assert job.status() == 75
    said = reasons(job.output())
    assert said == [
        "hybrid: stopped by SIGUSR1 before training began; nothing has been done or changed"
    ]
    assert not (tmp_path / "run").exists()
