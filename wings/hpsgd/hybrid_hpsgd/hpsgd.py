"""HPSGD: replicas keep training while the gradients of h steps are summed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from hybrid.solvers.acting import Acts, Count, CountOrZero, Needs
from hybrid.solvers.numerics.group_rates import set_rate
from hybrid.solvers.state import State
from hybrid.solvers.sync.base import ANOTHER, Strategy
from hybrid.solvers.sync.periodic import ByWeight, PeriodicSync, numbered
from hybrid.solvers.sync.reduction import BUCKET_BYTES, pack, use_counts, used_anywhere

LAG, READY = "lag", "ready"
DRIFTS = Acts(
    "replicas drift before a round lands (sync.lag is above 0, or sync.commit is ready)",
    lambda run: run.sync.lag or run.sync.commit == READY,
)
LAGS = Acts("sync.commit is lag", lambda run: run.sync.commit == LAG)
ONE_BLOCK = Needs(
    "there is one block, because several would take their sums at different steps",
    lambda run: run.setup.blocks == 1,
    "set split.blocks=1, or leave it out",
)


@dataclass(frozen=True)
class HPSGD(Strategy):
    r"""Hierarchical parallel SGD, following Zhou et al., arXiv 2009.02701, with fixed rounds.

    B: the weights all replicas agree on; S_r: the sum of replica r's gradients in this round, over
    its n_r samples of N, weight decay wd included.

        each step         g_r = mean gradient at w_r + wd w_r
                          S_r <- S_r + (n_r / N) g_r,   w_r <- w_r - lr g_r
        every h-th        P = sum over replicas of S_r, under way;   S_r <- 0
        when P is taken   B <- optimizer step from B on P, without decay;   w_r <- B

    When is it taken? With commit "lag", L = `lag` steps after it was sent, on all ranks: runs are
    repeatable. With "ready", as in the paper, where a rank polls whether P has landed: at each
    replica's first step at which P is there, and before the next sum begins at the latest. That
    depends on the time that messages take, so a run cannot be repeated; it is for one block, and P
    is stepped on at the learning rate of the step at which it was sent, the same on all replicas.

    Local steps are plain SGD, without momentum. The local steps since P was sent are thrown away
    (drift "discard", as in the paper; their gradients are in S_r) or kept ("keep"):
    w_r <- B - lr (N / n_r) S_r. With L = 0 and h = 1 a round is one step of the optimizer, and its
    weights are all-reduce's, bit for bit; with L = 0 and plain SGD they are local SGD's. A round
    may last longer than an epoch.

    A step on P replaces h steps, which only SGD allows: Adam and similar optimizers divide by the
    gradient's size, so they would take one step of the usual size in place of h.
    """

    name: ClassVar[str] = "hpsgd"
    anchored: ClassVar[bool] = True
    needs: ClassVar[tuple[Needs, ...]] = (
        Needs(
            "solver.clip_norm is 0, because it steps on sums of the gradients of several steps",
            lambda run: not getattr(run.solver, "clip_norm", 0.0),
            "leave solver.clip_norm out, or choose sync.name=all-reduce",
        ),
        Needs(
            "all steps are of one kind, because it adds up their gradients, so that there are no "
            "corrections and no serial epochs beside a solver's own steps",
            lambda run: run.solver.exact or not (run.solver.alternates or run.setup.corrects),
            f"leave rounds.serial_epochs out, or {ANOTHER}",
        ),
    )

    steps: Count = 4
    """h, steps between sums of gradients."""
    commit: Annotated[Literal["lag", "ready"], ONE_BLOCK] = "lag"
    """When a sum is applied: lag steps later, or once it is there, which cannot be repeated."""
    lag: Annotated[CountOrZero, LAGS] = 4
    """L, steps until their sum is applied."""
    drift: Annotated[Literal["discard", "keep"], DRIFTS] = "keep"
    """Discard or keep the local steps taken until then."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.commit == LAG and self.lag > self.steps:
            raise ValueError(
                f"lag is {self.lag} of rounds of {self.steps} steps: choose one of at most "
                "sync.steps, or two rounds would be under way"
            )
        if self.commit == READY and self.order == "replicas":
            raise ValueError(
                "order is 'replicas', whose two messages take a step of every replica at the same "
                "time, and commit is 'ready': leave order out"
            )

    @property
    def late(self) -> bool:
        """Whether replicas take steps while a sum is under way."""
        return self.lag > 0 or self.commit == READY

    def copies(self, replicas: int) -> float:
        """Count B, a slot of `Outer` and S and, with a lag, P twice: by weight and packed."""
        return 5 if self.late else 3


