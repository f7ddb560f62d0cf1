"""Rounds of replicas: each steps by itself, and every h steps they sum their changes."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hybrid.solvers.numerics.optimizer_state import flat, from_tensors, optimizer_state, to_tensors
from hybrid.solvers.peers import Sync, statistics
from hybrid.solvers.state import State, Tensors, entries
from hybrid.solvers.sync.reduction import Reduction, pack, unpack

ByWeight = dict[int, Tensor]
"""Tensors by the number of their weight; some weights may have none."""


class Outer(torch.optim.Optimizer):
    """The anchor and the outer momentum of each weight, equal on all replicas.

    They are an optimizer's state, so checkpoints keep them with the weight.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Set B = w and the momentum 0."""
        for p in self.weights():
            self.state[p] = {"anchor": p.detach().clone(), "momentum": torch.zeros_like(p)}

    def weights(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"]]

    def slots(self, name: str) -> list[Tensor]:
        return [self.state[p][name] for p in self.weights()]


class PeriodicSync(Sync):
    """Replicas whose weights differ within a round.

        each step      a step of the replica by itself
        every h-th     the sum over replicas begins
        L steps later  an outer step on the sum, the same on all replicas

    Rounds do not end with an epoch. An evaluation uses the replicas' mean, weighted by samples:

        mean of x = sum_r (n_r / N) x_r

    A checkpoint has the means of weights and momenta, for any other grid, and also those of every
    replica, from which the same grid resumes.

    An anchored strategy has weights B that all replicas agree on, from which each one drifts.
    """

    def begin(self) -> None:
        strategy = self.strategy
        self.count = 0
        """Steps since the rounds began."""
        self.apart = False
        """Whether replicas may have different weights."""
        self._exact = Reduction(self.peers, order=strategy.order)
        messages: Any = getattr(strategy, "messages", "float32")
        self._rounded = Reduction(self.peers, messages, strategy.order)
        self._sum: Callable[[], Tensor] | None = None
        """Waits for the sum under way, if there is one."""
        self.sent: ByWeight = {}
        """This replica's term of the sum under way."""
        self.started = 0
        """The step after which the sum under way began."""
        self._residuals: Tensors = {}
        """The rounding errors of messages before the sum under way."""
        if strategy.anchored:
            exact = self.block.optimizers["exact"]
            self.outer = Outer([p for group in exact.param_groups for p in group["params"]])
            self.block.optimizers["outer"] = self.outer

    def before_step(self, kind: str, rate: float) -> bool:
        """Rescale the gradient to that of the replica's own mean loss."""
        if self.share != 1:
            for p in self.block.stepping(kind):
                if p.grad is not None:
                    p.grad.div_(self.share)
        return True

    def after_step(self, kind: str) -> None:
        if kind != "auxiliary":  # auxiliary steps belong to the round's next step
            for _, optimizer, p in () if self.count else self._optimized():
                momenta_of(optimizer, p)  # which refuses some
            self.count += 1
            self.apart = True
            self.after_replica_step()

    @abstractmethod
    def after_replica_step(self) -> None:
        """Do the strategy's work after each step of the replica."""

    def message(self) -> Tensor:
        """Pack this replica's term of the sum, `sent`, into a vector."""
        return pack([*self.sent.values()])

    def start(self, count: int, sent: ByWeight) -> None:
        """Begin the sum of the round that ends with step `count`."""
        self.started, self.sent = count, sent
        self._residuals = dict(self._rounded.residuals)
        self._sum = self._rounded.start(self.message())

    def is_due(self, count: int) -> bool:
        """Whether an outer step on the sum under way is due after step `count`.

        It is also due when the next sum begins: a run may resume with another lag.
        """
        late = count >= self.started + self.strategy.lag
        return self._sum is not None and (late or count % self.strategy.steps == 0)

    def take(self, into: list[Tensor]) -> None:
        """Wait for the sum under way, and write it into the tensors."""
        assert self._sum is not None
        unpack(self._sum(), into)
        self._sum, self.sent = None, {}

    def join(self) -> None:
        if self._sum is not None:
            self._sum()  # a step with it would come after the last evaluation
            self._sum = None
        self.agree()

    def agree(self) -> None:
        """Replace weights and running statistics by their means over replicas."""
        if self.apart:
            self.replace(self._means([p.detach() for p in self.weights()]))
            self.join_statistics()
            self.apart = False

    @contextmanager
    def joined(self) -> Iterator[None]:
        apart, weights = self.apart, [p.data for p in self.weights()]
        momenta = self._momenta()
        others = [*statistics(self.block.module), *momenta]
        before = [t.clone() for t in others]
        self.agree()
        set_all(momenta, self._means(momenta))
        try:
            yield
        finally:
            self.replace(weights)
            set_all(others, before)
            self.apart = apart

    def _momenta(self) -> list[Tensor]:
        """List state shaped like its weight, of weights that all replicas' optimizers stepped."""
        optimized = [*self._optimized()]
        stepped = torch.tensor([float(p in optimizer.state) for _, optimizer, p in optimized])
        everywhere = (self._exact.start(stepped)() == self.peers.replicas).tolist()
        return [
            value
            for (_, optimizer, p), is_common in zip(optimized, everywhere, strict=True)
            for value in (momenta_of(optimizer, p) if is_common else ())
        ]

    def join_statistics(self) -> None:
        """Replace running statistics by their means over replicas."""
        running = statistics(self.block.module)
        set_all(running, self._means(running))

    def _means(self, tensors: list[Tensor]) -> list[Tensor]:
        """Compute means over replicas in new memory."""
        if means := [t.clone() for t in tensors]:
            unpack(self._exact.start(pack(tensors) * self.share)(), means)
        return means

    def weights(self) -> list[torch.nn.Parameter]:
        """List the weights that replicas agree on."""
        return self.outer.weights() if self.strategy.anchored else self.block.everything()

    def anchors(self) -> list[Tensor]:
        """Return B of every weight, which starts at the weights."""
        if not self.outer.state:
            self.outer.step()
        return self.outer.slots("anchor")

    def replace(self, weights: list[Tensor]) -> None:
        """Point the weights to other values, which must have the same strides."""
        for p, value in zip(self.weights(), weights, strict=True):
            p.data = value

    def state(self) -> State:
        if not self.count:
            return State()
        # a resumed run sends the sum under way again
        rounding = self._rounded.residuals if self._sum is None else self._residuals
        saved = {f"rounding {name}": residual for name, residual in rounding.items()}
        saved |= {"count": torch.tensor(self.count), "apart": torch.tensor(self.apart)}
        if self.apart:
            running = [b.clone() for b in statistics(self.block.module)]
            saved |= numbered("weight", dict(enumerate(p.detach() for p in self.weights())))
            saved |= numbered("statistic", dict(enumerate(running)))
        for name, optimizer, p in self._optimized():
            slots = to_tensors(optimizer.state.get(p, {})).items()
            saved |= {f"optimizer {name}.{slot}": t.clone() for slot, t in slots}
        if self._sum is not None:
            saved |= {"started": torch.tensor(self.started), **numbered("sent", self.sent)}
        return State(flight=saved)

    def load_state(self, state: State) -> None:
        saved = state.flight
        if "count" not in saved:
            return
        self._rounded.residuals = entries(saved, "rounding ")
        self.count, self.apart = int(saved["count"]), bool(saved["apart"])
        if self.apart:
            places = [p.data for p in self.weights()] + statistics(self.block.module)
            values = [*entries(saved, "weight ").values(), *entries(saved, "statistic ").values()]
            set_all(places, values)
        for name, optimizer, p in self._optimized():
            optimizer.state.pop(p, None)
            if slots := entries(saved, f"optimizer {name}."):
                optimizer.state[p] = from_tensors(optimizer_state(optimizer, p), slots)
        if "started" in saved:
            self.start(int(saved["started"]), self.by_weight(saved, "sent"))

    def by_weight(self, saved: Tensors, name: str) -> ByWeight:
        """Read what `numbered` wrote, with the strides and the device of the weights."""
        weights = self.weights()
        tensors = {int(number): t for number, t in entries(saved, f"{name} ").items()}
        return {i: torch.empty_like(weights[i]).detach().copy_(t) for i, t in tensors.items()}

    def _optimized(self) -> Iterator[tuple[str, torch.optim.Optimizer, Tensor]]:
        """Iterate over the parameters of all optimizers, named alike on all replicas."""
        companions = {f"{kind} companion": o for kind, o in self.block.companions.items()}
        # an optimizer with two names goes by the first
        optimizers = {o: kind for kind, o in [*(self.block.optimizers | companions).items()][::-1]}
        for optimizer, kind in optimizers.items():
            if not isinstance(optimizer, Outer):
                weights = (p for group in optimizer.param_groups for p in group["params"])
                for i, p in enumerate(weights):
                    yield f"{kind} {i:05}", optimizer, p


def momenta_of(optimizer: torch.optim.Optimizer, p: Tensor) -> list[Tensor]:
    """The state shaped like a weight; ValueError for codes, such as 8-bit ones: no mean is one."""
    state = optimizer.state.get(p, {}) if p.dim() else {}
    alike = [x for x in state.values() if isinstance(x, Tensor) and x.shape == p.shape]
    if flat(state).keys() != state.keys() or any(x.dtype.itemsize == 1 for x in alike):
        raise ValueError(
            f"{type(optimizer).__name__} keeps codes of a parameter, and sync.name averages what "
            "it keeps: choose sync.name=all-reduce, or another optimizer"
        )
    return alike


def set_all(tensors: list[Tensor], values: list[Tensor]) -> None:
    """Copy values into tensors, in place."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.data.copy_(value)


def numbered(name: str, tensors: ByWeight) -> Tensors:
    """Name the tensors of weights for a checkpoint."""
    return {f"{name} {i:05}": t for i, t in tensors.items()}
