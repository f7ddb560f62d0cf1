"""The network of `hybrid show`, and a sample of its inputs."""

import re
from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hybrid.bench.show.counting import describe
from hybrid.bench.show.description import Description
from hybrid.bench.show.fitting import find_fit, parse_memory
from hybrid.data import Data, Mapped, Texts
from hybrid.errors import one_line
from hybrid.networks.blocks import SAMPLES
from hybrid.networks.models import reads_texts
from hybrid.settings import methods
from hybrid.settings.resolve import load
from hybrid.solvers.acting import nearest
from hybrid.solvers.engine.engine import Scheduled
from hybrid.solvers.named import is_reference
from hybrid.training import build

IMAGES = "float32[3,32,32]"
"""The default input of a built-in network: CIFAR's images."""
TEXTS = "int64[256]"
"""The default input of a built-in network for texts."""
CLASSES = 10
_FORM = re.compile(r"(?:(?P<name>[^=\[\],]+)=)?(?P<dtype>\w+)\[(?P<sizes>[0-9, ]*)\]")
_DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "uint8", "bool")


def show(
    overrides: Mapping[str, Any], inputs: str | None = None, memory: str | None = None
) -> Description:
    """Describe the network of some settings ("section.key" -> value), cut as for a training.

    `inputs` is the form of a sample for `parse_inputs`; None: that of `data.name`, or the default.
    `memory` of a machine is compared with what blocks need, see `parse_memory`. ValueError for
    settings that contradict each other or do not fit the network.
    """
    _check(overrides, inputs)
    most = 0 if memory is None else parse_memory(memory)
    overrides = {"split.blocks": len(overrides.get("split.cuts", [""])) + 1, **overrides}
    settings = load(None, overrides)
    data: Data
    if "data.name" in overrides:
        data, _ = build.load_data_sets(settings.data, settings.train.loss)
    else:
        texts = reads_texts(settings.model.name)
        usual = TEXTS if texts else IMAGES
        batch = parse_inputs(usual if inputs is None else inputs)
        _check_form(settings.model.name, batch, inputs)
        data = (
            Texts.empty(batch.shape[1], settings.train.batch_size)
            if texts
            else Mapped(_Samples(batch, settings.train.batch_size))
        )
    blocks, solver = build.build_blocks(settings, data), methods.solver(settings)
    shown = describe(
        blocks,
        data.sample(SAMPLES)[0],
        batch_size=settings.train.batch_size,
        optimizer=settings.optimizer,
        measured=settings.split.balance == "measured",
        model=settings.model.name,
        wire=solver.wire() if isinstance(solver, Scheduled) else None,
    )
    return replace(shown, fit=find_fit(overrides, blocks, data, shown, most)) if most else shown


def _check(overrides: Mapping[str, Any], inputs: str | None) -> None:
    """Reject settings that contradict each other."""
    name, cuts = overrides["model.name"], overrides.get("split.cuts")
    data = overrides.get("data.name")
    if data is not None and inputs is not None:
        raise ValueError(f"--data {data} has the shapes that --inputs would give: leave one out")
    if data is None and "data.dir" in overrides:
        raise ValueError("--data-dir is the folder of the files of --data: give that, too")
    if is_reference(name) and data is None and inputs is None:
        raise ValueError(
            f"what goes into {name} is not known: give --inputs 'float32[3,224,224]', the shape of "
            "one sample, or --data package.module:function"
        )
    if cuts is None:
        return
    blocks = overrides.get("split.blocks", len(cuts) + 1)
    if blocks != len(cuts) + 1:
        raise ValueError(
            f"--blocks is {blocks}, but --cuts names {len(cuts)}, which make {len(cuts) + 1} "
            "blocks: leave one of the two out"
        )
    if overrides.get("split.balance") == "even":
        raise ValueError("--cuts settles the blocks, so --balance even has no effect: leave it out")


def _check_form(name: str, batch: Any, inputs: str | None) -> None:
    """Reject samples that a built-in network does not take."""
    texts = reads_texts(name)
    dtype, dim = (torch.int64, 2) if texts else (torch.float32, 4)
    fits = isinstance(batch, Tensor) and (batch.dtype, batch.dim()) == (dtype, dim)
    if not (fits or is_reference(name)):
        form = f"int64[length], such as {TEXTS}"
        if not texts:
            form = f"float32[channels,size,size], such as {IMAGES}"
        reads = "texts" if texts else "images"
        raise ValueError(f"--inputs is {inputs!r}, but {name} takes {reads}: write {form}")


class _Samples(list[Any]):
    """A data set of samples with target 0."""

    classes = range(CLASSES)

    def __init__(self, batch: Any, count: int) -> None:
        inputs = [tree_map(itemgetter(i), batch) for i in range(2)]
        rows = [(*x, 0) if isinstance(x, tuple) else (x, 0) for x in inputs]
        super().__init__(rows * max(1, count))


def parse_inputs(text: str) -> Any:
    """Parse the forms of inputs into two samples: a tensor, a tuple, or a dict by name.

    "float32[3,224,224]" is one tensor, "ids=int64[128],mask=int64[128]" are two by name. Real
    numbers are normally distributed, integers and booleans are 1. ValueError for any other text.
    """
    forms = [_parse_form(part.strip(), text) for part in re.split(r",(?![^\[]*\])", text)]
    names = [name for name, _ in forms if name]
    if 0 < len(names) < len(forms):
        raise ValueError(
            f"--inputs {text!r} names {len(names)} of {len(forms)} inputs: name all or none"
        )
    if len(set(names)) < len(names):
        raise ValueError(f"--inputs {text!r} names an input twice: each has a name of its own")
    if names:
        return dict(forms)
    return forms[0][1] if len(forms) == 1 else tuple(x for _, x in forms)


def _parse_form(part: str, text: str) -> tuple[str, Tensor]:
    """Parse the name and two samples of one input."""
    match = _FORM.fullmatch(part)
    sizes = re.split(r" *, *", match["sizes"].strip()) if match and match["sizes"].strip() else []
    if match is None or not all(re.fullmatch("[0-9]{1,9}", x) and int(x) for x in sizes):
        raise ValueError(
            f"--inputs {text!r}: {part!r} is no form of a sample; write TYPE[SIZES], such as "
            "float32[3,224,224], or with names ids=int64[128],mask=int64[128]"
        )
    name, dtype, shape = (match["name"] or "").strip(), match["dtype"], [*map(int, sizes)]
    if dtype not in _DTYPES:
        near = nearest(dtype, _DTYPES)
        hint = f"; did you mean {near!r}?" if near else ""
        raise ValueError(
            f"--inputs {text!r}: unknown type {dtype!r}; it must be one of "
            f"{', '.join(_DTYPES)}{hint}"
        )
    kind: torch.dtype = getattr(torch, dtype)
    try:
        if not kind.is_floating_point:
            return name, torch.ones(2, *shape, dtype=kind)
        return name, torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).to(kind)
    except RuntimeError as error:  # such as out of memory
        raise ValueError(f"--inputs {text!r}: no such samples: {one_line(error)[:200]}") from error
