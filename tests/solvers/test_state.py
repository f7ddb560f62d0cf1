"""Digests of tensors: of their bytes in the order of indices, or of what they wrap."""

import hashlib

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from hybrid.solvers.state import digests, sha256

X = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex64])
def test_a_digest_is_of_the_bytes_in_the_order_of_indices(dtype):
    x = X.to(dtype)
    expected = hashlib.sha256(bytes(x.contiguous().untyped_storage())).hexdigest()
    assert sha256(x) == sha256(x.t().contiguous().t()) == expected
    assert sha256(x.t()) != expected
    assert bytes(digests([x])[0].tolist()).hex() == expected


def test_there_are_digests_of_nothing_and_of_a_single_number():
    assert digests([]).shape == (0, 32)
    assert sha256(torch.tensor(1.0)) == sha256(torch.ones(1))


def test_a_tensor_that_wraps_others_has_a_digest_of_all_of_them():
    whole = sha256(TwoTensor(X, X))
    assert whole == sha256(TwoTensor(X.clone(), X.clone()))
    assert len({whole, sha256(TwoTensor(X, -X)), sha256(TwoTensor(-X, X))}) == 3
