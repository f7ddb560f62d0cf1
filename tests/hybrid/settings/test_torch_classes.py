"""Classes of torch by name: any case, the nearest name, the arguments they take."""

import pytest
from answers import refusal

from hybrid.settings.config import Config, OptimizerSettings
from hybrid.settings.resolve import check_command, load, resolve, to_toml


@pytest.mark.parametrize(
    ("section", "table", "said"),
    [
        ("optimizer", {"name": "rmsprob"}, "did you mean 'RMSprop'?"),
        ("optimizer", {"name": "LBFGS"}, "torch's LBFGS needs a closure"),
        ("optimizer", {"name": "sparseadam"}, "SparseAdam needs sparse gradients"),
        ("optimizer", {"arguments": {"lr": 0.1}}, "lr is not among them"),
        ("optimizer", {"name": "Adam", "arguments": {"params": 1}}, "params is not among them"),
        ("optimizer", {"arguments": 3}, "optimizer.arguments is 3"),
        ("schedule", {"name": "cosineannealing"}, "did you mean 'CosineAnnealingLR'?"),
        ("schedule", {"warmup_steps": 3, "warmup_epochs": 1.0}, "give one of the two"),
        ("schedule", {"name": "LambdaLR"}, "give Trainer(schedule=...) one"),
        ("schedule", {"name": "SequentialLR"}, "needs schedulers"),
        ("schedule", {"name": "one-cycle", "arguments": {"max_lr": 1}}, "max_lr is not among them"),
        (
            "schedule",
            {"name": "one-cycle", "arguments": {"cycle_momentum": True}},
            "cycle_momentum would move the momentum",
        ),
        ("schedule", {"arguments": {"gamma": 0.5}}, "'linear' takes none"),
    ],
)
def test_what_is_not_there_or_cannot_be_is_one_line(section, table, said):
    message = refusal(resolve, {section: table})
    assert message.startswith(f"{section}.")
    assert said in message


def test_arguments_come_one_by_one_and_go_with_their_class(tmp_path):
    stored = tmp_path / "stored.toml"
    overrides = {
        "optimizer.name": "rmsprop",
        "optimizer.arguments.eps": 1e-6,
        "optimizer.arguments.alpha": 0.9,
        "schedule.name": "cosineannealingwarmrestarts",
        "schedule.arguments.T_0": 2,
        "schedule.interval": "step",
    }
    first = load(None, overrides)
    assert first.optimizer.arguments == {"eps": 1e-6, "alpha": 0.9}
    stored.write_text(to_toml(first))
    assert load(stored, {}) == first
    more = load(None, {"optimizer.arguments.eps": 1e-7}, base=stored)
    assert more.optimizer.arguments == {"eps": 1e-7, "alpha": 0.9}
    other = load(None, {"optimizer.name": "adam", "schedule.name": "cosine"}, base=stored)
    assert other.optimizer.arguments == {}
    assert other.schedule == Config().schedule.model_copy(update={"name": "cosine"})


@pytest.mark.parametrize(
    ("name", "usual"), [("sgd", 0.1), ("AdamW", 1e-3), ("rmsprop", 0.01), ("Adadelta", 1.0)]
)
def test_every_optimizer_has_its_own_rate_unless_another_is_given(name, usual):
    assert OptimizerSettings(name=name).lr == usual
    config = load(None, {"optimizer.name": name})
    assert f"\nlr = {usual}\n" in to_toml(config)
    assert load(None, {"optimizer.name": name, "optimizer.lr": 0.5}).optimizer.lr == 0.5


def test_a_rate_that_was_given_goes_with_its_optimizer(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text("[optimizer]\nlr = 0.2\nname = 'sgd'\n")
    assert load(None, {"optimizer.name": "adamw"}, base=file).optimizer.lr == 1e-3
    assert load(file, {"optimizer.name": "SGD"}).optimizer.lr == 0.2


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_bench_takes_an_optimizer_whose_usual_rate_nobody_has_given(name):
    check_command("bench", load(None, {"optimizer.name": name}))
    asked = load(None, {"optimizer.name": name, "optimizer.lr": 0.5})
    assert "optimizer.lr is 0.5" in refusal(check_command, "bench", asked)
