"""Weights shared by several blocks, such as an embedding tied to the output layer."""

from collections.abc import Mapping, Sequence
from math import ceil

import torch
from torch import Tensor, nn

from hybrid.solvers import peers
from hybrid.solvers.base import Links
from hybrid.solvers.numerics.optimizer_state import from_tensors, optimizer_state, to_tensors
from hybrid.solvers.state import State, digests, entries


def lags(steps_late: Sequence[float]) -> list[int]:
    """Compute L_i of blocks from the delays of their gradients in steps, see `Ties`."""
    return [ceil(late - min(steps_late)) for late in steps_late]


class Ties:
    r"""Copies of tied weights on blocks k_1 < ... < k_n, which step on the sum of their gradients.

        g_j = sum_i g_{k_i, j - L_i},   L_i = ceil(tau_{k_i} - tau_{k_n}),   g_{k, j} = 0 for j < 0

    g_{k, j} is the gradient of the j-th step on block k. If gradients are tau_k steps late, block k
    takes its j-th step after the last block does, so its gradient is used L steps later and no
    block waits. In exact steps all L are 0 (the first of them also uses gradients left over), and
    the sum is the gradient of the undivided network, added up from the last block to the first as
    in back-propagation. All blocks add up the same tensors in the same order, clip by the norm of
    these or of the network, and take the j-th step at the same rate and by the same rule, so the
    copies keep the same bits. A step sends one gradient to each other block and, with
    `peers.COMPARED`, a checksum of the copy before that step, which must equal the others'. For a
    frozen weight a digest is sent before the first step, and the weight itself if they differ.
    """

    def __init__(
        self,
        links: Links,
        parameters: Sequence[nn.Parameter],
        blocks: Sequence[int],
        lags: Sequence[int],
        optimizers: Mapping[str, torch.optim.Optimizer],
    ) -> None:
        self.links, self.blocks = links, list(blocks)
        self.parameters = [p for p in parameters if p.requires_grad]
        self.frozen = [p for p in parameters if not p.requires_grad]
        self.optimizers = optimizers
        self.lags = dict(zip(blocks, lags, strict=True))
        self.size = sum(p.numel() for p in self.parameters)
        self.is_owner = links.rank == self.blocks[0]
        self._others = [k for k in self.blocks if k != links.rank]
        self._gradients: dict[int, Tensor] = {}
        """This block's gradients by step, as long as another block may need them."""
        self._used = dict.fromkeys(self.blocks, 0)
        """By block, the number of its gradients already added up."""
        self.steps = 0
        """Steps of this block so far."""
        self._resumed = False
        self._started = False
        links.meet(self.blocks)

    def sum_gradients(self, exact: bool) -> None:
        """Replace this block's gradient by g_j, before its j-th step."""
        self.begin()
        if not self.parameters:
            return
        gradient, j = torch.cat([*map(_gradient, self.parameters)]), self.steps
        if peers.COMPARED:  # as bytes, which are exact in every number format
            bits = peers.checksum(self.parameters).to_bytes(4, "big")
            gradient = torch.cat([gradient, gradient.new_tensor([*bits])])
        self._gradients[j] = gradient
        for block in self._others:
            self.links.to_block(block, gradient)
        total: Tensor | None = None
        for block in reversed(self.blocks):
            last = j - (0 if exact else self.lags[block])
            for step in range(self._used[block], last + 1):
                term, self._used[block] = self._gradient_of(block, step), step + 1
                total = term if total is None else total + term
        self.steps += 1
        total = gradient.new_zeros(self.size) if total is None else total
        parts = total.split([p.numel() for p in self.parameters])
        for p, part in zip(self.parameters, parts, strict=True):
            if p.requires_grad:
                p.grad = part.view(p.shape).to(p.dtype).clone(memory_format=torch.preserve_format)
        # a resumed run may have to send gradients again that the others have not used
        needed = self.steps - max(self.lags.values()) - 1
        self._gradients = {step: g for step, g in self._gradients.items() if step >= needed}

    def _gradient_of(self, block: int, step: int) -> Tensor:
        """Return g_{k, j}; another block's gradients arrive in the order of its steps."""
        local = self._gradients[step]
        if block == self.links.rank:
            return local[: self.size]
        while self._next[block] <= step:
            gradient = self.links.from_block(block)
            self._next[block] += 1
        bits = gradient[self.size :], local[self.size :]
        if all(map(len, bits)) and not torch.equal(*bits):
            raise RuntimeError(
                f"a weight of blocks {block} and {self.links.rank} differs between them before "
                f"their step {step}: report it, or see what in a solver or an optimizer of your "
                "own depends on the block"
            )
        return gradient[: self.size]

    def begin(self) -> None:
        """Exchange step counts and resend unused gradients, or copy the first block's weights.

        All blocks call it before the first of them trains: a block that waited for the others in
        its first step would hold back activations that they need for theirs.
        """
        if self._started:
            return
        self._started = True
        self._copy_frozen()
        if not self.parameters:
            return
        # after a resume on another grid the gradients under way are unknown
        count = torch.tensor([self.steps if self._resumed else -1])
        for block in self._others:
            self.links.to_block(block, count)
        steps = {k: int(self.links.from_block(k)) for k in self._others}
        if min(int(count), *steps.values()) < 0:
            self.steps, steps = 0, dict.fromkeys(steps, 0)
            self._used = dict.fromkeys(self.blocks, 0)
            self._gradients = {}
            for p in self.parameters:
                p.detach().copy_(self._from_owner(p.detach()))
                for optimizer in dict.fromkeys(self.optimizers.values()):
                    self._copy_optimizer_state(optimizer, p)
        self._next = {k: max(0, self.steps - self.lags[k]) for k in self._others}
        for block in self._others:
            for step in range(max(0, steps[block] - self.lags[self.links.rank]), self.steps):
                self.links.to_block(block, self._gradients[step])

    def _copy_frozen(self) -> None:
        """Copy the first block's frozen weights to the blocks that have other ones."""
        local = digests(self.frozen)
        partners = self._others if self.is_owner else self.blocks[:1]
        for block in partners if self.frozen else ():
            self.links.to_block(block, local)
        for block in partners if self.frozen else ():
            other = self.links.from_block(block)
            for p, same in zip(self.frozen, (other == local).all(1).tolist(), strict=True):
                if not same and self.is_owner:
                    self.links.to_block(block, p.detach().clone())
                elif not same:
                    p.detach().copy_(self.links.from_block(block))

    def _copy_optimizer_state(self, optimizer: torch.optim.Optimizer, p: nn.Parameter) -> None:
        """Copy the state, possibly empty, of the first block's parameter to all blocks."""
        slots = to_tensors(optimizer.state.get(p, {}))
        names = "\n".join(["", *sorted(slots)]) + "\n"
        names = bytes(self._from_owner(torch.tensor([*names.encode()])).tolist()).decode()
        state = {name: self._from_owner(slots.get(name)) for name in names.split("\n")[1:-1]}
        if not self.is_owner:
            optimizer.state.pop(p, None)
            if state:
                optimizer.state[p] = from_tensors(optimizer_state(optimizer, p), state)

    def _from_owner(self, tensor: Tensor | None) -> Tensor:
        """Send a tensor of the first block to the others."""
        if not self.is_owner:
            return self.links.from_block(self.blocks[0])
        assert tensor is not None
        for block in self._others:
            self.links.to_block(block, tensor.clone())
        return tensor

    def state(self) -> State:
        """Return the step counts, and the gradients that other blocks may not have used yet."""
        if not any(self.lags.values()):  # all gradients are used, and the copies are equal
            return State()
        gradients = {f"gradient {step}": g for step, g in self._gradients.items()}
        used = torch.tensor([*self._used.values()])
        return State(flight={"steps": torch.tensor(self.steps), "used": used, **gradients})

    def load_state(self, state: State) -> None:
        self._resumed = "steps" in state.flight
        if not self._resumed:
            return
        self.steps = int(state.flight["steps"])
        self._used = dict(zip(self.blocks, state.flight["used"].tolist(), strict=True))
        self._gradients = {int(step): g for step, g in entries(state.flight, "gradient ").items()}


