"""Costs, messages and memory of a network's blocks, counted on a batch of its inputs."""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from hybrid.bench.show.description import BlockPart, CutPart, Description, Form, UnitPart
from hybrid.errors import format_error, no_exit, one_line
from hybrid.method.memory import saved_bytes
from hybrid.method.optimizers import count_moments
from hybrid.networks.blocks import Blocks, laid_out
from hybrid.networks.costs import count_costs, measure_costs
from hybrid.networks.units import BlockModule, Unit, make_single_unit_blocks
from hybrid.settings.config import OptimizerSettings
from hybrid.solvers.numerics.weights import trained_bytes
from hybrid.solvers.wire import Wire


@no_exit()
@torch.random.fork_rng(devices=[])
def describe(
    blocks: Blocks,
    inputs: Any,
    *,
    batch_size: int = 128,
    optimizer: OptimizerSettings | None = None,
    measured: bool = False,
    model: str = "",
    wire: Wire | None = None,
) -> Description:
    """Describe the costs, messages and memory of a network in blocks.

    `inputs` is a batch of the network's inputs, (N, ...), as for `split`. The cost is counted on
    it, or `measured` in seconds. Bytes are for mini-batches of `batch_size` and an `optimizer`, by
    default SGD with momentum; messages have the codecs of `wire`, or float32. The network, its
    gradients, its buffers and torch's generator do not change.

    Raises ValueError for inputs that do not fit, and units that cannot run one by one.
    """
    blocks = blocks.with_bundles(inputs)
    packed = blocks.pack_inputs(inputs)
    shares = _shares(blocks, packed, measured)
    # the packed input of every unit, for two samples
    x, entering = packed[torch.arange(2) % len(packed)], list[Tensor]()
    with blocks.mode(training=False), torch.no_grad():
        for module in make_single_unit_blocks(blocks.units):
            entering.append(x)
            x = module(x)
    settings = optimizer or OptimizerSettings()
    moments = count_moments(settings)
    block_of = [k for k in range(len(blocks)) for _ in blocks.units_of(k)]
    units = [
        UnitPart(unit.name, block, 1, _count(unit.parameters().values()), share, _forms(unit, x))
        for unit, block, share, x in zip(blocks.units, block_of, shares, entering, strict=True)
    ]
    parts = [
        _block(blocks, k, entering[start], shares, batch_size, moments)
        for k, start in enumerate(blocks.starts)
    ]
    cuts = []
    for start in blocks.starts[1:]:
        up, down = _crossing_bytes(blocks.units[start], entering[start], wire or Wire())
        sizes = round(up), round(batch_size * up), round(batch_size * down)
        cuts.append(CutPart(units[start].name, units[start].inputs, *sizes))
    return Description(
        model or type(blocks.model).__name__,
        _count(blocks.model.parameters()),
        "measured" if measured else "counted",
        batch_size,
        settings.name,
        tuple(units),
        tuple(parts),
        tuple(cuts),
    )


def _crossing_bytes(unit: Unit, x: Tensor, wire: Wire) -> tuple[float, float]:
    """Bytes of a sample before a unit, up and down, where x is its packed input.

    What is not large goes as it is.
    """
    shapes = [tuple(x.shape[1:])] if unit.bundle is None else unit.bundle.large_shapes
    few = x.nbytes // len(x) - x.itemsize * sum(map(prod, shapes))
    up, down = (sum(each) for each in zip((0, 0), *map(wire.sample_bytes, shapes), strict=True))
    return few + up, few + down


def _shares(blocks: Blocks, packed: Tensor, measured: bool) -> list[float]:
    """Compute each unit's share of the cost."""
    measure = measure_costs if measured else count_costs
    try:
        costs = [sum(c) for c in measure(blocks.model, blocks.units, packed)]
    except RuntimeError as error:
        raise ValueError(
            f"the units of {type(blocks.model).__name__} cannot be costed, one by one forward and "
            f"backward: {one_line(error)[:200]}; correct the unit"
        ) from error
    return [cost / (sum(costs) or 1.0) for cost in costs]


def _forms(unit: Unit, x: Tensor) -> tuple[Form, ...]:
    if unit.bundle is None:
        return (Form("", _dtype(x.dtype), tuple(x.shape[1:])),)
    shapes = unit.bundle.shapes
    value = tree_unflatten(range(len(shapes)), unit.bundle.structure)
    flat = isinstance(value, dict) and len(value) == len(shapes)
    names = [*value] if flat else [""] * len(shapes)
    return tuple(
        Form(str(name), _dtype(dtype), shape)
        for name, dtype, shape in zip(names, unit.bundle.dtypes, shapes, strict=True)
    )


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _block(
    blocks: Blocks, k: int, x: Tensor, shares: Sequence[float], batch_size: int, moments: float
) -> BlockPart:
    """Describe block k, whose input for two samples is x."""
    module, run, start = blocks.module(k), blocks.units_of(k), blocks.starts[k]
    trained = trained_bytes(module)
    tensors = [*module.parameters(), *module.buffers()]
    return BlockPart(
        run[0].name,
        run[-1].name,
        len(run),
        _count(module.parameters()),
        sum(shares[start : start + len(run)]),
        sum(tensor.nbytes for tensor in tensors),
        trained,
        round(moments * trained),
        _activation_bytes(blocks, module, x.requires_grad_(k > 0), batch_size),
    )


def _activation_bytes(blocks: Blocks, module: BlockModule, two: Tensor, batch_size: int) -> int:
    """Extrapolate the bytes that a pass saves from two and four samples to a mini-batch."""
    four = two.detach().repeat(2, *[1] * (two.dim() - 1)).requires_grad_(two.requires_grad)
    try:
        with blocks.mode(training=True):
            of_two, of_four = (saved_bytes(module, laid_out(x)) for x in (two, four))
    except Exception as error:  # whatever a user's forward raises
        raise ValueError(
            f"a training pass over {len(two)} or {len(four)} samples fails: "
            f"{format_error(error)}; let the network take any number of them"
        ) from error
    sample = max(0, of_four - of_two) / 2
    return round(max(0.0, of_two - 2 * sample) + batch_size * sample)


def _count(parameters: Iterable[nn.Parameter]) -> int:
    """Count the numbers of parameters, tied ones once."""
    return sum(prod(p.shape) for p in {id(p): p for p in parameters}.values())
