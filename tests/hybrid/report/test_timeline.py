"""A timeline of ranks and what is said of their time, from traces made by hand."""

import pytest

from hybrid.report.diagnosis import spending, waiting
from hybrid.report.records import Line, Record, Summary
from hybrid.report.timeline import Span, shares, spans, timeline, usual_period, within


def event(name, start, seconds, rank=0, thread=0):
    times = {"ts": 1e6 * start, "dur": 1e6 * seconds}
    return {"name": name, "ph": "X", "pid": rank, "tid": thread, **times}


def test_spans_come_in_order_and_what_no_time_has_is_left_out():
    good = [event("forward", 2, 1, rank=1), event("serial", 1, 3, rank=1), event("step", 0, 1)]
    bad = [event("x", 0, -1), event("x", 1e300, 1), {"ph": "X", "ts": 0.0}, {"ph": "M"}]
    found = spans([*bad, *good])
    assert [(x.rank, x.name) for x in found] == [(0, "step"), (1, "serial"), (1, "forward")]
    assert timeline(found) is None  # one step has no length
    assert timeline(spans([event("step", 1, 0)] * 9)) is None


def test_the_usual_steps_are_shown_with_a_row_for_each_rank():
    # steps of one second, but for a pause after the third
    ends = [1, 2, 3, 13, 14, 15, 16]
    found = [Span(0, 0, "step", end - 0.25, end) for end in ends]
    found += [Span(1, 0, "wait: next", 0.5, 30)]
    start, stop = usual_period(found, 1)
    assert stop - start == 1
    shown = within(found, (13.5, 14.5))
    assert [(span.rank, span.start, span.end) for span in shown] == [
        (0, 13.75, 14),
        (1, 13.5, 14.5),
    ]
    chart = timeline(found)
    assert [key.label for key in chart.keys] == ["step", "wait"]
    assert [tick.get_text() for tick in chart.axes.get_yticklabels()] == ["rank 0", "rank 1"]
    many = [Span(rank, 0, "step", n, n + 0.5) for rank in range(200) for n in range(100)]
    assert len(timeline(many).svg()) < 300_000


def test_a_moment_counts_for_the_span_that_is_shown():
    outer = Span(0, 0, "serial", 0, 10)
    local = [Span(0, 0, "local step", 1, 5), Span(0, 0, "backward", 2, 4)]
    tested = [Span(0, 0, "evaluate", 6, 8), Span(0, 0, "wait: next", 7, 8)]
    found = shares([outer, *local, *tested, Span(1, 0, "wait: next", 0, 10)])
    wanted = {"serial": 0.2, "local step": 0.2, "evaluate": 0.1, "wait: next": 0.5}
    assert found == pytest.approx(wanted)
    assert spending(found) == (
        "Of the traced time of all ranks, 50% waiting for the block behind, 20% anything else, "
        "20% local steps, 10% evaluation."
    )
    assert "take fewer replicas" in spending({"wait: peers": 0.3, "forward": 0.7})
    assert spending({}) == ""


CUTS = ["layer2.0", "layer3.0"]


@pytest.mark.parametrize(
    ("idle", "known", "said"),
    [
        (
            [0.36, 0.05],
            {"blocks": 2, "cuts": CUTS[:1]},
            "Rank 0 waited 36% of the training, and rank 1 5%: cut later than before layer2.0 "
            "(split.cuts), or by time (split.balance=measured).",
        ),
        (
            [0.1, 0.2, 0.4],
            {"blocks": 3, "cuts": CUTS},
            "cut earlier than before layer2.0 and layer",
        ),
        (
            [0.5, 0.1, 0.6, 0.2],
            {"blocks": 2, "replicas": 2, "cuts": CUTS[:1]},
            "Ranks of block 0 waited 55% of the training, and ranks of block 1 15%: cut later",
        ),
        ([0.5, 0.55], {"blocks": 2}, "All ranks waited alike, 50% to 55% of the training: "),
        (
            [0.05, 0.1],
            {"blocks": 2},
            "Ranks waited at most 10% of the training: the cuts lie well.",
        ),
        ([0.0], {"blocks": 1}, ""),
        ([], {"blocks": 2}, ""),
        ([0.1, 0.2, 0.3], {"blocks": 2}, ""),
    ],
)
def test_who_waited_and_what_to_change_is_a_sentence(tmp_path, idle, known, said):
    ended = Record(tmp_path, None, Summary(idle_share=idle, **known), True, [], [])
    lines = [Line(step=1, epoch=0, phase="serial", idle=idle), Line(step=1, epoch=0, phase="test")]
    going_on = Record(tmp_path, None, Summary(**known), False, lines, [])
    for record in (ended, going_on):
        told = waiting(record)
        assert said in told
        assert bool(told) == bool(said)
