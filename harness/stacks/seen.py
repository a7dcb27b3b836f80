"""The keys under which the tensors and counts of a training run are kept and compared.

A reproducer contains the definitions of this file that it uses, so nothing here may import Concord.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal[
    "output", "losses", "evaluation", "gradient", "norm", "calls", "scales", "parameter", "buffer", "state", "averaged"
]
OF_PART = frozenset(["output", "losses", "evaluation", "scales", "averaged"])
"""Kinds of which a rank has its own rows, and the single device has all rows."""


class Seen(NamedTuple):
    """The key of a tensor that one party saw: its kind, what it belongs to, and when it was seen."""

    kind: Kind
    """The kind of a tensor. Of a micro-batch: ``output``; ``losses``, one for each row; ``evaluation``, the output in
    evaluation mode before it; ``gradient`` of a parameter after its backward. Of a step: ``norm`` of all gradients
    before they are clipped; and, after it, ``calls`` of a module's hooks, ``scales`` of the parts, ``parameter``,
    ``buffer``, ``state`` of the optimizer, and ``averaged``, the output with averaged parameters."""
    name: str = ""
    """The name of the parameter, buffer or module in the plain model."""
    micro_batch: int | None = None
    step: int | None = None
    state: str = ""
    """The name of the optimizer's state."""
    reloaded: bool = False
    """Whether state dicts were saved and loaded since the step."""

    @property
    def of_part(self) -> bool:
        """Whether a rank has its own rows of the tensor, and the single device has all rows."""
        return self.kind in OF_PART

    def __str__(self) -> str:
        when = f"micro-batch {self.micro_batch}" if self.step is None else f"step {self.step}"
        if self.kind == "evaluation":
            return f"evaluation before {when}: output"
        if self.reloaded:
            when += ", loaded again"
        what = {
            "losses": "loss of each row",
            "gradient": f"gradient of {self.name}",
            "norm": "norm of gradients",
            "calls": f"number of hook calls in {self.name}",
            "averaged": "output with averaged parameters",
            "scales": f"scale of each part in {self.name}",
            "state": f"{self.state} of {self.name}",
        }
        return f"{when}: {what.get(self.kind) or f'{self.kind} {self.name}'.rstrip()}"


class Pass(NamedTuple):
    """A forward or a backward of one micro-batch."""

    micro_batch: int
    phase: Literal["forward", "synced", "unsynced"]
    """``synced`` and ``unsynced`` are backwards with and without averaging of gradients over ranks."""

    def __str__(self) -> str:
        return f"micro-batch {self.micro_batch}, {self.phase}{'' if self.phase == 'forward' else ' backward'}"


Launched = dict[tuple[int, ...], int]
"""The number of collectives launched on each group. The key is the members' global ranks, in ascending order."""
Calls = dict[str, list[tuple[int, bool]]]
"""For each module, the buckets that its communication hook was called with, and whether each was marked as the last."""

__all__ = ["Calls", "Kind", "Launched", "Pass", "Seen"]
