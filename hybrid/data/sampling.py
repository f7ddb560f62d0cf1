"""Which samples make which batch, and random numbers that depend on nothing but their counters."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

ORDER_STREAM = 0
"""Stream of `epoch_order`, which takes those below it, too; others take streams from 1 on."""

# splitmix64 (Steele, Lea and Flood, OOPSLA 2014), its constants as signed 64-bit integers
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def epoch_order(seed: int, epoch: int, n: int, number: int = 0) -> Tensor:
    """A permutation of 0..n-1, int64 `(n,)`: a pure function of its arguments.

    An epoch that takes several numbers them.
    """
    if n < 1:
        raise ValueError(f"an epoch needs at least 1 sample, got {n}: choose a non-empty data set")
    return torch.argsort(_hash(seed, epoch, torch.arange(n), ORDER_STREAM - number), stable=True)


kept_order = lru_cache(maxsize=2)(epoch_order)
"""`epoch_order` for samplers, which take a mini-batch of it at a time."""


def uniform(seed: int, epoch: int, ids: Tensor, stream: int) -> Tensor:
    """Uniform float64 numbers in [0, 1), one for each of `ids`, int64 of any shape.

    A number depends on `(seed, epoch, id, stream)` only, so it is the same in any batch, in any
    order and on any rank.
    """
    return _logical_shift(_hash(seed, epoch, ids, stream), 11).double() * 2.0**-53


def _hash(seed: int, epoch: int, ids: Tensor, stream: int) -> Tensor:
    """Output number `id` of the splitmix64 generator that starts at the key of the others."""
    return _mix((ids + 1) * _GAMMA + _key(seed, epoch, stream))


@lru_cache(maxsize=64)
def _key(*counters: int) -> int:
    key = torch.zeros((), dtype=torch.int64)
    for counter in counters:
        signed = (counter + (1 << 63)) % (1 << 64) - (1 << 63)
        key = _mix((key ^ signed) + _GAMMA)
    return int(key)


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _logical_shift(bits, 30)) * _FIRST
    bits = (bits ^ _logical_shift(bits, 27)) * _SECOND
    return bits ^ _logical_shift(bits, 31)


def _logical_shift(bits: Tensor, count: int) -> Tensor:
    # >> of a signed integer copies the sign bit: the mask clears the copies
    return (bits >> count) & ((1 << (64 - count)) - 1)


_DRAWING = threading.Lock()
"""The generators that transforms draw from belong to the process: one thread at a time."""


@contextmanager
def restored_generators() -> Iterator[None]:
    """Restore the generators of this process after the body, which may seed and draw."""
    with _DRAWING:
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])


def seed_generators(*counters: int) -> None:
    """Seed `random`, numpy and torch by counters for a user's code."""
    seed = int(np.random.SeedSequence(counters).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
