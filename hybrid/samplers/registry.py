"""The samplers by name: one file each, a line here; a sampler is imported when asked for."""

from __future__ import annotations

from typing import Any

from hybrid.solvers.named import Named

SAMPLERS: Named[Any] = Named(
    "sampler",
    {
        "uniform": "hybrid.data.samplers.uniform:Uniform",
        "auto-assist": "hybrid.data.samplers.auto_assist:AutoAssist",
        "selective-backprop": "hybrid.data.samplers.selective_backprop:SelectiveBackprop",
    },
    default="uniform",
    group="hybrid.samplers",
    base="hybrid.data.samplers.base:Sampler",
)
"""Name -> where its class is."""
