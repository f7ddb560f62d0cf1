"""Per-sample storage of a window's auxiliary variables on one rank."""

import torch
from torch import Tensor

from hybrid.solvers.windows import Rows

FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Store:
    """Named (n, ...) buffers in one number format, allocated at the first write.

    float64 tensors stay float64 under the format float32. A window shorter than the store lies in
    its first rows, in recorded order; the rows behind them belong to no window.
    """

    def __init__(self, samples: int, number_format: str) -> None:
        self.samples = samples
        self.format = FORMATS[number_format]
        self._buffers: dict[str, Tensor] = {}
        self._used: dict[str, int] = {}
        """Rows of each buffer that belong to the window."""

    def put(self, name: str, rows: Rows, value: Tensor) -> None:
        """Store `value` (N, ...) as the samples `rows` of buffer `name`."""
        buffer = self._buffers.get(name)
        if buffer is None:
            buffer = self._buffers[name] = self._allocate(value)
        buffer[rows] = value.to(buffer.dtype)
        if isinstance(rows, slice):
            self._used[name] = max(rows.stop, self._used[name] if rows.start else 0)

    def get(self, name: str, rows: Rows) -> Tensor:
        """The samples `rows` of buffer `name`: a view if that needs neither gather nor cast."""
        value = self.raw(name, rows)
        return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value

    def raw(self, name: str, rows: Rows) -> Tensor:
        """The samples `rows` of buffer `name`, in the number format of the store."""
        return self._buffers[name][rows]

    def clear(self, name: str) -> None:
        """Set the buffer `name` to zero."""
        self._buffers[name].zero_()

    def norm(self, name: str) -> float:
        """Euclidean norm of the window's rows of buffer `name`."""
        values = self._buffers[name][: self._used[name]]
        return float(torch.linalg.vector_norm(values.float()))

    def state(self, names: list[str] | None = None) -> dict[str, Tensor]:
        """The buffers of these names, as far as they exist; without names all of them."""
        wanted = self._buffers if names is None else names
        return {name: self._buffers[name] for name in wanted if name in self._buffers}

    def message(self, value: Tensor) -> Tensor:
        """`value` in the number format, as it is sent to a neighbor."""
        return value if self.format is torch.float32 else value.to(self.format)

    def rounded(self, value: Tensor) -> Tensor:
        """`value` as `get` returns it after a `put`."""
        return value if self.format is torch.float32 else value.to(self.format).float()

    def _allocate(self, value: Tensor) -> Tensor:
        wide = torch.promote_types(value.dtype, torch.float32)
        dtype = wide if self.format is torch.float32 else self.format
        shape = (self.samples, *value.shape[1:])
        last = value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
        layout = torch.channels_last if last else torch.contiguous_format
        return torch.empty(shape, dtype=dtype, device=value.device, memory_format=layout)


def channels_last(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Images in the memory layout of training, which a file does not keep."""
    last = torch.channels_last
    return {k: t.contiguous(memory_format=last) if t.dim() == 4 else t for k, t in tensors.items()}
