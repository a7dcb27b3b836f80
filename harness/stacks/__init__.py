"""One file a stack: how a module is put on ranks with it, what may be asked of it, and how that is drawn.

Names that PyTorch keeps private are imported in these files and nowhere else in the library.  A package brings a stack
of its own (docs/plugins.md).
"""

from __future__ import annotations
