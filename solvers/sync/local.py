"""What strategies share whose replicas step by themselves between rounds of communication."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from solvers.state import State, Tensors, entries
from solvers.sync.base import Sync, statistics
from solvers.sync.messages import MessageFormat
from solvers.sync.reduction import Reduction, memory, packed, unpack


class Outer(torch.optim.Optimizer):
    """What is kept of each weight beside the optimisers of its steps, alike on all replicas.

    In the form of an optimiser, so that checkpoints keep it with the weight.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Begin: B = w."""
        for p in self.weights():
            self.state[p] = {"anchor": p.detach().clone(), "momentum": torch.zeros_like(p)}

    def weights(self) -> list[Any]:
        """Its parameters, in order."""
        return [p for group in self.param_groups for p in group["params"]]

    def kept(self, name: str) -> list[Tensor]:
        """Of every weight."""
        return [self.state[p][name] for p in self.weights()]


class LocalSync(Sync):
    """Replicas whose weights differ within a round.

    At the end of an epoch they become equal, with all that their optimisers keep, which is then
    the mean over replicas; within one a checkpoint keeps every replica's own.
    """

    def begin(self) -> None:
        self.count = 0
        """Steps since the replicas were equal."""
        self._mean = Reduction(self.peers, self._messages)
        self._plain = Reduction(self.peers)

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
        self.stepped()

    @abstractmethod
    def stepped(self) -> None:
        """Another step has been made."""

    @abstractmethod
    def settle(self) -> None:
        """End the round, and what is under way."""

    def join(self) -> None:
        if not self.count:
            return
        self.settle()
        kept = [memory(t) for name, t in self._optimiser_state().items() if self.drifts(name)]
        if kept:
            unpack(self.sum(packed(kept)) / self.peers.replicas, kept)
        self.join_statistics()
        self.count = 0

    def drifts(self, name: str) -> bool:
        """Whether what an optimiser keeps, by name, differs between replicas within a round."""
        return True

    def join_statistics(self) -> None:
        """Let running statistics be their mean over replicas."""
        moved = statistics(self.block.module)
        if moved:
            unpack(self.sum(packed(moved)) / self.peers.replicas, moved)

    def sum(self, vector: Tensor) -> Tensor:
        """Over replicas, exact, at once."""
        return self._plain.start(vector)()

    def weights(self) -> list[torch.nn.Parameter]:
        """What rounds are about."""
        return self.block.everything()

    def replace(self, weights: list[Tensor]) -> None:
        """Other values, in memory of their own, with the strides that a fresh weight has.

        A sum may have others where a dimension is 1, and then other kernels, and bits, follow.
        """
        for p, new in zip(self.weights(), weights, strict=True):
            same = new.stride() == p.stride()
            p.data = new if same else torch.empty_like(p.data).copy_(new)

    def _optimiser_state(self) -> Tensors:
        """What the optimisers of steps keep of each weight, by name; numbers of steps are alike."""
        found: Tensors = {}
        seen: set[int] = set()
        companions = {f"{kind} companion": o for kind, o in self.block.companions.items()}
        for kind, optimiser in (self.block.optimisers | companions).items():
            if id(optimiser) in seen or isinstance(optimiser, Outer):
                continue
            seen.add(id(optimiser))
            weights = (p for group in optimiser.param_groups for p in group["params"])
            for i, p in enumerate(weights):
                for slot, value in optimiser.state.get(p, {}).items():
                    if isinstance(value, Tensor) and value.dim():
                        found[f"{kind} {i:05}.{slot}"] = value
        return found

    def state(self) -> State:
        rounding = {f"rounding {name}": t for name, t in self.rounding().items()}
        if not self.count:
            return State(flight=rounding)
        own = {f"weight {i:05}": p.detach() for i, p in enumerate(self.weights())}
        own |= {f"statistic {i:05}": b for i, b in enumerate(statistics(self.block.module))}
        own |= {f"optimiser {name}": value for name, value in self._optimiser_state().items()}
        return State(flight=own | rounding | {"count": torch.tensor(self.count)} | self.under_way())

    def load_state(self, state: State) -> None:
        kept = state.flight
        self._mean.load_state(entries(kept, "rounding "))
        if "count" not in kept:
            return
        self.count = int(kept["count"])
        for p, new in zip(self.weights(), entries(kept, "weight ").values(), strict=True):
            p.data.copy_(new)
        moved = statistics(self.block.module)
        for b, new in zip(moved, entries(kept, "statistic ").values(), strict=True):
            b.copy_(new)
        mine = self._optimiser_state()
        for name, value in entries(kept, "optimiser ").items():
            mine[name].copy_(value)
        self.go_on(kept)

    def rounding(self) -> Tensors:
        """What messages have left out, but for one that a resumed run sends again."""
        return self._mean.state()

    def under_way(self) -> Tensors:
        """What a checkpoint within a round keeps besides."""
        return {}

    def go_on(self, kept: Tensors) -> None:
        """Take back what `under_way` gave."""


class AnchoredSync(LocalSync):
    """Replicas that agree on weights B, the anchor, from which each one drifts."""

    def begin(self) -> None:
        super().begin()
        exact = self.block.optimisers["exact"]
        self.outer = Outer([p for group in exact.param_groups for p in group["params"]])
        self.block.optimisers["outer"] = self.outer

    def weights(self) -> list[torch.nn.Parameter]:
        return self.outer.weights()

    def anchors(self) -> list[Tensor]:
        """B of every weight; before the first step moves one, the weights."""
        if not self.outer.state:
            self.outer.step()
        return self.outer.kept("anchor")

    def back(self) -> None:
        """w = B."""
        self.replace([b.clone() for b in self.anchors()])

    def anchor(self) -> None:
        """B = w."""
        torch._foreach_copy_(self.anchors(), [p.detach() for p in self.weights()])
