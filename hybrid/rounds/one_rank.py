"""Whether one rank would train faster than a run does by its defaults."""

from collections.abc import Mapping

RATE_TOTALS = "images", "serial_seconds", "parallel_seconds"
"""The totals that a rate is made of."""
LEAST_SECONDS = 2.0
"""The least seconds of training for a rate. A shorter first epoch does not count."""
LEAST_SHARE = 0.9
"""A run below this share of the rate estimated for one rank says that one would be faster."""


class OneRank:
    """The rate of one rank, estimated before training, until a run has been compared with it."""

    def __init__(self, seconds: float, batch_size: int) -> None:
        """`seconds` are of a mini-batch's passes; 0: nothing is compared."""
        self.rate = batch_size / seconds if seconds else 0.0
        self.start: Mapping[str, float] | None = None

    def compare(self, before: Mapping[str, float], after: Mapping[str, float]) -> str:
        """What to say after an epoch, from a run's totals before and after it; at most once.

        A short first epoch warms up; the epochs after it count together.
        """
        samples, *seconds = (after[key] - (self.start or before)[key] for key in RATE_TOTALS)
        self.start = self.start or dict(before if sum(seconds) >= LEAST_SECONDS else after)
        if not self.rate or sum(seconds) < LEAST_SECONDS:
            return ""
        alone, self.rate, rate = self.rate, 0.0, samples / sum(seconds)
        if rate >= LEAST_SHARE * alone:
            return ""
        return (
            f"one rank would be faster: this run trains {rate:,.0f} samples/s, and one rank would "
            f"train about {alone:,.0f}, by its passes' times: take one block, or a larger batch"
        )
