"""What test_baselines.py runs on every rank."""

import sys
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from time import sleep
from unittest import mock

import torch
import torch.distributed as dist
from problems import trained_by_hand
from torch import nn

from hybrid.bench.contenders import MethodContender, PlainLoop
from hybrid.bench.recipes import BASE
from hybrid.data import load
from hybrid.links.base import Start
from hybrid.links.mpi import MpiLinks
from hybrid.method.options import Options
from hybrid.method.problem import Problem
from hybrid.networks import models
from hybrid.networks.partition import split
from hybrid.settings.config import OptimizerSettings, TrainSettings
from hybrid.solvers import Batch

sys.path.append(str(Path(__file__).parents[3] / "docs/benchmarks"))
from torch_contenders import DataParallel, Pipeline, process_group

SETTINGS = OptimizerSettings()
KINDS = ("gpipe", "1f1b", "interleaved-zero-bubble")


@dataclass
class Noted:
    """A source that notes who asks for what, and with how many threads."""

    images_made: int = 0
    labels_made: int = 0
    threads: list = field(default_factory=list)
    busy_seconds: float = 0.0

    mixes = joint = False

    def images(self, ids, step=0):
        self.images_made += len(ids)
        self.threads.append(torch.get_num_threads())
        sleep(self.busy_seconds)
        made = [torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(int(i))) for i in ids]
        return torch.stack(made).to(memory_format=torch.channels_last)

    def labels(self, ids, step=0):
        self.labels_made += len(ids)
        return ids % 10


def batches(count=2, size=32, source=None):
    source = source or Noted()
    return [
        Batch(torch.arange(i * size, (i + 1) * size), 0.1 / (i + 1), source) for i in range(count)
    ]


class SampleNorm(nn.Module):
    """Each sample normalized alone.

    Not nn.GroupNorm: in torch 2.13 its channels_last backward pass on a CPU ends the process where
    it is asked for the weights' gradients alone, as by the zero-bubble schedule.
    """

    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        variance, mean = torch.var_mean(x, (1, 2, 3), keepdim=True)
        x = (x - mean) * (variance + 1e-5).rsqrt()
        return x * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)


def network(norms=True):
    """A ResNet-8; without `norms` each sample is normalized alone, so parts of a batch add up."""
    torch.manual_seed(0)
    model = models.build("resnet8", 10, 1, 8)
    for module in [] if norms else list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, SampleNorm(child.num_features))
    return model


def by_hand(model, wanted):
    model = deepcopy(model).to(memory_format=torch.channels_last)
    return trained_by_hand(model, ((b.images(), b.labels(), b.learning_rate) for b in wanted))


def off(state, norms=False):
    """Largest difference from the plain loop's state, relative to the farthest it went."""
    if state is None:
        return None
    model = network(norms)
    start, expected = model.state_dict(), by_hand(model, batches())
    if list(state) != list(expected):
        return "other names"
    pairs = [(state[n].double(), expected[n].double(), start[n].double()) for n in expected]
    return max(float((a - b).abs().max() / ((b - s).abs().max() + 1e-9)) for a, b, s in pairs)


def same(state, expected):
    if state is None:
        return None
    return list(state) == list(expected) and all(torch.equal(state[n], expected[n]) for n in state)


def state(row):
    """The whole network's state under its global names, on rank 0 only; all must call it."""
    if isinstance(row, PlainLoop):
        return row.model.state_dict() or None
    if not isinstance(row, MethodContender):
        return row.state_dict()
    row.rounds.drain()
    module = row.method.problem.blocks.module(row.links.rank)
    with row.block.joined():
        part = {module.global_name(k): v.clone() for k, v in module.state_dict().items()}
    everyone = row.links.all_gather(part)
    return None if row.links.place.number else {k: v for p in everyone for k, v in p.items()}


def plain(comm):
    here = comm.rank == 0
    row = PlainLoop(network(), SETTINGS, here=here)
    row.train(batches())
    before, two = torch.get_num_threads(), Noted()
    PlainLoop(network(), SETTINGS, threads=2, here=here).train(batches(1, source=two))
    return {
        "equal": same(state(row), by_hand(network(), batches())),
        "waited": row.spent()[1],
        "sent": row.spent()[0],
        "threads": [before, *two.threads, torch.get_num_threads()],
    }


def trained(row, source, norms=False):
    untouched = same(state(row), network(norms).state_dict())
    row.train(batches(source=source))
    found = {
        "untouched": untouched,
        "off": off(state(row), norms),
        "sent": row.spent()[0],
        "made": [source.images_made, source.labels_made],
        "waited": row.spent()[1],
    }
    row.close()
    return found


def replicas(comm):
    """Our own row of as many replicas as there are ranks."""
    options = Options(train=TrainSettings(batch_size=32))
    problem = Problem.of(options, split(network(False), 1), *load("digits"))
    method = BASE.method(problem, options, comm.size)
    return MethodContender(method, MpiLinks(Start.of(comm, comm.size)))


@mock.patch("hybrid.solvers.peers.COMPARED", False)
def facts(comm):
    torch.set_num_threads(1)
    process_group(comm.mpi)
    slow = Noted(busy_seconds=0.3 if comm.rank == 0 else 0.0)
    found = {
        "rank": [dist.get_rank(), dist.get_world_size()],
        "plain": plain(comm),
        "data parallel": trained(DataParallel(network(False), SETTINGS), slow),
        "replicas": trained(replicas(comm), Noted()),
        "exact": trained(Pipeline(network(), SETTINGS, "gpipe", 1), Noted(), norms=True),
    }
    for kind in KINDS:
        found[kind] = trained(Pipeline(network(False), SETTINGS, kind, 4), Noted())
    dist.destroy_process_group()
    return found
