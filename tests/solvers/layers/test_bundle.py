"""Several tensors, packed or apart, are what they were, and so are their adjoints."""

import pytest
import torch
from answers import refusal
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from hybrid.solvers.layers import bundle as bundle_module
from hybrid.solvers.layers.bundle import EXACT, Bundle, call_network, packed

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
LIMITS = {torch.uint8: 255, torch.int8: 127, torch.int16: (1 << 15) - 1}


@st.composite
def tensors(draw, samples, types):
    """One of so many samples, of any shape."""
    shape = (samples, *draw(st.lists(st.integers(0, 3), max_size=3)))
    dtype = draw(st.sampled_from(types))
    random = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=random).bool()
    if dtype.is_complex:
        return torch.randn(shape, generator=random, dtype=dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)
    most = LIMITS.get(dtype, EXACT)
    low = 0 if dtype is torch.uint8 else -most
    return torch.randint(low, most + 1, shape, generator=random).to(dtype)


@st.composite
def nests(draw, types=(*FLOATS, *INTEGERS, torch.bool)):
    """Tuples, lists and dicts of tensors, within each other."""
    leaf = tensors(draw(st.integers(1, 3)), types)
    return draw(
        st.recursive(
            leaf,
            lambda inner: (
                st.lists(inner, min_size=1, max_size=3)
                | st.tuples(inner, inner)
                | st.dictionaries(st.sampled_from("abc"), inner, min_size=1)
            ),
            max_leaves=5,
        )
    )


def samples_of(nest):
    return len(tree_leaves(nest)[0])


@given(nests())
def test_what_is_packed_comes_out_as_it_was(nest):
    bundle = Bundle.of(nest, samples_of(nest), "here")
    if bundle is None:  # a floating-point tensor alone
        assert isinstance(nest, torch.Tensor)
        assert nest.is_floating_point()
        return
    columns = bundle.pack(nest)
    assert columns.shape == (samples_of(nest), bundle.size)
    found, structure = tree_flatten(bundle.unpack(columns))
    leaves, expected = tree_flatten(nest)
    assert structure == expected
    for x, y in zip(found, leaves, strict=True):
        assert x.shape == y.shape
        assert torch.equal(x.to(y.dtype), y)
        assert x.dtype == y.dtype


@given(nests((torch.float64,)).filter(lambda nest: not isinstance(nest, torch.Tensor)))
def test_the_adjoint_of_the_whole_is_the_adjoints_side_by_side(nest):
    bundle = Bundle.of(nest, samples_of(nest), "here")
    apart = tree_map(lambda x: x.clone().requires_grad_(), nest)
    sum((x.sin() * x).sum() for x in tree_leaves(apart)).backward()
    whole = bundle.pack(nest).requires_grad_()
    sum((x.sin() * x).sum() for x in tree_leaves(bundle.unpack(whole))).backward()
    gradients = tree_map(lambda x: torch.zeros_like(x) if x.grad is None else x.grad, apart)
    if bundle.size:
        assert torch.equal(whole.grad, bundle.pack(gradients))


NUMBERS = (torch.float64, torch.complex128, torch.int64, torch.bool)


@pytest.mark.parametrize("small", [0, 2, 1 << 20])
@given(nest=nests(NUMBERS).filter(lambda nest: not isinstance(nest, torch.Tensor)))
def test_what_crosses_apart_comes_out_as_it_was_and_packs_to_the_same_columns(small, nest):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle_module, "SMALL", small)
        bundle = Bundle.of(nest, samples_of(nest), "here")
        parts = bundle.divide(nest)
        assert len(parts) == bundle.num_parts
        assert [tuple(x.shape[1:]) for x in parts[: bundle.num_large]] == bundle.large_shapes
        for x, y in zip(tree_leaves(bundle.join(parts)), tree_leaves(nest), strict=True):
            assert x.dtype == y.dtype
            assert torch.equal(x, y)
        assert torch.equal(packed(parts, bundle), bundle.pack(nest))


@given(nests((torch.float64,)).filter(lambda nest: not isinstance(nest, torch.Tensor)))
def test_adjoints_of_parts_are_the_parts_of_the_adjoint(nest):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle_module, "SMALL", 2)
        bundle = Bundle.of(nest, samples_of(nest), "here")
        whole = bundle.pack(nest).requires_grad_()
        sum((x.sin() * x).sum() for x in tree_leaves(bundle.unpack(whole))).backward()
        parts = tuple(x.detach().requires_grad_() for x in bundle.divide(nest))
        sum((x.sin() * x).sum() for x in tree_leaves(bundle.join(parts))).backward()
        adjoints = tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in parts)
        if bundle.size:
            assert torch.equal(packed(adjoints, bundle), whole.grad)


