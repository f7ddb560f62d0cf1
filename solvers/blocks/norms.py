"""BatchNorm's running statistics, which only some passes may move."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def frozen_statistics(module: nn.Module) -> Iterator[None]:
    """BatchNorm normalises by the batch and leaves its running statistics alone.

    They belong to the composed network, which only a serial pass sees.
    """
    norms = [
        m
        for m in module.modules()
        if isinstance(m, nn.modules.batchnorm._NormBase) and m.track_running_stats
    ]
    for m in norms:
        m.track_running_stats = False
    try:
        yield
    finally:
        for m in norms:
            m.track_running_stats = True
