"""Names that are nearest to one that is not known."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher


def unknown(name: str, known: Iterable[str], kind: str) -> str:
    """That a name is none of those known, and which may be meant."""
    known = list(known)
    near = nearest(name, known)
    hint = f"did you mean {near!r}?" if near else f"known: {', '.join(known)}"
    return f"unknown {kind} {name!r}; {hint}"


def nearest(word: str, known: Iterable[str], least: float = 0.5) -> str | None:
    """What is most alike of what is known, in any case of letters; None if nothing is, `least`.

    Of two as alike it is the one of the same letters: who types fast swaps them.
    """
    word, best, highest = word[:100].lower(), None, (least, 0.0)
    for other in known:
        match = SequenceMatcher(None, other.lower(), word)
        # bounds of the ratio, which is dear
        if match.real_quick_ratio() >= highest[0] and match.quick_ratio() >= highest[0]:
            found = match.ratio(), match.quick_ratio()
            if found > highest:
                best, highest = other, found
    return best
