"""What one party sees in a training run, as data: the keys under which tensors and counts are kept and compared.

A reproducer carries along the definitions of this file that it uses, so nothing here may import Concord.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["output", "losses", "evaluation", "gradient", "norm", "calls", "scales", "parameter", "buffer", "state"]
OF_PART = frozenset(["output", "losses", "evaluation", "scales"])
"""Kinds of which a rank sees its own rows, and the single device all of them."""


class Seen(NamedTuple):
    """What a tensor is that was seen: of which kind, of what, and when."""

    kind: Kind
    """``output`` and ``losses`` (of each row) of a micro-batch, ``evaluation``: the output in evaluation mode before
    it, ``gradient`` of a parameter after its backward; the ``norm`` of all gradients before they are clipped; after a
    step, ``calls`` of a module's hooks, ``scales`` of the parts, and ``parameter``, ``buffer``, ``state`` of the
    optimizer."""
    name: str = ""
    """Of the parameter, buffer or module, in the plain model."""
    micro_batch: int | None = None
    step: int | None = None
    state: str = ""
    """Which of the optimizer's states."""
    reloaded: bool = False
    """Whether state dicts were saved and loaded since the step."""

    @property
    def of_part(self) -> bool:
        """Whether a rank sees its own rows, and the single device all of them."""
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
            "scales": f"scale of each part in {self.name}",
            "state": f"{self.state} of {self.name}",
        }
        return f"{when}: {what.get(self.kind) or f'{self.kind} {self.name}'.rstrip()}"


class Pass(NamedTuple):
    """A forward or a backward of one micro-batch."""

    micro_batch: int
    phase: Literal["forward", "synced", "unsynced"]
    """``synced`` and ``unsynced`` are backwards: whether gradients are averaged over ranks."""

    def __str__(self) -> str:
        return f"micro-batch {self.micro_batch}, {self.phase}{'' if self.phase == 'forward' else ' backward'}"


Launched = dict[tuple[int, ...], int]
"""How many collectives were launched on each group, by the global ranks of its members, ascending."""
Calls = dict[str, list[tuple[int, bool]]]
"""Which buckets the communication hook of each module was called with, and whether each was said to be the last."""

__all__ = ["Calls", "Kind", "Launched", "Pass", "Seen"]
