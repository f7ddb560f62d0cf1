"""Modules that a trace may stumble over."""

import torch
from torch import nn


class Two(nn.Module):
    """Two layers, for others to do something between."""

    def __init__(self, between=None):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.between = nn.Linear(4, 4), nn.Linear(4, 4), between

    def forward(self, x):
        return self.b(self.between(self.a(x)))


class Doubling(nn.Module):
    """Control flow that depends on numbers."""

    def forward(self, x):
        return 2 * x if x.sum() > 0 else x


class Dropping(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, 0.5, self.training)


class Average(nn.Module):
    """A running mean of one's own, which is written to in place or anew."""

    def __init__(self, anew=False):
        super().__init__()
        self.anew = anew
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if self.anew:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        else:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - self.mean


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.randn(4)


class OwnFlow(Two):
    def forward(self, x):
        if x.sum() > 0:
            x = 2 * x
        return self.b(self.a(x))


class OwnDropout(Two):
    def forward(self, x):
        return self.b(nn.functional.dropout(self.a(x), 0.5, self.training))


class OwnCounter(Two):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return self.b(self.a(x))


class OwnNoise(Two):
    def forward(self, x):
        return self.b(self.a(x) + torch.randn(4))


class Statements(Two):
    """Works in place, and does not use what that gives."""

    def forward(self, x):
        x = self.a(x)
        x.mul_(2)
        nn.functional.relu_(x)
        return self.b(x)


class View(Two):
    """Writes to a view of what would cross the cut."""

    def forward(self, x):
        x = self.a(x)
        part = x[:, :2]
        z = self.b(x)
        part.mul_(2)
        return x + z


class Odds(Two):
    """A constant, a buffer that is not kept, and tensors that nothing uses."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(3, 3)
        self.register_buffer("unused", torch.ones(2))
        self.register_buffer("scale", torch.full((4,), 3.0), persistent=False)

    def forward(self, x):
        return self.b(self.a(x) * self.scale + torch.tensor([1.0, 2.0, 3.0, 4.0]))


class Normed(Two):
    """One BatchNorm in two places."""

    def __init__(self):
        super().__init__(nn.BatchNorm1d(4, affine=False))

    def forward(self, x):
        return self.between(self.b(self.between(self.a(x))))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.middle = nn.Embedding(9, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.middle(self.embedding(tokens)))
