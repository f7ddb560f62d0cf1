"""How tensors travel between GPUs: the choice of links, its probe, and streams and events."""

import os
import socket
from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from answers import output, refusal
from safetensors.torch import load_file
from torch import nn
from trainings import digits, trainer, trainer_of

from hybrid.errors import AgreedError
from hybrid.links import gpus, threads
from hybrid.links.base import Start
from hybrid.links.gloo import GlooLinks, own_address
from hybrid.links.grid import Grid
from hybrid.links.mpi import MpiLinks
from hybrid.links.nccl import NcclLinks
from hybrid.links.threads import Handed, SharedSum, ThreadLinks, ThreadTeam, deal_gpus
from hybrid.ranks import launch
from hybrid.settings.config import LinkSettings
from hybrid.solvers import Backprop

OWN = [("a", "1"), ("a", "2"), ("b", "1")]
SHARED = [("a", "1"), ("a", "1"), ("b", "1")]
LACKING = [("a", "1"), None, ("b", "1")]


def chosen(links, places, fault="", failed=False, **settings):
    """The links of three ranks with those GPUs; `fault`: what the last one's probe finds.

    `failed`: the first two have another reason not to begin.
    """
    answers = [(gpu, "" if gpu else "has no GPU", failed) for gpu in places]
    answers[-1] = (places[-1], fault, False)
    comm = SimpleNamespace(allgather=lambda value: answers)
    return gpus.links_between(links, Start(Grid(3), LinkSettings(**settings), comm=comm))


@pytest.mark.parametrize(
    ("links", "places", "settings", "expected"),
    [
        (MpiLinks, OWN, {}, NcclLinks),
        (GlooLinks, OWN, {}, NcclLinks),
        (GlooLinks, OWN, {"kind": "torch", "device": "nccl"}, NcclLinks),
        (MpiLinks, SHARED, {}, MpiLinks),
        (GlooLinks, LACKING, {}, GlooLinks),
        (MpiLinks, OWN, {"device": "host"}, MpiLinks),
        (MpiLinks, OWN, {"kind": "mpi"}, MpiLinks),
        (MpiLinks, OWN, {"device": "mpi"}, MpiLinks),
        (MpiLinks, SHARED, {"device": "mpi"}, MpiLinks),
        (ThreadLinks, OWN, {}, ThreadLinks),
    ],
)
def test_nccl_joins_ranks_that_have_gpus_of_their_own(links, places, settings, expected):
    assert chosen(links, places, **settings) is expected


@pytest.mark.parametrize(
    ("places", "fault", "device", "said"),
    [
        (SHARED, "", "nccl", "'nccl', but two ranks share a GPU: choose auto or host"),
        (LACKING, "", "nccl", "'nccl', but rank 1 has no GPU"),
        (LACKING, "", "mpi", "'mpi', but rank 1 has no GPU"),
        (OWN, "has a torch without NCCL", "nccl", "rank 2 has a torch without NCCL"),
        (OWN, "has an MPI that cannot", "mpi", "rank 2 has an MPI that cannot: choose auto"),
    ],
)
def test_a_way_that_one_rank_lacks_is_refused_on_all(places, fault, device, said):
    with pytest.raises(AgreedError, match=said):
        chosen(MpiLinks, places, fault, device=device)


def test_another_reason_not_to_begin_comes_before_the_way_of_tensors():
    assert chosen(MpiLinks, LACKING, failed=True, device="nccl") is MpiLinks


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("print('sent')", ""),
        ("import os; assert [k for k in os.environ if k[:5] == 'OMPI_'] == ['OMPI_MCA_pml']", ""),
        ("raise RuntimeError('no CUDA support in this library')", "(RuntimeError: no CUDA support"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "(signal 11)"),
        ("import time; time.sleep(60)", "does not send a GPU's memory within 1 s"),
    ],
)
def test_an_mpi_is_asked_in_a_child_process_whether_it_sends_a_gpus_memory(
    monkeypatch, program, said
):
    for name in [name for name in os.environ if name.startswith("OMPI_")]:
        monkeypatch.delenv(name)
    for name in ("OMPI_COMM_WORLD_SIZE", "OMPI_MCA_ess_base_vpid", "OMPI_MCA_pml"):
        monkeypatch.setenv(name, "2")
    found = gpus.probe(program, 1.0 if "sleep" in program else 30.0)
    assert said in found
    assert bool(said) == bool(found)


