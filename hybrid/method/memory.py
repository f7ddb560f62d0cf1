"""Estimates of the memory that a rank needs."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, prod

import torch
from torch import Tensor, nn

from hybrid.data import Data
from hybrid.links.grid import GridPlace
from hybrid.method.make_method import make_method
from hybrid.method.method import Method
from hybrid.method.optimizers import count_moments
from hybrid.method.options import Options
from hybrid.method.problem import Problem
from hybrid.networks.blocks import Blocks, laid_out
from hybrid.ranks import launch, launcher
from hybrid.solvers.base import GraphBytes, values_of
from hybrid.solvers.exact.exact_pass import PassSettings
from hybrid.solvers.layers.branches import nothing_left_out
from hybrid.solvers.numerics.buffers import frozen_statistics


def fit_to_memory(blocks: Blocks, options: Options, data: Data) -> Blocks:
    """Cut the network again where machines have what the method needs, if there is a limit.

    ValueError where no cut has room. The network and torch's generator do not change.
    """
    memory = Memory()

    @torch.random.fork_rng(devices=[])
    def needed(cut: Blocks) -> list[int]:
        problem = Problem.of(options, cut, data)
        method = make_method(problem, options).of_replica(GridPlace(replicas=options.replicas))
        inputs = [problem.sample, *problem.blocks.cut_tensors(problem.sample)]
        with problem.blocks.mode(training=True):
            return memory.needed(method, inputs)

    return replace(blocks if blocks.recut is None else blocks.recut(needed), recut=None)


class Memory:
    """Estimates bytes from passes over two samples; each run of units is measured once."""

    def __init__(self) -> None:
        self._saved: dict[tuple[object, ...], tuple[float, float]] = {}

    def needed(self, method: Method, inputs: Sequence[Tensor]) -> list[int]:
        """Estimate the bytes of each block of a replica: the sums of `parts`."""
        return [sum(parts.values()) for parts in self.parts(method, inputs)]

    def parts(self, method: Method, inputs: Sequence[Tensor]) -> list[dict[str, int]]:
        """Estimate the bytes of each block of a replica by purpose.

        `inputs` go into the blocks, a few samples each. "kept" is what the method has beside the
        newest weights: older versions, inputs, auxiliary variables, the state of the strategy.
        "activations" are live graphs, and temporary memory of a pass: tensors at the cuts, the
        adjoints of two activations, and a gradient that is added to that of other micro-batches.

        It is the memory of tensors. A C library that keeps freed memory takes more, because buffers
        of other sizes do not fill all of it.
        """
        blocks, options, replicas = method.problem.blocks, method.options, method.setup.replicas
        moments = count_moments(options.optimizer) + (options.train.ema > 0)
        moments += options.delay.mend != "none"
        of_sync = options.sync.copies(replicas) if replicas > 1 else 0.0
        needed = []
        for k, x in enumerate(inputs):
            module, lam = blocks.module(k), x.shape[1:]
            trained = [p.nbytes for p in module.parameters() if p.requires_grad]
            whole = x.detach()[:1].expand(method.setup.batch_size, *lam).requires_grad_(k > 0)
            live, samples = self._graphs(method, module, whole, k, self.graph)
            # two of a pass's tensors, and what crosses the cuts; the input is in the graph
            largest, after = self._of_a_sample(module, whole)[1], method.setup.shape_after(k)
            crossing = 2 * values_of(after) + prod(lam) * (k > 0)
            passing = round(samples * (2 * largest + crossing * whole.element_size()))
            passing += max(trained, default=0) * (samples < len(whole))
            kept = self._graphs(method, module, whole, k, lambda module, x: 0)[0]
            needed.append(
                {
                    "weights": sum(x.nbytes for x in (*module.parameters(), *module.buffers())),
                    "gradients": sum(trained),
                    "moments": round(moments * sum(trained)),
                    "kept": round(of_sync * sum(trained)) + kept + method.memory(k),
                    "activations": live - kept + passing,
                }
            )
        return needed

    def _graphs(
        self, method: Method, module: nn.Module, whole: Tensor, k: int, graph: GraphBytes
    ) -> tuple[int, int]:
        """Return the bytes of block k's live graphs, and the samples of its largest pass.

        Local work has a separate graph. `graph` tells the bytes of one.
        """
        solver, K = method.solver, method.setup.blocks
        exact = solver if isinstance(solver, PassSettings) else method.correction
        size, m = len(whole), exact.micro_batches or 1
        if not (solver.alternates or solver.exact):
            part = ceil(size / solver.num_micro_batches(size, K))
            local = graph(module, whole[:part]) if method.setup.local_work else 0
            return solver.held_bytes(module, whole, k, K, graph) + local, part
        share, a_sample = ceil(size / m), graph(module, whole) / size
        live = stored = share * a_sample
        if exact.recompute:
            stored = share * prod(whole.shape[1:]) * whole.element_size()
        live += (min(m, K - k) - 1) * stored
        if method.setup.stored_batches:
            live, share = max(live, size * a_sample), size
        return round(live), share

    def graph(self, module: nn.Module, x: Tensor) -> int:
        """Estimate the bytes that autograd saves in a pass over x, without parameters."""
        return round(len(x) * self._of_a_sample(module, x)[0])

    def _of_a_sample(self, module: nn.Module, x: Tensor) -> tuple[float, float]:
        """Return the bytes that autograd saves per sample, in all and of the largest tensor."""
        parameters = tuple(id(p) for p in module.parameters())
        kinds = tuple(type(m) for m in module.modules())
        key = (kinds, parameters, tuple(x.shape[1:]), x.requires_grad)
        if key not in self._saved:
            # of real samples: a module may not take others
            two = laid_out(x.detach()[:1].repeat_interleave(2, 0))
            sizes = _saved_tensors(module, two.requires_grad_(x.requires_grad))
            self._saved[key] = sum(sizes) / 2, max(sizes, default=0) / 2
        return self._saved[key]


def process_bytes(model: nn.Module) -> int:
    """The resident memory of this process beside a network: of libraries and data; 0: not known."""
    launch.keep_memory()
    tensors = {x.data_ptr(): x.nbytes for x in (*model.parameters(), *model.buffers())}
    return max(0, launcher.resident_bytes() - sum(tensors.values()))


def saved_bytes(module: nn.Module, x: Tensor) -> int:
    """Measure the bytes that autograd saves in a pass over x, without parameters and buffers."""
    return sum(_saved_tensors(module, x))


def _saved_tensors(module: nn.Module, x: Tensor) -> list[int]:
    """List the bytes of each tensor that autograd saves."""
    sizes: dict[int, int] = {}
    tensors = [*module.parameters(), *module.buffers()]
    stored = {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in stored:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    leaf = x.detach().requires_grad_(x.requires_grad)
    hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
    with torch.enable_grad(), hooks, nothing_left_out(), frozen_statistics(module):
        module(leaf)
    return [*sizes.values()]
