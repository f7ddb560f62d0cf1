"""What TrainingArguments of transformers say of a run: its settings, steps, events and metrics."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from math import ceil
from typing import Any

import torch
from torch import Tensor
from transformers import EvalPrediction, TrainerState
from transformers.trainer_pt_utils import EvalLoopContainer

from hybrid.data import Data
from hybrid.data.sampling import epoch_order
from hybrid.method.callback import Callback, RunInfo
from hybrid.rounds.phase_report import PhaseReport
from hybrid.settings.sections.base import MANY
from hybrid.solvers import Solver, registry

MAPPED = """
output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
lr_scheduler_kwargs warmup_steps warmup_ratio optim optim_args weight_decay adam_beta1 adam_beta2
adam_epsilon gradient_accumulation_steps max_grad_norm label_smoothing_factor bf16 fp16 tf32
activation_checkpointing gradient_checkpointing torch_compile logging_strategy logging_steps
logging_first_step report_to run_name project disable_tqdm log_level log_level_replica logging_dir
eval_strategy eval_steps per_device_eval_batch_size save_strategy save_steps save_total_limit
load_best_model_at_end metric_for_best_model greater_is_better full_determinism seed data_seed
use_cpu dataloader_drop_last dataloader_num_workers remove_unused_columns train_sampling_strategy
group_by_length length_column_name
"""
"""The fields of TrainingArguments that act as they do in transformers."""
NEUTRAL = """
log_on_each_node logging_nan_inf_filter trackio_space_id trackio_bucket_id trackio_static_space_id
eval_accumulation_steps torch_empty_cache_steps hub_token hub_private_repo hub_model_id hub_strategy
hub_always_push hub_revision dataloader_pin_memory dataloader_persistent_workers
dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph do_train do_eval
do_predict resume_from_checkpoint local_rank save_safetensors overwrite_output_dir
"""
"""Fields that change no number: of other launchers, of a hub that is off, and for scripts to read.

