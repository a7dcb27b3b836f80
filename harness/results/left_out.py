"""The reasons why a run does not have every test of a stack, as data.  ``str(reason)`` is the sentence for reports."""

from __future__ import annotations

import msgspec

from harness.safe_io.untrusted import Words


class OptionGiven(msgspec.Struct, frozen=True, tag="option", tag_field="why"):
    """An option that leaves out tests was given."""

    option: Words
    """As it is on the command line: ``-k``."""

    def __str__(self) -> str:
        return f"{self.option} was given"


class Deselected(msgspec.Struct, frozen=True, tag="deselected", tag_field="why"):
    """Something other than an option, such as a plug-in, deselected tests."""

    def __str__(self) -> str:
        return "tests were deselected"


class NotCollected(msgspec.Struct, frozen=True, tag="not-collected", tag_field="why"):
    """A file could not be collected, which makes the run fail."""

    def __str__(self) -> str:
        return "a file could not be collected"


class MaybeLeftOut(msgspec.Struct, frozen=True, tag="unknown", tag_field="why"):
    """A process died before it said what it had left out, or the file is older than version 5."""

    def __str__(self) -> str:
        return "tests were deselected, or a file could not be collected"


class OnlySome(msgspec.Struct, frozen=True, tag="only-some", tag_field="why"):
    """Only some files or tests of these stacks were requested."""

    stacks: tuple[Words, ...]

    def __str__(self) -> str:
        return f"only some files or tests were asked for of {', '.join(self.stacks)}"


LeftOut = OptionGiven | Deselected | NotCollected | MaybeLeftOut | OnlySome
