"""Turn a failure of ranks into what pytest reports: the text of the failure, sections, properties and evidence."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

import pytest

from harness.safe_io.shown import printable

if TYPE_CHECKING:
    from harness.worlds.postmortem import RanksFailed


def ranks_failed(error: BaseException | None) -> RanksFailed | None:
    """Return the failure of ranks in an exception, or in the group that Hypothesis makes of several."""
    import sys

    postmortem: Any = sys.modules.get("harness.worlds.postmortem")
    if postmortem is None or error is None:
        return None
    if isinstance(error, postmortem.RanksFailed):
        return cast("RanksFailed", error)
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            failure = ranks_failed(inner)
            if failure is not None:
                return failure
    return None


def shown(error: RanksFailed, excinfo: pytest.ExceptionInfo[BaseException], config: pytest.Config) -> Any:
    """Format a failure of ranks as pytest does: where the test ran something on ranks, then who failed first."""
    from _pytest._code.code import ExceptionChainRepr, ReprEntry, ReprFileLocation, ReprTraceback

    lines = []
    for entry in excinfo.traceback:
        path = str(entry.path)
        if path.startswith(_HARNESS) or entry.ishidden(excinfo) or "site-packages" in path:
            continue
        lines.append(f"{_relative(path, config)}:{entry.lineno + 1}: in {entry.name}")
        lines.append(f"    {_statement(entry)}")
    first, *rest = error.summary().split("\n")
    lines += [f"E   {first}", *(f"E   {line}" for line in rest)]
    for text in getattr(error, "__notes__", ()):  # from Hypothesis: the smallest example
        lines += [f"E   {line}" for line in text.split("\n")]
    file, line = error.place or ("", 0)
    crash = ReprFileLocation(printable(_relative(file, config)), line, error.headline)
    lines = [printable(text) for text in lines]
    traceback = ReprTraceback([ReprEntry(lines, None, None, None, "short")], None, "short")
    return ExceptionChainRepr([(traceback, crash, None)])


def _statement(entry: Any) -> str:
    """Return the source of a line of a traceback; empty if the file is another one by now."""
    try:
        return str(entry.statement).strip()
    except (AssertionError, IndexError, SyntaxError):
        return ""


def _relative(path: str, config: pytest.Config) -> str:
    root = f"{config.invocation_params.dir}{os.sep}"
    return path.removeprefix(root)


_HARNESS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def attach(item: pytest.Item, report: Any, error: RanksFailed) -> None:
    """Add the evidence of ranks to a report and its test: sections, output and properties."""
    from harness.worlds.terminal import prefixed

    add = getattr(report.longrepr, "addsection", None)
    if add is not None:
        for title, text in error.sections():
            add(title, text)
    for end in error.ends:
        if end.output.strip():
            report.sections.append((f"Captured stdout {report.when} (rank {end.index})", end.output))
            # For plug-ins that read the reports of later phases, such as JUnit XML.
            lines = end.output.rstrip("\n").split("\n")
            item.add_report_section(report.when, "stdout", "".join(f"{prefixed(end.index, x)}\n" for x in lines))
    for key, value in (
        ("verdict", error.verdict),
        ("first_rank", _first_rank(error)),
        ("headline", error.headline),
    ):
        note(item, key, value)
        report.user_properties.append((f"concord.{key}", value))
    report.concord_ranks = evidence_of(error)


def _first_rank(error: RanksFailed) -> str:
    """Return the rank to look at first; empty if there is none, or if clocks of hosts can't tell which failed first."""
    return str(error.culprits[0]) if error.culprits and not error.undecided else ""


def timed_out(error: BaseException) -> bool:
    """Return whether pytest-timeout ended a test by its signal."""
    return type(error).__name__ == "Failed" and str(error).startswith("Timeout (")


def evidence_of(error: RanksFailed) -> list[dict[str, Any]]:
    """Return what each rank reported, as plain data for results and for pytest-xdist's messages."""
    return [
        {
            "rank": end.index,
            "kind": end.kind,
            "what": end.what,
            "first": end is error.first and not error.undecided,
            "text": str((end.report or {}).get("text", "")),
            "stack": end.stack,
            "collectives": list(end.collectives),
            "output": end.output[-20_000:],
        }
        for end in error.ends
    ]


def note(item: pytest.Item, key: str, value: str) -> None:
    """Add a property to a test, for JUnit XML and the results."""
    item.user_properties.append((f"concord.{key}", value))
