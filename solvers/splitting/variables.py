"""The auxiliary variables of one rank: initial values, messages, checkpoint."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from hybrid.solvers.acting import Acts, Count, NotNegative, Positive
from hybrid.solvers.base import Setup, Shape, Solver, values_of
from hybrid.solvers.kernels.operations import pool, wide
from hybrid.solvers.layers.projection import Free, Projection
from hybrid.solvers.state import State, Tensors
from hybrid.solvers.windows import Record, Rows, rows_of

FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CORRECTED = Acts(
    "rounds.correct_every is above 0, or it is the method of local work",
    lambda run: run.setup.correct_every,
)
LAM_STEPS = Acts(
    "lam takes steps (several sweeps, or window 'all')", lambda run: run.solver.steps_lam(run.setup)
)
LAM_STEPS_OR_STARTS = Acts(
    "lam takes steps (several sweeps, or lam_start 'stepped')",
    lambda run: (
        run.solver.steps_lam(run.setup)
        or (run.solver.lam_start == "stepped" and run.setup.correct_every)
    ),
)


@dataclass(frozen=True)
class Splitting(Solver):
    """A method with auxiliary variables at its cuts: their initial values and storage."""

    beta: Positive = 5e-4
    """Coefficient of the coupling, for the squared norm of one sample."""
    lam_step: Annotated[NotNegative, LAM_STEPS_OR_STARTS] = 1.0
    """Step size of lam, in units of 1 / (2 beta)."""
    lam_start: Annotated[Literal["feasible", "stepped"], CORRECTED] = "stepped"
    """Initial lam: the recorded activations, or one step from them."""
    filter: Count = 1
    """Filter S of the coupling: means over N x N squares of pixels."""
    storage: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of stored and exchanged variables."""

    def moves(self, setup: Setup) -> bool:
        """Whether auxiliary variables move besides the weights."""
        return setup.exchanges

    def steps_lam(self, setup: Setup) -> bool:
        """Whether lam takes steps of `lam_step` after its initial value."""
        return self.moves(setup)

    def buffers(self, setup: Setup) -> tuple[list[str], list[str]]:
        """Name the buffers per sample at the cut before and the cut after a block."""
        return ["lam"], ["target"] + (["sent"] if self.moves(setup) else [])

    def first_multiplier(self, x: Tensor, p: Tensor | None) -> Tensor:
        """Return the initial kappa, from S x of an activation and S p of its adjoint, if any."""
        return torch.zeros_like(x)

    def memory(self, setup: Setup, index: int) -> int:
        before, after = self.buffers(setup)
        lam, out = values_of(setup.shape_before(index)), values_of(setup.shape_after(index))
        values = len(after) * (out // self.filter**2)
        values += sum(lam // (1 if name == "lam" else self.filter**2) for name in before)
        return setup.samples * values * FORMATS[self.storage].itemsize

    def layout(self) -> list[object]:
        return [self.filter]


class Store:
    """Named (n, ...) buffers in one number format, allocated at the first write.

    float64 tensors stay float64 under the format float32. A window shorter than the store occupies
    its first rows, in recorded order; the other rows are unused.
    """

    def __init__(self, samples: int, number_format: str) -> None:
        self.samples = samples
        self.format = FORMATS[number_format]
        self._buffers: dict[str, Tensor] = {}

    def put(self, name: str, rows: Rows, value: Tensor) -> None:
        """Store `value` (N, ...) as the samples `rows` of buffer `name`."""
        buffer = self._buffers.get(name)
        if buffer is None:
            dtype = self.format
            if dtype is torch.float32:
                dtype = torch.promote_types(value.dtype, dtype)
            shape = (self.samples, *value.shape[1:])
            last = value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
            form = torch.channels_last if last else torch.contiguous_format
            buffer = torch.empty(shape, dtype=dtype, device=value.device, memory_format=form)
            self._buffers[name] = buffer
        if value.shape[1:] != buffer.shape[1:]:
            raise ValueError(
                f"samples have shapes {tuple(value.shape[1:])} and {tuple(buffer.shape[1:])} at a "
                "cut whose variables are stored: pad to a fixed length (padding='max_length')"
            )
        buffer[rows_of(buffer, rows)] = value.to(buffer.dtype)

    def raw(self, name: str, rows: Rows) -> Tensor:
        """Read the samples `rows` of buffer `name`: a view if no gather is needed."""
        buffer = self._buffers[name]
        return buffer[rows_of(buffer, rows)]

    def state(self, names: list[str] | None = None) -> dict[str, Tensor]:
        """Return the allocated buffers, or those of some names."""
        names = [*self._buffers] if names is None else names
        return {name: self._buffers[name] for name in names if name in self._buffers}

    def message(self, value: Tensor) -> Tensor:
        """Convert `value` to the number format of messages."""
        return value if self.format is torch.float32 else value.to(self.format)


class AuxiliaryVariables:
    """lam_k, which this rank owns, and its copy of S lam_{k+1} and kappa_{k+1}."""

    def __init__(self, solver: Splitting, index: int, setup: Setup) -> None:
        self.solver, self.index, self.setup = solver, index, setup
        self.store = Store(setup.samples, solver.storage)
        self.constraint_before: Projection = Free()
        self.constraint_after: Projection = Free()
        self.carried = (False, False)
        """Whether a checkpoint has set the variables of the cut before and the cut after."""
        self._names_before, self._names_after = solver.buffers(setup)

    def record(self, record: Record) -> None:
        """Set the initial auxiliary variables of the record's rows.

        A record of a forward pass has no adjoints. Then they start at the activations, or stay as
        a checkpoint has set them.
        """
        rows, x, put = record.rows, record.lam, self.store.put
        if x is not None and not (self.carried[0] and record.p_in is None):
            lam = self._first_lam(x, record.p_in, self.constraint_before)
            put("lam", rows, lam)
            if "kappa_in" in self._names_before:
                put("kappa_in", rows, self._first_multiplier(x, record.p_in))
            if "x" in self._names_before:
                put("x", rows, self.pool(x))
        x = record.out
        if x is not None and not (self.carried[1] and record.p_out is None):
            lam = self._first_lam(x, record.p_out, self.constraint_after)
            put("target", rows, self.pool(lam))
            if "kappa_out" in self._names_after:
                put("kappa_out", rows, self._first_multiplier(x, record.p_out))

    def _first_lam(self, x: Tensor, p: Tensor | None, constraint: Projection) -> Tensor:
        if p is not None and self.solver.lam_start == "stepped":
            dtype = torch.promote_types(x.dtype, torch.float32)
            eta = self.solver.lam_step / (2 * self.solver.beta)
            x = x.to(dtype) - eta * p.to(dtype)
        return x if isinstance(constraint, Free) else constraint.project(x)

    def _first_multiplier(self, x: Tensor, p: Tensor | None) -> Tensor:
        return self.solver.first_multiplier(self.pool(x), None if p is None else self.pool(p))

    def pool(self, x: Tensor) -> Tensor:
        """Compute S x."""
        return pool(x, self.solver.filter)

    def lam(self, rows: Rows) -> Tensor:
        """Read lam_k, in at least float32."""
        return wide(self.store.raw("lam", rows))

    def shared_lam(self, lam: Tensor) -> Tensor:
        """Compute the message S lam from lam rounded to storage, so a checkpoint determines it."""
        return self.store.message(self.pool(wide(self.store.message(lam))))

    def multiplier(self, name: str, rows: Rows) -> Tensor | None:
        """Read kappa in the store's number format; None if the method has no multipliers."""
        names = (*self._names_before, *self._names_after)
        return self.store.raw(name, rows) if name in names else None

    def state(self) -> State:
        """Return the variables that outlive a window, at the cut before this block."""
        return State(cut=self.store.state(["lam", "kappa_in"]) if self.setup.carried else {})

    def load_state(self, state: State) -> None:
        """Restore the states of the cut before and the cut after this block."""
        everything, setup = slice(0, self.store.samples), self.setup
        before = self._matching(channels_last(state.cut), setup.shape_before(self.index))
        after = self._matching(channels_last(state.after), setup.shape_after(self.index))
        for name in ("lam", "kappa_in"):
            if name in before:
                self.store.put(name, everything, before[name])
        self.carried = ("lam" in before, "lam" in after)
        if "lam" in after:
            self.store.put("target", everything, self.shared_lam(after["lam"]))
            if "kappa_in" in after:
                self.store.put("kappa_out", everything, after["kappa_in"])

    def _matching(self, tensors: Tensors, shape: Shape | None) -> Tensors:
        """Select a checkpoint's tensors of a cut.

        RuntimeError if some are missing, or have the shape of another cut.
        """
        names = [name for name in ("lam", "kappa_in") if name in self._names_before]
        matching: Tensors = {name: tensors[name] for name in names if name in tensors}
        if matching and sorted(matching) != sorted(names):
            raise RuntimeError(f"{' and '.join(matching)} without the rest of {', '.join(names)}")
        for name, tensor in matching.items():
            channels, *pixels = shape or (0,)
            side = 1 if name == "lam" else self.solver.filter
            expected = (self.store.samples, channels, *(size // side for size in pixels))
            if tensor.shape != expected or not tensor.is_floating_point():
                raise RuntimeError(f"{name} is {tuple(tensor.shape)} of {tensor.dtype}")
        return matching


def channels_last(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert images to the memory layout of training, which files do not keep."""
    last = torch.channels_last
    return {k: t.contiguous(memory_format=last) if t.dim() == 4 else t for k, t in tensors.items()}
