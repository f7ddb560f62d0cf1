"""Small runs of `hybrid rl`, and what they leave."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid.folder import checkpoint
from hybrid_rl.resolve import load
from hybrid_rl.run import train

TINY: Mapping[str, Any] = {
    "rl.steps": 60,
    "rl.random_steps": 12,
    "rl.pretrain_steps": 3,
    "rl.batch_size": 8,
    "rl.width": 8,
    "rl.units": 6,
    "rl.layers": 2,
    "rl.evaluate_every": 60,
    "rl.episodes": 1,
    "rl.report_every": 20,
    "rl.checkpoint_every": 30,
    "rl.keep_last": 0,
    "rl.threads": 1,
}


def over(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`TINY`, but for these settings of [rl]; None leaves one out."""
    wanted = {**TINY, **{f"rl.{name}": value for name, value in settings.items()}}
    return {name: value for name, value in wanted.items() if value is not None}


def words(**settings: Any) -> list[str]:
    """Those of the command line, the settings of [rl] over `TINY`."""
    wanted = over(settings)
    texts = (f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in wanted.items())
    return [word for text in texts for word in ("--set", text)]


def trained(out: Path | None = None, resume: bool = False, kind: str = "auto", **settings: Any):
    """The summary of a run on threads, or virtual links."""
    wanted = over(settings)
    wanted |= {"links.kind": kind} if kind != "auto" else {}
    base = out / "config.toml" if resume and out else None
    return train(load(None, wanted, base), out, resume)


def kept(run: Path) -> dict[str, Tensor]:
    """All tensors of the newest checkpoint."""
    folder = checkpoint.complete(run / "checkpoints")[-1]
    manifest = checkpoint.read_manifest(folder)
    found = {}
    for load_one, kind in ((checkpoint.load_unit, "units"), (checkpoint.load_state, "states")):
        for name in manifest[kind]:
            tensors = load_one(folder, manifest, name)
            found |= {f"{name}/{key}": tensor for key, tensor in tensors.items()}
    return found


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def refused(**settings: Any) -> str:
    """Why."""
    try:
        trained(**settings)
    except ValueError as error:
        return str(error)
    raise AssertionError(f"{settings} is taken")
