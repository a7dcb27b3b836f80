"""The relevance of tests to a fault: the words that they share, of which rare words count more.

Perhaps only two tests in a suite of a thousand can detect a fault.  A fault's name and needs use the words of the
requirements, so tests that share these words run first.  Relevance decides only the order, never whether a test runs.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping

_WORD = re.compile(r"[a-z]+|\d+")


def words(text: str) -> set[str]:
    """Return the words of a text in the singular: ``test_all_reduce[2ranks]`` has test, all, reduce, 2, rank."""
    return {w[:-1] if len(w) > 3 and w.endswith("s") else w for w in _WORD.findall(text.lower())}


class Relevance:
    """The relevance of each of some texts to another text."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._words = {name: words(text) for name, text in texts.items()}
        counts = Counter(word for in_text in self._words.values() for word in in_text)
        self._weights = {word: math.log((1 + len(texts)) / (1 + count)) for word, count in counts.items()}

    def of(self, text: str) -> dict[str, float]:
        """Return the relevance of each text by its name, from 0 (no word in common) to 1 (every word)."""
        asked = words(text) & self._weights.keys()
        whole = self._sum(asked)
        return {name: self._sum(in_text & asked) / whole if whole else 0.0 for name, in_text in self._words.items()}

    def _sum(self, found: Iterable[str]) -> float:
        return sum(self._weights[word] for word in found)
