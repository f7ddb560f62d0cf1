"""Rounds that rest from their parallel phase train all the same."""

from unittest.mock import Mock

from hybrid.rounds.kinds import AlternatingRounds
from hybrid.solvers.windows import PhaseStats, Window


def test_a_rest_corrects_every_round_whatever_the_rounds_between_corrections():
    exact = Mock()
    exact.train.side_effect = lambda *_: PhaseStats(samples=1)
    rounds = AlternatingRounds(Mock(rank=0, now=float), exact, Mock(), correct_every=3)
    rounds.resting = True
    serial, parallel = PhaseStats(), PhaseStats()
    window = Window([Mock(step=0)])
    rounds.train([(window, window)] * 4, serial, parallel, None)
    assert (serial.samples, parallel.samples, rounds.count) == (4, 0, 4)
