"""BatchNorm over the samples of all replicas."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.solvers.peers import Peers


class SharedNorms:
    r"""Makes a module's BatchNorms normalize by the statistics of all replicas' samples.

    For a channel, over the n_r numbers of replica r, in replica order:

        N = sum_r n_r,   m = sum_r (n_r / N) m_r,   v = sum_r (n_r / N) (v_r + (m_r - m)^2)
        y = w (x - m) / sqrt(v + eps) + b

    One exchange of three numbers for each channel forward, and one of their adjoints backward.
    """

    def __init__(self, module: nn.Module, peers: Peers) -> None:
        self.norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        for norm in self.norms:
            norm.forward = partial(_forward, norm, peers)  # type: ignore[method-assign]

    def remove(self) -> None:
        """Restore the module's BatchNorms."""
        for norm in self.norms:
            del norm.forward
        self.norms = []


def _forward(norm: Any, peers: Peers, x: Tensor) -> Tensor:
    if not norm.training:
        return type(norm).forward(norm, x)  # type: ignore[no-any-return]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    dims = [d for d in range(x.dim()) if d != 1]
    variance, mean = torch.var_mean(wide, dims, correction=0)
    n = mean.new_full((1,), x.numel() / x.shape[1])
    statistics: Any = _Gather.apply(torch.cat([n, mean, variance]), peers)  # type: ignore[no-untyped-call]
    count = statistics[:, 0].sum()
    share = statistics[:, :1] / count
    means, variances = statistics[:, 1:].split(x.shape[1], 1)
    mean = (share * means).sum(0)
    variance = (share * (variances + (means - mean) ** 2)).sum(0)
    if norm.track_running_stats:
        with torch.no_grad():
            _track(norm, mean, variance * (count / (count - 1)))
    y = (wide - _wide(mean, x)) * _wide((variance + norm.eps).rsqrt(), x)
    if norm.affine:
        y = y * _wide(norm.weight.to(wide.dtype), x) + _wide(norm.bias.to(wide.dtype), x)
    return y.to(x.dtype)


def _track(norm: Any, mean: Tensor, variance: Tensor) -> None:
    """Update running statistics as torch does."""
    norm.num_batches_tracked.add_(1)
    momentum = norm.momentum
    if momentum is None:
        momentum = 1.0 / float(norm.num_batches_tracked)
    for running, value in ((norm.running_mean, mean), (norm.running_var, variance)):
        # .data: graphs under way do not use them
        running.data.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)


class _Gather(torch.autograd.Function):
    """The vectors (n,) of all replicas, (R, n), in their order."""

    @staticmethod
    def forward(ctx: Any, vector: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return torch.stack(peers.exchange([vector] * peers.replicas, [vector] * peers.replicas)())

    @staticmethod
    def backward(ctx: Any, *p: Tensor) -> tuple[Tensor, None]:
        # replica r receives the adjoints of its vector, one from each replica
        pieces = [row.contiguous() for row in p[0]]
        like = pieces[ctx.peers.replica]
        return torch.stack(ctx.peers.exchange(pieces, [like] * len(pieces))()).sum(0), None


def _wide(per_channel: Tensor, x: Tensor) -> Tensor:
    return per_channel.view(1, -1, *[1] * (x.dim() - 2))
