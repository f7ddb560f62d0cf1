"""Runs: resumed is uninterrupted, what they leave, and every setting acts or is refused."""

import json
import math
import shutil
import signal

import pytest
import torch
from answers import assert_one_line, output
from hypothesis import given
from hypothesis import strategies as st
from rl_runs import TINY, kept, refused, same, trained, words

from hybrid.errors import StoppedError
from hybrid.folder import checkpoint
from hybrid_rl.resolve import load, to_toml
from hybrid_rl.run import Run, train
from hybrid_rl.settings import RlSettings


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def stop_after(monkeypatch, steps):
    """A signal comes in the middle of the report after so many steps."""
    report = Run._report

    def told(self, *arguments):
        if self._steps == steps:
            self.stop.signal = signal.SIGUSR1
        report(self, *arguments)

    monkeypatch.setattr(Run, "_report", told)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("rl") / "run"
    return out, trained(out, actors=2)


def test_a_run_leaves_its_settings_its_course_and_its_summary(whole):
    out, summary = whole
    assert summary == json.loads((out / "summary.json").read_text())
    assert (summary["steps"], summary["updates"], summary["actors"]) == (60, 24, 2)
    assert len(summary["idle_share"]) == len(summary["bytes_sent"]) == summary["blocks"] == 1
    found = lines(out)
    assert [(x["step"], x["phase"]) for x in found if x["phase"] == "evaluation"] == [
        (60, "evaluation")
    ]
    learning = [x for x in found if x["phase"] == "learn"]
    assert [x["step"] for x in learning] == [20, 30, 40, 60]
    assert {"prediction", "critic", "policy", "entropy", "alpha"} < learning[-1].keys()
    stored = load(out / "config.toml", {})
    assert to_toml(stored) == (out / "config.toml").read_text()
    assert stored.rl.actors == 2
    assert [p.name for p in checkpoint.complete(out / "checkpoints")] == ["00000030", "00000060"]


@pytest.mark.parametrize(("stopped", "blocks"), [(12, 1), (30, 1), (40, 4), (20, 2)])
def test_a_run_that_is_stopped_and_resumed_ends_as_one_that_was_not(
    whole, tmp_path, monkeypatch, stopped, blocks
):
    """In the middle of episodes, of a lag and of the random steps; even on other ranks."""
    out = tmp_path / "run"
    stop_after(monkeypatch, stopped)
    with pytest.raises(StoppedError, match=f"stopped by SIGUSR1 after step {stopped}"):
        trained(out, actors=2)
    monkeypatch.undo()
    assert not (out / "summary.json").exists()
    summary = trained(out, True, actors=2, blocks=blocks)
    assert same(kept(out), kept(whole[0]))
    assert summary["returns"] == whole[1]["returns"]
    assert lines(out) == lines(whole[0])


@given(
    steps=st.integers(2, 400),
    actors=st.integers(1, 3),
    intervals=st.tuples(*[st.integers(1, 90)] * 3),
)
def test_nothing_that_is_due_is_passed_over(steps, actors, intervals):
    names = ("evaluate_every", "checkpoint_every", "report_every")
    given_intervals = dict(zip(names, intervals, strict=True))
    rl = RlSettings(steps=steps * actors, actors=actors, **given_intervals)
    ends, end = [], 0
    while end < rl.rounds:
        end = rl.end_after(end)
        ends.append(end)
    assert ends == sorted(set(ends))
    assert ends[-1] == steps
    assert {rl.random_rounds} - {0} <= set(ends)
    for interval in intervals:
        rounds = math.ceil(interval / actors)
        assert set(range(rounds, steps, rounds)) <= set(ends)


@pytest.mark.parametrize(("kind", "blocks"), [("auto", 1), ("virtual", 4)])
def test_episodes_are_told_once_with_their_returns(tmp_path, kind, blocks):
    out = tmp_path / "run"
    settings = {"actors": 2, "random_steps": 408, "pretrain_steps": 0, "evaluate_every": 410}
    trained(out, kind=kind, blocks=blocks, steps=410, report_every=100, **settings)
    ended = [x for x in lines(out) if x["phase"] == "episode"]
    assert [(x["step"], x["length"], x["actor"]) for x in ended] == [(400, 200, 0), (400, 200, 1)]
    rewards = kept(out)["replay/rows"][:400, 4]
    for actor in range(2):
        wanted = rewards[actor::2].sum().item()
        assert ended[actor]["return"] == pytest.approx(wanted, rel=1e-4)


