"""Steps, parts and samples of a run as TrainingArguments describe it."""

import pytest
import torch
from transformers_program import arguments, library, rows
from zoo_packages import installed

from hybrid.data import as_data

pytestmark = pytest.mark.skipif(
    not (installed("transformers") and installed("accelerate")), reason="needs transformers"
)


def course(tmp_path, **changes):
    library()
    from hybrid_transformers.course import Course

    data = as_data(rows(), labels_are_inputs=True)
    return Course(arguments(tmp_path, **changes), data, 1)


@pytest.mark.parametrize(
    ("changes", "steps", "part"),
    [
        ({}, 12, 6),
        ({"num_train_epochs": 0.5, "eval_strategy": "no"}, 3, 3),
        ({"num_train_epochs": 1.5, "eval_strategy": "no"}, 9, 9),
        ({"max_steps": 8, "eval_strategy": "steps", "eval_steps": 4}, 8, 4),
        ({"eval_strategy": "steps", "eval_steps": 100}, 12, 12),
        ({"eval_strategy": "steps", "eval_steps": 0.25}, 12, 3),
    ],
)
def test_a_run_has_the_steps_of_trainer_in_equal_parts(changes, steps, part, tmp_path):
    found = course(tmp_path, **changes)
    assert (found.steps, found.part, found.state.max_steps) == (steps, part, steps)


@pytest.mark.parametrize("part", [2, 4, 6, 12])
def test_parts_have_the_samples_of_epochs_one_after_the_other(part, tmp_path):
    """Of 6 steps of 8 samples; a part of 4 or 12 steps lies in two epochs."""
    found = course(tmp_path, eval_strategy="steps", eval_steps=part)
    parts = torch.cat([found.of_epoch(42, n) for n in range(12 // part)])
    whole = course(tmp_path)
    assert torch.equal(parts, torch.cat([whole.of_epoch(42, n) for n in range(2)]))
    assert sorted(parts[:48].tolist()) == [*range(48)]


def test_checkpoints_come_at_the_ends_of_parts_or_after_steps(tmp_path):
    kept = course(tmp_path, save_strategy="epoch", save_total_limit=3).kept()
    assert kept["out"] == str(tmp_path)
    assert (kept["checkpoint"]["every"], kept["checkpoint"]["steps"]) == (1, 0)
    assert kept["checkpoint"]["keep_last"] == 3
    kept = course(tmp_path, save_strategy="steps", save_steps=4).kept()
    assert kept["checkpoint"]["steps"] == 4
    assert course(tmp_path, save_strategy="no").kept() == {}
