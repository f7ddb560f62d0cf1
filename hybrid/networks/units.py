"""Units, the pieces of a model that are never cut, and runs of them as one module."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.solvers.layers.bundle import Bundle, call_network
from hybrid.solvers.numerics.attributes import restored_attributes, user_modules

Parts = list[tuple[str, nn.Module]]
"""Modules in running order, each behind its global prefix."""


@dataclass
class Unit:
    """The smallest piece of a chain that one rank owns whole.

    `parts` maps the global prefix of each module to the module, in running order; see `full_name`.
    """

    name: str
    parts: dict[str, nn.Module]
    bundle: Bundle | None = None
    """Of what goes in, where that is not one tensor."""
    begins: bool = False
    """Whether that is the network's input."""

    def begin_parts(self, run: Sequence[Unit], local: bool) -> tuple[Parts, int]:
        """The modules of the first units of a run, of which this is the first, and their number.

        `local`: with those tensors alone that a block with the run has.
        """
        return [*self.parts.items()], 1

    def tensors(self) -> dict[str, Tensor]:
        """Its parameters and persistent buffers by their names in the whole model."""
        return {
            full_name(prefix, name): tensor
            for prefix, module in self.parts.items()
            for name, tensor in module.state_dict().items()
        }

    def parameters(self) -> dict[str, nn.Parameter]:
        """Its parameters by their names in the whole model, tied ones by each of theirs."""
        return {
            full_name(prefix, name): parameter
            for prefix, module in self.parts.items()
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }


def parts_of(run: Sequence[Unit], local: bool = True) -> Parts:
    """The modules of a run of units in running order, and their global prefixes."""
    parts: Parts = []
    while run:
        some, count = run[0].begin_parts(run, local)
        parts, run = [*parts, *some], run[count:]
    return parts


def merged(run: Sequence[Unit], local: bool = False) -> Unit:
    """A run of units as one."""
    parts = {str(i): part for i, (_, part) in enumerate(parts_of(run, local))}
    return Unit(run[0].name, parts, run[0].bundle, run[0].begins)


def full_name(prefix: str, local: str) -> str:
    """The name of a module's tensor in the whole model, whose prefix is ""."""
    return f"{prefix}.{local}" if prefix else local


class Chain(nn.Sequential):
    """An `nn.Sequential` that knows which of its children stay together.

    `units` maps a unit's name to its children's names and covers all children, in order. A unit
    that is one plain `nn.Sequential` child ("layer1") is a stage: each of its children becomes a
    unit of its own ("layer1.0", "layer1.1", ...).

    `input_shape` is (channels, height, width) of an image, or (length,) of a text in tokens; the
    output is (samples, classes), or (samples, classes, length).
    """

    def __init__(
        self,
        modules: OrderedDict[str, nn.Module],
        units: dict[str, tuple[str, ...]],
        input_shape: tuple[int, ...],
        classes: int,
    ) -> None:
        super().__init__(modules)
        self.grouping = units
        self.input_shape = input_shape
        self.classes = classes

    def sample(self, count: int) -> Tensor:
        """Return `count` inputs for trials, always the same."""
        if len(self.input_shape) == 1:
            return torch.zeros(count, *self.input_shape, dtype=torch.int64)
        x = torch.randn(count, *self.input_shape, generator=torch.Generator().manual_seed(0))
        return x.to(memory_format=torch.channels_last)

    def __getitem__(self, idx: slice | int) -> nn.Sequential | nn.Module:
        # a slice has no grouping of its own, and the inherited method would build a Chain
        if isinstance(idx, slice):
            return nn.Sequential(OrderedDict(list(self._modules.items())[idx]))
        return super().__getitem__(idx)


