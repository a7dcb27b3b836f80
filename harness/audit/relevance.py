"""Which tests are about what a fault is about: words that both have in common, the rarer the better.

A fault may be in a suite of a thousand tests of which two can see it.  Its name and what it needs are in the same words
as the requirements, so those come first that share them.  This decides the order alone, never whether a test is run.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping

_WORD = re.compile(r"[a-z]+|\d+")


def words(text: str) -> set[str]:
    """The words of a text, in their singular: ``test_all_reduce[2ranks]`` has test, all, reduce, 2, rank."""
    return {w[:-1] if len(w) > 3 and w.endswith("s") else w for w in _WORD.findall(text.lower())}


class Relevance:
    """How much each of some texts is about another."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._words = {name: words(text) for name, text in texts.items()}
        counts = Counter(word for found in self._words.values() for word in found)
        self._weights = {word: math.log((1 + len(texts)) / (1 + count)) for word, count in counts.items()}

    def of(self, text: str) -> dict[str, float]:
        """From 0, nothing in common, to 1, every word, for each of the texts by its name."""
        asked = words(text) & self._weights.keys()
        whole = self._sum(asked)
        return {name: self._sum(found & asked) / whole if whole else 0.0 for name, found in self._words.items()}

    def _sum(self, found: Iterable[str]) -> float:
        return sum(self._weights[word] for word in found)
