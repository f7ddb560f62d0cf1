"""[model], [data] and [train]: network, samples, length and numerics of a training."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from hybrid.registries import LONGEST_TEXT, TEXT
from hybrid.settings.sections.base import (
    MANY,
    TESTED,
    TRAIN,
    TRAIN_OR_BENCH,
    TRAIN_OR_PLAN,
    Section,
)
from hybrid.settings.selection import Selection
from hybrid.solvers.acting import REPLICAS, Acts, Needs
from hybrid.solvers.named import is_reference

OWN_MODEL = Acts("model.name is a built-in network", lambda run: not is_reference(run.model.name))
OWN_DATA = Acts("data.name is a built-in data set", lambda run: not run.own_data)
IMAGES = Acts(
    "data.name is a built-in set of images", lambda run: not run.own_data and run.data.name != TEXT
)
OF_TEXT = Acts(f"data.name is {TEXT}", lambda run: run.data.name == TEXT)
READS = Acts(
    "data.name is your own function, since this package's data are in memory",
    lambda run: run.own_data,
)


class ModelSettings(Section):
    """[model] the network."""

    name: str = "resnet8"
    """Network: resnet20 (6n+2), wrn-16-4, revnet20, resnet18; for text gpt-4-128 (layers, width);
    your own: module:function."""
    survival: Annotated[float, OWN_MODEL] = Field(default=1.0, gt=0, le=1)
    """Stochastic depth: probability of keeping the last residual unit."""
    weights: Annotated[str, TRAIN_OR_PLAN] = ""
    """Pretrained weights: a safetensors file or folder."""


class DataSettings(Section):
    """[data] the samples."""

    name: str = "digits"
    """Data set: digits, cifar10, cifar100, synthetic, text; your own: module:function."""
    dir: Annotated[str, OWN_DATA] = ""
    """Folder of the data files; empty: $HYBRID_DATA, else ~/.cache/hybrid. For text: the file or
    folder to read."""
    limit: Annotated[int, OWN_DATA] = Field(default=0, ge=0, le=MANY)
    """Use only the first N training samples; 0: all."""
    length: Annotated[int, OF_TEXT] = Field(default=256, ge=2, le=LONGEST_TEXT)
    """Bytes per text sample; the network predicts each next byte."""
    validation: Annotated[float, TRAIN_OR_PLAN] = Field(default=0.0, ge=0, lt=1)
    """Fraction of the training set held out for validation; the test set is then measured only at
    the end. 0: none."""
    augment: Annotated[bool, IMAGES] = True
    """Standard augmentation (CIFAR: pad by 4, crop, flip; other data sets: none)."""
    workers: Annotated[int, READS] = Field(default=0, ge=0, le=1024)
    """Worker processes that load your data ahead; 0: none."""


ALIKE = Needs(
    "replicas agree after every step",
    lambda run: run.replicas == 1 or run.sync.exact,
    "leave it out, or choose sync.name=all-reduce",
)
ALIKE_IN_FLOAT16 = Needs(
    "in float16 replicas agree after every step",
    lambda run: run.train.precision != "float16" or run.replicas == 1 or run.sync.exact,
    "choose bfloat16, or sync.name=all-reduce",
)
ADDS_ALIKE = Needs(
    "in float16 there is no local work, since the loss scale may change within a step",
    lambda run: run.train.precision != "float16" or not run.setup.local_work,
    "choose bfloat16, or fill.name=none",
)
NO_DRAWS = Needs(
    "no layer draws random numbers, which would not be repeatable", lambda run: not run.draws
)
PASSES_ALONE = Needs(
    "train.sync_batchnorm is false, since its passes communicate",
    lambda run: run.replicas == 1 or not run.train.sync_batchnorm,
    "leave one of the two out",
)
TESTS_BEFORE_END = Acts(
    "a test before the last epoch can stop the run",
    lambda run: (
        (every := run.train.evaluate_every) * (1 - -run.train.early_stop // every)
        < run.train.epochs
        or run.resume  # whose epochs are compared with those that were trained
    ),
)
SELECTS = Acts(
    "train.early_stop or checkpoint.best follows it",
    lambda run: run.train.early_stop or run.checkpoint.best,
)
NORMS = Acts("the network has BatchNorm", lambda run: run.normed)
EQUAL_SHARES = Needs(
    "replicas have equal shares",
    lambda run: run.train.batch_size % run.replicas == 0,
    "take a train.batch_size that is a multiple of the replicas",
    here=lambda run: f"{run.replicas} replicas share {run.train.batch_size} samples",
)


class TrainSettings(Section):
    """[train] length, batch, numerics."""

    epochs: Annotated[int, TRAIN_OR_PLAN] = Field(default=12, ge=1, le=10**6)
    """Passes over the training data."""
    batch_size: int = Field(default=128, ge=1, le=MANY)
    """Samples per mini-batch, over all replicas."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Random seed of weights, sample order, augmentation and dropout."""
    loss: Annotated[str, TRAIN_OR_PLAN] = "cross-entropy"
    """Loss: cross-entropy, mse, l1, huber, bce (multi-label, from logits), model (the network's
    own, as in Hugging Face); your own: module:function."""
    label_smoothing: Annotated[float, TRAIN_OR_PLAN] = Field(default=0.0, ge=0, lt=1)
    """Label smoothing of cross-entropy in training."""
    precision: Annotated[
        Literal["float32", "bfloat16", "float16"], TRAIN_OR_BENCH, ADDS_ALIKE, ALIKE_IN_FLOAT16
    ] = "float32"
    """Number format of passes: float32, or under autocast bfloat16, float16."""
    frozen: Annotated[dict[str, int], TRAIN] = Field(default={})
    """Parameters or modules to freeze, and epochs (0: all), e.g.
    train.frozen.bert.embeddings = 2, or a list of names."""
    ema: Annotated[float, TRAIN_OR_PLAN, ALIKE] = Field(default=0.0, ge=0, lt=1)
    """EMA decay of the weights, e.g. 0.999; the average is tested and exported. 0: no average."""
    report_every: Annotated[int, TRAIN_OR_PLAN] = Field(default=16, ge=1, le=MANY)
    """Mini-batches between reports, where a run can stop; unflushed pipelines: times the blocks."""
    evaluate_every: Annotated[int, TRAIN_OR_PLAN, TESTED] = Field(default=1, ge=1, le=MANY)
    """Epochs between measurements on the validation (else test) set; the last epoch always is."""
    early_stop: Annotated[int, TRAIN_OR_PLAN, TESTS_BEFORE_END] = Field(default=0, ge=0, le=10**6)
    """Stop after N epochs without a better train.metric (training loss, if nothing is measured);
    0: never."""
    metric: Annotated[str, TRAIN_OR_PLAN, TESTED, SELECTS] = ""
    """Metric that early_stop and checkpoint.best follow: loss, accuracy, or your own; empty:
    accuracy, else loss."""
    metric_mode: Annotated[Literal["min", "max"] | None, TRAIN_OR_PLAN, TESTED, SELECTS] = None
    """Which values of train.metric are better; unset: min for loss, max for accuracy."""
    verify: Annotated[Literal["auto", "always", "never"], TRAIN] = "auto"
    """Compare gradients with the undivided network's before the first step, and losses while
    training; auto: for your own network, data or loss."""
    threads: int = Field(default=0, ge=0, le=1024)
    """Threads per rank; 0: OMP_NUM_THREADS, else the rank's share of the cores. Another number can
    give other bits."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of a block; auto: the local rank's GPU, if any."""
    kernels: Literal["auto", "torch", "cupy"] = "auto"
    """Kernels between passes; auto: fused CuPy kernels on a GPU with CuPy, else torch."""
    compile: Annotated[Literal[False, True, "graphs"], TRAIN, NO_DRAWS, PASSES_ALONE] = False
    """Compile the blocks with torch.compile; graphs: record their passes as CUDA graphs instead."""
    deterministic: Annotated[bool, TRAIN_OR_BENCH] = False
    """Use torch's and cuDNN's deterministic algorithms: the same bits on a GPU at every run."""
    sync_batchnorm: Annotated[bool, TRAIN_OR_PLAN, REPLICAS, EQUAL_SHARES, NORMS] = False
    """BatchNorm statistics over all replicas; false: each replica normalizes its own share."""

    @field_validator("frozen", mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        """Convert a name or a list of names to a table, and nested tables to dotted names."""
        names = [value] if isinstance(value, str) else value
        if isinstance(names, list | tuple):
            return dict.fromkeys(map(str, names), 0)
        return dict(_flatten(value)) if isinstance(value, Mapping) else value

    @property
    def selection(self) -> Selection:
        return Selection(self.metric, self.metric_mode)

    @field_validator("frozen")
    @classmethod
    def _epochs_of_frozen(cls, frozen: dict[str, int]) -> dict[str, int]:
        for name, epochs in frozen.items():
            if not 0 <= epochs <= 10**6:
                raise ValueError(f"{name} is frozen for {epochs} epochs: choose 0 (all) to 1000000")
        return frozen


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over the entries of nested tables by dotted names."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
