"""Settings: defaults < TOML < command line, and one line about whatever is wrong."""

from importlib.metadata import EntryPoints

import numpy as np
import pytest
from answers import refusal
from hypothesis import given, reject
from hypothesis import strategies as st

from hybrid.settings.config import Config, ScheduleSettings, TrainSettings
from hybrid.settings.methods import known_settings
from hybrid.settings.resolve import load, parse_override, resolve, to_toml
from hybrid.solvers import DDG, named, registry


def write(path, text):
    path.write_text(text)
    return path


def test_the_file_beats_the_defaults_and_the_command_line_beats_the_file(tmp_path):
    path = write(
        tmp_path / "x.toml",
        "[train]\nepochs = 3\nseed = 4\n[solver]\nname = 'penalty'\nbeta = 0.5\n",
    )
    config = load(path, {"train.epochs": 7, "solver.local_lr": 0.25})
    assert (config.train.epochs, config.train.seed) == (7, 4)
    assert config.train.batch_size == Config().train.batch_size
    assert (config.solver["beta"], config.solver["local_lr"]) == (0.5, 0.25)


@pytest.mark.parametrize("solver", registry.names())
def test_every_setting_of_the_resolved_config_has_a_help_text(solver):
    known = known_settings(solver)
    assert [key for key, text in known.items() if not text.strip() or "\n" in text] == []
    assert "all: the training set" in known["rounds.window"]
    assert "e.g. 0.999" in known["train.ema"]
    resolved = resolve({"solver": {"name": solver}}).model_dump()
    assert {f"{section}.{key}" for section, table in resolved.items() for key in table} <= {*known}


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"train": {"epoch": 1}}, "unknown setting 'train.epoch'; did you mean 'train.epochs'?"),
        ({"trian": {"epochs": 1}}, "unknown setting 'trian.epochs'; did you mean 'train.epochs'?"),
        (
            {"fill": {"name": "penalty", "betta": 1}},
            "unknown setting 'fill.betta'; did you mean 'fill.beta'?",
        ),
        ({"solver": {"name": [1]}}, "unknown solver '[1]'; known: "),
        (
            {"solver": {"name": "penalty", "micro_batches": 4}},
            "solver.micro_batches is a setting of backprop, ddg, features-replay, fdg, petra; this "
            "run's solver.name is penalty",
        ),
        ({"train": {"lr": 1}}, "unknown setting 'train.lr'; did you mean 'optimizer.lr'?"),
        (
            {"beta": 1},
            "unknown setting 'beta'; did you mean 'solver.beta' or 'fill.beta'?",
        ),
        ({"seed": {}}, "unknown setting 'seed'; did you mean 'train.seed'?"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_known_one(monkeypatch, tree, said):
    monkeypatch.setattr(named, "entry_points", EntryPoints)
    assert refusal(resolve, tree).startswith(said)


@pytest.mark.parametrize(
    ("key", "value", "limit"),
    [
        ("train.epochs", 0, "greater than or equal to 1"),
        ("train.epochs", "many", "a valid integer"),
        ("train.precision", "float8", "'float32', 'bfloat16' or 'float16'"),
        ("schedule.name", "cosin", "did you mean 'cosine'?"),
        ("rounds.window", 0, "an integer of at least 1, or all"),
        ("split.cuts", "layer2.0", "a valid list"),
        ("rounds.local_budget", "most", "a list of pairs"),
        ("optimizer.lr", float("inf"), "a finite number"),
        ("links.kind", "tcp", "auto, threads, mpi, torch, virtual"),
    ],
)
def test_a_wrong_value_is_named_with_its_setting_and_the_limit(key, value, limit):
    section, name = key.split(".")
    said = refusal(resolve, {section: {name: value}})
    assert said.startswith(f"{key} is {value!r}; it must ")
    assert limit in said


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: TrainSettings(precision="bf16"),
            "precision is 'bf16'; it must be 'float32', 'bfloat16' or 'float16'; did you mean "
            "'bfloat16'?",
        ),
        (lambda: ScheduleSettings(nme="cosine"), "unknown setting 'nme'; did you mean 'name'?"),
        (
            lambda: DDG(messages="fp16"),
            "messages is 'fp16'; it must be one of float32, bfloat16, float16, int8, int6, int4, "
            "int3, those in groups with their size if you like, as in int4:32",
        ),
    ],
)
def test_the_library_and_the_command_say_the_same_line(make, said):
    assert refusal(make) == said


