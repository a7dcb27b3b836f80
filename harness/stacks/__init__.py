"""The stacks, one file each: how a module is put on ranks, what its layouts may ask for, and how layouts are drawn.

Only these files of the library import names that PyTorch keeps private. A package can bring a stack of its own
(docs/plugins.md).
"""

from __future__ import annotations
