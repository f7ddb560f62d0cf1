"""The tick of a pipeline that is never flushed, which all methods with delayed gradients share."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import get_args

import torch
from torch import Tensor, nn

from hybrid.solvers.acting import Acts, CountOrZero, Needs, NotNegative
from hybrid.solvers.base import GraphBytes, Program, Solver
from hybrid.solvers.delayed.stash import Flight, load_flights, save_flights, with_parameter_strides
from hybrid.solvers.exact.pipeline import MicroBatch, split_into_micro_batches
from hybrid.solvers.exact.wire import Wire, WireFormat
from hybrid.solvers.peers import statistics
from hybrid.solvers.state import State, entries
from hybrid.solvers.windows import PhaseStats, Window

_FORMATS = get_args(WireFormat)
_PRECISIONS = torch.float32, torch.bfloat16, torch.float16


NOT_COMPILED = Needs(
    "train.compile is false, because it goes through its blocks unit by unit",
    lambda run: not run.setup.compiled,
    "leave train.compile out, or choose another solver",
)
ONE_REPLICA = Needs(
    "there is one replica, since replicas cannot agree on steps of single units",
    lambda run: run.setup.replicas == 1,
    "take one replica, or another solver",
)
NOT_FLOAT16 = Needs(
    "train.precision is not 'float16', whose loss scale may change between the steps of its units",
    lambda run: run.train.precision != "float16",
    "choose bfloat16",
)
SEVERAL_BLOCKS = Acts("there are several blocks", lambda run: run.setup.blocks > 1)


@dataclass(frozen=True)
class Delayed(Solver):
    r"""Mini-batches go through the blocks in m micro-batches. At its n-th tick, block k computes

        lam_k = x_{k-1} of micro-batch n,   x_k = f_k(lam_k; w_k)               forward, sent up
        p_k = b (d x_k / d lam_k)^T p_{k+1}  of micro-batch n - d_k             backward, sent down
        w_k <- optimizer step with the sum of (d x_k / d w_k)^T p_{k+1} over the micro-batches of a
               mini-batch, after the backward pass of its last

    where d_k is fixed, so the result does not depend on timing. The pipeline is never flushed: a
    micro-batch takes one tick, whatever K is. The gradient of a mini-batch is d_k / m steps late:
    the forward passes of its first d_k micro-batches came before the newest step (before the newest
    two, if d_k > m, ...). Block K-1 has d = 0 and works as back-propagation does. K = 1 is the
    pipelined pass with as many micro-batches, and with m = 1 it is plain back-propagation, bit for
    bit.

    d_k = K-1-k is one forward, one backward: a block has as many graphs under way as in a flushed
    pipeline, and waits for its neighbor if a message takes long (PipeDream, arXiv 1806.03377, steps
    in this order after every micro-batch). d_k = 2 (K-1-k) gives every message one tick of slack.
    The pipeline is drained at the end of an epoch and before a serial correction: all backward
    passes under way are completed, no forward pass begins, and no gradient is lost.
    """

    micro_batches: CountOrZero = 0
    """m, parts of a mini-batch, which shorten delays; 0: 8, but at least 16 samples each."""
    messages: WireFormat = "float32"
    """Number format of what crosses a cut: float32, bfloat16, float16 or int8."""
    clip_norm: NotNegative = 0.0
    """Largest norm of one block's gradient, 0: any; serial rounds have correction.clip_norm."""

    def delay(self, index: int, count: int) -> int:
        """d_k in ticks of block k = `index` of K = `count`."""
        return count - 1 - index

    def num_micro_batches(self, size: int) -> int:
        return min(self.micro_batches or max(1, min(8, size // 16)), size)

    def versions(self, index: int, count: int, size: int) -> int:
        """Most older versions of its weights that block `index` of `count` keeps at once."""
        return 0

    def held_bytes(
        self, module: nn.Module, lam: Tensor, index: int, count: int, graph: GraphBytes
    ) -> int:
        d, x = self.delay(index, count), self.first_part(lam)
        return graph(module, x) + d * tensor_bytes([x])

    def first_part(self, lam: Tensor) -> Tensor:
        """The first, and largest, micro-batch of a mini-batch."""
        size = ceil(len(lam) / self.num_micro_batches(len(lam)))
        return lam.detach()[:size].clone().requires_grad_(lam.requires_grad)

    @property
    def shrink(self) -> float:
        """b, by which an adjoint shrinks at every hop."""
        return 1.0


class DelayedProgram(Program):
    """One rank's ticks, and the micro-batches whose backward pass is yet to come."""

    solver: Delayed

    def begin(self) -> None:
        solver, block = self.solver, self.block
        self._delay = solver.delay(block.index, block.count)
        self._wire = Wire(solver.messages)
        self._flights: deque[Flight] = deque()
        """Oldest first."""
        self._inbox: deque[tuple[Tensor, ...]] = deque()
        """Messages of the next block that a checkpoint held."""
        self._ticks = 0
        self._rate = 0.0

    def train(self, window: Window) -> PhaseStats:
        """One tick for each micro-batch; the pipeline stays filled."""
        stats = PhaseStats()
        with stats.timed(self.links):
            for _, batch in window.recorded():
                self._rate = batch.learning_rate
                losses = []
                for part in split_into_micro_batches(
                    batch, self.num_micro_batches(batch), self.block
                ):
                    self._ticks += 1
                    if self.block.last:
                        losses.append(self._last_tick(part, stats))
                    else:
                        self._flights.append(self._forward(self._receive_input(part), part))
                        if len(self._flights) > self._delay:
                            self._backward(self._flights.popleft())
                if losses:
                    stats.losses.append(torch.stack(losses).sum())
                stats.samples += len(batch)
                stats.steps += 1
        return stats

    def drain(self) -> PhaseStats:
        while self._flights:
            self._backward(self._flights.popleft())
        self._ticks = 0
        self.links.flush()
        return PhaseStats()

    def state(self) -> State:
        if self._ticks == 0:
            return State()
        while len(self._inbox) < self._adjoints_sent():
            self._inbox.append(self._receive_message())
        state = {
            "ticks": torch.tensor(self._ticks),
            "rate": torch.tensor(self._rate, dtype=torch.float64),
            "sent as": torch.tensor(_FORMATS.index(self.solver.messages)),
            "computed in": torch.tensor(_PRECISIONS.index(self.block.precision)),
        }
        for name, parameter in self.block.module.named_parameters():
            if parameter.grad is not None:
                state[f"gradient {name}"] = parameter.grad
        if self.setup.replicas > 1:  # which are alike after a step, and not while one is prepared
            own = statistics(self.block.module)
            state |= {f"statistic {i}": x for i, x in enumerate(own)}
        state |= save_flights(self._flights)
        for i, message in enumerate(self._inbox):
            state |= {f"inbox {i}.{j}": tensor for j, tensor in enumerate(message)}
        return State(flight=state)

    def load_state(self, state: State) -> None:
        found, module = state.flight, self.block.module
        if not found:
            return
        self._refuse_other("solver.messages", self.solver.messages, _FORMATS[int(found["sent as"])])
        before, now = _PRECISIONS[int(found["computed in"])], self.block.precision
        self._refuse_other(
            "train.precision", *(str(p).removeprefix("torch.") for p in (now, before))
        )
        self._ticks, self._rate = int(found["ticks"]), float(found["rate"])
        for i, own in enumerate(statistics(module)):
            own.copy_(found.get(f"statistic {i}", own))
        for flight in load_flights(found, module):
            self._flights.append(self._rebuild(flight))
        for i in range(self._adjoints_sent()):
            self._inbox.append(tuple(entries(found, f"inbox {i}.").values()))
        for name, grad in with_parameter_strides(module, entries(found, "gradient ")).items():
            module.get_parameter(name).grad = grad

    @staticmethod
    def _refuse_other(setting: str, now: str, before: str) -> None:
        """ValueError if what is under way was made otherwise."""
        if now != before:
            raise ValueError(f"{setting} is {now!r}, and {before!r} for what is under way")

    def _adjoints_sent(self) -> int:
        """Adjoints that the next block has sent and this one has not yet received."""
        if self.block.last:
            return 0
        next_ = self.solver.delay(self.block.index + 1, self.block.count)
        return min(self._ticks, self._delay) - min(self._ticks, next_)

    def _receive_input(self, part: MicroBatch) -> Tensor:
        if part.images is not None:
            return part.images
        return self._wire.receive(self.links.from_previous, self.block.dtype)

    @abstractmethod
    def _forward(self, lam: Tensor, part: MicroBatch) -> Flight:
        """Send x_k up; keep what the backward pass will need."""

    def _rebuild(self, flight: Flight) -> Flight:
        """A flight of a checkpoint, made ready for its backward pass."""
        return flight

    @abstractmethod
    def _backward(self, flight: Flight) -> None:
        """Receive a flight's adjoint, add its gradient, and send its input's adjoint down."""

    def _last_tick(self, part: MicroBatch, stats: PhaseStats) -> Tensor:
        """The last block's tick: forward, loss, backward; its share of the mini-batch's loss."""
        lam = self._leaf(self._receive_input(part))
        assert part.labels is not None
        found = self.block.classify(self.block.forward(lam, part.key), part.labels, part.weight)
        self.block.backward(found.loss * part.share, key=part.key)
        stats.scored(found)
        self._finish(part, lam)
        return found.loss.detach() * part.own_share

    def _leaf(self, lam: Tensor | None) -> Tensor:
        assert lam is not None
        return lam.detach() if self.block.first else lam.detach().requires_grad_()

    def _send_output(self, out: Tensor) -> None:
        self._wire.send(self.links.to_next, out)

    def _receive_message(self) -> tuple[Tensor, ...]:
        """One message of the next block, as it is on the wire."""
        return tuple(self.links.from_next() for _ in range(self._wire.tensors))

    def _oldest_message(self) -> Callable[[], Tensor]:
        """Gives the tensors of the next block's oldest message, one at each call."""
        message = self._inbox.popleft() if self._inbox else self._receive_message()
        return partial(next, iter(message))

    def _receive_adjoint(self, part: MicroBatch, dtype: torch.dtype) -> Tensor:
        """p_{k+1} of the oldest flight, for an output of `dtype`."""
        wide = dtype if self.block.scaler is None else torch.float32
        return self._wire.receive_adjoint(self._oldest_message(), wide, part.size)

    def _finish(self, part: MicroBatch, lam: Tensor) -> None:
        """Send the adjoint of the leaf lam down; step if its mini-batch is complete."""
        if not self.block.first:
            self._send_adjoint(lam, self.block.input_adjoint(lam), part)
        self._step(part)

    def _send_adjoint(self, lam: Tensor, p_in: Tensor, part: MicroBatch) -> None:
        """One message to the previous block."""
        shrink = self.solver.shrink
        p_in = p_in if shrink == 1.0 else shrink * p_in
        self._wire.send_adjoint(self.links.to_previous, p_in, part.size)

    def _step(self, part: MicroBatch) -> None:
        """Step if that was its mini-batch's last micro-batch."""
        if part.is_last:
            self.block.step("local", self._rate, self.solver.clip_norm)


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Memory of the tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)
