"""Tensors of other blocks, as a block sees them: a shape and a number format, and no numbers."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only


class RemoteTensorError(ValueError):
    """Code needs the numbers of a tensor that another block has."""


class RemoteTensor(Tensor):
    """Wraps a meta tensor but reports a real device.

    Operations on remote tensors give remote tensors. RemoteTensorError where they need numbers, or
    would write them into a tensor that is here.
    """

    meta: Tensor

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device) -> "RemoteTensor":
        wrapper: RemoteTensor = Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=device
        )
        wrapper.meta = meta
        return wrapper

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"RemoteTensor({tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "RemoteTensor":
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # not torch's default, with which modules would take the fused kernels of plain tensors
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable and not isinstance(args[0], RemoteTensor):
            raise RemoteTensorError(f"{func} would write a tensor of another block into one here")
        if func._schema.is_mutable and torch.Tag.nondeterministic_seeded in func.tags:
            return args[0]  # torch would import its compiler to draw nothing
        wrappers: dict[int, RemoteTensor] = {}

        def to_meta(x: Any) -> Any:
            if isinstance(x, RemoteTensor):
                wrappers[id(x.meta)] = x
                return x.meta
            if isinstance(x, Tensor):
                return x.to("meta")
            return torch.device("meta") if isinstance(x, torch.device) else x

        metas, named = tree_map(to_meta, (tuple(args), dict(kwargs or {})))
        try:
            out = func(*metas, **named)
        except (RuntimeError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            raise RemoteTensorError(f"{func} needs a tensor of another block ({reason})") from error
        device = next(iter(wrappers.values())).device
        return tree_map_only(
            Tensor, lambda x: wrappers[id(x)] if id(x) in wrappers else cls(x, device), out
        )


def remote_like(value: Any, device: torch.device) -> Any:
    """A value in which every tensor is remote."""

    def remote(x: Tensor) -> Tensor:
        return x if isinstance(x, RemoteTensor) else RemoteTensor(x.detach().to("meta"), device)

    return tree_map_only(Tensor, remote, value)


def call_on_remote(
    func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], device: torch.device
) -> Any:
    """What a function gives for remote tensors, and for parameters as if they were."""
    args, kwargs = tree_map_only(nn.Parameter, lambda p: remote_like(p, device), (args, kwargs))
    with torch.no_grad():
        return func(*args, **kwargs)
