"""The auxiliary variables that one rank stores: their start, their messages, their checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybrid.solvers.blocks.block import Block
from hybrid.solvers.kernels.operations import pool, upsample
from hybrid.solvers.splitting.coefficients import Coefficients
from hybrid.solvers.splitting.store import Store, channels_last
from hybrid.solvers.state import State, Tensors
from hybrid.solvers.windows import Record, Rows


class AuxiliaryStore:
    """The part of a program that stores lam_k, and what its sub-problem needs of lam_{k+1}.

    It reads the settings beta_unit, lam_start, lam_step, filter, filter_mode, storage and
    balance_ratio.
    """

    solver: Any
    setup: Any
    block: Block

    def begin(self) -> None:
        solver = self.solver
        self._store = Store(self.setup.samples, solver.storage)
        self._whole = solver.filter_mode == "coupling"
        self._before, self._after = solver.coefficients(), solver.coefficients()
        self._carried = (False, False)

    def record(self, record: Record) -> None:
        """Start the auxiliary variables of the record's rows.

        A record of a forward pass has no adjoints. Then they start at the activations, and those
        that a checkpoint gave stay as they are.
        """
        before, after = self._carried
        lam = None if before and record.p_in is None else record.lam
        out = None if after and record.p_out is None else record.out
        self._start_variables(replace(record, lam=lam, out=out))

    def carried_input(self, rows: Rows) -> Tensor | None:
        return self._input(rows) if self._carried[0] else None

    def _start_variables(self, record: Record) -> None:
        rows = record.rows
        self._measure_energy(record)
        if record.lam is not None:
            lam = self._project_in(self._initial_value(record.lam, record.p_in, self._before))
            self._store.put("lam", rows, lam if self._whole else self._pool(lam))
        if record.out is not None:
            target = self._project_out(self._initial_value(record.out, record.p_out, self._after))
            self._store.put("target", rows, self._pool(target))

    def _measure_energy(self, record: Record) -> None:
        """Measure the activations' energy, once in each window, if beta_unit is "energy"."""
        if self.solver.beta_unit == "energy" and record.rows.start == 0:
            for cut, x in ((self._before, record.lam), (self._after, record.out)):
                if x is not None:
                    cut.measure(self._pool(x))

    def records(self) -> Tensors:
        return self._store.state() | {"energies": self._energies()}

    def load_records(self, records: Tensors) -> None:
        self._before.energy, self._after.energy = records.pop("energies").tolist()
        for name, value in channels_last(records).items():
            self._store.put(name, slice(0, self._store.samples), value)

    def _energies(self) -> Tensor:
        return torch.tensor([self._before.energy, self._after.energy], dtype=torch.float64)

    def state(self) -> State:
        kept = self._store.state(["lam", "kappa_in"]) if self.setup.carried else {}
        if self.solver.balance_ratio:
            kept["factor"] = torch.tensor(self._before.factor, dtype=torch.float64)
        if self.setup.carried and self.solver.beta_unit == "energy":
            kept["energy"] = torch.tensor(self._before.energy, dtype=torch.float64)
        return State(cut=kept)

    def load_state(self, state: State) -> None:
        everything = slice(0, self._store.samples)
        index, setup = self.block.index, self.setup
        for cut, kept in ((self._before, state.cut), (self._after, state.after)):
            cut.factor = float(kept.get("factor", cut.factor))
            cut.energy = float(kept.get("energy", cut.energy))
        before = self._matching_tensors(channels_last(state.cut), setup.shape_before(index))
        after = self._matching_tensors(channels_last(state.after), setup.shape_after(index))
        for name in ("lam", "kappa_in"):
            if name in before:
                self._store.put(name, everything, before[name])
        self._carried = ("lam" in before, "lam" in after)
        if "lam" in after:
            lam = after["lam"]
            self._store.put("target", everything, self._shared_lam(lam) if self._whole else lam)
            if "kappa_in" in after:
                self._store.put("kappa_out", everything, after["kappa_in"])

    def _matching_tensors(self, kept: Tensors, shape: tuple[int, ...] | None) -> Tensors:
        """The tensors that a checkpoint held of a cut.

        RuntimeError if some are missing, or have the shape of another cut.
        """
        wanted = [n for n in ("lam", "kappa_in") if n in self.solver.buffers(self.setup)[0]]
        found: Tensors = {name: kept[name] for name in wanted if name in kept}
        if found and sorted(found) != sorted(wanted):
            raise RuntimeError(f"{' and '.join(found)} without the rest of {', '.join(wanted)}")
        for name, tensor in found.items():
            channels, *pixels = shape or (0,)
            side = 1 if name == "lam" and self._whole else self.solver.filter
            expected = (self._store.samples, channels, *(size // side for size in pixels))
            if tensor.shape != expected or not tensor.is_floating_point():
                raise RuntimeError(f"{name} is {tuple(tensor.shape)} of {tensor.dtype}")
        return found

    def _project_in(self, lam: Tensor) -> Tensor:
        """lam projected onto the constraint of the cut before this block."""
        return lam

    def _project_out(self, lam: Tensor) -> Tensor:
        """lam projected onto the constraint of the cut after this block."""
        return lam

    def _initial_value(self, x: Tensor, p: Tensor | None, cut: Coefficients) -> Tensor:
        if p is None or self.solver.lam_start == "feasible":
            return x
        wide = torch.promote_types(x.dtype, torch.float32)
        eta: float = self.solver.lam_step / (2 * cut.step_beta)
        return x.to(wide) - eta * p.to(wide)

    def _input(self, rows: Rows) -> Tensor:
        """The block's input."""
        return self._lam(rows)

    def _lam(self, rows: Rows) -> Tensor:
        """lam_k, which this rank owns."""
        lam = self._store.get("lam", rows)
        return lam if self._whole else upsample(lam, self.solver.filter)

    def _stored_lam(self, rows: Rows) -> Tensor:
        """lam_k in the store's number format."""
        lam = self._store.raw("lam", rows)
        return lam if self._whole else upsample(lam, self.solver.filter)

    def _pool(self, x: Tensor) -> Tensor:
        return pool(x, self.solver.filter)

    def _shared_lam(self, lam: Tensor) -> Tensor:
        """S lam as it is sent, from lam as it is stored: a checkpoint of lam determines it."""
        return self._store.message(self._pool(self._store.rounded(lam)))