def units(model: nn.Module) -> list[Unit]:
    """The units of `model` in running order; running them one after the other is the model.

    A `Chain` has the units it was made with. In any other `nn.Sequential` every leaf is a unit,
    named by its dotted path ("0", "layer2.0"); nested plain `nn.Sequential`s are opened, and
    `nn.TransformerEncoder`s, which without masks run their layers one after the other; any other
    module is a leaf. A leaf that works in place (`nn.ReLU(inplace=True)`) belongs to the unit
    before it: at a cut its input would be an auxiliary variable, which nobody may write to.

    Raises `ValueError` for a model that is no chain of modules, or is empty.
    """
    if isinstance(model, Chain):
        return _units_of_chain(model)
    if not (isinstance(model, nn.Sequential) and is_sequence(model)):
        raise ValueError(
            f"a {type(model).__name__} is no nn.Sequential, or overrides forward: its units "
            "are known from its graph (hybrid.split with sample=)"
        )
    chain: list[Unit] = []
    for path, leaf in _leaves(model):
        if chain and getattr(leaf, "inplace", False):
            chain[-1].parts[path] = leaf
        else:
            chain.append(Unit(path, {path: leaf}))
    if not chain:
        raise ValueError("the model has 0 units, at least 1 is needed: add modules to it")
    return chain


def is_sequence(model: nn.Module) -> bool:
    """Whether running the model is running its children one after the other."""
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward


@dataclass(frozen=True)
class Modes:
    """By path, which modules of a model are in training mode in a training, and in an evaluation.

    The model's own `train` and `eval` decide, which may be overridden. What was set to evaluation
    mode while the model itself is in training mode stays so.
    """

    training: dict[str, bool]
    evaluation: dict[str, bool]

    @classmethod
    def of(cls, model: nn.Module) -> Modes:
        """Those of a model, which it is not left in."""
        flags = []
        for training in (True, False):
            with kept_modes(model):
                set_mode(model, training)
                paths = model.named_modules(remove_duplicate=False)
                flags.append({path: module.training for path, module in paths})
        return cls(*flags)

    def apply(self, training: bool, module: nn.Module, prefix: str = "") -> None:
        """Set the modes of a module that has this prefix in the model."""
        flags = self.training if training else self.evaluation
        for path, each in module.named_modules(remove_duplicate=False):
            each.training = flags.get(f"{prefix}.{path}".strip("."), training)


def set_mode(model: nn.Module, training: bool) -> None:
    """Set a model's mode as `Modes` says."""
    kept = [m for m in model.modules() if not m.training] if training and model.training else []
    model.train(training)
    for module in kept:
        module.training = False


@contextmanager
def kept_modes(model: nn.Module) -> Iterator[None]:
    """A context after which all modules of a model have the modes that they had before."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, before in modes:
            module.training = before


@contextmanager
def mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Training or evaluation mode; afterwards modes, buffers and attributes are what they were."""
    with kept_state(model), kept_modes(model):
        set_mode(model, training)
        yield


@contextmanager
def kept_state(model: nn.Module) -> Iterator[None]:
    """A context after which a model has the buffers and attributes that it had before."""
    registries = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    buffers = [(m, n, b) for m in model.modules() for n, b in m._buffers.items() if b is not None]
    copies = [buffer.clone() for *_, buffer in buffers]
    try:
        with restored_attributes(user_modules(model).values()):
            yield
    finally:
        for registry, before in registries:  # a first pass may fill what is empty
            for name in [n for n in registry if before.get(n) is None]:
                registry.pop(name)
                registry |= {name: None} if name in before else {}
        for (module, name, buffer), copy in zip(buffers, copies, strict=True):
            # on threads another block's graph may hold what no pass changes, such as positions
            same = torch.equal(buffer, copy)
            module._buffers[name] = buffer if same else buffer.copy_(copy)


def _units_of_chain(chain: Chain) -> list[Unit]:
    grouped = [child for children in chain.grouping.values() for child in children]
    assert grouped == list(chain._modules), "every child is in one unit, in running order"
    units = []
    for name, children in chain.grouping.items():
        parts = {child: chain.get_submodule(child) for child in children}
        stage = parts[children[0]]
        if len(parts) == 1 and type(stage) is nn.Sequential:
            units += [Unit(path, {path: leaf}) for path, leaf in _leaves(stage, children[0] + ".")]
        else:
            units.append(Unit(name, parts))
    return units