Any other field is refused if its value is not the default.
"""


class Course:
    """The steps of a run, in equal parts, and their samples: an `Order` of the training set.

    A part is an epoch, or the steps between evaluations: it is an epoch of `hybrid.Trainer`, at
    whose end blocks measure, and may stop.
    """

    def __init__(self, args: Any, data: Data, replicas: int) -> None:
        self.args, self.order = args, data.order
        self.count = count = len(data)
        if self.order is not None:
            count = len(self._samples(0))
        batch = data.batch_size or args.per_device_train_batch_size
        self.size = batch * args.gradient_accumulation_steps * replicas
        """Samples of a step."""
        self.epoch = count // self.size
        """Steps of an epoch."""
        if not self.epoch or (count % self.size and not args.dataloader_drop_last):
            raise ValueError(
                f"train_dataset has {count} samples and a step takes {self.size} "
                "(per_device_train_batch_size x gradient_accumulation_steps x replicas), but "
                "blocks make whole steps: set dataloader_drop_last=True, or take a divisor"
            )
        self.steps = args.max_steps
        if args.max_steps <= 0:
            self.steps = ceil(args.num_train_epochs * self.epoch)
        epochs = ceil(self.steps / self.epoch)
        self.state = TrainerState(max_steps=self.steps, num_train_epochs=epochs)
        self.state.train_batch_size = args.per_device_train_batch_size
        self.state.compute_steps(args, self.steps)
        by, self.part = args.eval_strategy, self.steps
        """Steps of a part."""
        if by == "steps":
            self.part = min(self.state.eval_steps, self.steps)
        elif by == "epoch" or self.steps % self.epoch == 0:
            self.part = self.epoch
        if self.steps % self.part:
            raise ValueError(
                f"eval_strategy is {by.value!r}, after every {self.part} steps, and the run has "
                f"{self.steps}: blocks evaluate after equal parts, so choose eval_steps that "
                "divide it, whole epochs, or none"
            )
        self.of_epoch = lru_cache(maxsize=2)(self._part)

    def _samples(self, epoch: int) -> Tensor:
        if self.order is None:
            return epoch_order(self.args.seed, epoch, self.count)
        return self.order.of_epoch(self.args.seed, epoch)

    def _part(self, seed: int, number: int) -> Tensor:
        """The samples of a part, in the order of the epochs that it lies in."""
        first, last = number * self.part, (number + 1) * self.part
        pieces = []
        for n in range(first // self.epoch, ceil(last / self.epoch)):
            start, stop = (min(max(x - n * self.epoch, 0), self.epoch) for x in (first, last))
            pieces.append(self._samples(n)[start * self.size : stop * self.size])
        return torch.cat(pieces)

    def kept(self) -> dict[str, Any]:
        """The run folder and its checkpoints, as `hybrid.Trainer` takes them."""
        args, by = self.args, self.args.save_strategy
        if by == "no":
            return {}
        apart = self.epoch if by == "epoch" else self.state.save_steps
        at_ends, best = apart % self.part == 0, args.load_best_model_at_end
        checkpoint = {
            "every": apart // self.part if at_ends else MANY,
            "steps": 0 if at_ends else apart,
            "keep_last": args.save_total_limit or (MANY if best else 0),
            "best": best,
            "rollbacks": 0,
        }
        return {"out": args.output_dir, "checkpoint": checkpoint}


class Events(Callback):
    """Tells the callbacks of transformers on the first rank what a run does; keeps its log."""

    def __init__(self, trainer: Any, course: Course) -> None:
        """`trainer` is transformers' own, whose state and control these are."""
        self.trainer, self.course = trainer, course
        self.sums = {"first": 0.0, "total": 0.0, "logged": 0.0, "loss": 0.0}
        """The first step and the losses of this call; the last logged step and the losses since."""

    def tell(self, event: str, *more: Any) -> None:
        """Call an event of all callbacks; ValueError for a wish that blocks do not grant."""
        t = self.trainer
        t.control = getattr(t.callback_handler, f"on_{event}")(t.args, t.state, t.control, *more)
        for wish in ("should_evaluate", "should_save", "should_epoch_stop"):
            if getattr(t.control, wish):
                raise ValueError(f"a callback sets {wish}: only logs and stops can be asked for")

    def on_start(self, run: RunInfo) -> None:
        self.sums["first"], state = run.step, self.trainer.state
        state.global_step, state.epoch = run.step, run.step / self.course.epoch
        self.tell("train_begin")
        self.tell("epoch_begin")

    def on_report(self, step: int, epoch: int, reports: Sequence[PhaseReport]) -> None:
        t, state, by = self.trainer, self.trainer.state, self.trainer.args.logging_strategy
        before = state.global_step
        for name in ("total", "loss"):
            self.sums[name] += reports[0].loss * (step - before)
        state.global_step, state.epoch = step, step / self.course.epoch
        self.tell("step_end")
        ended, due = (step // n > before // n for n in (self.course.epoch, state.logging_steps))
        if ended:
            self.tell("epoch_end")
        first = t.args.logging_first_step and not before
        if t.control.should_log or first or (ended if by == "epoch" else due and by == "steps"):
            loss = self.sums["loss"] / (step - self.sums["logged"])
            self.sums |= {"logged": step, "loss": 0.0}
            t.log({"loss": loss, "learning_rate": reports[0].learning_rate})
        if ended and step < self.course.steps:
            self.tell("epoch_begin")

    def on_epoch(self, epoch: int, results: Mapping[str, float | None]) -> bool:
        t, on = self.trainer, "validation_"
        measured = {k.removeprefix(on): x for k, x in results.items() if k.startswith(on)}
        if measured and None not in measured.values():
            metrics = named(measured, "eval")
            t.log(metrics)
            self.tell("evaluate", metrics)
            t._determine_best_metric(metrics, None)
        return bool(t.control.should_training_stop)

    def state(self) -> dict[str, Any]:
        kept = ("log_history", "best_metric", "best_global_step", "global_step", "epoch")
        return {"sums": self.sums, **{name: getattr(self.trainer.state, name) for name in kept}}

    def load_state(self, state: dict[str, Any]) -> None:
        self.sums = {**state["sums"], "first": state["global_step"], "total": 0.0}
        vars(self.trainer.state).update({k: x for k, x in state.items() if k != "sums"})


class Number:
    """One number of `compute_metrics`; those after the first take it `of` the first."""

    def __init__(
        self,
        function: Any = None,
        preprocess: Any = None,
        ignored: Container[str] = (),
        name: str = "",
        of: Number | None = None,
    ) -> None:
        """`ignored` are the names of outputs that are no predictions."""
        self.function, self.preprocess, self.ignored = function, preprocess, ignored
        self.name, self.of = name, of
        self.reset()

    def reset(self) -> None:
        self.samples = [EvalLoopContainer(True, padding_index=-100) for _ in range(2)]
        self.computed: dict[str, Any] = {}

    def update(self, out: Any, labels: Tensor) -> None:
        if self.of is None:
            logits = tuple(x for name, x in out.items() if name not in self.ignored)
            logits = logits[0] if len(logits) == 1 else logits
            if self.preprocess is not None:
                logits = self.preprocess(logits, labels)
            for samples, tensors in zip(self.samples, (logits, labels), strict=True):
                samples.add(tensors)

    def all(self) -> dict[str, Any]:
        """All numbers of the samples since `reset`."""
        if not self.computed:
            arrays = (samples.get_arrays() for samples in self.samples)
            self.computed = dict(self.function(EvalPrediction(*arrays)))
        return self.computed

    def compute(self) -> float:
        return float((self.of or self).all()[self.name])


def named(measured: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Metrics of a run by their names in transformers."""
    return {f"{prefix}_{k.removeprefix('eval_')}": x for k, x in measured.items() if k != "loss"}


def check_arguments(args: Any) -> None:
    """ValueError for a field that does not act and whose value is not the default."""
    usual = type(args)(output_dir=args.output_dir, use_cpu=args.use_cpu)
    acting = {*MAPPED.split(), *NEUTRAL.split()}
    for name in [each.name for each in fields(args) if each.name not in acting]:
        if (value := getattr(args, name)) != getattr(usual, name):
            raise ValueError(
                f"TrainingArguments has {name}={value!r}, which does not act in blocks: leave it "
                f"at {getattr(usual, name)!r}"
            )
    if getattr(args, "train_sampling_strategy", "") == "batch_rebalance":
        raise ValueError(
            "train_sampling_strategy is 'batch_rebalance', whose mini-batches have several sizes: "
            "choose random, sequential or group_by_length"
        )


def configured(solver: Solver | str, args: Any) -> Solver:
    """The solver with what the arguments say; an object keeps what it sets itself."""
    made: Any = registry.solver_class(solver)() if isinstance(solver, str) else solver
    recomputes = "activation_checkpointing"  # since 5.0
    recomputes = recomputes if hasattr(args, recomputes) else "gradient_checkpointing"
    settings: dict[str, Any] = {}
    for name, setting, off in (
        ("max_grad_norm", "clip_norm", 0),
        ("gradient_accumulation_steps", "micro_batches", 1),
        (recomputes, "recompute", False),
    ):
        value = getattr(args, name)
        if value in (None, off):
            continue
        if not hasattr(made, setting):
            raise ValueError(
                f"{name} is {value}, and the solver {made.name} has no {setting}: set "
                f"{name}={off}, or choose another solver"
            )
        if not getattr(made, setting):
            settings[setting] = value
    solver = replace(made, **settings)
    assert isinstance(solver, Solver)
    return solver
