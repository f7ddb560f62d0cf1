"""Rounds: replicas step by themselves, and every few steps they sum what they have done."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hybrid.solvers.numerics.optimizer_state import from_tensors, optimizer_state, to_tensors
from hybrid.solvers.peers import Sync, statistics
from hybrid.solvers.state import State, Tensors, entries
from hybrid.solvers.sync.reduction import Reduction, packed, unpack

Sent = dict[int, Tensor]
"""What a replica gives to a sum, by the number of the weight; a weight may have no part in it."""


class Outer(torch.optim.Optimizer):
    """The anchor and the outer momentum of each weight, equal on all replicas.

    They have the form of an optimizer's state, so that checkpoints keep them with the weight.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Set B = w and the momentum 0."""
        for p in self.weights():
            self.state[p] = {"anchor": p.detach().clone(), "momentum": torch.zeros_like(p)}

    def weights(self) -> list[Any]:
        """Its parameters, in order."""
        return [p for group in self.param_groups for p in group["params"]]

    def slots(self, name: str) -> list[Tensor]:
        """The slot of that name of every weight."""
        return [self.state[p][name] for p in self.weights()]


class Rounds(Sync):
    """Replicas whose weights differ within a round.

        each step      a step of the replica's own
        every h-th     what the replica gives to a sum over replicas begins to travel
        L steps later  an outer step on the sum, the same on all replicas

    A round may last longer than an epoch: nothing ends at an epoch's end. An evaluation sees the
    replicas' mean. A checkpoint keeps that as the network's weights and their momenta, for any
    other grid, and every replica's own beside it, from which the replicas go on. A replica counts
    by its samples:

        mean of x = sum_r (n_r / N) x_r

    An anchored strategy has weights B that all replicas agree on, from which each one drifts.
    """

    def begin(self) -> None:
        strategy = self.strategy
        self.count = 0
        """Steps since the rounds began."""
        self.apart = False
        """Whether replicas may have different weights."""
        self._plain = Reduction(self.peers, order=strategy.order)
        self._rounded = Reduction(
            self.peers, getattr(strategy, "messages", "float32"), strategy.order
        )
        self._sum: Callable[[], Tensor] | None = None
        """LocalBudget for the sum under way; None: there is none."""
        self.sent: Sent = {}
        """This replica's part of it, until an outer step has it."""
        self.started = 0
        """The step after which it began."""
        self._left: Tensors = {}
        """What messages had left out before it."""
        if strategy.anchored:
            exact = self.block.optimizers["exact"]
            self.outer = Outer([p for group in exact.param_groups for p in group["params"]])
            self.block.optimizers["outer"] = self.outer

    def before_step(self, kind: str, rate: float) -> bool:
        """The gradient of the replica's own mean."""
        if self.share != 1:
            for p in self.block.stepping(kind):
                if p.grad is not None:
                    p.grad.div_(self.share)
        return True

    def after_step(self, kind: str) -> None:
        if kind != "auxiliary":  # a round takes what those move with it
            self.count += 1
            self.apart = True
            self.after_replica_step()

    @abstractmethod
    def after_replica_step(self) -> None:
        """Called after each step of the replica by itself."""

    def message(self) -> Tensor:
        """What this replica gives to a sum, `sent`, as the vector that travels."""
        return packed([*self.sent.values()])

    def start(self, count: int, sent: Sent) -> None:
        """Begin the sum of the round that ends with a step."""
        self.started, self.sent = count, sent
        self._left = self._rounded.state()
        self._sum = self._rounded.start(self.message())

    def is_due(self, count: int) -> bool:
        """Whether the sum under way has had its time after so many steps.

        Also when the next one is to begin, where a run goes on with other settings.
        """
        late = count >= self.started + self.strategy.lag
        return self._sum is not None and (late or count % self.strategy.steps == 0)

    def take(self, into: list[Tensor]) -> None:
        """Wait for the sum under way, and write it into tensors."""
        assert self._sum is not None
        unpack(self._sum(), into)
        self._sum, self.sent = None, {}

    def join(self) -> None:
        if self._sum is not None:
            self._sum()  # a step with it would come after the last evaluation
            self._sum = None
        self.agree()

    def agree(self) -> None:
        """Let weights and running statistics be their mean over replicas."""
        if self.apart:
            self.replace(self._mean([p.detach() for p in self.weights()]))
            self.join_statistics()
            self.apart = False

    @contextmanager
    def joined(self) -> Iterator[None]:
        apart, weights = self.apart, self.weights()
        slots = [] if self.strategy.plain else self._common_slots()
        others = [*statistics(self.block.module), *slots]
        values, other_values = [p.data for p in weights], [t.clone() for t in others]
        self.agree()
        for slot, mean in zip(slots, self._mean(slots), strict=True):
            slot.copy_(mean)
        try:
            yield
        finally:
            for p, value in zip(weights, values, strict=True):
                p.data = value
            for t, value in zip(others, other_values, strict=True):
                t.data.copy_(value)
            self.apart = apart

    def _common_slots(self) -> list[Tensor]:
        """Momenta and the like of the weights that the optimizers of all replicas have stepped."""
        optimized = [*self._optimized()]
        stepped = torch.tensor([float(p in optimizer.state) for _, optimizer, p in optimized])
        everywhere = (self._plain.start(stepped)() == self.peers.replicas).tolist()
        return [
            value
            for (_, optimizer, p), is_common in zip(optimized, everywhere, strict=True)
            for value in (optimizer.state[p].values() if is_common else ())
            if isinstance(value, Tensor) and value.shape == p.shape and p.dim()
        ]

    def join_statistics(self) -> None:
        """Let running statistics be their mean over replicas."""
        running = statistics(self.block.module)
        for statistic, mean in zip(running, self._mean(running), strict=True):
            statistic.data.copy_(mean)

    def _mean(self, tensors: list[Tensor]) -> list[Tensor]:
        """Over replicas, exact, at once, in memory of its own."""
        new = [t.clone() for t in tensors]
        if new:
            unpack(self._plain.start(packed(tensors) * self.share)(), new)
        return new

    def weights(self) -> list[torch.nn.Parameter]:
        """The weights that replicas agree on."""
        return self.outer.weights() if self.strategy.anchored else self.block.everything()

    def anchors(self) -> list[Tensor]:
        """B of every weight; before the first step moves one, the weights."""
        if not self.outer.state:
            self.outer.step()
        return self.outer.slots("anchor")

    def replace(self, weights: list[Tensor]) -> None:
        """Other values, in memory of their own, with the strides that a fresh weight has.

        A sum may have others where a dimension is 1, and then other kernels, and bits, follow.
        """
        for p, new in zip(self.weights(), weights, strict=True):
            same = new.stride() == p.stride()
            p.data = new if same else torch.empty_like(p.data).copy_(new)

    def state(self) -> State:
        # a resumed run sends again what is under way
        rounding = self._rounded.state() if self._sum is None else self._left
        saved = {f"rounding {name}": left for name, left in rounding.items()}
        if not self.count:
            return State(flight=saved)
        saved |= {"count": torch.tensor(self.count), "apart": torch.tensor(self.apart)}
        if self.apart:
            running = [b.clone() for b in statistics(self.block.module)]
            saved |= numbered("weight", dict(enumerate(p.detach() for p in self.weights())))
            saved |= numbered("statistic", dict(enumerate(running)))
        if not self.strategy.plain:  # whose optimizers step from B alone, on all replicas alike
            for name, optimizer, p in self._optimized():
                slots = to_tensors(optimizer.state.get(p, {})).items()
                saved |= {f"optimizer {name}.{slot}": t.clone() for slot, t in slots}
        if self._sum is not None:
            saved |= {"started": torch.tensor(self.started), **numbered("sent", self.sent)}
        return State(flight=saved)

    def load_state(self, state: State) -> None:
        saved = state.flight
        self._rounded.load_state(entries(saved, "rounding "))
        if "count" not in saved:
            return
        self.count, self.apart = int(saved["count"]), bool(saved["apart"])
        if self.apart:
            places = [p.data for p in self.weights()] + statistics(self.block.module)
            values = [*entries(saved, "weight ").values(), *entries(saved, "statistic ").values()]
            for place, value in zip(places, values, strict=True):
                place.copy_(value)
        if not self.strategy.plain:
            # in place of the mean, which the weights' own files have
            for name, optimizer, p in self._optimized():
                optimizer.state.pop(p, None)
                if slots := entries(saved, f"optimizer {name}."):
                    optimizer.state[p] = from_tensors(optimizer_state(optimizer, p), slots)
        if "started" in saved:
            self.start(int(saved["started"]), self.of_weights(saved, "sent"))

    def of_weights(self, saved: Tensors, name: str) -> Sent:
        """What `numbered` has saved, with the strides and the device of the weights."""
        weights = self.weights()
        tensors = {int(number): t for number, t in entries(saved, f"{name} ").items()}
        return {i: torch.empty_like(weights[i]).detach().copy_(t) for i, t in tensors.items()}

    def _optimized(self) -> Iterator[tuple[str, torch.optim.Optimizer, Tensor]]:
        """What optimizers of steps have, by a name that is the same on all replicas."""
        companions = {f"{kind} companion": o for kind, o in self.block.companions.items()}
        # of two names of one optimizer the first
        optimizers = {o: kind for kind, o in [*(self.block.optimizers | companions).items()][::-1]}
        for optimizer, kind in optimizers.items():
            if not isinstance(optimizer, Outer):
                weights = (p for group in optimizer.param_groups for p in group["params"])
                for i, p in enumerate(weights):
                    yield f"{kind} {i:05}", optimizer, p


def numbered(name: str, tensors: Sent) -> Tensors:
    """Tensors of weights as a checkpoint names them."""
    return {f"{name} {i:05}": t for i, t in tensors.items()}