def test_a_run_that_has_ended_goes_on_for_more_steps(tmp_path):
    """By what it has settled: random steps are a share of all only when it begins."""
    settings = {"random_steps": None, "pretrain_steps": None}
    for run, steps in (("whole", 80), ("first", 60)):
        given = settings if run == "first" else {"random_steps": 6, "pretrain_steps": 6}
        trained(tmp_path / run, steps=steps, **given)
    out = tmp_path / "first"
    assert load(out / "config.toml", {}).rl.random_steps == 6
    train(load(None, {"rl.steps": 80}, out / "config.toml"), out, True)
    assert same(kept(out), kept(tmp_path / "whole"))


def test_a_run_that_has_ended_stays_as_it_is(whole, capsys):
    before = (whole[0] / "summary.json").read_text()
    assert trained(whole[0], True, actors=2) == whole[1]
    assert "has ended after 60 steps" in capsys.readouterr().err
    assert (whole[0] / "summary.json").read_text() == before


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"actors": 1}, "is a run with rl.actors 2, not 1: resume with its actors"),
        ({"actors": 2, "width": 9}, "it is of another model"),
        ({"actors": 2, "replay_size": 10}, "a replay buffer of (60, 9) numbers after 60"),
        ({"actors": 2, "env": "Hopper-v5"}, "is a run with rl.env Pendulum-v1, not Hopper-v5"),
    ],
)
def test_another_runs_checkpoint_is_refused(whole, settings, says):
    assert says in refused(out=whole[0], resume=True, **settings)


@pytest.mark.parametrize("name", ["waiting", "weights", "episode/actions", "episode/episode"])
@pytest.mark.parametrize("how", ["short", "gone"])
def test_an_actors_part_that_was_changed_is_refused_in_one_line(whole, tmp_path, name, how):
    """As by a program that also corrects the checksums."""
    run = shutil.copytree(whole[0], tmp_path / "run")
    folder = checkpoint.complete(run / "checkpoints")[-1]
    manifest = checkpoint.read_manifest(folder)
    tensors = checkpoint.load_state(folder, manifest, "actor 1")
    tensor = tensors.pop(name)
    if how == "short":
        tensors[name] = tensor[1:].clone() if tensor.dim() else tensor + 1
    manifest["states"]["actor 1"] = checkpoint.write(folder, "actor 1", tensors)
    text = json.dumps({**manifest, "sha256": checkpoint.digest(manifest)})
    (folder / "manifest.json").write_text(text)
    told = refused(out=run, resume=True, actors=2, steps=80)
    assert "cannot be resumed with these settings" in told
    assert "\n" not in told


def test_a_loss_that_is_no_number_ends_the_run_with_the_remedy(tmp_path):
    told = refused(out=tmp_path / "run", lr=1e15)
    assert "is not finite" in told
    assert "lower rl.lr" in told
    assert not (tmp_path / "run" / "summary.json").exists()


OTHERS = {
    "env": "InvertedDoublePendulum-v5",
    "steps": 70,
    "representation": False,
    "random_steps": 14,
    "pretrain_steps": 5,
    "replay_size": 20,
    "evaluate_every": 30,
    "checkpoint_every": 20,
    "threads": 2,
    "keep_last": 1,
    "units": 8,
    "layers": 3,
    "blocks": 3,
    "discount": 0.5,
}
"""Values that are neither the default nor that of `TINY`; of other settings a little more."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    out = tmp_path_factory.mktemp("base") / "run"
    return told(trained(out), out)


def told(summary, out):
    """What a setting can act on: files' tensors, the course, the shape of the summary."""
    left = {p.name for p in checkpoint.complete(out / "checkpoints")}
    shape = {k: v for k, v in summary.items() if "second" not in k and k != "idle_share"}
    return kept(out), lines(out), left, shape


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if i % 3 else ())
        for i, name in enumerate(sorted(RlSettings.model_fields))
    ],
)
def test_every_setting_acts(name, base, tmp_path):
    field = RlSettings.model_fields[name]
    before = TINY.get(f"rl.{name}", field.default)
    value = OTHERS.get(name, None if before is None else before * 2 or 3)
    settings = {name: value}
    if name == "representation":
        settings |= dict.fromkeys(("units", "layers", "pretrain_steps"))
    if name == "threads":
        settings |= {"steps": 13}  # two cores that others work on, too, wait for each other
    if name == "keep_last":
        settings["checkpoint_every"] = 20
    threads = torch.get_num_threads()
    out = tmp_path / "run"
    tensors, *rest = told(trained(out, **settings), out)
    torch.set_num_threads(threads)
    assert not same(tensors, base[0]) or rest != list(base[1:])


