"""No credentials get out of a run: neither into its results and what is made of them, nor onto the terminal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sessions import Folder

from harness import results
from reports.build import build, load
from reports.markdown import markdown
from reports.page import page

pytestmark = pytest.mark.slow


def test_credentials_stay_in_the_process(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """Results, page, JUnit file and terminal have no credentials of environment, command line, or tests' failures."""
    secrets = {
        "CONCORD_HISTORY": "postgresql://bob:hunter2@db/perf",
        "MPI_PWD": "Tr0ub4dor&3",
        "TORCH_HUB_PAT": "ghp_x8Jk2aQ9vLm3Zt7Rb1Yc5Wd0",
        "ALERTS": "https://hooks.slack.com/services/T01234567/B01234567/aBc1dEf2gHi3jKl4mNo5pQr6",
        "PYTEST_ADDOPTS": "-o cache_dir=https://ann:s3cr3t99@h/x -p no:cacheprovider",
    }
    text = """
        import os
        import pytest

        @pytest.mark.parametrize("token", [os.environ["TORCH_HUB_PAT"]])
        def test_leaks(token):
            print(dict(os.environ))
            raise RuntimeError(f"{os.environ} password=never-heard-of postgresql://carl:swordfish1@db/x")
    """
    folder = make_folder({"suites/collectives/test_leaks.py": text})
    session = folder.run("--concord-results", "out", "--junitxml=junit.xml", env=secrets)
    (path,) = session.folder.glob("out/*/results.jsonl")
    made = build([load(path)])
    texts = path.read_text() + page(made) + markdown(made, largest=1 << 20)
    leaks = ["hunter2", "Tr0ub4dor", "ghp_x8", "aBc1dEf2", "s3cr3t99", "never-heard-of", "swordfish1"]
    assert [leak for leak in leaks if leak in texts] == []
    texts = session.out + session.err + (session.folder / "junit.xml").read_text()
    texts = texts.replace(f"test_leaks[{secrets['TORCH_HUB_PAT']}]", "")  # names of tests are as pytest made them
    assert [leak for leak in leaks if leak in texts] == []
    assert "RuntimeError: environ({" in session.out
    assert results.read(path).counts()["failed"] == 1


