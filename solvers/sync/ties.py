"""Weights that several blocks have, such as an embedding that is the output layer's, too."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import torch
from torch import Tensor, nn

from hybrid.solvers.base import Links
from hybrid.solvers.state import State, entries


class Ties:
    r"""Copies of one weight on blocks k_1 < ... < k_n, which step on the sum of their gradients.

        g_j = sum_i g_{k_i, j - L_i},   L_i = ceil(tau_{k_i} - tau_{k_n}),   g_{k, j} = 0 for j < 0

    g_{k, j} is the gradient of the j-th step on block k. Where gradients are late, by tau_k steps,
    block k makes its j-th step after the last block does, so its gradient is used L steps later
    and nobody waits; with L = 0 the sum is the gradient of the undivided network, added up from
    the last block to the first as back-propagation does. All blocks add up the same tensors in the
    same order and step by the same rule, so the copies keep the same bits. A step sends each other
    block one gradient.
    """

    def __init__(
        self,
        links: Links,
        parameters: Sequence[nn.Parameter],
        blocks: Sequence[int],
        steps_late: Sequence[float],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.links, self.parameters, self.blocks = links, list(parameters), list(blocks)
        self.optimizer = optimizer
        least = min(steps_late)
        self.lags = {k: ceil(t - least) for k, t in zip(blocks, steps_late, strict=True)}
        self.is_owner = links.rank == self.blocks[0]
        self._others = [k for k in self.blocks if k != links.rank]
        self._gradients: dict[int, dict[int, Tensor]] = {k: {} for k in self.blocks}
        """By block and the number of its step."""
        self.steps = 0
        """Of this block so far."""
        self._resumed = False
        self._begun = False
        links.meet(self.blocks)

    def sum_gradients(self) -> None:
        """Put g_j in the place of this block's own gradient, before its j-th step."""
        self.begin()
        own, rank, j = torch.cat([*map(_gradient, self.parameters)]), self.links.rank, self.steps
        self._gradients[rank][j] = own
        for block in self._others:
            self.links.to_block(block, own)
        total: Tensor | None = None
        for block in reversed(self.blocks):
            term = self._gradient_of(block, j - self.lags[block])
            if term is not None:
                total = term if total is None else total + term
        self.steps += 1
        parts = (torch.zeros_like(own) if total is None else total).split(
            [p.numel() for p in self.parameters]
        )
        for p, part in zip(self.parameters, parts, strict=True):
            if p.requires_grad:
                p.grad = part.view(p.shape).clone(memory_format=torch.preserve_format)
        # a resumed run may have to send the others what they have not used
        self._forget(rank, self.steps - 2 * max(self.lags.values()) - 1)

    def _gradient_of(self, block: int, step: int) -> Tensor | None:
        """g_{k, j}; None for j < 0."""
        if step < 0:
            return None
        if block == self.links.rank:
            return self._gradients[block][step]
        while step not in self._gradients[block]:
            self._gradients[block][self._next[block]] = self.links.from_block(block)
            self._next[block] += 1
        self._forget(block, step)
        return self._gradients[block][step]

    def _forget(self, block: int, before: int) -> None:
        kept = self._gradients[block]
        for step in [step for step in kept if step < before]:
            del kept[step]

    def begin(self) -> None:
        """Agree on where every block is, and send what others have not used, or begin alike.

        All blocks do so before the first of them trains: one that waits for the others in its
        first step would keep from them what they need for theirs.
        """
        if self._begun:
            return
        self._begun = True
        # of a run that goes on from a checkpoint of another grid nobody knows what was under way
        own = torch.tensor([self.steps if self._resumed else -1])
        for block in self._others:
            self.links.to_block(block, own)
        at = {k: int(self.links.from_block(k)) for k in self._others} | {self.links.rank: int(own)}
        if min(at.values()) < 0:
            self.steps, at = 0, dict.fromkeys(at, 0)
            self._begin_alike()
        rank = self.links.rank
        self._next = {k: max(0, self.steps - self.lags[k]) for k in self._others}
        for block in self._others:
            for step in range(max(0, at[block] - self.lags[rank]), self.steps):
                self.links.to_block(block, self._gradients[rank][step])

    def _begin_alike(self) -> None:
        """Let all copies have the weights and the optimizer's state of the first block's."""
        for gradients in self._gradients.values():
            gradients.clear()
        for p in self.parameters:
            slots = self.optimizer.state.get(p, {})
            state = [p.detach(), *(x for _, x in sorted(slots.items()) if isinstance(x, Tensor))]
            for tensor in state:
                if self.is_owner:
                    for block in self._others:
                        self.links.to_block(block, tensor.clone())
                else:
                    tensor.copy_(self.links.from_block(self.blocks[0]))

    def state(self) -> State:
        """What the other blocks may not have used yet, and how many steps were taken."""
        rank = self.links.rank
        own = {f"gradient {step}": g for step, g in self._gradients[rank].items()}
        return State(flight={"steps": torch.tensor(self.steps), **own})

    def load_state(self, state: State) -> None:
        self._resumed = "steps" in state.flight
        if not self._resumed:
            return
        self.steps = int(state.flight["steps"])
        kept = entries(state.flight, "gradient ")
        self._gradients[self.links.rank] = {int(step): g for step, g in kept.items()}


class AllTies:
    """The ties of a block, of which there is one for each set of blocks that have something."""

    def __init__(self, ties: Sequence[Ties] = ()) -> None:
        self.ties = list(ties)

    def wait_for_each_other(self) -> None:
        """Sum gradients of the same step: blocks that make but one can wait for each other."""
        for each in self.ties:
            each.lags = dict.fromkeys(each.lags, 0)

    def begin(self) -> None:
        """Before the first step, on all blocks at once: agree on where each of them is."""
        for each in self.ties:
            each.begin()

    def sum_gradients(self) -> None:
        """Before a step: gradients of what other blocks have, too, become the sums of all."""
        for each in self.ties:
            each.sum_gradients()

    def counted(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Those that count in the norm of all gradients: not of what an earlier block has, too."""
        copies = [p for each in self.ties if not each.is_owner for p in each.parameters]
        left_out = {id(p.grad) for p in copies}
        return [g for g in gradients if id(g) not in left_out]

    def state(self) -> State:
        """The states of all."""
        flight = {
            f"{i} {name}": x
            for i, each in enumerate(self.ties)
            for name, x in each.state().flight.items()
        }
        return State(flight=flight)

    def load_state(self, state: State) -> None:
        for i, each in enumerate(self.ties):
            each.load_state(State(flight=entries(state.flight, f"{i} ")))


def _gradient(p: nn.Parameter) -> Tensor:
    return (torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1)
