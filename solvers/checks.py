"""Checks of settings by themselves: ValueError with the value and the limit."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher
from math import inf
from typing import Literal, get_args, get_origin, get_type_hints

LARGEST, SMALLEST = 1e15, 1e-30
"""Of any setting, but for 0: beyond, float32 overflows."""


def check_choices(settings: object) -> None:
    """ValueError for a Literal field with another value."""
    for name, hint in get_type_hints(type(settings)).items():
        if get_origin(hint) is Literal and getattr(settings, name) not in get_args(hint):
            value, choices = getattr(settings, name), ", ".join(map(str, get_args(hint)))
            raise ValueError(f"{name} is {value!r}; choose one of {choices}")


def check_numbers(
    settings: object,
    positive: tuple[str, ...] = (),
    not_negative: tuple[str, ...] = (),
    at_least_one: tuple[str, ...] = (),
) -> None:
    """ValueError for a field out of its range."""
    for name in (*positive, *not_negative, *at_least_one):
        value = getattr(settings, name)
        if LARGEST < value < inf:
            raise ValueError(f"{name} is {value}; it must be at most {LARGEST:g}")
        if 0 < value < SMALLEST:
            raise ValueError(f"{name} is {value}; it must be at least {SMALLEST:g}")
        if name in positive and not value > 0:
            raise ValueError(f"{name} is {value}; it must be positive")
        if name in not_negative and not value >= 0:
            raise ValueError(f"{name} is {value}; it must be 0 or positive")
        if name in at_least_one and not value >= 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")


def check_ratio(settings: object, *names: str) -> None:
    """ValueError unless each is over 1, or 0."""
    for name in names:
        if getattr(settings, name) != 0 and not getattr(settings, name) > 1:
            raise ValueError(f"{name} is {getattr(settings, name)}; it must be over 1, or 0 (off)")


def check_momentum(momentum: float | None) -> None:
    """ValueError unless it is unset or lies in [0, 1)."""
    if momentum is not None and not 0 <= momentum < 1:
        raise ValueError(f"momentum is {momentum}; it must lie in [0, 1)")


def unknown(name: str, known: Iterable[str], kind: str) -> str:
    """An error message for a name that is not known, with the name that may be meant."""
    known = list(known)
    near = nearest(name, known)
    hint = f"did you mean {near!r}?" if near else f"known: {', '.join(known)}"
    return f"unknown {kind} {name!r}; {hint}"


def nearest(word: str, known: Iterable[str], least: float = 0.5) -> str | None:
    """The known word that is most similar, in any case of letters; None below similarity `least`.

    Of two equally similar words it is the one with the same letters: who types fast swaps letters.
    """
    word, best, highest = word[:100].lower(), None, (least, 0.0)
    for other in known:
        match = SequenceMatcher(None, other.lower(), word)
        # cheap upper bounds of the ratio
        if match.real_quick_ratio() >= highest[0] and match.quick_ratio() >= highest[0]:
            found = match.ratio(), match.quick_ratio()
            if found > highest:
                best, highest = other, found
    return best
