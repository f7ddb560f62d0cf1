"""Tensors of other blocks, as a block sees them: a shape and a number format, and no numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

METADATA: frozenset[Any] = frozenset(
    {
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.nelement),
        Tensor.element_size,
        *(Tensor.ndimension, Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex),
        *(Tensor.storage_offset, Tensor.__len__, Tensor.get_device, Tensor.is_signed),
        *(torch.is_tensor, torch.is_floating_point, torch.is_complex, torch.numel),
        *(
            vars(torch._C.TensorBase)[name].__get__
            for name in (
                *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf"),
                *("is_cuda", "is_cpu", "is_meta", "is_mps", "is_sparse", "is_nested", "names"),
                *("is_quantized", "is_mkldnn", "is_xpu", "itemsize", "nbytes", "grad_fn"),
                "_version",
            )
            if name in vars(torch._C.TensorBase)
        ),
    }
)
"""What reads a tensor's description, and none of its numbers."""


_OPERATORS = {
    "setitem",
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "iand", "ior", "ixor"),
}


class AbsentError(ValueError):
    """Code needs the numbers of a tensor that another block has."""


class Absent(Tensor):
    """A tensor without numbers, `meta` on torch's meta device, which says that it is on another."""

    meta: Tensor

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device) -> Absent:
        made: Absent = Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=device
        )
        made.meta = meta
        return made

    def __init__(self, meta: Tensor, device: torch.device) -> None:
        super().__init__()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Absent({tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Absent:
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise AbsentError(f"{getattr(func, '__name__', func)} needs a tensor of another block")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        raise AbsentError(f"{func} needs a tensor of another block")


def absent_like(value: Any, device: torch.device) -> Any:
    """A value in which every tensor is absent."""

    def absent(x: Any) -> Any:
        if not isinstance(x, Tensor) or isinstance(x, Absent):
            return x
        return Absent(
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), device
        )

    return tree_map(absent, value)


def call_on_absent(
    func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], device: torch.device
) -> Any:
    """What a function gives for absent tensors, which is absent.

    AbsentError where it would need their numbers, or write them into a tensor that is here.
    """
    name = getattr(func, "__name__", str(func))
    if func in (Tensor.cuda, Tensor.cpu):
        return args[0]
    if writes(func) and args and isinstance(args[0], Tensor) and not isinstance(args[0], Absent):
        raise AbsentError(f"{name} would write a tensor of another block into one that is here")
    here: dict[int, Absent] = {}

    def to_meta(x: Any) -> Any:
        if isinstance(x, Absent):
            here[id(x.meta)] = x
            return x.meta
        if isinstance(x, Tensor):
            return x.detach().to("meta")
        if isinstance(x, torch.device) or (func is Tensor.to and isinstance(x, str)):
            return torch.device("meta")
        return x

    some, named = tree_map(to_meta, (tuple(args), dict(kwargs)))
    if named.get("device") is not None:
        named["device"] = torch.device("meta")
    try:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            out = func(*some, **named)
    except (RuntimeError, NotImplementedError) as error:
        raise AbsentError(
            f"{name} needs the numbers of a tensor of another block ({str(error).splitlines()[0]})"
        ) from error

    def from_meta(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return here[id(x)] if id(x) in here else Absent(x, device)

    if any(isinstance(x, Tensor) and not x.is_meta for x in tree_leaves(out)):
        raise AbsentError(f"{name} needs the numbers of a tensor of another block")
    return tree_map(from_meta, out)


def writes(func: Any) -> bool:
    """Whether a function writes to its first argument."""
    name = getattr(func, "__name__", str(func))
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name.strip("_") in _OPERATORS