class HPSGDSync(PeriodicSync):
    """One replica's drift, and the round under way."""

    strategy: HPSGD

    def begin(self) -> None:
        super().begin()
        self._decays = [0.0] * len(self.weights())
        """wd of every weight, if the gradient of a step includes it in place of the optimizer."""
        optimizer = self.block.optimizers["exact"]
        self._ready: Callable[[], bool] = lambda: False
        """Whether the sum under way is there, with commit "ready"."""
        self._rates: list[list[float]] = []
        """Learning rate and momentum of each group at the step when that sum was sent, likewise."""
        if self.strategy.commit == READY:
            optimizer.register_step_pre_hook(self._set_rates)
            trial = self.peers.sum(torch.zeros(1))
            trial.finish()
            if trial.ready is None:
                raise ValueError(
                    "sync.commit is 'ready', and nobody can ask on a virtual clock, whose ranks "
                    "run in turn, whether a sum is there: choose sync.commit=lag, or "
                    "links.kind=threads"
                )
        if self.strategy.steps > 1 or self.strategy.late:
            groups = optimizer.param_groups
            minimizes = not any(group.get("maximize") for group in groups)
            rates = {group.get("lr_ratio", 1.0) for group in groups}
            if not (isinstance(optimizer, torch.optim.SGD) and minimizes and len(rates) == 1):
                raise ValueError(
                    f"the optimizer is {type(optimizer).__name__}, and sync.name 'hpsgd' takes one "
                    "step of it on the gradients of several, which needs SGD that minimizes with "
                    "one learning rate: choose optimizer.name=sgd, or sync.name=local-sgd"
                )
            self._decays = [g["weight_decay"] for g in groups for _ in g["params"]]
            for group in groups:
                group["weight_decay"] = 0.0
        self._sums: ByWeight = {}
        """S_r, of the weights with a gradient in this round."""
        self._rate = 0.0
        """Of the newest step; a number or, in a run, what `set_rate` takes."""
        self._landed = False
        """Whether the newest step is the optimizer's step on P."""

    def before_step(self, kind: str, rate: float) -> bool:
        h, done = self.strategy.steps, self.count + 1
        if not self.count:
            self._move_anchor()  # a run may resume with weights from within a round
        gradients = self._gradients()
        self._rate = rate
        add(gradients, self._sums)
        self._landed = self.is_due(done)
        if not self._landed and not self.strategy.late and done % h == 0:
            self._send(done)
            self._landed = True
        if self._landed:
            self._take_sum()
        else:
            self._drift(gradients)
        return self._landed

    def _gradients(self) -> ByWeight:
        """Return (n_r / N) g_r; a weight that no sample has used does not decay either."""
        return {
            i: p.grad.add(p.detach(), alpha=self.share * decay) if decay else p.grad
            for i, (p, decay) in enumerate(zip(self.weights(), self._decays, strict=True))
            if p.grad is not None
        }

    def _drift(self, gradients: ByWeight) -> None:
        """Take a plain gradient step, without the optimizer."""
        weights = {i: p.detach() for i, p in enumerate(self.weights())}
        add(gradients, weights, -self._rate / self.share)

    def after_replica_step(self) -> None:
        if self._landed:
            self._move_anchor()
            self.apart = self.count > self.started  # even without drift the statistics differ
            if not self.apart:
                self.join_statistics()
            elif self.strategy.drift == "keep":
                self._drift(self._sums)
        if self.strategy.late and self.count % self.strategy.steps == 0:
            self._send(self.count)

    def _send(self, count: int) -> None:
        sums, self._sums = self._sums, {}
        self.start(count, sums)
        if self.strategy.commit == READY:
            groups = self.block.optimizers["exact"].param_groups
            for group in groups:
                set_rate(group, self._rate)
            self._rates = [[group["lr"], group["momentum"]] for group in groups]

    def start(self, count: int, sent: ByWeight) -> None:
        if self.strategy.commit == LAG:
            super().start(count, sent)
            return
        self.started, self.sent = count, sent
        message = self.message()
        parts = message.split(BUCKET_BYTES // message.element_size())
        sums = [self.peers.sum(part) for part in parts]
        self._sum = lambda: torch.cat([each.finish() for each in sums])
        self._ready = lambda: all(each.ready() for each in sums if each.ready)

    def is_due(self, count: int) -> bool:
        if self.strategy.commit == LAG:
            return super().is_due(count)
        return self._sum is not None and (count % self.strategy.steps == 0 or self._ready())

    def _set_rates(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Let a step on P be the same at whichever step a replica takes it."""
        for group, (rate, momentum) in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"], group["momentum"] = rate, momentum

    def message(self) -> Tensor:
        """Pack S_r, and flags of the weights in it."""
        weights, used = self.weights(), self._used()
        sums = [self.sent[i] if u else torch.zeros_like(weights[i]) for i, u in enumerate(used)]
        return pack([*sums, use_counts(used, weights)])

    def _used(self) -> list[bool]:
        return [i in self.sent for i in range(len(self.weights()))]

    def _take_sum(self) -> None:
        """Set w = B with gradient P; a weight that no replica has used has no gradient."""
        weights, used = self.weights(), self._used()
        total, counts = [torch.empty_like(p) for p in weights], use_counts(used, weights)
        self.take([*total, counts])
        self.replace([b.clone() for b in self.anchors()])
        for p, gradient, times in zip(weights, total, used_anywhere(used, counts), strict=True):
            p.grad = gradient if times else None

    def _move_anchor(self) -> None:
        """Set B = w."""
        torch._foreach_copy_(self.anchors(), [p.detach() for p in self.weights()])

    def state(self) -> State:
        landing: dict[str, Tensor] = {}
        if self.strategy.commit == READY and self.count:
            # of each replica by itself: some have taken P, and will not send their sums again
            landing = numbered("anchor", dict(enumerate(self.anchors())))
            if self._sum is not None:
                total = self._sum()
                self._sum, self._ready = lambda: total, lambda: True
                landing |= {"total": total, "rates": torch.tensor(self._rates, dtype=torch.float64)}
        state = super().state()
        if "total" in landing:
            landing["begun"] = state.flight.pop("started")
        state.flight |= numbered("sum", self._sums) | landing
        return state

    def load_state(self, state: State) -> None:
        super().load_state(state)
        saved = state.flight
        self._sums = self.by_weight(saved, "sum")
        if not (anchors := self.by_weight(saved, "anchor")):
            return
        if self.strategy.commit == LAG:
            raise ValueError(
                "sync.commit is 'lag', and in this checkpoint some replicas have applied a sum "
                "that others have not, as 'ready' does: resume with sync.commit=ready"
            )
        torch._foreach_copy_(self.anchors(), [*anchors.values()])
        if "total" in saved:
            total = saved["total"]
            self._sum, self._ready = lambda: total, lambda: True
            self.sent, self.started = self.by_weight(saved, "sent"), int(saved["begun"])
            self._rates = saved["rates"].tolist()


def add(terms: ByWeight, sums: ByWeight, factor: float = 1.0) -> None:
    """Add multiples of terms to the sums of the same weights; a missing sum becomes a copy."""
    if both := [i for i in terms if i in sums]:
        torch._foreach_add_([sums[i] for i in both], [terms[i] for i in both], alpha=factor)
    sums |= {i: term.clone() for i, term in terms.items() if i not in sums}


HPSGD.program = HPSGDSync