@pytest.mark.parametrize(
    "content", [b"train = [", b"\xff", b"x = " + b"1" * 5000, b"x = " + b"[" * 9999]
)
def test_a_file_that_is_not_toml_is_named(tmp_path, content):
    path = tmp_path / "x.toml"
    path.write_bytes(content)
    assert refusal(load, path, {}).startswith(f"{path} is not a TOML file: ")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=1e-3", 1e-3),
        ("a.b=true", True),
        ('a.b=["x", "y"]', ["x", "y"]),
        ("a.b=x=y", "x=y"),
        ("a.b=" + "[" * 9999, "[" * 9999),
    ],
)
def test_an_override_is_toml_where_it_parses_and_text_elsewhere(text, value):
    assert parse_override(text) == ("a.b", value)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        *((text, "") for text in ("", "x=1", "a.b", "a\nb")),
        ("optimizer=AdamW", "; did you mean optimizer.name=AdamW?"),
        ("beta=1", "; did you mean solver.beta=1 or fill.beta=1 or sampler.beta=1?"),
    ],
)
def test_an_override_of_another_form_is_answered_with_the_form_and_its_section(text, meant):
    said = refusal(parse_override, text)
    assert said == f"--set {text!r}: write --set section.key=value{meant}"


positive = st.floats(1e-8, 1e8)
trees = st.fixed_dictionaries(
    {},
    optional={
        "model": st.fixed_dictionaries({"name": st.text()}),
        "data": st.fixed_dictionaries({"dir": st.text(), "limit": st.integers(0)}),
        "train": st.fixed_dictionaries({"epochs": st.integers(1), "threads": st.integers(0, 9)}),
        "optimizer": st.fixed_dictionaries({"lr": positive, "nesterov": st.booleans()}),
        "schedule": st.fixed_dictionaries({"milestones": st.lists(positive)}),
        "rounds": st.fixed_dictionaries({"memory_gb": positive})
        | st.fixed_dictionaries({"window": st.integers(1) | st.just("all")})
        | st.fixed_dictionaries({"sweeps": st.integers(1, 9)}),
        "links": st.fixed_dictionaries(
            {"kind": st.just("virtual"), "latency_microseconds": positive}
        ),
        "split": st.fixed_dictionaries({"cuts": st.lists(st.text())}),
        "correction": st.fixed_dictionaries(
            {"micro_batches": st.integers(1, 9), "messages": st.sampled_from(["bfloat16", "int8"])}
        ),
        "solver": st.fixed_dictionaries({"name": st.just("penalty")})
        | st.fixed_dictionaries({"beta": positive, "momentum": st.none() | st.just(0.5)}),
    },
)


@given(tree=trees)
def test_settings_written_as_toml_and_read_again_are_the_same(tmp_path_factory, tree):
    try:
        config = resolve(tree)
    except ValueError:
        reject()
    path = write(tmp_path_factory.mktemp("toml") / "config.toml", to_toml(config))
    assert load(path, {}) == config


@pytest.mark.parametrize("dotted", ["data.dir", "model.weights"])
def test_a_name_that_is_not_utf8_is_refused_before_config_toml_would_hold_it(dotted):
    said = refusal(load, None, {dotted: "caf\udce9"})
    assert said.startswith(f"{dotted} is 'caf\\udce9': config.toml takes UTF-8 alone")


def test_numbers_of_numpy_and_tuples_are_taken_from_scripts():
    assert TrainSettings(batch_size=np.int32(8), ema=np.float32(0.5)).batch_size == 8
    assert TrainSettings(compile=np.bool_(True), frozen={"a": np.int64(2)}).frozen == {"a": 2}
    assert ScheduleSettings(milestones=(0.5, 0.75)).milestones == [0.5, 0.75]
    with pytest.raises(ValueError, match="compile is 1; it must be a valid boolean"):
        TrainSettings(compile=1)


@pytest.mark.parametrize("value", ["2", True])
@pytest.mark.parametrize("key", ["train.epochs", "solver.micro_batches", "sampler.lag"])
def test_a_text_or_a_truth_is_no_number(key, value):
    overrides = {"sampler.name": "auto-assist", key: value}
    said = refusal(load, None, overrides)
    assert said.startswith(f"{key} is {value!r}; it must be a valid integer")
