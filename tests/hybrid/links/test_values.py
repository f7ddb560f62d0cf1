"""What ranks tell each other by gloo comes back as it was, and is never code."""

import pickle
from pathlib import Path

import pytest
import torch

from hybrid.links.values import decode, encode
from hybrid.rounds.phase_report import PhaseReport
from hybrid.solvers.local_work.budget import Cost

VALUES = {
    "numbers": [None, True, 3, -0.0, 1e-300, float("inf"), 2**70],
    "texts": ["", "ä\n\0", "\udcff"],
    "containers": {1: (2, [3]), (0, "a"): {4}, "none": frozenset(), "raw": b"\x00\xff"},
    "a dict like one of the format": {"tuple": [1], "tensor": [0, 0, 1, 1]},
    "classes": [PhaseReport("exact", 8, 0.5, None, 1.0), Cost(1.0, 2.0), Path("runs/first")],
    "dtypes": [torch.float16, torch.bool],
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_value_comes_back_as_it_was(value):
    assert repr(decode(encode(value))) == repr(value)


def test_tensors_come_back_with_their_bits_and_strides():
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    sent = [image, image[:, :1, ::2], torch.tensor(float("nan")), torch.tensor([True]), image[:0]]
    for one, other in zip(sent, decode(encode({"x": tuple(sent)}))["x"], strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
        assert one.dtype == other.dtype
    assert decode(encode(image)).stride() == image.stride()


class Payload:
    """Runs a command in whoever unpickles it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


FORGED = {
    "a class that is no dataclass": '{"subprocess:Popen": [["true"]]}',
    "a function": '{"os:system": ["true"]}',
    "a module that is not imported": '{"antigravity:fly": []}',
    "a tensor beyond its bytes": '{"tensor": [0, 0, 100, 1]}',
    "strides beyond its bytes": '{"tensor": [0, 0, 1, 2, 1, 100]}',
    "a negative size": '{"tensor": [0, 0, -1, 1]}',
    "a place before its bytes": '{"tensor": [-8, 0, 2, 1]}',
    "deep": "[" * 100_000,
    "too few fields": '{"hybrid.solvers.engine.schedule:Kind": [1]}',
}


@pytest.mark.parametrize("text", FORGED.values(), ids=FORGED)
def test_bytes_that_are_no_value_are_refused(text):
    message = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    head = torch.tensor([len(message)]).view(torch.uint8)
    with pytest.raises(ValueError, match="bytes that are no value"):
        decode(torch.cat([head, message, torch.zeros(4, dtype=torch.uint8)]))


def test_a_pickle_is_refused(tmp_path):
    mark = tmp_path / "ran"
    message = torch.frombuffer(bytearray(pickle.dumps(Payload(mark))), dtype=torch.uint8)
    with pytest.raises(ValueError, match="bytes that are no value"):
        decode(message)
    assert not mark.exists()


def test_what_cannot_be_sent_is_named():
    with pytest.raises(ValueError, match="Payload cannot be sent to other ranks: send numbers"):
        encode({"x": [Payload("")]})
