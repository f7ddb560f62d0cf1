"""Ranks that torchrun or srun has started meet, or say why they do not."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from random import Random
from time import sleep

import pytest
import torch.distributed as dist
from ports import listening

from hybrid.ranks import meeting, stopping


@pytest.fixture
def store():
    return dist.HashStore()


def meet(store, size=3, kept=False):
    """The names of the meeting that so many threads have come to as ranks."""
    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(meeting._meet, store, "here", r, size, kept) for r in range(size)]
        return {rank.result(timeout=20) for rank in ranks}


def test_ranks_of_one_job_meet(store):
    assert len(meet(store)) == 1


def test_a_second_process_of_one_rank_is_told(store):
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meeting._meet, store, "here", 1, 2)
        sleep(0.1)
        store.set("rank 1", "another, process 7 on another host")
        with pytest.raises(meeting.MeetingError, match="two processes are rank 1 of 2 at here"):
            first.result(timeout=20)
    meet(store, 2)
    with pytest.raises(meeting.MeetingError, match="two processes are rank 1") as e:
        meeting._meet(store, "here", 1, 2)  # after the others have begun
    assert e.value.speaks


def test_ranks_that_are_started_again_meet_anew_in_any_order(store):
    """Their launcher's store has those of earlier starts, some of which had never met."""
    found = set()
    for seed in range(8):
        random = Random(seed)
        for rank in random.sample(range(3), random.randrange(4)):
            store.set(f"rank {rank}", f"{seed}, a process that has ended")
        found |= meet(store, kept=True)
    assert len(found) == 8


def test_who_is_missing_is_named_before_the_wait_is_over(store, monkeypatch, capsys):
    monkeypatch.setattr(meeting, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(meeting, "MEETING_SECONDS", 0.2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(meeting.MeetingError, match=r"rank 0, 2, 3 did not come to here") as e:
        meeting._meet(store, "here", 1, 4)
    assert e.value.speaks  # the first of those that are there
    assert capsys.readouterr().err.count("rank 0, 2, 3 did not come to here yet") == 1


def test_the_identity_is_that_of_the_command_and_of_the_launchers_job(monkeypatch):
    found = set()
    for name, value in (("SLURM_JOB_ID", "7"), ("SLURM_STEP_ID", "1"), ("WORLD_SIZE", "2")):
        found.add(meeting.identity())
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["hybrid", "train", "--seed", "2"])
    assert len(found | {meeting.identity()}) == 4


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
    with stopping.after(0.01, meeting.MeetingError("no answer", speaks=False).end_process):
        while not ended:
            sleep(0.005)
    assert ended == [1]
