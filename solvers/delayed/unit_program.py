"""A rank's program whose passes go through a block unit by unit."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from hybrid.solvers.delayed.base import DelayedProgram
from hybrid.solvers.delayed.stash import Flight
from hybrid.solvers.delayed.units import UnitFlight, UnitLock, Units, with_strides_of
from hybrid.solvers.exact.pipeline import MicroBatch
from hybrid.solvers.state import State, Tensors


class UnitProgram(DelayedProgram):
    """Has `Units`, whose steps need not wait for the backward pass of the whole block."""

    _units: Units

    def _forward(self, lam: Tensor, part: MicroBatch) -> UnitFlight:
        flight = self._units.new_flight(part, self._leaf(lam))
        self._forward_units(flight)
        return flight

    def _forward_units(self, flight: UnitFlight) -> None:
        for unit in range(self._units.count):
            self._units.forward(flight, unit, nullcontext())

    def _backward(self, flight: Flight) -> None:
        assert isinstance(flight, UnitFlight)
        for unit in reversed(range(flight.units_left)):
            self._backward_unit(flight, unit, self._rate, nullcontext())

    def _backward_unit(self, flight: UnitFlight, unit: int, rate: float, lock: UnitLock) -> None:
        """The backward pass of a unit; the first one's ends with a message down."""
        self._units.backward(flight, unit, rate, lock)
        if unit == 0 and not self.block.first:
            self._send_input_adjoint(flight)

    def _send_input_adjoint(self, flight: UnitFlight) -> None:
        lam, (p_in,) = flight.lam, flight.adjoint
        assert lam is not None
        p_in = torch.zeros_like(lam) if p_in is None else with_strides_of(p_in, lam)
        self._send_adjoint(lam, p_in, flight.part)

    @property
    def _unit_flights(self) -> list[UnitFlight]:
        return [flight for flight in self._flights if isinstance(flight, UnitFlight)]

    def state(self) -> State:
        known: dict[tuple[int, ...], Tensors] = {}
        for flight in self._unit_flights:
            self._units.save(flight, known)
        return super().state()

    def _rebuild(self, flight: Flight) -> UnitFlight:
        flight.lam = self._leaf(flight.lam)
        return self._units.rebuild(flight)