class AllTies:
    """The ties of a block, one for each set of blocks that share weights."""

    def __init__(self, ties: Sequence[Ties] = ()) -> None:
        self.ties = list(ties)

    def wait_for_each_other(self) -> None:
        """Sum gradients of the same step: a program of one step can wait for the other blocks."""
        for each in self.ties:
            each.lags = dict.fromkeys(each.lags, 0)

    def begin(self) -> None:
        """Exchange step counts before the first step; all blocks call it together."""
        for each in self.ties:
            each.begin()

    def sum_gradients(self, exact: bool) -> None:
        """Replace gradients of tied weights by the sums over blocks, before a step."""
        for each in self.ties:
            each.sum_gradients(exact)

    def without_copies(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Leave out gradients of weights that an earlier block counts in the network's norm."""
        copies = [p for each in self.ties if not each.is_owner for p in each.parameters]
        left_out = {id(p.grad) for p in copies}
        return [g for g in gradients if id(g) not in left_out]

    def by_blocks(self, gradients: Sequence[Tensor]) -> list[list[Tensor]]:
        """Divide gradients by the blocks that have the weight, this block's alone first."""
        ids = {id(g) for g in gradients}
        by_tie = ([p.grad for p in each.parameters] for each in self.ties)
        sets = [[g for g in each if g is not None and id(g) in ids] for each in by_tie]
        tied = {id(g) for tie in sets for g in tie}
        return [[g for g in gradients if id(g) not in tied], *sets]

    def state(self) -> State:
        states = enumerate(each.state().flight for each in self.ties)
        return State(flight={f"{i} {name}": x for i, each in states for name, x in each.items()})

    def load_state(self, state: State) -> None:
        for i, each in enumerate(self.ties):
            each.load_state(State(flight=entries(state.flight, f"{i} ")))


def _gradient(p: nn.Parameter) -> Tensor:
    return (torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1)
