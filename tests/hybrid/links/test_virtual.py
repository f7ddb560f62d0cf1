"""Virtual links: clocks that add up."""

from collections.abc import Callable
from time import perf_counter, thread_time

import pytest
import torch

from hybrid.links import LinkSpeed, VirtualLinks, run_virtual

SLOW = LinkSpeed(bytes_per_second=100.0, latency_seconds=0.25)
"""A byte takes 10 ms."""
Work = Callable[[float], None]


def by_hand(size, program, network=SLOW):
    """Run `program(links, work)` on clocks that only `work(seconds)` moves."""

    def on_rank(links):
        assert isinstance(links, VirtualLinks)
        worked = [0.0]
        links._timer = lambda: worked[0]
        links._timer_start = 0.0

        def work(seconds):
            worked[0] += seconds

        return program(links, work)

    return run_virtual(size, on_rank, network)


def test_work_on_a_machine_of_another_speed_takes_as_much_longer_and_messages_do_not():
    def program(links, work):
        work(1.0)
        links.set_speed(0.5)
        work(1.0)
        if links.rank == 0:
            links.to_next(message(50))
        else:
            links.from_previous()
        return links.now()

    assert by_hand(2, program) == [3.0, 3.75]


def message(size):
    return torch.zeros(size, dtype=torch.uint8)


# what each rank does: works so many seconds, sends bytes to the next (>) or the previous (<),
# or receives from it (n, p); and when it is done
TIMINGS = {
    "a message arrives after its bytes and the latency": ([[1.0, ">50"], "p"], [1.0, 1.75]),
    "a message that has arrived costs nothing": ([[">50"], [5.0, "p"]], [0.0, 5.0]),
    "one message goes at a time": ([[">100", 0.1, ">50", 0.1, ">10"], "ppp"], [0.2, 1.85]),
    "an idle link starts when the sender does": ([[">10", 3.0, ">10"], "pp"], [3.0, 3.35]),
    "directions and sides share no link": (
        [[">100", "n"], [">100", "<100", "p", "n"], ["<100", "p"]],
        [1.25, 1.25, 1.25],
    ),
    "sending goes on beside the work": ([[">200", 1.0], "p"], [1.0, 2.25]),
}


@pytest.mark.parametrize(("scripts", "clocks"), TIMINGS.values(), ids=TIMINGS.keys())
def test_a_clock_follows_work_bytes_and_latency(scripts, clocks):
    def program(links, work):
        for step in scripts[links.rank]:
            if isinstance(step, float):
                work(step)
            elif step in "np":
                (links.from_next if step == "n" else links.from_previous)()
            else:
                send = links.to_next if step[0] == ">" else links.to_previous
                send(message(int(step[1:])))
        return links.now()

    assert by_hand(len(scripts), program) == pytest.approx(clocks)


def test_waiting_is_recorded_on_its_side_and_shown_to_the_watcher():
    def program(links, work):
        spans: list[tuple[str, float, float]] = []
        links.watch = lambda *span: spans.append(span)
        work(0.5)
        if links.rank == 0:
            links.to_next(message(100))
        else:
            links.from_previous()
        return links.traffic.waiting_seconds, links.traffic.bytes_sent, spans

    (sender, sent, _), (receiver, _, spans) = by_hand(2, program)
    assert sender == {"next": 0.0, "previous": 0.0, "peers": 0.0, "everyone": 0.0}
    assert sent == {"next": 100, "previous": 0, "peers": 0}
    assert receiver == {"next": 0.0, "previous": pytest.approx(1.25), "peers": 0.0, "everyone": 0.0}
    assert spans == [("wait: previous", 0.5, pytest.approx(1.75))]


@pytest.mark.parametrize(("size", "hops"), [(1, 0), (2, 1), (3, 2), (5, 3)])
def test_a_gather_sets_every_clock_to_the_latest_and_a_tree_of_latencies(size, hops):
    def program(links, work):
        work(1.0 + links.rank)
        everyone = links.all_gather(10 * links.rank)
        return everyone, links.now(), links.traffic.waiting_seconds["everyone"]

    end = size + 2 * hops * 0.25
    for rank, (everyone, now, waited) in enumerate(by_hand(size, program)):
        assert everyone == [10 * r for r in range(size)]
        assert now == pytest.approx(end)
        assert waited == pytest.approx(end - 1.0 - rank)


def test_the_clock_counts_what_a_rank_computes_and_not_what_others_do():
    def program(links):
        end = thread_time() + 0.1
        while thread_time() < end:
            pass
        if links.rank == 0:
            links.to_next(message(1))
        else:
            links.from_previous()
        return links.now()

    begun = perf_counter()
    clocks = run_virtual(2, program)
    assert perf_counter() - begun >= 0.2
    assert all(0.1 <= clock < 0.19 for clock in clocks)
