"""BlockTrainer beside transformers' Trainer: the same steps, arguments, callbacks and log."""

from contextlib import redirect_stdout
from dataclasses import fields
from io import StringIO

import pytest
import torch
from answers import refusal
from trainings import assert_same
from transformers_program import arguments, library, make, right, rows, trained
from zoo_packages import installed

pytestmark = pytest.mark.skipif(
    not (installed("transformers") and installed("accelerate")), reason="needs transformers"
)

REFUSED = """
optim_target_modules average_tokens_across_devices bf16_full_eval fp16_full_eval
activation_checkpointing_kwargs gradient_checkpointing_kwargs torch_compile_backend
torch_compile_mode use_liger_kernel liger_kernel_config use_cache neftune_noise_alpha
auto_find_batch_size include_num_input_tokens_seen eval_delay prediction_loss_only eval_on_start
eval_do_concat_batches eval_use_gather_object include_for_metrics batch_eval_metrics save_only_model
save_on_each_node enable_jit_checkpoint push_to_hub ignore_data_skip
restore_callback_states_from_checkpoint accelerator_config parallelism_config label_names
ddp_backend ddp_timeout fsdp fsdp_config deepspeed debug skip_memory_metrics
"""
"""What is refused if it is set, of transformers 5.24."""


def block_trainer():
    library()
    import hybrid_transformers

    return hybrid_transformers


def losses(trainer, name="loss"):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def compare(expected, found):
    """Losses and weights but for rounding in float32, and all else of the logs."""
    for name in ("loss", "eval_loss", "learning_rate"):
        assert losses(found, name) == pytest.approx(losses(expected, name), rel=1e-5)
    places = [
        [(entry["step"], entry["epoch"]) for entry in trainer.state.log_history]
        for trainer in (expected, found)
    ]
    assert [x for pair in places[0] for x in pair] == pytest.approx(
        [x for pair in places[1] for x in pair]
    )
    for name, weight in expected.model.state_dict().items():
        torch.testing.assert_close(found.model.state_dict()[name], weight, rtol=0, atol=1e-6)


def listener(stop_at=None):
    """A callback that notes what it is told, and may stop a run after an epoch."""

    class Listener(library().TrainerCallback):
        def __init__(self):
            self.events = []

        def on_epoch_end(self, args, state, control, **given):
            self.events.append(("epoch", state.global_step, state.epoch))
            control.should_training_stop |= state.epoch == stop_at

        def on_evaluate(self, args, state, control, metrics, **given):
            self.events.append(("evaluate", state.global_step, metrics["eval_loss"] > 0))

        def on_step_end(self, args, state, control, **given):
            self.events.append(("step", state.global_step, given["model"] is not None))

        def on_train_end(self, args, state, control, **given):
            self.events.append(("end", state.global_step, state.log_history[-1]["step"]))

    return Listener()


@pytest.mark.parametrize(
    ("kind", "blocks"),
    [
        ("gpt2", 2),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (
                ("gpt2", 1),
                ("gpt2", 4),
                ("llama", 1),
                ("llama", 2),
                ("llama", 4),
                ("lora", 2),
            )
        ),
    ],
)
def test_steps_and_events_are_those_of_trainer(kind, blocks, tmp_path):
    if kind == "lora" and not installed("peft"):
        pytest.skip("peft is not installed")
    theirs, ours = listener(), listener()
    expected = trained(tmp_path / "theirs", kind, callbacks=[theirs])
    compare(expected, trained(tmp_path / "ours", kind, blocks, callbacks=[ours]))
    assert ours.events == theirs.events
    epoch = [*["step"] * 6, "epoch", "evaluate"]
    assert [event for event, *_ in ours.events] == [*epoch, *epoch, "end"]


@pytest.mark.slow
def test_replicas_share_a_step_of_as_many_samples(tmp_path):
    whole = trained(tmp_path, "gpt2", 2)
    compare(whole, trained(tmp_path, "gpt2", 2, replicas=2, per_device_train_batch_size=2))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_smoothed_labels_and_a_loss_of_ones_own_are_trainers(kind, tmp_path):
    def squared(output, labels, num_items_in_batch=None):
        wanted = torch.nn.functional.one_hot(labels[:, 1:].clamp_min(0), 37).double()
        errors = ((output.logits[:, :-1].softmax(-1) - wanted) ** 2).sum(-1)
        return errors[labels[:, 1:] != -100].sum() / num_items_in_batch

    settings = {"num_train_epochs": 1, "eval_strategy": "no"}
    for given in ({"label_smoothing_factor": 0.2}, {"compute_loss_func": squared}):
        expected = trained(tmp_path, kind, **settings, **given)
        compare(expected, trained(tmp_path, kind, 2, **settings, **given))


def test_every_field_of_training_arguments_is_mapped_neutral_or_refused(tmp_path):
    """A field that a newer transformers adds is refused; then it belongs into one of the lists."""
    module, args = block_trainer(), arguments(tmp_path)
    from hybrid_transformers import course as run

    lists = [run.MAPPED.split(), run.NEUTRAL.split(), REFUSED.split()]
    for name in [each.name for each in fields(args)]:
        assert sum(name in each for each in lists) == 1, name
    for name in REFUSED.split():
        given = arguments(tmp_path)
        setattr(given, name, not getattr(given, name))
        said = refusal(module.BlockTrainer, make("llama"), given)
        assert f"TrainingArguments has {name}=" in said
        assert "leave it at" in said