def _leaves(stage: nn.Sequential, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    # not named_children(), which skips a module's second occurrence
    for name, child in stage._modules.items():
        assert child is not None
        # exactly nn.Sequential: a subclass may have a forward of its own
        if type(child) is nn.Sequential:
            yield from _leaves(child, f"{prefix}{name}.")
        elif type(child) is nn.TransformerEncoder:
            yield from _leaves(nn.Sequential(*child.layers), f"{prefix}{name}.layers.")
            if child.norm is not None:
                yield f"{prefix}{name}.norm", child.norm
        else:
            yield prefix + name, child


class BlockModule(nn.Sequential):
    """A block's units in running order, with the global names of their tensors.

    Several tensors go in and out packed as one or, where that is asked for, apart: see `Bundle`.
    The network's outputs stay as they are.
    """

    def __init__(
        self,
        block: Sequence[Unit],
        after: Unit | None = None,
        parts: Sequence[tuple[str, nn.Module]] | None = None,
        modes: Modes | None = None,
    ) -> None:
        parts = parts_of(block) if parts is None else parts
        super().__init__(OrderedDict((str(i), m) for i, (_, m) in enumerate(parts)))
        self.prefixes = [prefix for prefix, _ in parts]
        self.before: Bundle | None = block[0].bundle
        self.after: Bundle | None = after.bundle if after else None
        self.begins = block[0].begins
        """Whether its input is the network's."""
        self.modes = modes
        """Of the network's modules; None: all have the same mode."""

    def train(self, mode: bool = True) -> BlockModule:
        """Training or evaluation mode, as the whole network's `train` would set it."""
        super().train(mode)
        if self.modes is not None:
            for prefix, part in zip(self.prefixes, self, strict=True):
                self.modes.apply(mode, part, prefix)
        return self

    def forward(self, input: Any, parts: slice | None = None, apart: bool = False) -> Any:
        """(N, ...) -> (N, ...); with `parts` through these only, from the first one's input.

        With `apart` several tensors go out so; they may come in either way.
        """
        if self.before is None and self.after is None and parts is None:
            return super().forward(input)  # type: ignore[no-untyped-call]
        chosen = range(len(self._modules))[parts or slice(None)]
        value = input
        if self.before is not None and 0 in chosen:
            restore = self.before.join if isinstance(input, tuple) else self.before.unpack
            value = restore(input)
        for i in chosen:
            part = self[i]
            value = call_network(part, value) if self.begins and not i else part(value)
        ends = len(self._modules) - 1 in chosen
        if self.after is None or not ends:
            return value
        return self.after.divide(value) if apart else self.after.pack(value)

    def global_name(self, local: str) -> str:
        """The name in the whole model's state dict of this module's tensor `local`."""
        index, _, rest = local.partition(".")
        return full_name(self.prefixes[int(index)], rest)


def make_single_unit_blocks(chain: Sequence[Unit]) -> list[BlockModule]:
    """Every unit as a separate block."""
    return [
        BlockModule([unit], after, [*unit.parts.items()])
        for unit, after in zip(chain, [*chain[1:], None], strict=True)
    ]


def check_shared_tensors(blocks: Sequence[BlockModule]) -> None:
    """ValueError if two blocks share a parameter or statistic: their copies would differ soon."""
    owner: dict[int, int] = {}
    for index, module in enumerate(blocks):
        norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
        statistics = {id(b) for norm in norms for b in norm.buffers()}
        tensors: list[tuple[str, str, Tensor]]
        tensors = [(name, "parameter", p) for name, p in module.named_parameters()]
        tensors += [(n, "statistic", b) for n, b in module.named_buffers() if id(b) in statistics]
        for name, kind, tensor in tensors:
            if owner.setdefault(id(tensor), index) != index:
                raise ValueError(
                    f"blocks {owner[id(tensor)]} and {index} share the {kind} "
                    f"{module.global_name(name)!r}, and their copies would drift apart: cut "
                    "elsewhere, or give each its own"
                )
