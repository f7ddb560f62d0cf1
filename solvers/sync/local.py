"""What strategies share whose replicas step by themselves between rounds of communication."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from hybrid.solvers.acting import Acts
from hybrid.solvers.state import State, Tensors, entries
from hybrid.solvers.sync.base import Sync, statistics
from hybrid.solvers.sync.messages import MessageFormat
from hybrid.solvers.sync.reduction import Reduction, packed, unpack

OptimizerState = Annotated[
    Literal["own", "mean"],
    Acts(
        "the optimizer keeps something of a weight from step to step",
        lambda run: run.optimizer_keeps_state,
        "leave it out, or give the optimizer a momentum",
    ),
]
"""Of the replicas, between rounds: each keeps its own, or all take the mean of a round's end."""


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


class LocalSync(Sync):
    """Replicas whose weights differ within a round.

    A round may last longer than an epoch: nothing ends at an epoch's end. An evaluation sees the
    replicas' mean. A checkpoint keeps that as the network's weights, for any other grid, and every
    replica's own beside it, from which the replicas go on. A replica counts by its samples:

        mean of x = sum_r (n_r / N) x_r
    """

    own_optimizers: ClassVar[bool] = True
    """Whether what the optimizers of steps keep may differ between replicas."""

    def begin(self) -> None:
        self.count = 0
        """Steps since the rounds began."""
        self.apart = False
        """Whether replicas may have different weights."""
        self._mean = Reduction(self.peers, self._messages, self.strategy.order)
        self._plain = Reduction(self.peers, order=self.strategy.order)

    @property
    def _messages(self) -> MessageFormat:
        return "float32"

    def before_step(self, kind: str, rate: float) -> bool:
        """The gradient of the replica's own mean."""
        if self.share != 1:
            for p in self.block.stepping(kind):
                if p.grad is not None:
                    p.grad.div_(self.share)
        return True

    def after_step(self, kind: str) -> None:
        if kind == "auxiliary":
            return  # a round takes what those move with it
        self.count += 1
        self.apart = True
        self.after_own_step()

    @abstractmethod
    def after_own_step(self) -> None:
        """Called after each of the replica's own steps."""

    def join(self) -> None:
        self.agree()

    def agree(self) -> None:
        """Let weights and running statistics be their mean over replicas."""
        if self.apart:
            self.replace(self.mean([p.detach() for p in self.weights()]))
            self.join_statistics()
            self.apart = False

    @contextmanager
    def joined(self) -> Iterator[None]:
        apart, weights, moved = self.apart, self.weights(), statistics(self.block.module)
        if self.own_optimizers:
            moved += self._slots().values()
        own, values = [p.data for p in weights], [t.clone() for t in moved]
        self.agree()
        if self.own_optimizers:
            self.join_optimizers()
        try:
            yield
        finally:
            for p, mine in zip(weights, own, strict=True):
                p.data = mine
            for t, mine in zip(moved, values, strict=True):
                t.data.copy_(mine)
            self.apart = apart

    def mean(self, tensors: list[Tensor]) -> list[Tensor]:
        """Over replicas, exact, at once, in memory of its own."""
        new = [t.clone() for t in tensors]
        if new:
            unpack(self._plain.start(packed(tensors) * self.share)(), new)
        return new

    def join_statistics(self) -> None:
        """Let running statistics be their mean over replicas."""
        moved = statistics(self.block.module)
        for b, new in zip(moved, self.mean(moved), strict=True):
            b.data.copy_(new)

    def join_optimizers(self) -> None:
        """Let what the optimizers of steps keep be its mean over replicas.

        Of a weight that some replica has not stepped yet each keeps its own.
        """
        weights = self._optimized()
        stepped = torch.tensor([float(p in o.state) for o, p in weights.values()])
        everywhere = (self._plain.start(stepped)() == self.peers.replicas).tolist()
        found = [
            value
            for (optimizer, p), all_ in zip(weights.values(), everywhere, strict=True)
            for slot, value in (optimizer.state[p].items() if all_ else ())
            if isinstance(value, Tensor) and value.shape == p.shape and slot != "step"
        ]
        for value, new in zip(found, self.mean(found), strict=True):
            value.copy_(new)

    def weights(self) -> list[torch.nn.Parameter]:
        """The weights that replicas agree on."""
        return self.block.everything()

    def replace(self, weights: list[Tensor]) -> None:
        """Other values, in memory of their own, with the strides that a fresh weight has.

        A sum may have others where a dimension is 1, and then other kernels, and bits, follow.
        """
        for p, new in zip(self.weights(), weights, strict=True):
            same = new.stride() == p.stride()
            p.data = new if same else torch.empty_like(p.data).copy_(new)

    def _optimized(self) -> dict[str, tuple[torch.optim.Optimizer, Tensor]]:
        """The weights that optimizers of steps have, by a name that is the same on all replicas."""
        found: dict[str, tuple[torch.optim.Optimizer, Tensor]] = {}
        seen: set[int] = set()
        companions = {f"{kind} companion": o for kind, o in self.block.companions.items()}
        for kind, optimizer in (self.block.optimizers | companions).items():
            if id(optimizer) in seen or isinstance(optimizer, Outer):
                continue
            seen.add(id(optimizer))
            weights = (p for group in optimizer.param_groups for p in group["params"])
            found |= {f"{kind} {i:05}": (optimizer, p) for i, p in enumerate(weights)}
        return found

    def _slots(self) -> Tensors:
        """What those optimizers keep, as tensors."""
        return {
            f"{name}.{slot}": value
            for name, (optimizer, p) in self._optimized().items()
            for slot, value in optimizer.state.get(p, {}).items()
            if isinstance(value, Tensor)
        }

    def state(self) -> State:
        rounding = {f"rounding {name}": t for name, t in self.rounding().items()}
        if not self.count:
            return State(flight=rounding)
        own: Tensors = {}
        if self.apart:
            own |= {f"weight {i:05}": p.detach() for i, p in enumerate(self.weights())}
            moved = statistics(self.block.module)
            own |= {f"statistic {i:05}": b.clone() for i, b in enumerate(moved)}
        if self.own_optimizers:
            slots = self._slots().items()
            own |= {f"optimizer {name}": value.clone() for name, value in slots}
        counts = {"count": torch.tensor(self.count), "apart": torch.tensor(self.apart)}
        return State(flight=own | rounding | counts | self.under_way())

    def load_state(self, state: State) -> None:
        saved = state.flight
        self._mean.load_state(entries(saved, "rounding "))
        if "count" not in saved:
            return
        self.count, self.apart = int(saved["count"]), bool(saved["apart"])
        if self.apart:
            moved = [p.data for p in self.weights()] + statistics(self.block.module)
            own = (entries(saved, f"{what} ").values() for what in ("weight", "statistic"))
            for values, new in zip(moved, chain(*own), strict=True):
                values.copy_(new)
        if self.own_optimizers:
            self._load_slots(entries(saved, "optimizer "))
        self.load_under_way(saved)

    def _load_slots(self, saved: Tensors) -> None:
        """In place of the mean that the weights' own files have."""
        mine, weights = self._slots(), self._optimized()
        for name, value in saved.items():
            weight, _, slot = name.partition(".")
            optimizer, p = weights[weight]
            if name in mine:
                mine[name].copy_(value)
            else:  # the first replica had none
                optimizer.state[p][slot] = value.clone()
        stepped = {name.partition(".")[0] for name in saved}
        for weight, (optimizer, p) in weights.items():
            if weight not in stepped:
                optimizer.state.pop(p, None)

    def rounding(self) -> Tensors:
        """What messages have left out, but for one that a resumed run sends again."""
        return self._mean.state()

    def under_way(self) -> Tensors:
        """What a checkpoint within a round keeps besides."""
        return {}

    def load_under_way(self, saved: Tensors) -> None:
        """Load what `under_way` gave."""


class AnchoredSync(LocalSync):
    """Replicas that agree on weights B, the anchor, from which each one drifts."""

    def begin(self) -> None:
        super().begin()
        exact = self.block.optimizers["exact"]
        self.outer = Outer([p for group in exact.param_groups for p in group["params"]])
        self.block.optimizers["outer"] = self.outer
        self._finish_sum: Callable[[], Tensor] | None = None
        """Waits for the sum under way; None: there is none."""

    def join(self) -> None:
        if self._finish_sum is not None:
            self._finish_sum()  # a step with it would come after the last evaluation
            self._finish_sum = None
        super().join()

    def weights(self) -> list[torch.nn.Parameter]:
        return self.outer.weights()

    def anchors(self) -> list[Tensor]:
        """B of every weight; before the first step moves one, the weights."""
        if not self.outer.state:
            self.outer.step()
        return self.outer.slots("anchor")

    def return_to_anchor(self) -> None:
        """w = B."""
        self.replace([b.clone() for b in self.anchors()])

    def move_anchor(self) -> None:
        """B = w."""
        torch._foreach_copy_(self.anchors(), [p.detach() for p in self.weights()])
