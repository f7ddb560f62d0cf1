"""A trace tells of passes, steps, waits and messages, in every mode, and stays small."""

from collections import Counter

import pytest
from trainings import digits, trained_weights, trainer

from hybrid.folder.traces import spans
from hybrid.links.grid import GridPlace
from hybrid.rounds import trace as traces
from hybrid.rounds.trace import Trace
from hybrid.settings.config import LinkSettings
from hybrid.solvers import DDG, AugmentedLagrangian, Backprop, BlockADMM, Petra
from hybrid_auxnet import AuxNet
from hybrid_messages import PDASGD

WINDOW = {"window": 2}
MODES = {
    "backprop": (Backprop(micro_batches=2), {}),
    "augmented-lagrangian": (AugmentedLagrangian(), WINDOW),
    "ddg, waits": (DDG(), {"fill": "augmented-lagrangian", "local_budget": [(8, 8), (0, 16)]}),
    "block-admm": (BlockADMM(), WINDOW),
    "auxnet": (AuxNet(), WINDOW),
    "ddg": (DDG(micro_batches=2), {}),
    "petra": (Petra(), {"model": "revnet8"}),
    "pd-asgd": (PDASGD(), {"blocks": 1}),
}
LOCAL = ("augmented-lagrangian", "block-admm", "ddg, waits")


def events(run):
    return spans(run)


@pytest.mark.parametrize("name", MODES)
def test_every_mode_shows_its_passes(name, tmp_path):
    solver, settings = MODES[name]
    run = tmp_path / "run"
    trained_weights(trainer(solver, run, links=LinkSettings(kind="virtual"), **settings), digits(2))
    found = events(run)
    for rank in {event["pid"] for event in found}:
        own = [event for event in found if event["pid"] == rank and event["ph"] == "X"]
        names = Counter(event["name"] for event in own)
        assert names["forward"]
        assert names["backward"]
        assert names["step"]
        assert names["checkpoint"]
        assert ("local step" in names) == (name in LOCAL)
        if settings.get("blocks") != 1:
            assert any(what.startswith("send: ") for what in names)
        _check_nested(own)
    keys = [e["args"] for e in found if e["name"] == "forward" and "args" in e]
    assert {key["step"] for key in keys} == {0, 1, 2, 3}
    if name == "backprop":
        _check_order([e for e in found if e["name"] == "forward" and "args" in e])


def _check_order(passes):
    """A block's forward pass begins after that of the block before: ranks have one time of day."""
    ends = {(e["pid"], *e["args"].values()): e["ts"] + e["dur"] for e in passes}
    for event in (e for e in passes if e["pid"]):
        before = ends[(event["pid"] - 1, *event["args"].values())]
        assert event["ts"] > before - 0.5, event  # clocks have a resolution


def _check_nested(own):
    """Spans of a thread lie within each other, or apart."""
    for thread in {event["tid"] for event in own}:
        mine = sorted((e for e in own if e["tid"] == thread), key=lambda e: (e["ts"], -e["dur"]))
        open_until: list[float] = []
        for event in mine:
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"] + 0.5:  # clocks have a resolution
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 0.5, event
            open_until.append(end)


def test_ranks_and_threads_have_names():
    trace = Trace(GridPlace(block=1, blocks=2, replica=1, replicas=2))
    trace.add("forward", 0.0, 1.0)
    names = {e["name"]: e["args"]["name"] for e in trace.events if e["ph"] == "M"}
    assert names == {"process_name": "block 1 of replica 1", "thread_name": "thread 0"}
    assert {e["pid"] for e in trace.events} == {3}


def test_a_long_run_keeps_its_first_spans_and_its_last(monkeypatch):
    monkeypatch.setattr(traces, "LIMIT", 3)
    trace = Trace()
    for number in range(10):
        trace.add(str(number), number, number + 1)
    kept = [event["name"] for event in trace.events if event["ph"] == "X"]
    assert kept == ["0", "1", "2", "7", "8", "9"]
