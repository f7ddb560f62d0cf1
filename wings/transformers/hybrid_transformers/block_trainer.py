"""transformers' Trainer in blocks: its arguments, callbacks and log, and its gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from time import time
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback
from transformers import trainer_callback as callbacks
from transformers import trainer_utils as utils
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hybrid.data import Data, as_data
from hybrid.links.communicator import agreement
from hybrid.method.callback import Callback
from hybrid.method.objectives import count_of_transformers
from hybrid.networks.blocks import SAMPLES, Blocks
from hybrid.networks.partition.split import split
from hybrid.networks.units import kept_modes
from hybrid.ranks import launch
from hybrid.solvers import Solver, registry
from hybrid.solvers.layers.bundle import call_network
from hybrid.solvers.metrics import WeightedSum, user_code
from hybrid.solvers.objective import CountOf, loss_of
from hybrid.training import trainer as blockwise
from hybrid.training.restore import read_weights
from hybrid_transformers.course import (
    Course,
    Events,
    Number,
    check_arguments,
    configured,
    named,
)

OVERRIDES = ("compute_loss", "training_step", "prediction_step", "evaluation_loop")
"""Methods of Trainer that are not called."""
EVENTS = ("step_begin", "substep_end", "pre_optimizer_step", "optimizer_step", "save")
"""Events that are not told: blocks make a step at several times."""


class BlockTrainer(Trainer):  # type: ignore[misc]
    """Trains a model of transformers in blocks, with the arguments of transformers' Trainer.

    It runs on K threads, or on the ranks of mpirun or torchrun, one for each block. With the exact
    solver its steps are Trainer's, up to rounding and random draws; of a delayed method each block
    clips its own gradient.

    - A step takes per_device_train_batch_size x gradient_accumulation_steps x replicas samples, the
      accumulation as micro-batches. dataloader_drop_last drops an incomplete step.
    - output_dir is the run folder. resume_from_checkpoint=True goes on from its newest checkpoint,
      on any number of blocks. USR1, USR2 and TERM write a checkpoint and end the run.
    - Logs, checkpoints and on_step_end come with the first report at or after their step. Callbacks
      are called on the first rank; they may stop a run at the end of an epoch or an evaluation.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *arguments: Any,
        blocks: int | Sequence[str] = 2,
        solver: Solver | str = registry.DEFAULT,
        replicas: int = 1,
        options: Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        """Take Trainer's arguments; `blocks` is a number, or names the first unit after each cut.

        An object as `solver` keeps the settings that it has. `options` are other arguments of
        `hybrid.Trainer`, such as sync and links. ValueError, by name, for what cannot act.
        """
        if found := _overridden(type(self), Trainer, OVERRIDES):
            raise ValueError(
                f"{type(self).__name__} overrides {found}, which blocks do not call: give "
                "compute_loss_func= or compute_metrics= instead"
            )
        if args is not None:
            check_arguments(args)
        super().__init__(model, args, *arguments, **keywords)
        if self.model_init is not None:
            raise ValueError("model_init is given, but blocks train one model: give it as model=")
        self.cut_at, self.solver, self.replicas = blocks, solver, replicas
        self.options = dict(options or {})
        self.blockwise: blockwise.Trainer | None = None
        """The trainer of the blocks, from the first training or evaluation on."""
        self.pop_callback(callbacks.DefaultFlowCallback)  # a run's settings decide what it does
        if not self.is_world_process_zero():
            self.callback_handler.call_event = lambda event, args, state, control, **_: control

    # ---- in place of transformers' loops

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: Any = None,
    ) -> Any:
        """Train as `hybrid.Trainer.fit` does; give the steps, the mean loss and the speed."""
        begin, args, source = time(), self.args, resume_from_checkpoint
        if isinstance(source, str) and Path(source).resolve() != Path(args.output_dir).resolve():
            raise ValueError(
                f"resume_from_checkpoint is {source}, and a run goes on from the newest checkpoint "
                "of its output_dir: give True"
            )
        loader = self.get_train_dataloader()
        for each in self.callback_handler.callbacks:
            found = _overridden(type(each), TrainerCallback, [f"on_{name}" for name in EVENTS])
            if found and not type(each).__module__.startswith("transformers."):
                raise ValueError(
                    f"the callback {type(each).__name__} has {found}, which blocks do not call: "
                    "use on_step_end, on_log, on_evaluate or on_epoch_end"
                )
        if isinstance(self.processing_class, PreTrainedTokenizerBase):
            align = getattr(utils, "align_special_tokens", lambda model, tokenizer: None)
            align(self.model, self.processing_class)
        data = self._data(loader)
        if args.gradient_accumulation_steps > 1 and not self._is_divided(data):
            raise ValueError(
                f"gradient_accumulation_steps is {args.gradient_accumulation_steps}, and the loss "
                "does not use num_items_in_batch, so that Trainer would add up the means of "
                "micro-batches: set 1 and a larger batch, and give solver= with micro_batches"
            )
        course = data.order = Course(args, data, self.replicas)
        data.batch_size, self.state = None, course.state
        tested = self._data(self.get_eval_dataloader()) if args.eval_strategy != "no" else None
        if getattr(self, "_created_lr_scheduler", False):
            self.lr_scheduler = None
        self.create_optimizer_and_scheduler(course.steps)
        handler = self.callback_handler
        handler.optimizer, handler.lr_scheduler = self.optimizer, self.lr_scheduler
        handler.train_dataloader = loader
        events = Events(self, course)
        options = self._of_training(course, events) | {"resume": bool(source)}
        self.blockwise = self._on_blocks(data, tested, options)
        self.blockwise.fit(data, validation=tested)
        if (comm := launch.communicator()) is not None:  # the first rank alone has been told
            told, events.sums = comm.bcast((vars(self.state), events.sums))
            vars(self.state).update(told, is_world_process_zero=self.is_world_process_zero())
        steps = int(self.state.global_step - events.sums["first"])
        metrics = utils.speed_metrics("train", begin, steps * course.size, steps)
        metrics["train_loss"] = events.sums["total"] / max(1, steps)
        self.log(metrics)
        self.control: Any = handler.on_train_end(args, self.state, self.control)
        return utils.TrainOutput(self.state.global_step, metrics["train_loss"], metrics)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Measure the loss, as Trainer's mean over mini-batches, and what compute_metrics gives."""
        if isinstance(sets := self.eval_dataset if eval_dataset is None else eval_dataset, dict):
            each = [self.evaluate(x, None, f"{metric_key_prefix}_{k}") for k, x in sets.items()]
            return {k: x for metrics in each for k, x in metrics.items()}
        begin, data = time(), self._data(self.get_eval_dataloader(sets))
        trainer = self.blockwise
        if trainer is None or not trainer.options.metrics:
            links = {k: x for k, x in self.options.items() if k == "links"}
            trainer = self.blockwise = self._on_blocks(data, data, links)
        metrics = named(trainer.evaluate(data), metric_key_prefix)
        steps = ceil(len(data) / self.args.per_device_eval_batch_size)
        metrics |= utils.speed_metrics(metric_key_prefix, begin, len(data), steps)
        self.log(metrics)
        said = self.args, self.state, self.control, metrics
        self.control = self.callback_handler.on_evaluate(*said)
        return metrics

    def predict(self, *arguments: Any, **keywords: Any) -> Any:
        """Predict as Trainer does, in one process that has the whole model."""
        if launch.communicator() is not None:
            raise ValueError(
                "predict needs the whole model, and each rank has a block: call it in a script of "
                "one process, on what save_model has written"
            )
        super()._move_model_to_device(self.model, self.args.device)
        return super().predict(*arguments, **keywords)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write what from_pretrained reads; the first rank does, from the run folder."""
        if (comm := launch.communicator()) is None:
            super().save_model(output_dir, _internal_call)
            return
        with agreement(comm.first_of):
            if comm.rank == 0:
                run, best = Path(self.args.output_dir), self.args.load_best_model_at_end
                self._save(output_dir, read_weights(run, best).tensors)

    def is_world_process_zero(self) -> bool:
        return (comm := launch.communicator()) is None or comm.rank == 0

    is_local_process_zero = is_world_process_zero

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Leave the model to its blocks, which have devices of their own."""

    # ---- what a training is made of

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Make a loader with the order that Trainer has on one device."""
        sampler = self._get_train_sampler()
        if type(sampler) is RandomSampler:  # as accelerate replaces it
            sampler = SeedableRandomSampler(self.train_dataset, data_seed=self.args.data_seed)
        size = self.args.per_device_train_batch_size
        return self._loader("train_dataset", self.train_dataset, size, sampler)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        size, sampler = self.args.per_device_eval_batch_size, self._get_eval_sampler(dataset)
        return self._loader("eval_dataset", dataset, size, sampler)

    def _loader(self, name: str, dataset: Any, size: int, sampler: Any) -> DataLoader[Any]:
        if dataset is None or isinstance(dataset, dict | IterableDataset):
            raise ValueError(
                f"{name} is {'None' if dataset is None else f'a {type(dataset).__name__}'}: give "
                "one data set with a length; hybrid.Trainer takes a stream"
            )
        collate = self._get_collator_with_removed_columns(self.data_collator, name)
        workers = self.args.dataloader_num_workers
        return DataLoader(dataset, size, sampler=sampler, collate_fn=collate, num_workers=workers)

    def _data(self, loader: DataLoader[Any]) -> Data:
        own = self.compute_loss_func is None and self.label_smoother is None
        return as_data(loader, labels_are_inputs=own)

    def _is_divided(self, data: Data) -> bool:
        """Whether the loss is over the number of labels in a step; tried on two samples."""
        function = self.compute_loss_func
        if function is None and (self.label_smoother or not self.model_accepts_loss_kwargs):
            return True  # or by micro-batches
        inputs, labels = data.sample(2)

        def loss(number: int) -> Tensor:
            if function is None:
                return loss_of(self.model(**inputs, num_items_in_batch=number))
            out = call_network(self.model, inputs)
            value: Tensor = function(out, labels, num_items_in_batch=number)
            return value

        with torch.no_grad(), kept_modes(self.model):
            self.model.eval()
            return bool(torch.isclose(loss(1), 2 * loss(2), rtol=1e-3))

    def _loss(self) -> dict[str, Any]:
        """The loss and what it is divided by, as in Trainer; empty: the model's own, as it is.

        Trainer divides by the labels that it counts in a step, if the model accepts that number, or
        else by micro-batches. A model may have its mean over others: GPT-2 predicts no first label.
        """
        counts = CountOf("labels"), CountOf("shifted labels")
        counted = counts[getattr(self, "_loss_shifts_labels", False)]  # all of them, before 5.0
        if self.compute_loss_func is not None:
            function = partial(_normalized, self.compute_loss_func, counted)
            return {"loss": function, "denominator": counted}
        own, loss = count_of_transformers(self.model), loss_of
        accepts = self.model_accepts_loss_kwargs
        if self.label_smoother is not None:
            within = getattr(self.model, "get_base_model", lambda: self.model)()  # of peft's
            shifts = type(within).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
            own, loss = counts[shifts], partial(_smoothed, self.label_smoother, shifts)
        elif own is None or (own == counted and accepts):
            return {}
        if not accepts:
            return {"loss": loss, "denominator": CountOf("samples")}
        return {"loss": partial(_recounted, loss, own, counted), "denominator": counted}

    def _of_training(self, course: Course, told: Callback) -> dict[str, Any]:
        """What a training of the blocks has, and an evaluation has not."""
        args, solver = self.args, configured(self.solver, self.args)
        apart = course.state.logging_steps
        if not (solver.exact or solver.alternates):  # reports are as many times apart
            apart //= self.cut_at if isinstance(self.cut_at, int) else len(self.cut_at) + 1
        train = {
            "epochs": course.steps // course.part,
            "batch_size": course.size,
            "report_every": max(n for n in range(1, 17) if max(1, apart) % n == 0),
            "compile": args.torch_compile,
            "deterministic": args.full_determinism,
        }
        best = (args.metric_for_best_model or "loss").removeprefix("eval_")
        best = "eval_loss" if best == "loss" else best
        if args.load_best_model_at_end:
            train |= {"metric": best, "metric_mode": "max" if args.greater_is_better else "min"}
        when = best if isinstance(self.lr_scheduler, ReduceLROnPlateau) else "step"
        options = {
            "solver": solver,
            "train": train,
            "optimizer": self.optimizer,
            "schedule": (self.lr_scheduler, when),
            "callbacks": [told],
            **course.kept(),
        }
        if twice := {*options, "loss", "metrics", "replicas"} & self.options.keys():
            raise ValueError(f"options has {min(twice)!r}, which other arguments set: leave it out")
        return options | self.options

    def _on_blocks(
        self, data: Data, tested: Data | None, options: Mapping[str, Any]
    ) -> blockwise.Trainer:
        """Make the trainer of the blocks, which are cut once."""
        args = self.args
        if self.blockwise is not None:
            blocks = self.blockwise.blocks
        else:
            at, sample = self.cut_at, data.sample(SAMPLES)[0]
            how = {"blocks": at} if isinstance(at, int) else {"cuts": at}
            blocks = split(self.model, sample=sample, **how)
        train = {
            "seed": args.seed,
            "precision": "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32",
            "device": "cpu" if args.use_cpu else "auto",
            **options.get("train", {}),
        }
        usual = {"replicas": self.replicas, "quiet": True, **self._loss()}
        usual["metrics"] = {} if tested is None else self._metrics(blocks, tested)
        return blockwise.Trainer(blocks, **{**usual, **options, "train": train})

    def _metrics(self, blocks: Blocks, data: Data) -> dict[str, Any]:
        """The loss of Trainer's evaluations, and each number of compute_metrics."""
        metrics: dict[str, Any] = {
            "eval_loss": partial(_mean_of_batches, self._loss().get("loss", loss_of))
        }
        if self.compute_metrics is None:
            return metrics
        ignored = getattr(self.model.config, "keys_to_ignore_at_inference", None) or ()
        function, preprocess = self.compute_metrics, self.preprocess_logits_for_metrics
        first = Number(function, preprocess, {"loss", *ignored})
        inputs, labels = data.sample(2)
        with user_code("compute_metrics fails on two samples"):
            first.update(blocks.compute_outputs(inputs), labels)
            names = [*first.all()]
        first.name = names[0]
        others = {name: Number(of=first, name=name) for name in names[1:]}
        return {**metrics, first.name: first, **others}


def _overridden(kind: type, base: type, names: Sequence[str]) -> str:
    """The first of these methods that a class has of its own; empty without one."""
    return next((name for name in names if getattr(kind, name) is not getattr(base, name)), "")


def _normalized(function: Any, count: CountOf, out: Any, labels: Tensor) -> Any:
    return function(out, labels, num_items_in_batch=count(labels).long())


def _smoothed(smoother: Any, shifts: bool, out: Any, labels: Tensor) -> Tensor:
    """The mean of smoothed labels, which is summed in float32."""
    mean: Tensor = smoother(out, labels, shift_labels=shifts)
    return mean.float()


def _recounted(loss: Any, own: CountOf, counted: CountOf, out: Any, labels: Tensor) -> Tensor:
    """A mean over what `own` counts, as the sum divided by what is `counted`."""
    mean: Tensor = loss(out, labels)
    return mean * (own(labels) / counted(labels).clamp_min(1)).to(mean)


def _mean_of_batches(loss: Any, out: Any, labels: Tensor) -> WeightedSum:
    return WeightedSum(loss(out, labels) * len(labels), torch.tensor(len(labels)))