def test_a_large_tensor_crosses_in_its_memory_and_comes_back_in_it():
    x, mask = torch.randn(2, 32, 16), torch.ones(2, 32, dtype=torch.bool)
    bundle = Bundle.of((x, mask), 2, "here")
    large, small = bundle.divide((x, mask))
    assert large.data_ptr() == x.data_ptr()
    assert small.shape == (2, 32)
    assert bundle.join((large, small))[0].data_ptr() == x.data_ptr()


@pytest.mark.parametrize("sign", [1, -1])
def test_integers_to_two_to_the_24_are_exact_and_beyond_are_refused(sign):
    number = torch.tensor([[sign * EXACT], [1]])
    bundle = Bundle.of(number, 2, "here")
    assert torch.equal(bundle.unpack(bundle.pack(number)), number)
    for beyond in (EXACT + 1, 1 << 40):
        said = refusal(bundle.pack, torch.tensor([[sign * beyond], [1]]))
        assert f"size {beyond} is beyond 2^24" in said
        assert "number them from 0" in said


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ((torch.ones(2), 3), "a int, '3': only tensors"),
        ((torch.ones(2), None), "a NoneType"),
        ((torch.ones(2), "word"), "a str, 'word'"),
        ((torch.ones(2), torch.ones(3)), "shape (3,) for 2 samples"),
        ((torch.ones(2), torch.tensor(1.0)), "shape () for 2 samples"),
    ],
    ids=str,
)
def test_what_has_no_row_a_sample_is_refused_with_the_place(value, part):
    said = refusal(Bundle.of, value, 2, "what goes into layer3")
    assert said.startswith("what goes into layer3 ")
    assert part in said
    assert said.endswith("or cut elsewhere")


FORMATS = ["float32", "bfloat16", "float16", "int8"]


def test_a_narrower_format_changes_integers_but_not_truth_values():
    rows = torch.ones(2, 1)
    kept = {
        name: [kind for kind in FORMATS if Bundle.of((rows, other), 2, "here").survives(kind)]
        for name, other in {"long": rows.long(), "bool": rows.bool(), "float": rows}.items()
    }
    assert kept == {"long": FORMATS[:1], "bool": FORMATS[:3], "float": FORMATS}


@pytest.mark.parametrize(
    ("value", "expected"),
    [((1, 2), ((1, 2), {})), ([1], ((1,), {})), ({"a": 1}, ((), {"a": 1})), (5, ((5,), {}))],
)
def test_a_network_is_called_by_position_or_by_name(value, expected):
    assert call_network(lambda *given, **named: (given, named), value) == expected


def of_length(length, others=4, rows=2):
    """Hidden states (L, 3), integers (L,), a mask (1, L, L), twice as many (2 L) and (4,)."""
    random = torch.Generator().manual_seed(length)
    shapes = ((length, 3), (length,), (1, length, length), (2 * length,), (others,))
    tensors = [torch.randn(rows, *shape, generator=random) for shape in shapes]
    tensors[1] = tensors[1].long()
    return tuple(tensors)


def test_one_length_may_vary_and_the_width_tells_it():
    bundle = Bundle.of(of_length(5), 2, "here").varying([of_length(9), of_length(7)])
    for length in range(1, 40):
        value = of_length(length, rows=3)
        found = bundle.unpack(bundle.pack(value))
        for x, y in zip(found, value, strict=True):
            assert torch.equal(x, y)
            assert x.dtype == y.dtype


def test_shapes_that_one_length_does_not_give_are_refused():
    fixed = Bundle.of(of_length(5), 2, "here")
    bundle = fixed.varying([of_length(9)])
    two = refusal(fixed.varying, [of_length(9), of_length(5, others=6)])
    assert two.startswith("here has shapes (5, 3), (5,), (1, 5, 5), (10,), (4,) and ")
    assert "more than one length varies" in two
    assert "more than one length varies" in refusal(fixed.varying, [of_length(9, others=3)])
    for each, value in ((fixed, of_length(6)), (bundle, of_length(6, others=5))):
        said = refusal(each.pack, value)
        assert said.startswith("here has shape (6, 3), ")
        assert "padding='max_length'" in said
    assert "in the first ones" in refusal(bundle.unpack, torch.ones(2, bundle.size + 1))