def test_a_stopped_run_goes_on_with_other_blocks_as_if_undisturbed(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 4, "logging_steps": 2}
    whole = trained(tmp_path / "whole", blocks=2, **settings)
    stopped = trained(tmp_path / "run", blocks=2, callbacks=[listener(stop_at=1)], **settings)
    assert stopped.state.global_step == 6
    resumed = trained(tmp_path / "run", blocks=3, resume=True, **settings)
    compare(whole, resumed)
    kept = sorted(int(each.name) for each in (tmp_path / "whole" / "checkpoints").iterdir())
    assert kept == [0, 4, 8, 12]


@pytest.mark.slow
def test_metrics_decide_which_weights_a_run_ends_with(tmp_path):
    settings = {
        "compute_metrics": right,
        "num_train_epochs": 4,
        "learning_rate": 0.1,
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "metric_for_best_model": "right",
        "save_total_limit": 1,
        "seed": 3,
    }
    found = trained(tmp_path / "ours", blocks=2, **settings)
    expected = trained(tmp_path / "theirs", **settings)
    for name in ("eval_right", "eval_count"):
        assert losses(found, name) == pytest.approx(losses(expected, name))
    best = max(losses(found, "eval_right"))
    assert losses(found, "eval_right")[-1] < best
    assert found.state.best_metric == pytest.approx(best)
    with redirect_stdout(StringIO()):
        assert found.evaluate()["eval_right"] == pytest.approx(best)


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["ddg", "pd-asgd"])
def test_delayed_methods_log_learn_and_save_what_from_pretrained_reads(solver, tmp_path):
    settings = {"save_strategy": "epoch", "num_train_epochs": 3, "logging_steps": 2}
    trainer = trained(tmp_path / "run", blocks=2, solver=solver, **settings)
    assert [e["step"] for e in trainer.state.log_history if "loss" in e] == [
        2,
        4,
        6,
        8,
        10,
        12,
        14,
        16,
        18,
    ]
    assert losses(trainer)[-1] < losses(trainer)[0]
    trainer.save_model(str(tmp_path / "saved"))
    loaded = type(trainer.model).from_pretrained(tmp_path / "saved")
    assert_same(dict(loaded.state_dict()), dict(trainer.model.state_dict()))


def test_ranks_of_mpi_log_measure_and_save_as_threads_do(world, tmp_path):
    settings = {"solver": "ddg", "save_strategy": "epoch", "compute_metrics": right}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "right"}
    trainer = trained(tmp_path / "threads", blocks=2, **settings)
    with redirect_stdout(StringIO()):
        expected = trainer.evaluate()
    for log, measured in world.run(2, "transformers_program:on_ranks", tmp_path / "run", settings):
        assert [e["loss"] for e in log if "loss" in e] == losses(trainer)
        for name in ("eval_loss", "eval_right", "eval_count"):
            assert measured[name] == expected[name]
    saved = type(trainer.model).from_pretrained(tmp_path / "run" / "saved")
    assert_same(dict(saved.state_dict()), dict(trainer.model.state_dict()))


def test_what_blocks_cannot_do_is_refused_in_one_line(tmp_path):
    module, tf = block_trainer(), library()

    class Own(module.BlockTrainer):
        def compute_loss(self, *arguments, **given):
            raise NotImplementedError

    class Steps(tf.TrainerCallback):
        def on_pre_optimizer_step(self, *arguments, **given):
            raise NotImplementedError

    def said(more=(), blocks=2, trainer=module.BlockTrainer, resume=None, **changes):
        mine = {
            "train_dataset": rows(),
            "eval_dataset": rows(4),
            "solver": "backprop",
            **dict(more),
        }
        args = arguments(tmp_path / "run", **changes)

        def call():
            trainer(make("llama"), args, blocks=blocks, **mine).train(resume)

        return refusal(call)

    assert "Own overrides compute_loss, which blocks do not call" in said(trainer=Own)
    assert "Steps has on_pre_optimizer_step" in said({"callbacks": [Steps()]})
    ignoring = {"compute_loss_func": lambda out, labels, num_items_in_batch: out.logits.mean()}
    assert "does not use num_items_in_batch" in said(ignoring)
    incomplete = {"train_dataset": rows(30)}
    assert "set dataloader_drop_last=True" in said(incomplete)
    assert "choose eval_steps that divide it" in said(eval_strategy="steps", eval_steps=5)
    assert "options has 'train'" in said({"options": {"train": {}}})
    assert "'batch_rebalance'" in said(train_sampling_strategy="batch_rebalance")
    assert "and a run goes on from the newest" in said(resume=str(tmp_path), save_strategy="epoch")
    assert "eval_dataset is a dict" in said({"eval_dataset": {"a": rows(4)}})
    assert "has no micro_batches: set gradient_acc" in said({"solver": "block-admm"})
