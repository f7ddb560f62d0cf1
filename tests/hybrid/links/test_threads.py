"""Links between threads: what arrives, what is counted, and how failure spreads."""

from time import sleep

import pytest
import torch

from hybrid.links import AgreedError, run_threads, run_virtual


def test_a_tensor_arrives_without_a_copy_and_keeps_its_strides():
    sent = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)

    def program(links):
        return links.to_next(sent) if links.rank == 0 else links.from_previous()

    arrived = run_threads(2, program)[1]
    assert arrived.data_ptr() == sent.data_ptr()
    assert arrived.stride() == sent.stride()


@pytest.mark.parametrize("side", ["previous", "everyone"])
def test_waiting_is_counted_on_its_side(side):
    """Two seconds pass on a clock of the test's while one rank waits, and not before."""
    clock, ranks = [0.0], {}

    def program(links):
        links.now, ranks[links.rank] = lambda: clock[0], links
        if links.rank == 0:
            while 1 not in ranks or ranks[1].wait is None:
                sleep(0.001)
            clock[0] = 2.0
        if side == "everyone":
            links.all_gather(0)
        elif links.rank == 0:
            links.to_next(torch.zeros(1))
        else:
            links.from_previous()
        return links.traffic

    sender, receiver = run_threads(2, program)
    assert receiver.waiting_seconds[side] == receiver.total_waiting == 2.0
    assert sender.total_waiting == 0.0


@pytest.mark.parametrize("failing", [[], [0], [2], [1, 2]])
def test_an_agreement_passes_or_raises_the_first_failing_ranks_reason_on_all(failing):
    def program(links):
        try:
            with links.agreement():
                if links.rank in failing:
                    raise ValueError(f"rank {links.rank}\n  is unwell")
        except AgreedError as error:
            return str(error)
        return "passed"

    expected = f"rank {failing[0]} is unwell" if failing else "passed"
    assert run_threads(3, program) == [expected] * 3


@pytest.mark.parametrize("run", [run_threads, run_virtual])
@pytest.mark.parametrize("waits_for", ["from_previous", "from_next", "all_gather"])
def test_a_failing_rank_releases_the_waiting_ones_and_its_own_error_is_raised(waits_for, run):
    def program(links):
        if links.rank == 1:
            raise KeyError("mine")
        if waits_for == "all_gather":
            links.all_gather(0)
        elif links.rank == (2 if waits_for == "from_previous" else 0):
            getattr(links, waits_for)()

    with pytest.raises(KeyError, match="mine"):
        run(3, program)
