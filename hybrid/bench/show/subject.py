"""The network that `hybrid show` is asked for, in blocks, and a sample of its inputs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from hybrid.bench.show.counting import describe
from hybrid.bench.show.description import Description
from hybrid.data import Data, Mapped
from hybrid.networks.blocks import SAMPLES
from hybrid.settings.resolve import load
from hybrid.settings.sections.base import is_reference
from hybrid.solvers.acting import nearest
from hybrid.training import build

IMAGES = "float32[3,32,32]"
"""What goes into a network of this package unless another shape is asked for: CIFAR's images."""
CLASSES = 10
_FORM = re.compile(r"(?:(?P<name>[^=\[\],]+)=)?(?P<dtype>\w+)\[(?P<sizes>[0-9, ]*)\]")
_DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "uint8", "bool")


def show(given: Mapping[str, Any], inputs: str | None = None) -> Description:
    """Describe the network of some settings ("section.key" -> value), cut as a training would.

    `inputs` is the form of a sample, as `parse_inputs` takes it; None: that of `data.name`, if this
    is given. ValueError for settings that contradict each other or do not fit the network.
    """
    _check(given, inputs)
    settings = load(None, {"split.blocks": 2, **given})
    if "data.name" in given:
        data, _ = build.load_data_sets(settings.data)
    else:
        data = Mapped(_Samples(parse_inputs(inputs or IMAGES)))
    blocks = build.build_blocks(settings, data)
    return describe(
        blocks,
        data.sample(SAMPLES)[0],
        batch_size=settings.train.batch_size,
        optimizer=settings.optimizer,
        measured=settings.split.balance == "measured",
        model=settings.model.name,
    )


def _check(given: Mapping[str, Any], inputs: str | None) -> None:
    """ValueError for settings that contradict each other."""
    name, data, cuts = given["model.name"], given.get("data.name"), given.get("split.cuts")
    if data is not None and inputs is not None:
        raise ValueError(f"--data {data} has the shapes that --inputs would give: leave one out")
    if data is None and "data.dir" in given:
        raise ValueError("--data-dir is the folder of the files of --data: give that, too")
    if is_reference(name) and data is None and inputs is None:
        raise ValueError(
            f"what goes into {name} is not known: give --inputs 'float32[3,224,224]', the shape of "
            "one sample, or --data package.module:function"
        )
    if cuts is None:
        return
    blocks = given.get("split.blocks", len(cuts) + 1)
    if blocks != len(cuts) + 1:
        raise ValueError(
            f"--blocks is {blocks}, but --cuts names {len(cuts)}, which make {len(cuts) + 1} "
            "blocks: leave one of the two out"
        )
    if given.get("split.balance") == "even":
        raise ValueError("--cuts settles the blocks, so --balance even has no effect: leave it out")


class _Samples:
    """Two samples with the target 0, as a data set."""

    classes = range(CLASSES)

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        if isinstance(self._batch, dict):
            return {name: x[index] for name, x in self._batch.items()}, 0
        several = isinstance(self._batch, tuple)
        return (*(x[index] for x in self._batch), 0) if several else (self._batch[index], 0)