def test_the_probe_sends_through_the_mpi_that_is_here():
    """In a host's memory; it has to be a program that runs."""
    on_host = gpus.PROBE.replace("DEVICE", "'cpu'").replace("torch.cuda.synchronize()", "")
    on_host = on_host.replace("[received,", "[received.numpy(),").replace(
        "[sent,", "[sent.numpy(),"
    )
    assert gpus.probe(on_host) == ""


def test_under_mpirun_the_links_of_gpus_train_to_the_bits_of_host_memory(world, tmp_path):
    """gloo carries in NCCL's place, in NCCL's groups."""
    found, words = (
        {},
        ("--data", "digits", "--set", "data.limit=96", "--epochs", "1", "--batch-size", "32"),
    )
    for name, run in (
        ("host", world.hybrid),
        ("nccl", lambda n, *rest: world.run(n, "tests.hybrid.links.torch_program:with_gpus", rest)),
    ):
        out = tmp_path / name
        answers = run(2, "train", "--model", "resnet8", *words, "--out", str(out))
        said = output(answers if name == "host" else answers[0])
        assert f"tensors travel by {'MPI' if name == 'host' else 'NCCL'};" in said
        (newest,) = sorted((out / "checkpoints").iterdir())[-1:]
        found[name] = {
            f"{file.name} {key}": value
            for file in sorted(newest.glob("*.safetensors"))
            for key, value in load_file(file).items()
        }
    assert found["host"].keys() == found["nccl"].keys()
    assert len(found["host"]) > 50
    assert all(torch.equal(x, found["nccl"][key]) for key, x in found["host"].items())


def test_a_wait_ends_with_its_message_though_a_tensor_is_still_being_staged():
    sent = []
    links = object.__new__(MpiLinks)
    copy = SimpleNamespace(memory="x", ready=lambda: False, wait=lambda: None)
    links._staged = deque([(copy, sent.append)])
    arrived = SimpleNamespace(done=lambda: True, wait=lambda: None)
    links._before_wait("next")
    links._wait_for(arrived)
    assert sent == []
    # of one that is not there yet, the tensor is sent as soon as it is ready
    asked = iter([False, False, True])
    copy.ready = lambda: next(asked)
    links._wait_for(SimpleNamespace(done=lambda: False, wait=lambda: None))
    assert sent == ["x"]
    links._staged.append((copy, sent.append))
    links._before_wait("peers")
    assert sent == ["x"] * 2
    # a receive of gloo does not tell that it is complete
    links = object.__new__(GlooLinks)
    links._staged = deque([(copy, sent.append)])
    links._wait_for(arrived)
    assert sent == ["x"] * 3


