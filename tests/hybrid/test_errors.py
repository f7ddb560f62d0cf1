"""Any error is told on one line."""

from __future__ import annotations

import pytest

from hybrid.errors import format_error, one_line, reason


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
