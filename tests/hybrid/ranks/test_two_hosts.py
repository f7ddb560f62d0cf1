"""Two hosts: the bits of one, and an end with a reason when one host or the link is lost."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from two_hosts import TwoHosts, missing, two_hosts

from hybrid.folder.checkpoint import complete, load_model, read_manifest

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
EPOCHS = 4
SETTINGS = ("--epochs", EPOCHS, "--batch-size", "32", "--set", "train.threads=1")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    with two_hosts(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(hybrid_cli, tmp_path_factory) -> dict[str, torch.Tensor]:
    """The weights of the same training on threads."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    command = [hybrid_cli, "train", "--blocks", 2, *SETTINGS, "--out", out]
    subprocess.run([str(part) for part in command], capture_output=True, timeout=100, check=True)
    return weights(out)


@pytest.fixture
def start(hosts, hybrid_cli, tmp_path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a training on both hosts, a rank each; what is left of it ends with the test."""
    jobs = []

    def training(*more: object, **environment: str) -> subprocess.Popen[str]:
        command = (hybrid_cli, "train", *SETTINGS, "--out", tmp_path / "run", *more)
        jobs.append(hosts.mpirun(*command, env=environment))
        return jobs[-1]

    yield training
    for job in jobs:
        job.kill()


def weights(out: Path) -> dict[str, torch.Tensor]:
    newest = complete(out / "checkpoints")[-1]
    return load_model(newest, read_manifest(newest))


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def wait_for_checkpoint(run: Path, job: subprocess.Popen[str]) -> None:
    limit = monotonic() + 60
    while not complete(run / "checkpoints"):
        assert monotonic() < limit, "no checkpoint"
        assert job.poll() is None, "the job has ended"
        sleep(0.05)


def seconds_to_the_end(hosts: TwoHosts, limit: float) -> float:
    """How long until no process is left on either host; more than `limit` is an error."""
    begin = monotonic()
    while left := hosts.processes(0) | hosts.processes(1):
        assert monotonic() - begin < limit, left
        sleep(0.1)
    return monotonic() - begin


@pytest.mark.parametrize(
    ("silently", "timeout", "limit"),
    [
        pytest.param(False, 3, 13, id="link down", marks=pytest.mark.slow),
        pytest.param(True, 10, 20, id="packets lost"),
    ],
)
def test_a_cut_link_ends_the_job_on_both_hosts_and_a_resume_has_the_bits(
    silently, timeout, limit, hosts, start, tmp_path, undisturbed
) -> None:
    job = start(**({} if timeout == 10 else {"HYBRID_HOST_TIMEOUT": str(timeout)}))
    wait_for_checkpoint(tmp_path / "run", job)
    hosts.cut(silently)
    seconds_to_the_end(hosts, limit)
    _, errors = job.communicate(timeout=5)
    assert job.returncode not in (0, None)
    silence = f"no sign of life from host {hosts.names[1]} for {timeout} s"
    reason = f"{silence}: the network or the node has failed; go on with --resume"
    assert errors.count(f"hybrid: error: {reason}") == 1
    assert errors.count("hybrid: error:") == 1
    assert "Traceback" not in errors
    hosts.mend()
    job = start("--resume")
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors
    assert_same(weights(tmp_path / "run"), undisturbed)


@pytest.mark.parametrize(
    ("host", "word"),
    [(0, "prterun"), (1, "prted"), (1, "")],
    ids=["mpirun", "its daemon on the other host", "all of the other host"],
)
def test_what_is_killed_on_one_host_ends_the_job_on_both(host, word, hosts, start, tmp_path):
    job = start()
    wait_for_checkpoint(tmp_path / "run", job)
    hosts.kill(host, word)
    seconds_to_the_end(hosts, 10)
    _, errors = job.communicate(timeout=5)
    # of a lost daemon mpirun may tell first
    assert errors.count("hybrid: error:") + errors.count("PRTE has lost communication") in (1, 2)
    assert errors.count("hybrid: error:") <= 1
    if word == "prterun":
        assert "hybrid: error: the launcher (prterun process" in errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_stopped_rank_and_a_short_cut_are_waited_for(hosts, start, tmp_path, undisturbed):
    job = start(HYBRID_HOST_TIMEOUT="4")
    wait_for_checkpoint(tmp_path / "run", job)
    (rank,) = (
        pid
        for pid, command in hosts.processes(1).items()
        if "hybrid train" in command and "prted" not in command
    )
    os.kill(rank, signal.SIGSTOP)
    sleep(6)
    os.kill(rank, signal.SIGCONT)
    hosts.cut(silently=True)
    sleep(2)
    hosts.mend()
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors
    assert_same(weights(tmp_path / "run"), undisturbed)
