"""Batches of expression trees without messages: padded level by level, or packed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from expression_trees import OPERATORS, Tree, follow


class Padded:
    """The same network on a batch: level by level, each as wide as the widest tree's."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules = modules
        self.slots = self.used = 0
        """Computed, and of those not padding."""

    def __call__(self, trees: Sequence[Tree]) -> Tensor:
        """Scores of the roots."""
        levels = max(tree.heights[-1] for tree in trees) + 1
        members = [
            [[n for n, height in enumerate(tree.heights) if height == level] for tree in trees]
            for level in range(levels)
        ]
        slot = [[0] * len(tree.symbols) for tree in trees]
        begin = 0
        for rows in members:
            for places, nodes in zip(slot, rows, strict=True):
                for at, node in enumerate(nodes, begin):
                    places[node] = at
            begin += max(map(len, rows))
        self.slots += begin * len(trees)
        self.used += sum(len(tree.symbols) for tree in trees)
        symbols = [
            pad([[tree.symbols[n] for n in nodes] for tree, nodes in zip(trees, rows, strict=True)])
            for rows in members
        ]
        state = self.modules["leaf"](symbols[0])
        weight, bias = self._stacked()
        lines = torch.arange(len(trees))[:, None]
        for rows, symbol in zip(members[1:], symbols[1:], strict=True):
            children = [
                pad(
                    [
                        [places[tree.children[n][side]] for n in nodes]  # type: ignore[index]
                        for tree, places, nodes in zip(trees, slot, rows, strict=True)
                    ]
                )
                for side in (0, 1)
            ]
            x = state[lines[..., None], torch.stack(children, -1)]  # tree, slot, child, h and c
            h, c = x.chunk(2, -1)
            # all operators' gates of all slots, then those that count
            gates = nn.functional.linear(h.flatten(-2), weight, bias).unflatten(
                -1, (len(OPERATORS), -1)
            )
            which = symbol[..., None, None].expand(-1, -1, 1, gates.shape[-1])
            state = torch.cat([state, follow(gates.gather(2, which).squeeze(2), c)], 1)
        root = torch.tensor([places[-1] for places in slot])
        return self.modules["head"](state[lines[:, 0], root])

    def _stacked(self) -> tuple[Tensor, Tensor]:
        gates = [self.modules[name].gates for name in OPERATORS]
        return torch.cat([each.weight for each in gates]), torch.cat([each.bias for each in gates])


class Packed:
    """The same level by level and operator by operator, only what there is: nothing is padded."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules = modules

    def __call__(self, trees: Sequence[Tree]) -> Tensor:
        """Scores of the roots."""
        bins: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for t, tree in enumerate(trees):
            for n, (height, symbol) in enumerate(zip(tree.heights, tree.symbols, strict=True)):
                bins.setdefault((height, symbol if height else 0), []).append((t, n))
        slot = [[0] * len(tree.symbols) for tree in trees]
        leaves = bins.pop((0, 0))
        for at, (t, n) in enumerate(leaves):
            slot[t][n] = at
        filled = len(leaves)
        state = self.modules["leaf"](torch.tensor([trees[t].symbols[n] for t, n in leaves]))
        for (_, symbol), members in sorted(bins.items()):
            children = [[slot[t][n] for n in trees[t].children[n] or ()] for t, n in members]
            for at, (t, n) in enumerate(members, filled):
                slot[t][n] = at
            filled += len(members)
            cell = self.modules[list(OPERATORS)[symbol]]
            state = torch.cat([state, cell(state[torch.tensor(children)])])
        return self.modules["head"](state[torch.tensor([places[-1] for places in slot])])


def pad(rows: Sequence[Sequence[int]]) -> Tensor:
    """Zeros behind the shorter rows: what is computed there, nobody reads."""
    out = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for at, row in enumerate(rows):
        out[at, : len(row)] = row
    return torch.from_numpy(out)
