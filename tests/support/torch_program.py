"""What test_torch.py runs on every rank."""

from functools import reduce

import torch
from mpi_program import arrivals, exchange

from hybrid.links.distributed.gloo import GlooLinks
from hybrid.links.mpi import MpiLinks

LINKS = {"mpi": MpiLinks, "torch": GlooLinks}


def facts(comm):
    links = GlooLinks(comm)
    found = {**arrivals(links)}
    found["crossed"] = exchange(links, 30, lambda i, rank: torch.full((1 << 18,), i + 100.0 * rank))
    found["gathered"] = links.all_gather(10 * links.rank)
    found["bytes"] = links.traffic.bytes_sent["previous"]
    links.close()
    return found


def sums(comm, kind):
    """What the engine of links finds with every rank a replica, and what it should."""
    links = LINKS[kind](comm, replicas=comm.size)
    links.fewest_by_engine = 1
    each = [torch.randn(1001, generator=torch.Generator().manual_seed(r)) for r in range(comm.size)]
    ends = [links.peers.sum(factor * each[links.place.replica]) for factor in (1, 2)]
    second, first = ends[1](), ends[0]()
    pieces = [each[links.place.replica][: 3 + r].to(torch.bfloat16) for r in range(comm.size)]
    mine = [pieces[links.place.replica]] * comm.size
    arrived = links.peers.exchange(pieces, mine)()
    expected = reduce(torch.add, each)
    length = 3 + links.place.replica
    theirs = [x[:length].to(torch.bfloat16) for x in each]
    return {
        "close": torch.allclose(first, expected, atol=1e-5),
        "twice": torch.allclose(second, 2 * expected, atol=1e-5),
        "bits": first.numpy().tobytes(),
        "exchanged": all(map(torch.equal, arrived, theirs)),
        "calls": links.traffic.calls["peers"],
        "bytes": links.traffic.bytes_sent["peers"],
    }
