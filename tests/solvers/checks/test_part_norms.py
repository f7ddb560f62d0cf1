"""BatchNorm by parts in a pass over a whole mini-batch equals passes over the parts."""

import pytest
import torch
from torch import nn

from hybrid.solvers.checks.constant_draws import ConstantDraws, UnknownDrawError
from hybrid.solvers.checks.part_norms import NoRowsError, normalized_by_parts

ROWS = 9


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=None), nn.Dropout(0.3), nn.Linear(6, 4)]
    return nn.Sequential(*layers, nn.Tanh(), nn.BatchNorm1d(4)).double()


def by_hand(module: nn.Module, x: torch.Tensor, parts: list[list[torch.Tensor]]) -> torch.Tensor:
    """Passes over parts: each replica's from the same statistics, which are then averaged."""
    out, start, found = torch.empty_like(x), dict(module.named_buffers()), []
    for groups in parts:
        give_buffers(module, {name: b.clone() for name, b in start.items()})
        for rows in groups:
            out = out.index_put((rows,), module(x[rows]))
        found.append((sum(map(len, groups)) / ROWS, dict(module.named_buffers())))
    means = {n: sum(share * b[n] for share, b in found) for n, x in start.items() if x.dim()}
    give_buffers(module, {**found[0][1], **means})
    return out


def give_buffers(module: nn.Module, buffers: dict[str, torch.Tensor]) -> None:
    for name, b in buffers.items():
        path, _, field = name.rpartition(".")
        module.get_submodule(path)._buffers[field] = b


@pytest.mark.parametrize("sizes", [[[9]], [[4, 5]], [[2, 3], [4]], [[2], [2, 2], [3]]], ids=str)
def test_a_pass_by_parts_equals_passes_over_them(sizes: list[list[int]]) -> None:
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    each = iter(order.split([n for groups in sizes for n in groups]))
    parts = [[next(each) for _ in groups] for groups in sizes]
    x = torch.randn(ROWS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    one, other = network(), network()
    with ConstantDraws():
        expected = by_hand(one, x, parts)
        with normalized_by_parts(other, parts, ROWS):
            out = other(x)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    out.square().sum().backward()
    expected.square().sum().backward()
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-10, atol=1e-12)
    for name, value in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, rtol=1e-12, atol=1e-13)
    assert "forward" not in vars(other[1])


def test_evaluation_is_left_alone_and_an_input_without_rows_is_refused() -> None:
    module, x = network().eval(), torch.randn(ROWS, 4, dtype=torch.float64)
    parts = [[torch.arange(4), torch.arange(4, ROWS)]]
    with normalized_by_parts(module, parts, ROWS):
        assert torch.equal(module(x), network().eval()(x))
        with pytest.raises(NoRowsError, match="an input of 5 rows for 9 samples"):
            module.train()[5](x[:5])


def draws(x: torch.Tensor) -> list[torch.Tensor]:
    """One of each kind, a row for each of x."""
    shape = tuple(x.shape)
    bernoulli = torch.full_like(x, 0.4).bernoulli()
    return [
        *(torch.rand(shape), torch.randn(shape), torch.rand_like(x), torch.randn_like(x)),
        *(torch.randint(3, 9, shape), torch.empty(shape).uniform_(1, 2), bernoulli),
        *(torch.empty(shape).normal_(2, 3), torch.empty(shape).exponential_(2.0)),
        *(nn.functional.dropout(x, 0.5), torch.normal(x, 1.0), torch.empty(shape).random_(7)),
        torch.multinomial(x.softmax(1), 2),
    ]


def test_what_a_row_draws_does_not_depend_on_the_others() -> None:
    x = torch.randn(6, 5)
    with ConstantDraws():
        whole, parts = draws(x), [draws(rows) for rows in x.split([1, 3, 2])]
        for i, values in enumerate(whole):
            assert torch.equal(torch.cat([part[i] for part in parts]), values)
        assert whole[4].min() >= 3
        assert whole[4].max() < 9
        assert len(whole[0][0].unique()) == 5
    with ConstantDraws(), pytest.raises(UnknownDrawError, match="poisson draws random numbers"):
        torch.poisson(torch.ones(2))
