"""Nested values are mapped and flattened as torch's pytree does it."""

from collections import OrderedDict, defaultdict, deque, namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from hybrid.solvers.layers.trees import leaves_of, map_leaves, tensors_of

Pair = namedtuple("Pair", "first second")


class Tuple(tuple):
    """A leaf: no namedtuple."""


A, B = torch.ones(2, 3), torch.nn.Parameter(torch.zeros(4))
VALUES = {
    "tensor": A,
    "empty": ((), {}, [], None),
    "call": ((A, None, 2.5, ("x", [B, slice(1, 2)])), {"b": A, "a": {"c": (B,)}}),
    "named": [Pair(A, {"x": Pair(1, B)}), Tuple((A, B)), A.shape],
    "others": (OrderedDict(b=A, a=B), defaultdict(list, x=[A]), deque([B, A])),
    "results": (torch.max(A, 1), {"inner": [torch.sort(A)]}),
    "object": [SimpleNamespace(x=A), lambda: A, torch.float32],
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_values_have_the_leaves_and_the_structure_that_pytree_finds(value):
    expected = tree_leaves(value)
    assert [*map(id, leaves_of(value))] == [*map(id, expected)]
    tensors = [x for x in expected if isinstance(x, torch.Tensor)]
    assert [*map(id, tensors_of(value))] == [*map(id, tensors)]

    def number(seen):
        return lambda x: seen.append(id(x)) or len(seen)

    ours, theirs = [], []
    mapped, wanted = map_leaves(number(ours), value), tree_map(number(theirs), value)
    assert ours == theirs
    assert repr(mapped) == repr(wanted)
