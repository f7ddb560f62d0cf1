"""torchvision and timm, where they are installed."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

_KEPT: list[torch.library.Library] = []


def installed(package: str) -> bool:
    """Whether a package can be had; "" always is."""
    return not package or find_spec(package) is not None


def package(name: str) -> Any:
    """A module of torchvision or timm."""
    try:
        import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
        # compiled operators that do not load beside a CPU build of torch: only declared, not there
        _KEPT.append(torch.library.Library("torchvision", "DEF"))
        for operator in ("nms", "qnms"):
            _KEPT[0].define(
                f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
        import_module("torchvision")
    return import_module(name)
