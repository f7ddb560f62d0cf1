"""The peak of a process is that of weights, gradients, moments and versions, and little more."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_training_takes_little_more_than_its_weights_gradients_moments_and_versions(tmp_path):
    program = Path(__file__).with_name("memory_program.py")
    # large buffers go back to the system, so that the C library's leftovers do not count
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    answer = subprocess.run(
        [sys.executable, program, tmp_path],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=environment,
    )
    bytes_of = json.loads(answer.stdout.splitlines()[-1])
    # and the largest gradient of one more micro-batch
    bound = bytes_of["libraries"] + 1.15 * bytes_of["told"] + bytes_of["largest"]
    assert bytes_of["peak"] <= bound, bytes_of
