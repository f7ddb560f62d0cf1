"""Small chains with units that may be left out, and a simulation of instances on them."""

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

import torch
from conditions import check
from problems import Fixed, Problem, copied
from torch import nn
from torch.func import functional_call

from hybrid import split
from hybrid.links import run_threads
from hybrid.links.base import Start
from hybrid.links.mpi import MpiLinks
from hybrid.solvers import Batch
from hybrid.solvers.layers.branches import Skippable, nothing_left_out, survival
from hybrid.solvers.numerics.buffers import frozen_statistics
from hybrid.solvers.state import State
from hybrid_messages.chain import Chain
from hybrid_messages.units import node_slices

MOMENTUM = 0.9


class Branch(Skippable):
    def __init__(self, width, p):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.survival = p

    def forward(self, x):
        if self.left_out():
            return x
        return x + self.scaled(torch.tanh(self.bn(self.conv(x))))


def deep(cuts=(), survivals=(0.8, 0.6, 0.5, 0.4), batches=6, batch=12, seed=5):
    """Stem, as many residual units as there are probabilities, head; other learning rates."""
    torch.manual_seed(seed)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4))
    body = [Branch(3, p) for p in survivals]
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), *body, *head).double()
    x = torch.randn(batch * batches, 1, 6, 6, dtype=torch.float64)
    source = Fixed(x, torch.randint(0, 4, (len(x),)))
    ids = torch.arange(len(x)).split(batch)
    made = [Batch(i, 0.1 / (t + 1), source, t) for t, i in enumerate(ids)]
    return Problem(split(model, cuts=[str(c) for c in cuts]), made)


def setup_of(problem):
    return replace(problem.setup(window=0), output=(4,), seed=3)


def trained(problem, solver, at=None, run=run_threads, pieces=None, watch=None):
    """The network after all mini-batches; broken off and gone on with at mini-batch `at`."""

    def program(block, links):
        setup = setup_of(problem)
        check(solver, setup)
        mine = solver.start(block, links, setup)
        if watch is not None:
            watch(mine)
        stats = []
        if at is not None:
            stats.append(mine.train(problem.window(1, 0, at)))
            kept = mine.state()
            state = State(block=copied(kept.block), flight=copied(kept.flight))
            block.module.zero_grad()
            mine = solver.start(block, links, setup)
            if watch is not None:
                watch(mine)
            mine.load_state(state)
        ends = [at or 0, *(pieces or []), len(problem.batches)]
        for first, end in pairwise(ends):
            stats.append(mine.train(problem.window(1, first, end)))
        stats.append(mine.drain())
        assert mine.state().flight == {}
        assert not mine._under_way
        assert all(u.contributions == 0 for u in mine.units.updates)
        assert all(p.grad is None for p in block.module.parameters())
        late = sum((s.staleness for s in stats), Counter())
        return late, stats

    problem.stats = problem.on_every_block(program, MOMENTUM, run)
    return problem.tensors()


class Masked:
    """One process: the dense network with masks, every unit's weights by version.

    A unit's mask is 0 where the instance's path leaves it out: its branch is multiplied by it, and
    its gradient is not counted. Blocks take turns as ranks do.
    """

    def __init__(self, problem, solver, paths):
        self.problem, self.paths = problem, paths
        K = self.K = len(problem.blocks)
        self.most = solver.max_active_keys or 2 * K
        self.m = solver.num_micro_batches(len(problem.batches[0]), K)
        self.muf = solver.min_update_frequency or self.m
        self.parts, self.w = [], []
        for k in range(K):
            module = problem.blocks.module(k).train()
            for some in node_slices(module):
                unit = nn.Sequential(*[*module][some])
                self.parts.append((k, unit))
                self.w.append([copied(dict(unit.named_parameters()))])
        self.late, self.momenta = Counter(), {}
        self.added = [None for _ in self.parts]
        self.samples = [[] for _ in self.parts]
        self.rates = [0.0 for _ in self.parts]

    def units(self, k):
        return [u for u, (block, _) in enumerate(self.parts) if block == k]

    def mask(self, i, u):
        k = self.parts[u][0]
        return float(u - self.units(k)[0] in self.paths[i][k])

    def run_unit(self, i, u, x, weights):
        unit = self.parts[u][1]
        if not survival(unit[0]) < 1:
            return functional_call(unit, weights, (x,))
        with nothing_left_out():
            return x + self.mask(i, u) * (functional_call(unit, weights, (x,)) - x)

    def train(self):
        batches = self.problem.batches
        self.sizes = [len(ids) for ids in batches[0].ids.tensor_split(self.m)]
        self.value = dict(enumerate(x for b in batches for x in b.images().split(self.sizes)))
        self.labels = [y for b in batches for y in b.labels().split(self.sizes)]
        self.inputs, self.met, self.seen = defaultdict(dict), defaultdict(dict), defaultdict(dict)
        chain = Chain(self.K, self.most, self.work)
        chain.extend([len(units) for units in path] for path in self.paths)
        chain.drain()
        for u in range(len(self.parts)):
            self.step(u)
        return [w[-1] for w in self.w]

    def work(self, k, forward, i):
        if not forward:
            self.backward(i, k)
            return
        x = self.value[i]
        for u in self.units(k):
            version = {n: w.clone().requires_grad_() for n, w in self.w[u][-1].items()}
            self.inputs[i][u] = x = x.detach().requires_grad_(u > 0)
            self.met[i][u], self.seen[i][u] = version, len(self.w[u])
            x = self.run_unit(i, u, x, version)
        self.value[i] = x
        if k == self.K - 1:
            out, y = x.detach().requires_grad_(), self.labels[i]
            (nn.functional.cross_entropy(out, y) * (len(y) / sum(self.sizes))).backward()
            self.value[i] = out.grad

    def backward(self, i, k):
        p = self.value[i]
        for u in reversed(self.units(k)):
            met = self.met[i][u]
            x = self.inputs[i][u]
            x.grad = None
            with frozen_statistics(self.parts[u][1]):
                self.run_unit(i, u, x, met).backward(p)
            p = x.grad
            if self.mask(i, u):
                self.add(i, u, {n: w.grad for n, w in met.items()})
        self.value[i] = p

    def add(self, i, u, g):
        had = self.added[u]
        self.added[u] = g if had is None else {n: had[n] + g[n] for n in g}
        self.samples[u].append(self.sizes[i % self.m])
        self.rates[u] = self.problem.batches[i // self.m].learning_rate
        if g:
            self.late[len(self.w[u]) - self.seen[i][u]] += 1
        if len(self.samples[u]) >= self.muf:
            self.step(u)

    def step(self, u):
        if not self.samples[u]:
            return
        new = {}
        for name, w in self.w[u][-1].items():
            g = self.added[u][name] * (sum(self.sizes) / sum(self.samples[u]))
            v = self.momenta.get((u, name))
            v = self.momenta[u, name] = g if v is None else v * MOMENTUM + g
            new[name] = w.add(g.add(v, alpha=MOMENTUM), alpha=-self.rates[u])
        self.w[u].append(new)
        self.added[u], self.samples[u] = None, []


def on_ranks(comm, K, solver, cuts, at=None):
    """The weights of this MPI rank's block, as bytes."""
    problem = deep(cuts)

    def run(count, program):
        return [MpiLinks.start(program, Start.of(comm))]

    trained(problem, solver, at, run)
    module = problem.blocks.module(comm.rank)
    return {module.global_name(n): t.numpy().tobytes() for n, t in module.state_dict().items()}
