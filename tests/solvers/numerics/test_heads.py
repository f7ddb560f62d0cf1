"""Auxiliary heads by the rank of what a block gives, and of what the network does."""

import pytest
import torch
from torch import nn

from hybrid.solvers import Block
from hybrid.solvers.local.heads import Head, sizes


def block(module):
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    return Block(module, 0, 2, {"exact": sgd, "local": sgd})


@pytest.mark.parametrize("kind", ["linear", "mlp:5"])
@pytest.mark.parametrize(
    ("module", "shape", "output"),
    [
        (nn.Conv2d(3, 4, 1), (4, 6, 6), (10,)),
        (nn.Conv1d(3, 4, 1), (4, 9), (10,)),
        (nn.Linear(3, 4), (4,), (10,)),
        (nn.Linear(3, 4), (4,), (1,)),
        (nn.Linear(3, 4), (4,), ()),
        (nn.Linear(3, 4), (9, 4), (10,)),
        (nn.Linear(3, 4), (9, 4), (9, 10)),
        (nn.Linear(3, 4), (9, 4), (10, 9)),
    ],
    ids=str,
)
def test_a_head_gives_the_networks_output_and_comes_back_from_its_state(
    module, shape, output, kind
):
    made = block(module)
    head, x = Head(kind, made, shape, output), torch.randn(5, *shape)
    assert head(made, x).shape == (5, *output)
    again = Head.of_state(kind, made, head.state())
    assert torch.equal(again(made, x), head(made, x))


def test_of_tokens_the_mean_of_their_outputs_is_taken_or_each_has_its_own():
    made = block(nn.Linear(3, 4))
    x = torch.randn(5, 9, 4)
    pooled, own = (Head("linear", made, (9, 4), out) for out in ((10,), (9, 10)))
    each = own(made, x)
    assert torch.allclose(each.mean(1), pooled(made, x), atol=1e-6)
    turned = Head("linear", made, (9, 4), (10, 9))
    assert torch.equal(turned(made, x), each.transpose(1, 2))


@pytest.mark.parametrize("shape", [(16, 8, 8), (9, 4), (4,)])
def test_an_output_of_another_kind_is_refused(shape):
    with pytest.raises(ValueError, match=r"^no auxiliary head makes an output of shape"):
        sizes(shape, (3, 7, 7), convolves=False)
