"""[optimizer], [schedule] and [delay]: steps of the weights, learning rates, late gradients."""

from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from hybrid.settings import torch_classes
from hybrid.settings.sections.base import LARGE, MANY, TRAIN_OR_PLAN, Section
from hybrid.solvers.acting import Acts, Facts, Needs

WITH_MOMENTUM = Acts(
    "optimizer.name is sgd, adamw, nadamw, muon or soap, as others take it as an argument",
    lambda run: run.optimizer.name in torch_classes.OPTIMIZERS,
    "put it in optimizer.arguments",
)
WITHOUT_BETAS = Acts(
    "optimizer.arguments has no betas", lambda run: "betas" not in run.optimizer.arguments
)
STEPS_OUTSIDE = Acts(
    "solver.momentum is unset, or there are serial rounds", lambda run: steps_outside(run)
)
MOMENTUM_OUTSIDE = Needs(
    "it sets no momentum, or solver.momentum is unset, or there are serial rounds",
    lambda run: "momentum" not in run.optimizer.arguments or steps_outside(run),
)
NESTEROVS = Acts(
    "optimizer.name is sgd or muon, and optimizer.momentum above 0",
    lambda run: run.optimizer.name in ("sgd", "muon") and run.optimizer.momentum,
)
MUON = Acts("optimizer.name is muon", lambda run: run.optimizer.name == "muon")
BY_SHAPE = Acts(
    "optimizer.name is muon or soap", lambda run: run.optimizer.name in torch_classes.BY_SHAPE
)
SHARES_STEPS = Acts(
    "there are replicas, which agree after every step",
    lambda run: run.replicas > 1 and run.sync.exact,
)
DECAYS = Acts(
    "the optimizer has a weight decay", lambda run: torch_classes.decays(run.optimizer.name)
)
DECAY_IS_SET = Acts("optimizer.weight_decay is above 0", lambda run: run.optimizer.weight_decay)


def steps_outside(run: Facts) -> bool:
    """Whether any step uses the optimizer's momentum instead of the solver's."""
    return run.setup.corrects or not (run.solver.alternates and run.solver.separate_momentum)


