"""Names that are nearest to one that is not known."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher


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
