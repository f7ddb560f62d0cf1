"""Ranks that torchrun or srun has started meet, or say why they do not."""

import os
import socket
from time import sleep

import pytest
import torch.distributed as dist
from ports import listening

from hybrid.ranks import meeting


@pytest.fixture
def store():
    return dist.HashStore()


def test_ranks_of_one_job_meet(store):
    for rank in range(3):
        meeting._register(store, "here", rank, 3)
    meeting._wait_for_all(store, "here", 0, 3)


def test_a_second_process_of_one_rank_is_told(store, monkeypatch):
    meeting._register(store, "here", 0, 2)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(meeting.MeetingError, match="two processes are rank 0 of 2 at here") as e:
        meeting._register(store, "here", 0, 2)
    assert e.value.speaks


def test_who_is_missing_is_named_before_the_wait_is_over(store, monkeypatch, capsys):
    monkeypatch.setattr(meeting, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(meeting, "MEETING_SECONDS", 0.2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    meeting._register(store, "here", 1, 4)
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
    first = dist.PrefixStore(f"hybrid {meeting.identity()} 0", server)
    meeting._register(first, "here", 0, 1)
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


def test_ranks_that_meet_on_one_host_listen_there_alone(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    before = listening()
    monkeypatch.setattr(meeting, "TorchCommunicator", lambda *arguments: arguments)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "set by the user")
    store, *_ = meeting.of_torchrun(0, 1)
    assert listening() - before == {("127.0.0.1", port)}
    assert os.environ["GLOO_SOCKET_IFNAME"] == "set by the user"
    with pytest.raises(meeting.MeetingError, match=r"\(Address already in use\): another program"):
        meeting.of_torchrun(0, 1)
    del store


def test_a_program_that_is_silent_at_the_port_ends_the_wait(monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with meeting._ends_after(0.01, meeting.MeetingError("no answer", speaks=False)):
        while not ended:
            sleep(0.005)
    assert ended == [1]
