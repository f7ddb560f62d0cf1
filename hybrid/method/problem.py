"""The problem to train: a network in blocks, with its data and objectives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hybrid.data import Data
from hybrid.data.items import TARGETS
from hybrid.method.objectives import Objectives, input_names
from hybrid.method.options import Options
from hybrid.networks.blocks import SAMPLES, Blocks
from hybrid.solvers.base import Shape, Solver
from hybrid.solvers.layers.branches import survival


@dataclass(frozen=True)
class Problem:
    """A network in blocks with its data and objectives, for which a method is made."""

    blocks: Blocks
    """The blocks, with the bundles of their units."""
    objectives: Objectives
    inputs: Any
    """A few inputs of the network."""
    shapes: tuple[Shape, ...]
    """The shape of one sample at every cut."""
    formats: tuple[torch.dtype, ...]
    """The number format at every cut."""
    drawing: list[dict[nn.Module, tuple[int, ...]]]
    """For each block, the modules that draw random numbers and the numbers of their units."""
    survival: float
    """The smallest probability that a unit is kept in a pass."""
    normed: bool
    """Whether the network has running statistics."""
    steps: int
    """Mini-batches per epoch."""
    augmented: bool
    """Whether samples are augmented anew in every epoch."""
    ordered: bool
    """Whether the data determine the order of samples."""
    streamed: bool
    """Whether samples are available only in that order."""
    varies: bool
    """Whether samples have several lengths."""
    data: Data
    """The training data."""
    sample: Tensor
    """A few samples, packed for the first block."""

    @classmethod
    def of(
        cls,
        options: Options,
        blocks: Blocks,
        train: Data,
        test: Data | None = None,
        validation: Data | None = None,
    ) -> "Problem":
        """Check that network, data and objectives fit; ValueError with the remedy if not."""
        check_size(options.train.batch_size, train)
        if not any(p.requires_grad for p in blocks.model.parameters()):
            raise ValueError(
                f"{type(blocks.model).__name__} has 0 parameters to train: give it layers "
                "that have some, or let theirs require gradients"
            )
        inputs, _ = train.sample(SAMPLES)
        sets = [each for each in (train, validation, test) if each is not None]
        # what is stored for a window has one shape
        stores = options.solver.alternates or isinstance(options.fill, Solver)
        blocks = with_bundles(blocks, sets, stores)
        objectives = Objectives.of(options, blocks, train, train if test is None else test)
        objectives = objectives.with_validation(options, blocks, train, validation)
        sample = blocks.pack_inputs(inputs)
        crossing = blocks.cut_tensors(sample)
        choice = options.sampler.start(train, options.train.seed)
        steps = choice.batches(options.train.batch_size)
        if not steps:
            raise ValueError(
                f"the batch size is {options.train.batch_size}, more samples than the sampler "
                f"takes of {len(train)} in an epoch: choose a smaller one"
            )
        modules = list(blocks.model.modules())
        return cls(
            blocks,
            objectives,
            inputs,
            tuple(tuple(x.shape[1:]) for x in crossing),
            tuple(x.dtype for x in crossing),
            blocks.find_random_modules(sample),
            min(map(survival, modules)),
            any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in modules),
            steps,
            train.augmented,
            train.streamed or train.order is not None,
            train.streamed,
            any(data.varies for data in sets),
            train,
            sample,
        )

    @property
    def draws(self) -> bool:
        """Whether layers of the network draw random numbers."""
        return any(self.drawing)

    @property
    def unit(self) -> str:
        """ "images" for inputs with channels, height and width, else "samples"."""
        image = isinstance(self.inputs, Tensor) and self.inputs.dim() == 4
        return "images" if image else "samples"


def with_bundles(blocks: Blocks, sets: Sequence[Data], one_shape: bool = False) -> Blocks:
    """Give the blocks' units the bundles of inputs of these data, of all known lengths.

    ValueError for inputs that differ from those with which the network was cut.
    """
    inputs = [data.sample(2)[0] for data in sets]
    _check_names(input_names(blocks), blocks.num_inputs, inputs[0])
    bundled = blocks.with_bundles(inputs[0])
    if one_shape:
        return bundled
    return bundled.varying([*inputs, *(x for data in sets for x, _ in data.others)])


def _check_names(names: set[str], wanted: int, inputs: Any) -> None:
    """Reject inputs that differ from the sample's in their names or their number."""
    keys = {*inputs} if isinstance(inputs, Mapping) else names
    count = len(tree_leaves(inputs))
    if keys == names and count == len(names) if names else count in (0, wanted or count):
        return
    shown = ", ".join(sorted(keys)) if isinstance(inputs, Mapping) else f"{count} tensors"
    labels = (names - keys) & {*TARGETS}
    what = "give data.Mapped(..., labels_are_inputs=True)" if labels else "give both the same"
    expected = ", ".join(sorted(names)) or f"{wanted} tensors"
    raise ValueError(
        f"the inputs are {shown}, and those of the sample= of split {expected}: {what}"
    )


def check_size(size: int, data: Data) -> None:
    """Reject a mini-batch larger than the training set."""
    if size > len(data):
        raise ValueError(
            f"the batch size is {size} but there are {len(data)} training samples: choose a batch "
            f"size of at most {len(data)}"
        )
