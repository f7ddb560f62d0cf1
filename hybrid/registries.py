"""The links and the samplers by name: this package's, and those of others by entry points."""

from hybrid.solvers.named import Named

AUTO = "auto"
"""What joins the ranks that a launcher has started, MPI or torch.distributed; else threads."""

TEXT = "text"
"""The data set of the bytes of files; all others of this package are images."""

LONGEST_TEXT = 1 << 15
"""Bytes of a sample of it, half of the least that is held out together of a long text."""

LINKS = Named(
    "link",
    {
        "threads": "hybrid.links.threads:ThreadLinks",
        "mpi": "hybrid.links.mpi:MpiLinks",
        "torch": "hybrid.links.gloo:GlooLinks",
        "virtual": "hybrid.links.virtual:VirtualLinks",
    },
    default=AUTO,
    base="hybrid.links.base:RankLinks",
)
"""Name -> where its class is."""

SAMPLERS = Named(
    "sampler",
    {"uniform": "hybrid.data.samplers.uniform:Uniform"},
    default="uniform",
    base="hybrid.data.samplers.base:Sampler",
)
"""Name -> where its class is."""