WRONG = {
    "rl.steps=61 rl.actors=2": "which is not a multiple of rl.actors (2): take 60",
    "rl.random_steps=60": "rl.random_steps is 60 of 60 steps in all, so no step is left",
    "rl.blocks=4": "4 ranks are more than a representation, a learner and 1 actor(s) can use",
    "rl.replay_size=1 rl.actors=2": "rl.replay_size is 1, and 2 actors bring as many",
    "rl.random_steps=0": "rl.pretrain_steps is 3, but there are no random steps",
    "rl.units=7": "rl.units is 7, which is not a multiple of rl.layers (2): take 6",
    "rl.representation=false": "which has an effect only where rl.representation is on",
    "rl.env=os:Pendulum-v1": "rl.env is 'os:Pendulum-v1'",
    "rl.env=CartPole-v1": "they must be a vector of bounded real numbers",
    "rl.wdith=1": "unknown setting 'rl.wdith'; did you mean 'rl.width'?",
    "rl.lr=much": "rl.lr is 'much'; it must be a valid number",
    "links.device=nccl": "a command computes on GPUs",
    "links.timeout=3": "there are several processes",
}


@pytest.mark.parametrize("given", WRONG)
def test_bad_input_gets_one_line(given, hybrid, tmp_path):
    asked = [word for each in given.split() for word in ("--set", each)]
    answer = hybrid("rl", "--out", tmp_path / "run", *words(), *asked)
    assert_one_line(answer, WRONG[given])
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").iterdir())


def test_the_command_tells_the_return_and_the_folder(hybrid, tmp_path):
    flags = ("--width", 8, "--actors", 2, "--seed", 3)
    said = output(hybrid("rl", *words(), *flags, "--out", tmp_path / "run"))
    assert said.startswith("return -")
    assert str(tmp_path / "run") in said
    stored = load(tmp_path / "run" / "config.toml", {}).rl
    assert (stored.seed, stored.actors) == (3, 2)


@pytest.mark.parametrize(
    "words", [("evaluate",), ("export", "model.safetensors"), ("report", "another")]
)
def test_what_is_for_networks_that_classify_says_so(whole, hybrid, words):
    status, _, err = hybrid(words[0], whole[0], *words[1:])
    assert status == 1
    assert "is a run of hybrid rl, which has no test data and no one network" in err


def test_resume_needs_a_folder_with_a_checkpoint(hybrid, tmp_path):
    assert "--resume needs --out" in hybrid("rl", "--resume")[2]
    assert "has no checkpoint to resume from" in hybrid("rl", "--resume", "--out", tmp_path)[2]


def test_a_report_draws_the_learning_curve(whole, hybrid, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole[0], run)
    assert output(hybrid("report", run)) == f"wrote {run / 'report' / 'index.html'}\n"
    text = (run / "report" / "index.html").read_text()
    assert text.count('role="img"') == 6  # returns and five quantities of the updates
    assert "Pendulum-v1" in text
    (run / "summary.json").unlink()
    assert hybrid("report", run)[0] == 0
    assert "it has come to step 60" in (run / "report" / "index.html").read_text()
    (run / "metrics.jsonl").write_text('{"step": -1, "phase": "learn"}\n')
    assert "metrics.jsonl line 1: step is -1" in hybrid("report", run)[2]