LEAKS = {
    "popped": "pOpp3d-Xk29vLm3Zt7",
    "changed": "chAng3d-Xk29vLm3Zt7",
    "collected": "c0llect-Xk29vLm3Zt7",
    "reason": "r3as0n-Xk29vLm3Zt7",
    "warned": "w4rned-Xk29vLm3Zt7",
    "label": "l4bel-Xk29vLm3Zt7",
    "property": "pr0perty-Xk29vLm3Zt7",
    "attribute": "attr1bute-Xk29vLm3Zt7",
    "skipped": "sk1pped-Xk29vLm3Zt7",
    "local": "l0cal-Xk29vLm3Zt7",
    "teardown": "t34rdown-Xk29vLm3Zt7",
    "rerun": "r3run-Xk29vLm3Zt7",
}
LEAKING = """
    import os
    import warnings

    import pytest

    def secret(name):
        return os.environ[f"MY_{name.upper()}_TOKEN"]

    def test_popped():
        raise RuntimeError(os.environ.pop("MY_POPPED_TOKEN"))

    def test_changed():
        told = secret("changed")
        os.environ["MY_CHANGED_TOKEN"] = "something else"
        print(told)
        raise RuntimeError(told)

    @pytest.mark.xfail(reason=f"it said {secret('reason')}")
    def test_reason():
        assert False

    def test_reason_at_once():
        pytest.xfail(f"it said {secret('reason')}")

    @pytest.mark.xfail(strict=True, reason=f"it said {secret('reason')}")
    def test_strict():
        pass

    @pytest.mark.skip(reason=f"it said {secret('skipped')}")
    def test_skipped():
        pass

    def test_warned():
        warnings.warn(f"it said {secret('warned')}")
        warnings.warn(RuntimeWarning("it said", secret("warned")))

    def test_labels(subtests):
        with subtests.test(msg=f"it said {secret('label')}", label=secret("label"), password="unheard-of-label"):
            assert False

    def test_property(record_testsuite_property, record_property):
        record_testsuite_property("said", secret("property"))
        record_testsuite_property("password", "unheard-of-property")
        record_property("said", [secret("property")])
        record_property("password", "unheard-of-property")

    def test_attribute(record_xml_attribute):
        record_xml_attribute("said", secret("attribute"))

    def test_local():
        passphrase = "unheard-of-local"
        told = secret("local")
        assert not told

    @pytest.fixture
    def given():
        yield
        raise RuntimeError(secret("teardown"))

    def test_teardown(given):
        pass

    @pytest.mark.flaky(reruns=1)
    def test_rerun():
        if os.environ.pop("MY_RERUN_TOKEN", None) is not None:
            raise RuntimeError("%s")
""" % LEAKS["rerun"]  # noqa: UP031 - the text has braces of its own
COLLECTED = """
    import os
    import warnings

    warnings.warn(f"it said {os.environ['MY_WARNED_TOKEN']}")
    raise RuntimeError(f"it said {os.environ.pop('MY_COLLECTED_TOKEN')}")
"""
MODULE_SKIPPED = """
    import os
    import pytest

    pytest.skip(f"it said {os.environ['MY_SKIPPED_TOKEN']}", allow_module_level=True)
"""
ARGUMENTS = (
    "--junitxml=junit.xml",
    "-o",
    "junit_logging=all",
    "-o",
    "junit_family=xunit1",
    "--showlocals",
    "-rA",
    "-v",
)


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "workers"])
def test_whatever_pytest_shows(make_folder: Callable[[dict[str, str]], Folder], workers: tuple[str, ...]) -> None:
    """Nothing that pytest or Concord makes of a run has credentials that a test told of in any way that pytest has."""
    files = {"test_leaking.py": LEAKING, "test_collected.py": COLLECTED, "test_skipped.py": MODULE_SKIPPED}
    folder = make_folder({f"suites/collectives/{name}": text for name, text in files.items()})
    secrets = {f"MY_{name.upper()}_TOKEN": value for name, value in LEAKS.items()}
    options = ("--continue-on-collection-errors", "--concord-results", "out", *ARGUMENTS, *workers)
    session = folder.run(*options, env=secrets)
    (path,) = session.folder.glob("out/*/results.jsonl")
    texts = {
        "terminal": session.out + session.err,
        "junit": (session.folder / "junit.xml").read_text(),
        "results": path.read_text(),
    }
    for where, text in texts.items():
        assert [(where, leak) for leak in (*LEAKS.values(), "unheard-of") if leak in text] == []
    assert "it said ***" in texts["terminal"]
    assert {name: session.counts.get(name) for name in ("failed", "xfailed", "errors")} == {
        "failed": 6,
        "xfailed": 2,
        "errors": 3 if workers else 2,  # each worker tells of a file that it could not collect
    }
    assert results.read(path).counts()["flaky"] == 1


@pytest.mark.parametrize("how", ["exit", "internal", "stop"])
def test_sessions_that_end_early(make_folder: Callable[[dict[str, str]], Folder], how: str) -> None:
    """Why a session was ended is shown without credentials, also where it is an error within pytest."""
    text = """
        import os
        import pytest

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_logfinish():
            told = os.environ.pop("MY_TOKEN", None)
            if told:
                HOW
    """
    told = {
        "exit": "pytest.exit(f'it said {told}')",
        "internal": "raise RuntimeError(f'it said {told}')",
        "stop": "SESSION[0].shouldstop = f'it said {told}'",
    }
    text = text.replace("HOW", told[how])
    text += """
        SESSION = []
        def pytest_sessionstart(session):
            SESSION.append(session)
    """
    tests = "def test_a(): pass\ndef test_b(): pass"
    folder = make_folder({"suites/collectives/test_it.py": tests, "conftest.py": text})
    session = folder.run("--concord-results", "out", env={"MY_TOKEN": LEAKS["popped"]})
    assert LEAKS["popped"] not in session.out + session.err
    assert "it said ***" in session.out + session.err
