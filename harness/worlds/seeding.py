"""The seeds that every rank starts with, and that a warm rank starts again with."""

from __future__ import annotations

import random
import sys


def seed(*, accelerators: bool = True) -> None:
    """Seed the random generators of Python, torch and, if it is imported, numpy.

    ``accelerators``: those of accelerators, too, whose turn comes at their first use. For each kind of them, torch
    keeps the formatted stack of whoever seeds it, which takes 5 ms: the server does it for the ranks on the host.
    """
    import torch

    random.seed(0)
    if accelerators:
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
