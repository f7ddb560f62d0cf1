"""What a user's script names: `dir`, and types that mypy --strict accepts."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.hybrid import user_script

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("package", ["hybrid", "hybrid.solvers"])
def test_dir_shows_the_public_names_and_no_others(package):
    module = import_module(package)
    assert set(module.__all__) <= set(dir(module))
    assert not [n for n in dir(module) if n.startswith("_") and n != "__version__"]
    assert all(getattr(module, name) is not None for name in dir(module))


def test_mypy_accepts_a_users_script_of_every_documented_call_and_rejects_wrong_ones():
    """Seconds, with what `make test` has cached; a minute without."""
    script = ROOT / "tests/hybrid/user_script.py"
    command = [sys.executable, "-m", "mypy", "--strict", str(script)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert found.returncode == 0, found.stdout + found.stderr


def test_what_the_script_calls_works(tmp_path):
    made = user_script.settings_in_every_form(tmp_path) + user_script.optimizers_of_a_loop()
    assert all(trainer.options.solver.name for trainer in made)
    user_script.trained(tmp_path / "run")
    user_script.looked_at(tmp_path)
