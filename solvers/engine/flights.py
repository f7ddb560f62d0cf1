"""What is under way on a block, and how a checkpoint holds it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.solvers.micro_batches import MicroBatch
from hybrid.solvers.numerics.group_rates import rate_of_tensor, rate_to_tensor
from hybrid.solvers.numerics.weights import with_parameter_strides
from hybrid.solvers.state import Tensors, entries


@dataclass
class Flight:
    """A micro-batch whose forward pass a block has done and whose backward pass is yet to come.

    What crosses a cut is a tensor, or a tuple where several cross apart.
    """

    part: MicroBatch
    lam: Any = None
    """The input of its forward pass, if the backward pass needs it."""
    stash: Tensors = field(default_factory=dict)
    """What else its backward pass needs, for a checkpoint."""
    weights: Tensors | None = None
    """The version of the weights that its forward pass used, if the backward pass needs it."""
    buffers: Tensors = field(default_factory=dict)
    """The buffers that passes have changed since, as they were before its forward pass."""
    out: Any = None
    """x_k with its graph, if the policy keeps it."""
    p_out: Any = None
    """p_{k+1}, once it has arrived."""
    x: Any = None
    """x_k alone, if it is to be recorded and no later pass could compute it again."""
    recorded: Any = None
    """The `RecordedPass` that made its forward pass, if one did."""
    returned: Tensor | None = None
    """x_k as the next block has computed it from its output, if the method sends it back."""


def save_flights(flights: Iterable[Flight]) -> Tensors:
    """All flights as named tensors; a version of the weights that several share is there once."""
    saved: Tensors = {}
    versions: list[Tensors] = []
    for i, flight in enumerate(flights):
        entry = {"part": torch.tensor(flight.part[:6])}
        entry["rate"] = rate_to_tensor(flight.part.learning_rate)
        for name, tensor in (("lam", flight.lam), ("x", flight.x)):
            parts = tensor if isinstance(tensor, tuple) else ()
            entry |= {f"{name} part {j}": part for j, part in enumerate(parts)}
            if isinstance(tensor, Tensor):
                entry[name] = tensor
        if flight.weights is not None:
            if not versions or flight.weights is not versions[-1]:
                versions.append(flight.weights)
            entry["version"] = torch.tensor(len(versions) - 1)
        entry |= flight.stash | {f"buffer {name}": b for name, b in flight.buffers.items()}
        saved |= {f"flight {i}.{name}": tensor.detach() for name, tensor in entry.items()}
    for v, weights in enumerate(versions):
        saved |= {f"version {v}.{name}": w.detach() for name, w in weights.items()}
    return saved


def load_flights(saved: Tensors, module: nn.Module) -> Iterator[Flight]:
    """The flights that `save_flights` wrote, oldest first; their graphs are not there yet."""
    versions: dict[int, Tensors] = {}
    for i in range(len({name.partition(".")[0] for name in saved if name[:6] == "flight"})):
        entry = entries(saved, f"flight {i}.")
        part = MicroBatch(*entry.pop("part").tolist())
        rate = rate_of_tensor(entry.pop("rate"))
        flight = Flight(part._replace(learning_rate=rate), _popped(entry, "lam"))
        flight.x = _popped(entry, "x")
        if "version" in entry:
            v = int(entry.pop("version"))
            if v not in versions:
                loaded = with_parameter_strides(module, entries(saved, f"version {v}."))
                versions[v] = {n: nn.Parameter(w, requires_grad=False) for n, w in loaded.items()}
            flight.weights = versions[v]
        flight.buffers = entries(entry, "buffer ")
        flight.stash = {name: t for name, t in entry.items() if not name.startswith("buffer ")}
        yield flight


def _popped(entry: Tensors, name: str) -> Any:
    """Take from an entry what has crossed a cut: a tensor, several as a tuple, or None."""
    names = [key for key in entry if key.startswith(f"{name} part ")]
    parts = [entry.pop(f"{name} part {j}") for j in range(len(names))]
    return tuple(parts) if parts else entry.pop(name, None)