@pytest.mark.parametrize(
    ("ranks", "count", "expected"),
    [(8, 8, range(8)), (8, 2, [0] * 4 + [1] * 4), (3, 2, [0, 0, 1]), (2, 8, [0, 1])],
)
def test_the_threads_of_a_process_are_dealt_to_its_gpus(monkeypatch, ranks, count, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    dealt = deal_gpus(ranks, torch.device("cuda", 0))
    assert [gpu.index for gpu in dealt] == list(expected)
    assert deal_gpus(ranks, torch.device("cpu")) == deal_gpus(ranks, None) == [None] * ranks
    assert deal_gpus(1, torch.device("cuda", 1)) == [torch.device("cuda", 1)]
    team = ThreadTeam(Grid(1, ranks), torch.device("cuda", 0))
    assert ThreadLinks(0, team).peers_share_gpu == (ranks > count)


@pytest.mark.parametrize(
    ("visible", "local_rank", "expected"),
    [(1, 3, 0), (4, 3, 3), (4, 5, 1)],
    ids=["gpus per task", "gpus per node", "shared"],
)
def test_a_rank_takes_its_gpu_of_those_it_sees(monkeypatch, visible, local_rank, expected):
    current = [0]
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", lambda n: current.__setitem__(0, n))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(launch, "ranks", lambda: launch.Ranks(None, local_rank, 1))
    assert launch.device("auto") == torch.device("cuda", expected)


@pytest.mark.parametrize(("blocks", "count"), [(1, 1), (1, 2), (2, 2), (2, 4)])
def test_backward_passes_that_would_wait_in_one_thread_are_refused(monkeypatch, blocks, count):
    """torch has one thread for the backward passes of a GPU: the first to wait would hang all.

    Where block 0 of one replica waits for the other's, behind which block 1 waits for the first's.
    """
    dealt = [torch.device("cuda", n % count) for n in range(2 * blocks)]
    monkeypatch.setattr(threads, "deal_gpus", lambda ranks, device: dealt)
    monkeypatch.setattr(threads, "separate_streams", lambda gpus, number: nullcontext())
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda gpu: stream)
    train = {"epochs": 1, "sync_batchnorm": True}
    made = trainer(Backprop(), blocks=blocks, replicas=2, train=train)
    if count == 2 * blocks:
        made.fit(*digits(1))
    else:
        assert f"the ranks with mpirun -n {2 * blocks}, or" in refusal(made.fit, *digits(1))


class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("by", torch.ones(1))

    def forward(self, x):
        return x + self.by


@pytest.mark.parametrize("count", [1, 2])
def test_a_buffer_of_two_blocks_is_refused_on_two_gpus(monkeypatch, count):
    dealt = [torch.device("cuda", n % count) for n in range(2)]
    monkeypatch.setattr(threads, "deal_gpus", lambda ranks, device: dealt)
    monkeypatch.setattr(threads, "separate_streams", lambda gpus, number: nullcontext())
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda gpu: stream)
    shift = Shift()
    ends = nn.Sequential(nn.Flatten(), nn.Linear(64, 8)), nn.Linear(8, 10)
    made = trainer_of(nn.Sequential(ends[0], shift, ends[1], shift), cuts=["2"])
    if count == 1:
        made.fit(*digits(1))
    else:
        assert "has buffers, is in several blocks, and these are on 2 GPUs" in refusal(
            made.fit, *digits(1)
        )


class OnGpu:
    """In a tensor's place, one on a GPU that notes what is done to it, in order."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, name, log):
        self.name, self.log = name, log

    def __add__(self, other):
        self.log.append(f"{self.name} + {other.name}")
        return OnGpu(f"({self.name} + {other.name})", self.log)

    def record_stream(self, stream):
        pass

    def to(self, device, non_blocking):
        return self

    def clone(self):
        self.log.append(f"clone {self.name}")
        return self


def test_peers_on_threads_add_and_read_after_the_streams_that_made_the_terms(monkeypatch):
    """Each thread has a stream, and an event is waited for before what it marks is used."""
    log, stream = [], SimpleNamespace()

    class Event:
        def record(self, of):
            self.of = of

    def current(device=None):
        name = getattr(stream, "name", "main")
        return SimpleNamespace(
            name=name, wait_event=lambda event: log.append(f"{name} waits for {event.of.name}")
        )

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    shared = SharedSum(2)
    for replica, name in enumerate("ab"):
        stream.name = name
        shared.put(replica, OnGpu(name, log), 0.0)
    for name in "ba":
        stream.name = name
        shared.total()[0].clone()
    waits = ["b waits for a", "b waits for b"]
    assert log[:3] == [*waits, "a + b"]
    assert log[3:] == ["b waits for b", "clone (a + b)", "a waits for b", "clone (a + b)"]
    message = Handed(OnGpu("x", log))
    stream.name = "b"
    message.take()
    assert log[-1] == "b waits for a"


def test_a_host_whose_name_others_cannot_reach_is_told_how_to_name_its_interface(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    said = refusal(own_address)
    assert "the name node7 of this host resolves to 127.0.1.1" in said
    assert "set GLOO_SOCKET_IFNAME" in said
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.7")
    assert own_address() == "node7"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ether77")
    assert "GLOO_SOCKET_IFNAME is 'ether77' on node7: No such device" in refusal(own_address)
