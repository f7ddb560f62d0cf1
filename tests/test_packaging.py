"""The wheel has all that the command needs, away from the sources; job scripts are made by it."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from hybrid.folder.runfolder import DISTRIBUTION
from hybrid.settings.resolve import tomllib

ROOT = Path(__file__).parents[1]


def test_what_is_advised_can_be_installed_from_a_clone():
    """No index has the distribution, so that its name is no advice, and its extras exist."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    for path in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *(file for room in ("hybrid", "solvers", "wings") for file in ROOT.glob(f"{room}/**/*.py")),
    ]:
        text = path.read_text()
        assert not re.search(rf"{DISTRIBUTION}\[|install '?{DISTRIBUTION}", text), path
        for extras in re.findall(r"'\.\[([\w,]+)\]'", text):
            assert {*extras.split(",")} <= {*project["optional-dependencies"]}, path


@pytest.mark.parametrize("project", [ROOT, *ROOT.glob("wings/*")], ids=lambda path: path.name)
def test_every_dependency_declares_its_lowest_version(project):
    """`make test-versions` installs these."""
    table = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    needs = sum(table.get("optional-dependencies", {}).values(), table["dependencies"])
    assert not [x for x in needs if ">=" not in x and not x.startswith(DISTRIBUTION)]


@pytest.fixture
def wheel(tmp_path):
    """Made from the source distribution, which is made from a copy of the sources."""
    sources, tools, made = (tmp_path / name for name in ("sources", "tools", "made"))
    sources.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    for name in ("hybrid", "solvers", "jobs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, sources / name, symlinks=True, ignore=ignored)
    pip = [sys.executable, "-m", "pip"]
    subprocess.run(
        [*pip, "install", "-q", "--target", tools, "setuptools>=77"], check=True, timeout=300
    )
    build = f"import setuptools.build_meta as b; b.build_sdist({str(made)!r})"
    using = os.environ | {"PYTHONPATH": str(tools)}
    subprocess.run([sys.executable, "-c", build], check=True, timeout=120, cwd=sources, env=using)
    (sdist,) = made.glob("*.tar.gz")
    words = [*pip, "wheel", "--no-deps", "-q", "-w", made, sdist]
    subprocess.run(words, check=True, timeout=300, cwd=tmp_path)
    (found,) = made.glob("*.whl")
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_works_away_from_the_sources(wheel, tmp_path):
    """In an environment that has the other packages from this one, by a path file."""
    names = zipfile.ZipFile(wheel).namelist()
    for needed in (
        "hybrid/jobs/train.sbatch",
        "hybrid/report/page.html",
        "hybrid/data/NOTICE",
        "hybrid/data/digits.safetensors",
        "hybrid/solvers/kernels/source.cu",
        "hybrid/solvers/splitting/penalty.py",
    ):
        assert needed in names
    assert {name.partition("/")[0] for name in names if "dist-info" not in name} == {"hybrid"}
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True, timeout=120)
    python, command = (tmp_path / "env" / "bin" / name for name in ("python", "hybrid"))
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    install = [python, "-m", "pip", "install", "-q", "--no-deps", wheel]
    subprocess.run(install, check=True, timeout=120, cwd=tmp_path, env=alone)
    site = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))

    def run(*words):
        done = subprocess.run(
            words,
            cwd=tmp_path,
            env=alone,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert str(site) in run(python, "-c", "import hybrid; print(hybrid.__file__)")
    apart = run(python, "-c", "from importlib.util import find_spec as f; print(f('solvers'))")
    assert apart == "None\n"
    run(command, "train", "--epochs", "1", "--out", "run", "--set", "data.limit=256")
    run(command, "report", "run")
    assert (tmp_path / "run" / "report" / "index.html").exists()
    run(command, "show", "resnet8", "--picture", "blocks.svg")
    assert (tmp_path / "blocks.svg").exists()
    assert "augmented-lagrangian" in run(command, "list", "solvers")
    submit = ("submit", "run/config.toml", "--nodes", "1", "--ranks-per-node", "2", "--dry-run")
    assert "#SBATCH" in run(command, *submit)
