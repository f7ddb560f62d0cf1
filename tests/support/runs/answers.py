"""Answers of one line: of calls, and of the command as (exit status, stdout, stderr)."""

from collections.abc import Callable

import pytest

Answer = tuple[int, str, str]


def refusal(call: Callable[..., object], *arguments: object, **named: object) -> str:
    """The one line of its ValueError."""
    with pytest.raises(ValueError, match=r"^.+$") as caught:
        call(*arguments, **named)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def assert_one_line(answer: Answer, *parts: str, status: int = 1) -> None:
    code, _, err = answer
    assert code == status
    assert err.startswith("hybrid: error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert ("details in" in err) == ("details in " in parts)
    assert [part for part in parts if part not in err] == []


def output(answer: Answer) -> str:
    """What a command that went well said."""
    status, out, err = answer
    assert status == 0, err
    return out
