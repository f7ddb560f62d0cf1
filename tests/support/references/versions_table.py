"""Delayed gradients, with and without local steps in waits, from their formulas in one process."""

import torch
from problems import copied
from torch import nn
from torch.func import functional_call
from unit_steps import MOMENTUM

from hybrid.solvers import AugmentedLagrangian
from hybrid.solvers.numerics.buffers import frozen_statistics


def hops(name):
    return 2 if name == "fdg" else 1


class Table:
    """One process that keeps every version of every block's weights.

    Micro-batch n of block k meets the version of tick n: steps made by then, one for every
    mini-batch whose last micro-batch came back at a tick before, d_k after it went up. With `local`
    block k adds to each step the gradient of its local loss, of the method `fill`, over the first
    samples of every micro-batch of the mini-batch that came back before: of a tick so many before
    and so many after the backward pass, which are normalized apart.
    """

    def __init__(self, problem, name, m, local=None, fill=None):
        self.name, self.K, self.batches = name, len(problem.blocks), problem.batches
        self.modules = [problem.blocks.module(k).train() for k in range(self.K)]
        self.versions = [[copied(dict(module.named_parameters()))] for module in self.modules]
        self.momenta = [{} for _ in self.modules]
        self.sums = [{} for _ in self.modules]
        self.parts = []
        for t, batch in enumerate(problem.batches):
            rows = torch.arange(len(batch)).tensor_split(min(m, len(batch)))
            self.parts += [(t, r, len(r) / len(batch), r is rows[-1]) for r in rows]
        self.inputs, self.graphs = ([{} for _ in self.modules] for _ in range(2))
        self.adjoints = [{} for _ in range(self.K + 1)]
        self.oldest = [0] * self.K
        self.local, self.fill = local or [(0, 0)] * self.K, fill
        self.records = [{} for _ in self.modules]
        self.sent = {}

    def run(self):
        N = len(self.parts)
        longest = 2 * (self.K - 1)
        for n in range(N + longest):
            if n < N:
                self.forward(n)
            for k in reversed(range(self.K)):
                i = n - hops(self.name) * (self.K - 1 - k)
                if 0 <= i < N:
                    self.backward(k, i, self.batches[self.parts[i][0]].learning_rate)
        found = {}
        for k, module in enumerate(self.modules):
            tensors = self.versions[k][-1] | dict(module.named_buffers())
            found |= {module.global_name(name): tensor for name, tensor in tensors.items()}
        return found

    def forward(self, n):
        t, rows, _, _ = self.parts[n]
        x = self.batches[t].images()[rows]
        for k, module in enumerate(self.modules):
            self.inputs[k][n] = x
            replayed = self.name == "features-replay" and k < self.K - 1
            if replayed:
                with frozen_statistics(module):
                    x = functional_call(module, self.versions[k][-1], (x,))
                self.sent[k, n] = x.detach()
            else:
                self.graphs[k][n] = x, *_ = self.computed(k, n, len(self.versions[k]) - 1)
            x = x.detach()

    def computed(self, k, n, version):
        lam = self.inputs[k][n].clone().requires_grad_(k > 0)
        w = {name: t.clone().requires_grad_() for name, t in self.versions[k][version].items()}
        return functional_call(self.modules[k], w, (lam,)), lam, w, version

    def backward(self, k, n, rate):
        t, rows, share, ends = self.parts[n]
        adjoint = self.adjoints[k + 1].get(n)
        if n not in self.graphs[k]:
            self.graphs[k][n] = self.computed(k, n, -1)
        out, lam, w, version = self.graphs[k].pop(n)
        self.oldest[k] = max(self.oldest[k], len(self.versions[k]) - 1 - version)
        if k == self.K - 1:
            labels = self.batches[t].labels()[rows]
            (nn.functional.cross_entropy(out, labels) * share).backward()
        else:
            out.backward(self.adjoints[k + 1].pop(n))
        if k > 0:
            self.adjoints[k][n] = lam.grad * 0.7 if self.name == "fdg" else lam.grad
        for name, weight in w.items():
            before = self.sums[k].get(name)
            self.sums[k][name] = weight.grad if before is None else before + weight.grad
        N = len(self.batches[t])
        x = self.sent.pop((k, n), out.detach())  # a replay computes another
        self.records[k][n] = lam.detach(), x, None if adjoint is None else adjoint * N
        if ends:
            self.add_local(k, t)
            self.versions[k].append(self.stepped(k, rate))
            self.sums[k] = {}

    def add_local(self, k, t):
        """g + c l: l the mean over the local samples, c = local_lr min(1, their share)."""
        sums, count = {}, 0
        for i, (of, rows, _, _) in enumerate(self.parts):
            if of != t - 1:
                continue
            start = 0
            for size in self.local[k]:
                places = slice(start, min(start + size, len(rows)))
                start += size
                if places.start < places.stop and (size == 1 or places.stop - places.start > 1):
                    count += places.stop - places.start
                    for name, g in self.local_gradients(k, i, places).items():
                        sums[name] = sums.get(name, 0) + g
        for name, total in sums.items():
            c = self.fill.local_lr * min(1, count / len(self.batches[t]))
            self.sums[k][name] = self.sums[k][name] + c * total / count

    def local_gradients(self, k, i, places):
        """Of the local loss, summed over some samples of micro-batch i."""
        t, rows, _, _ = self.parts[i]
        lam, target, p = (None if x is None else x[places] for x in self.records[k][i])
        w = {name: x.clone().requires_grad_() for name, x in self.versions[k][-1].items()}
        with frozen_statistics(self.modules[k]):
            x = functional_call(self.modules[k], w, (lam,))
        if k == self.K - 1:
            labels = self.batches[t].labels()[rows[places]]
            loss = nn.functional.cross_entropy(x, labels, reduction="sum")
        else:
            r = target - x
            kappa = -p if isinstance(self.fill, AugmentedLagrangian) else torch.zeros_like(r)
            loss = (self.fill.beta * r.square() + kappa * r).sum()
        return dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))

    def stepped(self, k, rate):
        """v <- momentum v + g,  w <- w - rate (g + momentum v)."""
        new = {}
        for name, g in self.sums[k].items():
            v = self.momenta[k].get(name)
            v = self.momenta[k][name] = g if v is None else v * MOMENTUM + g
            new[name] = self.versions[k][-1][name].add(g.add(v, alpha=MOMENTUM), alpha=-rate)
        return new
