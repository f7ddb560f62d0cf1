"""What test_baselines.py runs on every rank."""

import sys
from copy import deepcopy
from pathlib import Path

import torch
import torch.distributed as dist
from problems import trained_by_hand
from torch import nn

from hybrid.bench.contenders import MethodContender, PlainLoop
from hybrid.networks import models
from hybrid.settings.config import OptimizerSettings
from hybrid.solvers import Batch

sys.path.append(str(Path(__file__).parents[3] / "docs/benchmarks"))
from torch_contenders import DataParallel, Pipeline, process_group

SETTINGS = OptimizerSettings()
KINDS = ("gpipe", "1f1b", "interleaved-zero-bubble")


class Noted:
    """A source that notes with how many threads its images are asked for."""

    mixes = joint = False

    def __init__(self):
        self.threads = []

    def images(self, ids, step=0):
        self.threads.append(torch.get_num_threads())
        images = [
            torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(int(i))) for i in ids
        ]
        return torch.stack(images).to(memory_format=torch.channels_last)

    def labels(self, ids, step=0):
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
    before, source = torch.get_num_threads(), Noted()
    PlainLoop(network(), SETTINGS, threads=2, here=here).train(batches(1, source=source))
    expected = by_hand(network(), batches())
    weights = state(row)
    equal = weights and all(torch.equal(weights[name], w) for name, w in expected.items())
    threads = [before, *source.threads, torch.get_num_threads()]
    return {"equal": equal, "spent": row.spent(), "threads": threads}


def trained(row, norms=False):
    row.train(batches())
    result = {"off": off(state(row), norms), "sent": row.spent()[0]}
    row.close()
    return result


def facts(comm):
    torch.set_num_threads(1)
    process_group(comm.mpi)
    rows = {
        "plain": plain(comm),
        "data parallel": trained(DataParallel(network(False), SETTINGS)),
        "exact": trained(Pipeline(network(), SETTINGS, "gpipe", 1), norms=True),
    }
    for kind in KINDS:
        rows[kind] = trained(Pipeline(network(False), SETTINGS, kind, 4))
    dist.destroy_process_group()
    return rows
