"""Draw layouts of FSDP1 over tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import msgspec

from harness.stacks.drawing import Drawing, wrappable
from harness.stacks.limit import Case
from harness.stacks.tp_extension.limits import HYBRID, hybrid

NEUTRAL = (("use_orig_params", False), ("strategy", "NO_SHARD"))
"""Options that don't forbid any plan."""


def tensor_sizes(world: int) -> Sequence[int]:
    """Return how many ranks may share a layer. Some numbers come twice, so that other ranks often share the batch."""
    divided = [t for t in (2, 3) if world % t == 0 and t < world]
    return sorted([1, *2 * divided, world])


def draw(d: Drawing) -> None:
    """Draw a plan, wrapped layers and options, and then move to the nearest layout that no limit forbids."""
    strategy = d.among(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", *HYBRID))
    # The first layer of a compiled model stays in the root, which otherwise would have nothing to compile.
    able = [n.name for n in d.case.named[d.case.compiled :] if wrappable(n) and "." not in n.name]
    chosen = d.some(able)
    wrapped = tuple(n.name for n in reversed(d.case.named) if n.name in chosen)
    d.become(d.with_layout(options=NEUTRAL))
    plan: list[tuple[str, str]] = []
    for n in d.case.named:
        styles = [style for style in ("columns", "rows") if d.fits(d.with_layout(plan=((n.name, style),)))]
        if styles and (style := d.among((*styles, ""))):
            plan.append((n.name, style))
    d.become(d.with_layout(wrapped=wrapped, plan=tuple(plan)))
    d.set(use_orig_params=True, strategy=strategy)
    if d.fits(flat := d.with_options(use_orig_params=False)) and d.either():
        d.become(flat)
    d.settle(_nearest(d.case))
    if hybrid(d.case):
        data = d.case.data
        d.set(replicas=1)
        d.option("replicas", [r for r in (1, 2) if data % r == 0])
    # FSDP1's CPUOffload is not drawn: it pins memory, which needs an accelerator.
    for option, dtypes in (
        ("param_dtype", ("bfloat16", "float16")),
        ("reduce_dtype", ("bfloat16", "float16", "float32")),
    ):
        fitting = [dtype for dtype in dtypes if d.fits(d.with_options(**{option: dtype}))]
        if fitting and d.among((False, False, True)):
            d.set(**{option: d.among(fitting)})


def _nearest(case: Case) -> Iterator[Case]:
    """Yield a case, then the cases that differ from it in one thing, in two, and so on."""
    flat = not case.options["use_orig_params"]
    changes = ("use_orig_params", "strategy", "wrapped", "plan")
    for count in range(len(changes) + 1):
        for changed in combinations(changes, count):
            options = {
                "use_orig_params": flat if "use_orig_params" in changed else not flat,
                "strategy": "NO_SHARD" if "strategy" in changed else case.options["strategy"],
            }
            layout = msgspec.structs.replace(
                case.layout,
                wrapped=() if "wrapped" in changed else case.layout.wrapped,
                plan=() if "plan" in changed else case.layout.plan,
                options=tuple(options.items()),
            )
            yield replace(case, layout=layout)