def _taken(check: Callable[[str, dict[str, Any]], None]) -> AfterValidator:
    """Make the validator of the arguments of a class, whose name comes before them."""

    def checked(arguments: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if "name" in info.data:
            check(info.data["name"], arguments)
        return arguments

    return AfterValidator(checked)


class OptimizerSettings(Section):
    """[optimizer] the step of the weights."""

    name: Annotated[str, AfterValidator(torch_classes.optimizer_name)] = "sgd"
    """sgd (with momentum), muon, soap, adamw, nadamw, a class of torch.optim, or module:Class."""
    lr: Annotated[float, TRAIN_OR_PLAN] = Field(default=torch_classes.SGD_RATE, gt=0, le=LARGE)
    """Peak learning rate; default 0.1 for sgd, 0.02 for muon, 1e-3 for module:Class, or torch's."""
    momentum: Annotated[float, Field(ge=0, lt=1), WITH_MOMENTUM, WITHOUT_BETAS, STEPS_OUTSIDE] = 0.9
    """Momentum of sgd and muon (default 0.95); beta_1 of adamw, soap and nadamw (default 0.99)."""
    nesterov: Annotated[bool, NESTEROVS] = True
    """Nesterov momentum."""
    weight_decay: Annotated[float, DECAYS] = Field(default=5e-4, ge=0, le=LARGE)
    """Weight decay (decoupled in AdamW); default 0 for module:Class."""
    decay_all: Annotated[bool, DECAYS, DECAY_IS_SET] = False
    """Also decay biases and BatchNorm parameters."""
    vectors: Annotated[Literal["sgd", "adamw"], BY_SHAPE] = "sgd"
    """Optimizer of vectors, norms, embeddings and the output layer; default adamw for soap."""
    vectors_lr: Annotated[float | None, BY_SHAPE] = Field(default=None, gt=0, le=LARGE)
    """Peak learning rate of optimizer.vectors; unset: optimizer.lr."""
    sharded: Annotated[bool | None, MUON, SHARES_STEPS] = None
    """Divide Muon's matrix products among replicas; unset: if they cost over 3 % of compute."""
    arguments: Annotated[
        dict[str, Any], _taken(torch_classes.check_optimizer), MOMENTUM_OUTSIDE
    ] = Field(default={})
    """Further arguments of the class, e.g. optimizer.arguments.eps = 1e-6."""

    def usual(self) -> dict[str, Any]:
        return torch_classes.usual_values(self.name)

    @model_validator(mode="before")
    @classmethod
    def _with_usual_values(cls, values: Any) -> Any:
        """Set defaults by name: sgd's rate of 0.1 would make AdamW diverge."""
        if isinstance(values, dict) and isinstance(values.get("name"), str):
            with suppress(KeyError):  # an unknown name, which its validator rejects
                return torch_classes.usual_values(values["name"]) | values
        return values


OF_TORCH = Acts(
    "schedule.name is a torch scheduler other than plateau",
    lambda run: run.schedule.name not in torch_classes.SCHEDULES and not run.schedule.on_plateau,
)
PLATEAU = Acts("schedule.name is plateau", lambda run: run.schedule.on_plateau)
BY_STEPS = Acts("schedule.name is step", lambda run: run.schedule.name == "step")


class ScheduleSettings(Section):
    """[schedule] the learning rate over the steps."""

    acts: ClassVar[dict[str, Acts]] = {"schedule.*": TRAIN_OR_PLAN}

    name: Annotated[str, AfterValidator(torch_classes.scheduler_name)] = "linear"
    """Schedule: cosine, linear, step, constant, one-cycle, plateau, or a class of lr_scheduler."""
    warmup_epochs: float | None = Field(default=None, ge=0, le=LARGE)
    """Epochs of linear warm-up; unset: 1, or 0 for torch's schedulers."""
    warmup_steps: int | None = Field(default=None, ge=0, le=MANY)
    """Steps of linear warm-up, instead of epochs."""
    milestones: Annotated[list[float], BY_STEPS] = Field(default=[0.5, 0.75])
    """Fractions of the training at which the rate is multiplied by gamma."""
    gamma: Annotated[float, BY_STEPS] = Field(default=0.1, gt=0, le=1)
    """Factor at each milestone."""
    interval: Annotated[Literal["epoch", "step"] | None, OF_TORCH] = None
    """When the scheduler steps; unset: every epoch (OneCycleLR, CyclicLR: every step)."""
    metric: Annotated[str, PLATEAU] = "loss"
    """Metric that plateau follows: loss, accuracy, or your own."""
    arguments: Annotated[dict[str, Any], _taken(torch_classes.check_scheduler)] = Field(
        default={}, validate_default=True
    )
    """Arguments of a torch scheduler, e.g. schedule.arguments.gamma = 0.9."""

    @property
    def on_plateau(self) -> bool:
        """Whether the rate falls when a metric no longer improves."""
        return torch_classes.SHORT.get(self.name, self.name) == torch_classes.SHORT["plateau"]

    def warm_up(self, steps_per_epoch: int) -> int:
        if self.warmup_steps is not None:
            return self.warmup_steps
        usual = 1.0 if self.name in torch_classes.SCHEDULES else 0.0
        epochs = usual if self.warmup_epochs is None else self.warmup_epochs
        return round(epochs * steps_per_epoch)

    @field_validator("warmup_steps")
    @classmethod
    def _one_warm_up(cls, steps: int | None, info: ValidationInfo) -> int | None:
        epochs = info.data.get("warmup_epochs")
        if steps is not None and epochs is not None:
            raise ValueError(f"warmup_epochs is {epochs:g}, too: give one of the two")
        return steps


LATE = Acts(
    "gradients are delayed",
    lambda run: run.solver.steps_late(0, run.setup.blocks, run.setup.batch_size) > 0,
)
MENDED = Acts("delay.mend is not none", lambda run: run.delay.mend != "none")


class DelaySettings(Section):
    """[delay] what a step does about the delay of its gradient."""

    mend: Annotated[Literal["none", "extrapolate"], LATE] = "none"
    """extrapolate: predict the weights by adding the change from one update to the next."""
    cap: Annotated[float, MENDED] = Field(default=1.0, gt=0, le=LARGE)
    """Upper limit, in steps, of a block's delay that is extrapolated."""
