"""The tutorial does what it says, from its first command to its last.

One process after the other would take a minute to start: what needs no MPI runs in this one.
"""

import re
import runpy
import shlex
from pathlib import Path

import pytest
from answers import output

TEXT = (Path(__file__).parents[1] / "docs" / "tutorial.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


@pytest.mark.timeout(240)
def test_every_command_and_every_block_of_code_works(tmp_path, monkeypatch, hybrid, world, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # where `own` is found, as from a shell
    told = {}
    for language, text in BLOCKS:
        if language == "python":
            (tmp_path / "own.py").write_text(text)
            runpy.run_path("own.py", run_name="__main__")
            assert float(capsys.readouterr().out.split()[-1]) > 0.7
            continue
        for line in text.splitlines():
            told[line] = _run(line, hybrid, world)
    assert len(told) == 15
    assert (tmp_path / "runs" / "first" / "report" / "index.html").exists()
    script = told[next(line for line in told if line.startswith("hybrid submit"))]
    assert "#SBATCH --ntasks-per-node=2" in script
    assert "--set model.name=own:network --set data.name=own:data" in script
    fdg = [tmp_path / "runs" / name / "summary.json" for name in ("fdg", "fdg-mpi")]
    accuracies = [re.search(r'"test_accuracy": ([\d.]+)', file.read_text())[1] for file in fdg]
    assert accuracies[0] == accuracies[1]


def _run(line, hybrid, world):
    words = shlex.split(line)
    if words[0] == "mpirun":
        assert words[:4] == ["mpirun", "-n", "2", "hybrid"]
        # its processes start elsewhere
        here = [Path.cwd() / word if word.startswith("runs/") else word for word in words[4:]]
        return output(world.hybrid(2, *here))
    assert words[0] == "hybrid"
    command, _, file = line.partition(" > ")
    said = output(hybrid(*shlex.split(command)[1:]))
    if file:
        Path(file).write_text(said)
    return said
