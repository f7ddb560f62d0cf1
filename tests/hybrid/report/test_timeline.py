"""A timeline of ranks, from traces made by hand."""

from hybrid.report.timeline import Span, spans, timeline, usual_period, within


def event(name, start, seconds, rank=0, thread=0):
    times = {"ts": 1e6 * start, "dur": 1e6 * seconds}
    return {"name": name, "ph": "X", "pid": rank, "tid": thread, **times}


def test_spans_come_in_order_and_what_no_time_has_is_left_out():
    good = [event("forward", 2, 1, rank=1), event("serial", 1, 3, rank=1), event("step", 0, 1)]
    bad = [event("x", 0, -1), event("x", 1e300, 1), {"ph": "X", "ts": 0.0}, {"ph": "M"}]
    found = spans([*bad, *good])
    assert [(x.rank, x.name) for x in found] == [(0, "step"), (1, "serial"), (1, "forward")]
    assert timeline(found, "ms", []) is None  # one step has no length
    assert timeline(spans([event("step", 1, 0)] * 9), "ms", []) is None


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
    chart = timeline(found, "ms", [0.25])
    assert [label for _, label in chart.keys] == ["step", "wait"]
    assert [tick.get_text() for tick in chart.axes.get_yticklabels()] == [
        "rank 0, idle 25%",
        "rank 1",
    ]
    many = [Span(rank, 0, "step", n, n + 0.5) for rank in range(200) for n in range(100)]
    assert len(timeline(many, "ms", []).svg()) < 300_000
