"""Ranks that torchrun or srun has started meet, or say why they do not."""

import os
from time import sleep

import pytest
import torch.distributed as dist

from hybrid.ranks import meeting

AGENT = "0=host/1"


@pytest.fixture
def store():
    return dist.HashStore()


def shown(store, rank, size, monkeypatch, job="job", agent=AGENT):
    """Show a rank of a job."""
    monkeypatch.setattr(meeting, "identity", lambda: job)
    monkeypatch.setattr(meeting, "_agent", lambda: agent)
    meeting._register(store, "here", rank, size)


def test_ranks_of_one_job_meet(store, monkeypatch):
    for rank in range(3):
        shown(store, rank, 3, monkeypatch)
    meeting._wait_for_all(store, "here", 0, 3)
    meeting._check_job(store, "here", 2, 3)


@pytest.mark.parametrize("other", [{"job": "another"}, {"agent": "0=host/2"}], ids=str)
def test_a_rank_of_another_job_is_refused_by_all(store, monkeypatch, other):
    """It has other words of the command, or another torchrun of the same group has started it."""
    for rank in range(3):
        shown(store, rank, 3, monkeypatch, **(other if rank == 2 else {}))
    monkeypatch.setattr(meeting, "sleep", lambda seconds: None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    said = []
    for rank in range(3):
        with pytest.raises(
            meeting.MeetingError, match="ranks 0 and 2 of 3 at here are of two"
        ) as e:
            meeting._check_job(store, "here", rank, 3)
        said.append(e.value.speaks)
    assert said == [True, False, True]  # once for each of the jobs


def test_agents_of_several_hosts_are_of_one_job(store, monkeypatch):
    for rank in range(4):
        shown(store, rank, 4, monkeypatch, agent=f"{rank // 2}=host{rank // 2}/7")
    meeting._check_job(store, "here", 0, 4)


def test_a_second_process_of_one_rank_is_told(store, monkeypatch):
    shown(store, 0, 2, monkeypatch)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(meeting.MeetingError, match="two processes are rank 0 of 2 at here") as e:
        shown(store, 0, 2, monkeypatch)
    assert e.value.speaks


def test_who_is_missing_is_named_before_the_wait_is_over(store, monkeypatch, capsys):
    monkeypatch.setattr(meeting, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(meeting, "MEETING_SECONDS", 0.2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    shown(store, 1, 4, monkeypatch)
    with pytest.raises(meeting.MeetingError, match=r"ranks 0, 2, 3 did not come to here") as e:
        meeting._wait_for_all(store, "here", 1, 4)
    assert e.value.speaks  # the first of those that are there
    assert capsys.readouterr().err.count("ranks 0, 2, 3 did not come to here yet") == 1


def test_the_identity_is_that_of_the_command_and_of_the_launchers_job(monkeypatch):
    found = set()
    for name, value in (("SLURM_JOB_ID", "7"), ("SLURM_STEP_ID", "1"), ("WORLD_SIZE", "2")):
        found.add(meeting.identity())
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["hybrid", "train", "--seed", "2"])
    assert len(found | {meeting.identity()}) == 4


@pytest.mark.parametrize(("restart", "meets"), [("0", False), ("1", True)])
def test_ranks_that_torchrun_starts_again_meet_anew(monkeypatch, restart, meets):
    """Its own process keeps the store, in which the first start has left its ranks."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first = dist.PrefixStore("hybrid 0", server)
    shown(first, 0, 1, monkeypatch)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(meeting, "TorchCommunicator", lambda *arguments: arguments)
    for name, value in (
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        ("TORCHELASTIC_RESTART_COUNT", restart),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", str(server.port)),
    ):
        monkeypatch.setenv(name, value)
    if not meets:
        with pytest.raises(meeting.MeetingError, match="two processes"):
            meeting.of_torchrun(0, 1)
    else:
        assert meeting.of_torchrun(0, 1)[1:] == (0, 1)


def test_a_program_that_is_silent_at_the_port_ends_the_wait(monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with meeting._ends_after(0.01, meeting.MeetingError("no answer", speaks=False)):
        while not ended:
            sleep(0.005)
    assert ended == [1]
