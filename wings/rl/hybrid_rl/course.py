"""The parts that one rank has, and their steps in an order in which no two wait for each other."""

from __future__ import annotations

from hybrid.links import RankLinks
from hybrid_rl.actor import Actor
from hybrid_rl.parts import Front, Middle, Networks, parts_of, ports


class Course:
    """Steps of the actors, and the updates that follow them.

    With lag L an actor's step t needs only update t - L. The learner's update t needs step t and
    the representation's update t. So the learner works d = max(0, L - 2) updates behind what it
    passes on, and with L = 3 all are at work at the same time:

        actors           step 2      step 3      step 4        step 4: the weights of update 1
        representation   update 1    update 2    update 3
        learner          update 0    update 1    update 2

    Every part receives from a named neighbor, in a fixed order: what it computes depends neither
    on timing, nor on how parts are spread over ranks, nor on how steps are spread over calls.
    """

    def __init__(self, links: RankLinks, networks: Networks) -> None:
        rl = networks.rl
        count = 2 + rl.actors
        joined = ports(links, count)
        own = parts_of(links.rank, links.size, count)
        self.ahead = max(0, rl.lag - 2)
        self.front = Front(networks, joined[0][1]) if 0 in own else None
        self.middle = Middle(networks, *joined[1]) if 1 in own else None
        self.actors = [
            Actor(
                networks, part - 2, joined[part][0], joined[part][1] if part + 1 < count else None
            )
            for part in own
            if part >= 2
        ]

    def run(self, first: int, last: int) -> None:
        """Steps `first` to `last` - 1 and their updates; nothing is under way afterwards."""
        for i in range(first, last + self.ahead):
            if i < last:
                self._step(i)
            if self.middle is not None and i - self.ahead >= first:
                self.middle.learn(i - self.ahead)
        for actor in self.actors:
            actor.drain(last)

    def _step(self, t: int) -> None:
        for actor in self.actors:
            actor.receive_weights(t)
        for actor in reversed(self.actors):
            actor.act(t)
        if self.middle is not None:
            self.middle.pass_on()
        if self.front is not None:
            self.front.learn(t)
