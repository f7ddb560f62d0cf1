"""Virtual links: clocks that add up."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, sleep, thread_time
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid.links import Network, RankLinks, VirtualLinks, run_virtual

SLOW = Network(bytes_per_second=100.0, latency_seconds=0.25)
"""A byte takes 10 ms."""
Work = Callable[[float], None]


def by_hand(
    size: int, program: Callable[[VirtualLinks, Work], Any], network: Network = SLOW
) -> list[Any]:
    """Run `program(links, work)` on clocks that only `work(seconds)` moves."""

    def on_rank(links: RankLinks) -> Any:
        assert isinstance(links, VirtualLinks)
        worked = [0.0]
        links._timer = lambda: worked[0]
        links._begun = 0.0

        def work(seconds: float) -> None:
            worked[0] += seconds

        return program(links, work)

    return run_virtual(size, on_rank, network)


def message(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def test_a_message_arrives_after_its_bytes_and_the_latency() -> None:
    def program(links: VirtualLinks, work: Work) -> float:
        if links.rank == 0:
            work(1.0)
            links.to_next(message(50))
        else:
            links.from_previous()
        return links.now()

    assert by_hand(2, program) == pytest.approx([1.0, 1.0 + 0.5 + 0.25])


def test_a_message_that_has_arrived_costs_the_receiver_nothing() -> None:
    def program(links: VirtualLinks, work: Work) -> tuple[float, float]:
        if links.rank == 0:
            links.to_next(message(50))
        else:
            work(5.0)
            links.from_previous()
        return links.now(), links.traffic.total_waiting

    assert by_hand(2, program)[1] == pytest.approx((5.0, 0.0))


def test_a_direction_carries_one_message_at_a_time() -> None:
    def program(links: VirtualLinks, work: Work) -> list[float]:
        arrivals = []
        if links.rank == 0:
            for size in (100, 50, 10):
                links.to_next(message(size))
                work(0.1)
        else:
            for _ in range(3):
                links.from_previous()
                arrivals.append(links.now())
        return arrivals

    assert by_hand(2, program)[1] == pytest.approx([1.25, 1.75, 1.85])


def test_a_link_that_has_been_idle_starts_when_the_sender_does() -> None:
    def program(links: VirtualLinks, work: Work) -> float:
        if links.rank == 0:
            links.to_next(message(10))
            work(3.0)
            links.to_next(message(10))
        else:
            links.from_previous()
            links.from_previous()
        return links.now()

    assert by_hand(2, program)[1] == pytest.approx(3.0 + 0.1 + 0.25)


def test_the_two_directions_and_the_two_sides_do_not_share_a_link() -> None:
    def program(links: VirtualLinks, work: Work) -> float:
        if links.rank == 1:
            links.to_next(message(100))
            links.to_previous(message(100))
            links.from_previous()
            links.from_next()
        elif links.rank == 0:
            links.to_next(message(100))
            links.from_next()
        else:
            links.to_previous(message(100))
            links.from_previous()
        return links.now()

    assert by_hand(3, program) == pytest.approx([1.25] * 3)


def test_sending_goes_on_beside_the_work() -> None:
    def program(links: VirtualLinks, work: Work) -> float:
        if links.rank == 0:
            links.to_next(message(200))
            work(1.0)
        else:
            links.from_previous()
        return links.now()

    assert by_hand(2, program) == pytest.approx([1.0, 2.25])


def test_waiting_is_recorded_on_its_side_and_shown_to_the_watcher() -> None:
    def program(links: VirtualLinks, work: Work) -> Any:
        spans: list[tuple[str, float, float]] = []
        links.watch = lambda *span: spans.append(span)
        work(0.5)
        if links.rank == 0:
            links.to_next(message(100))
        else:
            links.from_previous()
        return links.traffic.waiting_seconds, links.traffic.bytes_sent, spans

    (sender, sent, _), (receiver, _, spans) = by_hand(2, program)
    assert sender == {"next": 0.0, "previous": 0.0, "everyone": 0.0}
    assert sent == {"next": 100, "previous": 0}
    assert receiver == {"next": 0.0, "previous": pytest.approx(1.25), "everyone": 0.0}
    assert spans == [("wait: previous", 0.5, pytest.approx(1.75))]


@pytest.mark.parametrize(("size", "hops"), [(1, 0), (2, 1), (3, 2), (5, 3)])
def test_a_gather_sets_every_clock_to_the_latest_and_a_tree_of_latencies(
    size: int, hops: int
) -> None:
    def program(links: VirtualLinks, work: Work) -> tuple[list[int], float, float]:
        work(1.0 + links.rank)
        everyone = links.all_gather(10 * links.rank)
        return everyone, links.now(), links.traffic.waiting_seconds["everyone"]

    end = size + 2 * hops * 0.25
    for rank, (everyone, now, waited) in enumerate(by_hand(size, program)):
        assert everyone == [10 * r for r in range(size)]
        assert now == pytest.approx(end)
        assert waited == pytest.approx(end - 1.0 - rank)


def test_only_one_rank_runs_at_a_time() -> None:
    running: list[int] = []

    def program(links: RankLinks) -> None:
        for _ in range(3):
            running.append(links.rank)
            sleep(0.005)
            assert running[-1] == links.rank
            links.all_gather(None)

    run_virtual(3, program)
    assert len(running) == 9


def test_stages_that_overlap_end_before_the_sum_of_their_work() -> None:
    stages, items, sent = 4, 8, message(0)

    def program(links: VirtualLinks, work: Work) -> float:
        for _ in range(items):
            if links.rank > 0:
                links.from_previous()
            work(1.0)
            if links.rank < links.size - 1:
                links.to_next(sent)
        return links.now()

    fast = Network(1e9, 0.0)
    assert max(by_hand(stages, program, fast)) == pytest.approx(items + stages - 1)


def test_the_clock_counts_what_a_rank_computes_and_not_what_others_do() -> None:
    def busy(seconds: float) -> None:
        end = thread_time() + seconds
        while thread_time() < end:
            pass

    def program(links: RankLinks) -> float:
        if links.rank == 0:
            busy(0.1)
            links.to_next(message(1))
        else:
            busy(0.1)
            links.from_previous()
        return links.now()

    begun = perf_counter()
    clocks = run_virtual(2, program)
    assert perf_counter() - begun >= 0.2
    assert all(0.1 <= clock < 0.19 for clock in clocks)
