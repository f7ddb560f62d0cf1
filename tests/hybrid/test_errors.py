"""Any error is told on one line."""

from __future__ import annotations

import pytest

from hybrid import export
from hybrid.errors import format_error, one_line, reason
from hybrid.folder.runfolder import RunFolder


class SpeechlessError(Exception):
    def __str__(self) -> str:
        raise KeyError("no words")


class OddError(Exception):
    def __str__(self) -> str:
        return 7  # type: ignore[return-value]


@pytest.mark.parametrize(("kind", "by"), [(SpeechlessError, "KeyError"), (OddError, "TypeError")])
def test_an_error_whose_text_fails_is_told_all_the_same(kind, by, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    said = f"{kind.__name__}, whose text fails with {by}"
    assert one_line(kind()) == said
    assert format_error(kind()) == f"{kind.__name__}: {said}"
    assert reason(kind()).startswith(f"{kind.__name__}: {said} (details in {tmp_path}")


def test_a_remedy_names_flags_in_the_command_and_arguments_in_a_script(hybrid, finished, tmp_path):
    folder = finished
    assert "already holds a run: give --resume to go on" in hybrid("train", "--out", folder)[2]
    with pytest.raises(ValueError, match="holds a run: give resume=True to go on with it; or"):
        RunFolder(folder).check(resume=False)
    assert "leave out --best, or" in hybrid("export", folder, tmp_path / "x", "--best")[2]
    with pytest.raises(ValueError, match="leave out best=True, or"):
        export(folder, tmp_path / "x", best=True)
