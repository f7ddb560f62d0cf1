"""BatchNorm over the samples of all replicas."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.solvers.peers import Peers


class SharedNorms:
    r"""Lets a module's BatchNorms normalize by the statistics of all replicas' samples.

    Of a channel, over the n_r numbers that replica r has of it, in replica order:

        N = sum_r n_r,   m = sum_r (n_r / N) m_r,   v = sum_r (n_r / N) (v_r + (m_r - m)^2)
        y = w (x - m) / sqrt(v + eps) + b
        d x = w / sqrt(v + eps) (d y - mean(d y) - y_hat mean(d y y_hat)),   means over all N

    One exchange of three numbers a channel forward, and one of two backward.
    """

    def __init__(self, module: nn.Module, peers: Peers) -> None:
        self.norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        for norm in self.norms:
            norm.forward = partial(_forward, norm, peers)  # type: ignore[method-assign]

    def remove(self) -> None:
        """Leave the module as it was."""
        for norm in self.norms:
            del norm.forward
        self.norms = []


def _forward(norm: Any, peers: Peers, x: Tensor) -> Tensor:
    if not norm.training:
        return type(norm).forward(norm, x)  # type: ignore[no-any-return]
    channels = x.shape[1]
    weight = x.new_ones(channels) if norm.weight is None else norm.weight
    bias = x.new_zeros(channels) if norm.bias is None else norm.bias
    normalized: Any = _Shared.apply(x, weight, bias, norm.eps, peers)  # type: ignore[no-untyped-call]
    y, mean, variance, count = normalized
    if norm.track_running_stats:
        with torch.no_grad():
            _track(norm, mean, variance * (count / (count - 1)))
    return y  # type: ignore[no-any-return]


def _track(norm: Any, mean: Tensor, variance: Tensor) -> None:
    """Move running statistics as torch does."""
    norm.num_batches_tracked.add_(1)
    momentum = norm.momentum
    if momentum is None:
        momentum = 1.0 / float(norm.num_batches_tracked)
    for running, value in ((norm.running_mean, mean), (norm.running_var, variance)):
        # .data: graphs under way do not use them
        running.data.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)


class _Shared(torch.autograd.Function):
    """Normalize by the statistics of all replicas; also gives these."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, peers: Peers
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        dims = [d for d in range(x.dim()) if d != 1]
        variance, mean = torch.var_mean(wide, dims, correction=0)
        n = mean.new_full((1,), x.numel() / x.shape[1])
        everyone = _gathered(peers, torch.cat([n, mean, variance]))
        count = torch.stack([each[0] for each in everyone]).sum()
        parts = [(each[0] / count, *each[1:].split(x.shape[1])) for each in everyone]
        mean = torch.stack([share * m for share, m, _ in parts]).sum(0)
        variance = torch.stack([s * (v + (m - mean) ** 2) for s, m, v in parts]).sum(0)
        scale = (variance + eps).rsqrt()
        normal = (wide - _wide(mean, x)) * _wide(scale, x)
        ctx.save_for_backward(normal, weight, scale, count)
        ctx.peers, ctx.dims = peers, dims
        y = normal * _wide(weight.to(wide.dtype), x) + _wide(bias.to(wide.dtype), x)
        ctx.mark_non_differentiable(mean, variance, count)
        return y.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, p: Tensor, *_: Tensor) -> Any:
        normal, weight, scale, count = ctx.saved_tensors
        wide = p.to(normal.dtype)
        bias_gradient = wide.sum(ctx.dims)
        weight_gradient = (wide * normal).sum(ctx.dims)
        everyone = _gathered(ctx.peers, torch.cat([bias_gradient, weight_gradient]))
        means = torch.stack(everyone).sum(0) / count
        of_p, of_both = means.split(len(bias_gradient))
        inner = wide - _wide(of_p, p) - normal * _wide(of_both, p)
        p_in = inner * _wide(weight.to(wide.dtype) * scale, p)
        gradients = weight_gradient.to(weight.dtype), bias_gradient.to(weight.dtype)
        return p_in.to(p.dtype), *gradients, None, None


def _gathered(peers: Peers, vector: Tensor) -> list[Tensor]:
    """Everyone's, in replica order."""
    everyone = [vector] * peers.replicas
    return peers.exchange(everyone, everyone)()


def _wide(per_channel: Tensor, x: Tensor) -> Tensor:
    return per_channel.view(1, -1, *[1] * (x.dim() - 2))
