"""The replay buffer: the newest transitions, from which mini-batches are drawn."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """Transitions, a row each."""

    state: Tensor
    """(N, states)"""
    action: Tensor
    """(N, actions), within -1..1"""
    outcome: Tensor
    """(N, 2): the reward, and 1 where the episode ended by itself, not by a limit of time."""
    next_state: Tensor
    """(N, states)"""


def packed(
    state: Tensor, action: Tensor, reward: float, terminated: bool, next_state: Tensor
) -> Tensor:
    """One transition as a row, (1, 2 states + actions + 2)."""
    outcome = torch.tensor([reward, float(terminated)])
    return torch.cat([state, action, outcome, next_state]).unsqueeze(0)


class Replay:
    """A ring of rows, allocated once: the newest row replaces the oldest."""

    def __init__(self, size: int, states: int, actions: int) -> None:
        self.rows = torch.empty(size, 2 * states + actions + 2)
        self.sizes = [states, actions, 2, states]
        self.added = 0
        """Rows ever added; row n is at n modulo the size."""

    def __len__(self) -> int:
        return min(self.added, len(self.rows))

    def add(self, rows: Tensor) -> None:
        """Add rows, the oldest first; at most as many as it holds."""
        places = torch.arange(self.added, self.added + len(rows)) % len(self.rows)
        self.rows[places] = rows
        self.added += len(rows)

    def draw(self, count: int, draws: torch.Generator) -> Batch:
        """Rows chosen uniformly, with replacement."""
        places = torch.randint(len(self), (count,), generator=draws)
        return Batch(*self.rows[places].split(self.sizes, 1))

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        return {"rows": self.rows[: len(self)], "added": torch.tensor(self.added)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore it; ValueError if it has another size."""
        rows, added = state["rows"], int(state["added"])
        if added < 0 or rows.shape != (min(added, len(self.rows)), self.rows.shape[1]):
            raise ValueError(
                f"a replay buffer of {tuple(rows.shape)} numbers after {added} transitions "
                f"does not fit this run's, which holds {tuple(self.rows.shape)}"
            )
        self.rows[: len(rows)] = rows
        self.added = added
