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


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("flat", "makes an output of shape (144,), and the network one of (10,)"),
        ("function", "of block 0 gave a method_descriptor, not a torch Module"),
        ("failing", "of block 0 failed: IndexError: tuple index out of range"),
        ("unlike", "of block 0 failed: RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        ("flatt", "user_heads has no flatt; did you mean 'flat'?"),
    ],
)
def test_a_users_head_that_cannot_be_is_refused_in_one_line(name, fault):
    made = block(nn.Conv2d(3, 4, 1))
    with pytest.raises(ValueError, match=r"^solver\.head=user_heads:[^\n]*$") as caught:
        Head(f"user_heads:{name}", made, (4, 6, 6), (10,))
    assert fault in str(caught.value)


def test_a_lazy_head_is_the_same_in_every_run():
    made, x = block(nn.Conv2d(3, 4, 1)), torch.randn(5, 4, 6, 6)
    first, again = (Head("user_heads:lazy", made, (4, 6, 6), (10,), seed=3) for _ in range(2))
    assert torch.equal(first(made, x, (1, 7)), again(made, x, (1, 7)))
    assert len(first.optimizer.param_groups[0]["params"]) == 2


def test_a_users_head_comes_back_from_its_state_with_its_buffers():
    made, x = block(nn.Conv2d(3, 4, 1)), torch.randn(5, 4, 6, 6)
    head = Head("user_heads:drawing", made, (4, 6, 6), (10,), seed=3)
    assert torch.equal(head.module[1][1].running_mean, torch.zeros(6))  # no trial is left
    out = head(made, x, (1, 7))
    again = Head.of_state("user_heads:drawing", made, head.state(), seed=3)
    assert torch.equal(again.module[1][1].running_mean, head.module[1][1].running_mean)
    assert torch.equal(again(made, x, (1, 7)), out)
    assert not torch.equal(again(made, x, (1, 8)), out)


@pytest.mark.parametrize("shape", [(16, 8, 8), (9, 4), (4,)])
def test_an_output_of_another_kind_is_refused(shape):
    with pytest.raises(ValueError, match=r"^no auxiliary head makes an output of shape"):
        sizes(shape, (3, 7, 7), convolves=False)
