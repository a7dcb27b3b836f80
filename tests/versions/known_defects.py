"""A checkout with a few known defects, of every kind and of some areas, one of which is hostile."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

HOSTILE = "</script></style></title><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
ISSUE = "https://github.com/pytorch/pytorch/issues/130515"
OLD, NEW = "2.13.0", "2.15.0"


def defect(id: str, kind: str = "", *, tests: str = "collectives/test_a.py::test_one[*]", **keys: str) -> str:
    """A defect in TOML; ``keys`` are further keys, or other values of those that it has."""
    said = {"reason": f"the reason of {id}", "link": "unreported", **keys}
    lines = [f"{key} = {json.dumps(value)}" for key, value in said.items()]
    if kind:
        lines.append(f'kind = "{kind}"')
    return "\n".join(["[[defect]]", f'id = "{id}"', f'tests = ["suites/{tests}"]', *lines, "expires = 2027-06-30", ""])


DEFECTS = [
    defect("dtensor_item", "wrong", tests="tp_extension/test_b.py::test_b[*-numbers]", link=ISSUE),
    defect("dtensor_fixed", "wrong", tests="tp_extension/test_b.py::test_b[*-numbers]"),
    defect("strided", "error"),
    defect("stuck", "hang"),
    defect("fallen", "crash"),
    defect("lenient", "accepts"),
    defect("compiled_often", "cost", tests="dynamo/test_c.py::test_*"),
    defect("of_no_kind"),
    defect("without_script", "wrong", reason=HOSTILE),
]
CAUSES = f"""
[[cause]]
at = "torch/distributed/tensor/_dispatch.py::OpDispatcher.dispatch"
why = "It forgets `item`."
sure = "ran"
defects = ["pytorch/dtensor_item", "pytorch/dtensor_fixed"]

[[cause]]
at = "torch/distributed/tensor/_dispatch.py"
why = {json.dumps(HOSTILE)}
sure = "guess"
defects = ["pytorch/strided"]

[[cause]]
at = "gloo/gloo/barrier.cc::barrier"
why = "It waits for a | forever."
sure = "read"
defects = ["pytorch/stuck"]
"""
OUTCOMES = {
    "dtensor_item": ("wrong result", "wrong result"),
    "dtensor_fixed": ("wrong result", "not there"),
    "strided": ("raises ValueError", "raises TypeError"),
    "stuck": ("hangs", "hangs"),
    "fallen": ("dies by signal 11", "not there"),
    "lenient": ("wrong result", "wrong result"),
    "compiled_often": ("wrong result", "wrong result"),
}
ROWS = """
# Findings

| finding | scripts | tests | reported |
|---|---|---|---|
| item() of a `DTensor` is silently wrong | [dtensor_item](findings/dtensor_item.py) | `test_b` | an issue |
| two hang | [stuck](findings/stuck.py), [fallen](findings/fallen.py), [also](findings/also.py) | `a` | unreported |
| a row without a script | none | none | none |
| cut off
"""
REQUIREMENTS = r"""
| id | requirement | source | tests |
|---|---|---|---|
| `COLL-A-01` | A collective \_works\_. | docs | [`test_one`](../../suites/collectives/test_a.py) |
| `TP-B-01` | Numbers add up. | docs | [`test_b[numbers, all]`](../../suites/tp_extension/test_b.py) *(property)* |
| `TP-B-02` *(optional)* | Letters sort. | docs | [`test_b[letters]`](../../suites/tp_extension/test_b.py) |
| `DYN-C-01` | Compiled. | docs | [`test_c`](../../suites/dynamo/test_c.py), [`test_d`](../../suites/dynamo/test_c.py) |
"""


def script(name: str) -> str:
    """The text of a script."""
    run = f"# Run:  torchrun --standalone --nproc-per-node=2 {name}.py"
    return f"# what {name} does\n# Seen with torch {OLD}\n{run}\nprint('{HOSTILE if name == 'stuck' else name}')\n"


def checkout(
    folder: Path, defects: list[str] = DEFECTS, outcomes: Mapping[str, tuple[str, str]] = OUTCOMES, rows: str = ROWS
) -> Path:
    """Write the checkout; returns its folder."""
    files = {
        "fixtures/defects/pytorch.toml": "\n".join(['owner = "pytorch"', *defects]),
        "fixtures/defects/gloo.toml": 'owner = "gloo"\nbackends = ["gloo"]\n',
        "docs/findings.md": rows,
        "docs/requirements/collectives.md": REQUIREMENTS,
        **({"docs/findings/causes.toml": CAUSES} if defects else {}),
        "docs/findings/versions.json": json.dumps(
            {
                version: {"torch": version, "python": "3.11", "outcomes": {k: v[i] for k, v in outcomes.items()}}
                for i, version in enumerate((OLD, NEW))
            }
        ),
        **{f"docs/findings/{name}.py": script(name) for name in (*outcomes, "also")},
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder
