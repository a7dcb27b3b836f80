"""Nothing that leaves the machine has credentials in it: URLs, variables, command lines and texts."""

from __future__ import annotations

import json
import string
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from harness import results
from harness.audit.records import Healthy, Journal
from harness.bench.fingerprint import fingerprint
from harness.programs import reproducer
from harness.provenance import environment
from harness.redaction import HIDDEN, NOT_SHOWN, Memory, Redactor, Url, current, recorded, redacted, remember
from harness.redaction import text as redaction_text
from harness.results import RankEvidence, TestResult, Writer
from harness.specs.program import Linear, Model, Program

TOKEN = "ghp_x8Jk2aQ9vLm3Zt7Rb1Yc5Wd0"
SLACK = "https://hooks.slack.com/services/T01234567/B01234567/aBc1dEf2gHi3jKl4mNo5pQr6"
HISTORY = "postgresql://bob:hunter2@db/perf"


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test puts into the environment is not remembered in the next."""
    monkeypatch.setattr(redaction_text, "_MEMORY", Memory())


@pytest.mark.parametrize(
    ("whole", "shown"),
    [
        (HISTORY, "postgresql://***@db/perf"),
        ("postgresql://bob:hun ter2@db/perf", "postgresql://***@db/perf"),
        ("postgresql://bob:hun'ter2@db/perf", "postgresql://***@db/perf"),
        ('postgresql://bob:hun"ter2@db/perf', "postgresql://***@db/perf"),
        ("postgresql://bob:hun`t<e>r2@db/perf", "postgresql://***@db/perf"),
        ("postgresql://bob smith:hunter2@db/perf", "postgresql://***@db/perf"),
        ("postgresql://hun ter2@db/perf", "postgresql://***@db/perf"),
        ("postgresql://bob:12 34@db/perf", "postgresql://***@db/perf"),
        ("postgresql://bob:hun@ter x2@db/perf", "postgresql://***@db/perf"),
        ("https://bob:hun ter2@db/perf", "https://***@db/perf"),
        ("postgresql://bob@db:5432/perf", "postgresql://***@db:5432/perf"),
        ("postgresql://db/perf?user=bob&password=hunter2", "postgresql://db/perf?user=***&password=***"),
        (
            "postgresql://db/perf?sslmode=require&connect_timeout=5",
            "postgresql://db/perf?sslmode=require&connect_timeout=5",
        ),
        ("postgresql://bob:hun/t?e#r@2@db/perf", "postgresql://***@db/perf"),
        ("postgresql://bob:hunt…", "postgresql://***"),
        ("mysql+pymysql://bob:hunter2@h1:1,h2:2/x", "mysql+pymysql://***@h1:1,h2:2/x"),
        ("sqlite:////var/lib/perf.sqlite", "sqlite:////var/lib/perf.sqlite"),
        ("https://x-access-token:abc@github.com/o/r.git", "https://***@github.com/o/r.git"),
        (SLACK, "https://hooks.slack.com/services/T01234567/B01234567/***"),
        ("https://api.telegram.org/bot123456:AAF-x8Jk2aQ9vLm3Zt7/send", "https://api.telegram.org/***/send"),
        ("https://h/blob?sv=1&sig=abc%3D", "https://h/blob?sv=***&sig=***"),
        ("https://h/?hunter2", "https://h/?***"),
        ("https://h/cb#access_token=hunter2", "https://h/cb#***"),
        ("https://github.com/pytorch/pytorch/issues/1#issuecomment-123456789",) * 2,
        ("https://download.pytorch.org/whl/cpu/torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl",) * 2,
        ("tcp://[::1]:29500",) * 2,
    ],
)
def test_urls_show_no_credentials(whole: str, shown: str) -> None:
    """A URL is shown without user info, unknown parameters and tokens; where there are none, as it is."""
    assert (str(Url(whole)), repr(Url(whole))) == (shown, f"Url({shown!r})")
    assert Redactor({})(f"at {whole}, it said") == f"at {shown}, it said"


WORDS = st.text(string.ascii_letters + string.digits + "-._~!$()*+,:/?#@%&=", min_size=4, max_size=30)


@given(user=WORDS, password=WORDS, scheme=st.sampled_from(["postgresql", "mysql+x", "redis", "amqps"]))
def test_no_part_of_a_password_is_shown(user: str, password: str, scheme: str) -> None:
    """Whatever is in a password, escaped or not, the URL that is shown has only what is behind the last @."""
    assume("://" not in user + password)
    assert (
        str(Url(f"{scheme}://{user}:{password}@db.example.org:5432/perf")) == f"{scheme}://***@db.example.org:5432/perf"
    )


@given(st.text(max_size=60).map(lambda text: f"x://{text}"))
def test_what_is_shown_is_shown_again(text: str) -> None:
    """Redacting twice is redacting once, and no text is an error."""
    once = str(Url(text))
    assert str(Url(once)) == once


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("NCCL_DEBUG", "INFO", "INFO"),
        ("NCCL_DEBUG", "hunter2", NOT_SHOWN),
        ("NCCL_BUFFSIZE", "4194304", "4194304"),
        ("NCCL_SOCKET_IFNAME", "^lo,docker0", "^lo,docker0"),
        ("NCCL_SOCKET_IFNAME", TOKEN, NOT_SHOWN),
        ("CUDA_VISIBLE_DEVICES", "0,3", "0,3"),
        (
            "CUDA_VISIBLE_DEVICES",
            "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
            "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
        ),
        ("CUDA_VISIBLE_DEVICES", "hunter2", NOT_SHOWN),
        ("VENDOR_VISIBLE_DEVICES", "", ""),
        (
            "PYTORCH_CUDA_ALLOC_CONF",
            "expandable_segments:True,max_split_size_mb:128",
        )
        + ("expandable_segments:True,max_split_size_mb:128",),
        ("KMP_AFFINITY", "granularity=fine,compact,1,0", "granularity=fine,compact,1,0"),
        ("OMP_NUM_THREADS", "1", "1"),
        ("TORCH_LOGS", "+dynamo,graph_breaks", "+dynamo,graph_breaks"),
        ("TORCH_HUB_PAT", TOKEN, None),
        ("MPI_PWD", "hunter2", None),
        ("MPI_PWD", "1", None),
        ("CONCORD_NOTIFY", SLACK, NOT_SHOWN),
        ("CONCORD_HISTORY", HISTORY, "postgresql://***@db/perf"),
        ("CONCORD_HISTORY", "reports/out/history.sqlite", "reports/out/history.sqlite"),
        ("CONCORD_EXAMPLES", "thorough", "thorough"),
        ("CI", "true", "true"),
        ("PYTHONHASHSEED", "random", "random"),
        ("PYTHONPATH", "/usr/lib:.", "/usr/lib:."),
        ("PYTEST_PLUGINS", "evil,more.evil", "evil,more.evil"),
        ("PYTEST_ADDOPTS", "-p evil --token=abc --password hunter2", "-p evil '--token=***' --password '***'"),
        ("PYTEST_ADDOPTS", "-p 'evil", NOT_SHOWN),
        ("CONCORD_HISTORY", "/tmp/h.db?password=foo", NOT_SHOWN),
        ("CONCORD_HISTORY", "/tmp/h.db?token=foo", NOT_SHOWN),
        ("CONCORD_HISTORY", "/tmp/password=foo", NOT_SHOWN),
        ("PYTHONPATH", f"/usr/lib:/tmp/{TOKEN}", "/usr/lib:/tmp/***"),
        ("TORCH_HOME", "/tmp/x8Jk2aQ9vLm3Zt7Rb1Yc5Wd0", "/tmp/x8Jk2aQ9vLm3Zt7Rb1Yc5Wd0"),
        ("HOME", "/x", None),
        ("GITHUB_TOKEN", TOKEN, None),
        ("MY_WEBHOOK", SLACK, None),
    ],
)
def test_variables_are_recorded_by_list(name: str, value: str, shown: str | None) -> None:
    """A listed variable shows a value of its kind, and no other; one that is not listed is not recorded."""
    assert recorded(name, value) == shown


@given(
    value=st.text(max_size=200), name=st.sampled_from(["NCCL_X", "CUDA_VISIBLE_DEVICES", "TORCH_LOGS", "KMP_AFFINITY"])
)
def test_any_value_has_an_answer_at_once(value: str, name: str) -> None:
    """Any value of a variable is shown as it is, or not at all."""
    assert recorded(name, value) in (value, NOT_SHOWN)


@pytest.mark.parametrize(
    "value", ["a" * 4000 + "!", "-" * 4000, "0," * 2000 + "!", "a=" * 2000, "1" * 4000], ids=lambda v: v[:4]
)
@pytest.mark.parametrize(
    "name", ["CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_LOGS", "NCCL_X", "OMP_PLACES"]
)
@pytest.mark.timeout(60)
def test_long_values_take_no_time(name: str, value: str) -> None:
    """No value makes a check go on for ever."""
    assert recorded(name, value) in (value, NOT_SHOWN)


def test_environment_has_no_credentials() -> None:
    """What a header says of the environment has none of what variables have but for what was checked."""
    given = {"MPI_PWD": "hunter2", "TORCH_HUB_PAT": TOKEN, "CONCORD_HISTORY": HISTORY, "NCCL_ALERTS": SLACK, "CI": "1"}
    found = environment(given)
    text = json.dumps(found)
    assert not [secret for secret in ("hunter2", TOKEN, "aBc1dEf2") if secret in text]
    assert found["variable NCCL_ALERTS"] == NOT_SHOWN
    assert found["variable CI"] == "1"


VARIABLES = {
    "SERVICE": TOKEN,
    "DB_PASSWORD": "hunter2",
    "PASSPHRASE": "letmeinplease",
    "DSN": "host=db user=bob password=Tr0ub4dor&3",
    "CONCORD_HISTORY": "postgresql://bob:p%40ssw0rd@db/perf",
    "ALERTS": SLACK,
    "SHORT_TOKEN": "abc",
    "MODE_KEY": "sum",
    "TARGET": "suites/replicate/modules/test_application.py",
    "REGION": "us-east-1",
    "TMP": "/tmp/x8Jk2aQ9vLm3Zt7Rb1Yc5Wd0",
}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"E  assert '{TOKEN}' == 1", "E  assert '***' == 1"),
        (f"<{TOKEN}>{TOKEN}x", "<***>***x"),
        ("login bob hunter2 failed", "login bob *** failed"),
        ("hunter21, xhunter2", "hunter21, xhunter2"),
        ("said letmeinplease", "said ***"),
        ("test_letmeinplease.py a/letmeinplease", "test_letmeinplease.py a/letmeinplease"),
        ("Tr0ub4dor&3", "***"),
        (quote("Tr0ub4dor&3", safe=""), "***"),
        ("p%40ssw0rd and p@ssw0rd", "*** and ***"),
        (f"posted to {SLACK}!", "posted to ***!"),
        ("aBc1dEf2gHi3jKl4mNo5pQr6", "***"),
        ("conninfo host=db password=unheard-of port=1", "conninfo host=db password=*** port=1"),
        ('{"api_key": "unheard-of"}', '{"api_key": "***"}'),
        ('os.environ["X_SECRET"] = "unheard-of"', 'os.environ["X_SECRET"] = "***"'),
        ("Authorization: Bearer unheard-of", "Authorization: Bearer ***"),
        ("def f(password: str, token=3, key=None): pwd=/home", "def f(password: str, token=3, key=None): pwd=/home"),
        (r"'\nPASSWORD=unheard-of'", r"'\nPASSWORD=***'"),
        (r"'\\nPWD=unheard-of\\x0aX_SECRET=too'", r"'\\nPWD=***'"),
        (r"'a\npwd: unheard-of'", r"'a\npwd: ***'"),
        (r"{\"api_key\": \"unheard-of\"}", r"{\"api_key\": \"***\"}"),
        (r"'user\nhunter2\nend'", r"'user\n***\nend'"),
        (r"b'\x0ahunter2'", r"b'\x0a***'"),
        ("password='pa ss' password=\"pa'ss\"", "password='***' password=\"***\""),
        (r'password="pa\"s s" x', 'password="***" x'),
        ("PGPASSWORD=unheard-of dbPassword: unheard-of", "PGPASSWORD=*** dbPassword: ***"),
        ("password=/unheard-of password=str-unheard password=***unheard", "password=*** password=*** password=***"),
        ("secret     = 'unheard-of'", "secret     = '***'"),
        (f"clone /tmp/ghp_{'q1' * 12}/x", "clone /tmp/***/x"),
        (rf"\nghp_{'q1' * 12}", r"\n***"),
        (f"at eyJ{'hbGci' * 4}.eyJ{'zdWIi' * 4}.{'x-y' * 4}, said", "at ***, said"),
        ("task-with-a-long-name-of-words disk-0-partition-1-of-2",) * 2,
        ("at postgresql:/bob:hunter2x@db/perf", "at postgresql:/***@db/perf"),
        ("at tcp://10.0.0.1:29500 for bob@example.org",) * 2,
        ("see https://pytorch.org/docs 'x': bob@example.org",) * 2,
        ("{'A': 'redis://db:6379', 'MAIL': 'bob@example.org'}",) * 2,
        ("abc sum suites/replicate/modules/test_application.py us-east-1",) * 2,
        ("/tmp/x8Jk2aQ9vLm3Zt7Rb1Yc5Wd0/file.py:3",) * 2,
    ],
)
def test_texts(text: str, shown: str) -> None:
    """Credentials of the environment are left out of a text in any spelling; short values, words and paths are not."""
    assert Redactor(VARIABLES)(text) == shown


SECRETS = st.text(string.ascii_letters + string.digits + "!$%^&*()+/='\"\\ é", min_size=12, max_size=60).filter(
    lambda text: any(c.isdigit() for c in text) and text == text.strip()
)


@given(secret=SECRETS, before=st.text(max_size=20), after=st.text(max_size=20))
def test_a_secret_does_not_survive(secret: str, before: str, after: str) -> None:
    """The value of a variable that is called a token is in no text, as it is, in JSON, in a repr or percent-encoded."""
    redactor = Redactor({"X_TOKEN": secret})
    for spelling in (secret, json.dumps(secret)[1:-1], repr(secret)[1:-1], quote(secret, safe="")):
        assert spelling not in redactor(f"{before}{spelling}{after}")


@given(st.text(max_size=300))
def test_texts_of_nobody_are_left_alone(text: str) -> None:
    """A text without URLs and assignments is as it was; redacting is never an error."""
    once = Redactor({})(text)
    assert Redactor({})(once) == once
    if "://" not in text and "=" not in text and ":" not in text:
        assert once == text


REPEATED = (
    *("-_", "a-", "a", "a_", "password", "password=", "password='", "pwd:", "\\n", "\\npassword", "key \n", "\"'"),
    *("://", "a://", "a:/", "a:/a:", "x:", "@/", "a://u:", "a://u:p ", "a://u:p' ", "a:// @", "a://a:1,", "http://a,a"),
    *(
        "eyJ",
        "eyJa.",
        "SG.",
        "sk-",
        "ghp_",
        "xoxb-",
        "AKIA",
        "-----BEGIN PRIVATE KEY-----",
        "authorization:",
        "access-",
    ),
)
"""Each makes some search begin anew at every place of a text, or go back through all of it."""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("piece", REPEATED)
def test_long_texts_take_no_time(piece: str) -> None:
    """A text of 300,000 characters is looked through within seconds, whatever it is."""
    Redactor(VARIABLES)(piece * (300_000 // len(piece)) + "=x@h'")


@pytest.mark.timeout(60)
def test_a_long_name_takes_no_time() -> None:
    """A name of two million characters is read once, and not from each of its places anew."""
    assert Redactor(VARIABLES)("-_" * 1_000_000 + "password=unheard-of").endswith("_password=***")


@given(
    pieces=st.lists(st.sampled_from(REPEATED), min_size=1, max_size=4),
    end=st.sampled_from(["", "=", "@h", "'", ":", "\n"]),
)
@settings(max_examples=20, deadline=10_000)
def test_mixed_long_texts_take_no_time(pieces: list[str], end: str) -> None:
    """No mixture of such texts takes more than seconds either."""
    piece = "".join(pieces)
    Redactor(VARIABLES)(piece * (100_000 // len(piece)) + end)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("piece", ["a", "a=", "a=b;", "a://", "://", "a://u:", "-_", "key='", "a;", "a:b@c "])
@pytest.mark.parametrize("name", ["X", "X_TOKEN", "PYTHONPATH", "CONCORD_HISTORY", "PYTEST_ADDOPTS"])
def test_long_variables_take_no_time(name: str, piece: str) -> None:
    """A variable of 130,000 characters, the most that Linux passes on, is looked through within seconds."""
    Redactor({name: piece * (130_000 // len(piece))})("text")


@pytest.mark.parametrize("change", ["popped", "changed"])
def test_secrets_are_remembered(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A credential that the environment had once is left out of texts after it has been removed or changed."""
    monkeypatch.setenv("SERVICE", TOKEN)
    monkeypatch.setenv("X_PASSWORD", "hunter2")
    current()
    for name in ("SERVICE", "X_PASSWORD"):
        monkeypatch.delenv(name) if change == "popped" else monkeypatch.setenv(name, "something else")
    assert redacted(f"{TOKEN} hunter2") == "*** ***"


def test_secrets_of_the_start_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the environment had when the process began to look counts, though nothing was redacted by then."""
    monkeypatch.setenv("SERVICE", TOKEN)
    monkeypatch.setattr(redaction_text, "_MEMORY", Memory())
    monkeypatch.delenv("SERVICE")
    assert redacted(TOKEN) == HIDDEN


def test_environments_of_others_are_remembered() -> None:
    """An environment that this process gives to another counts, too."""
    remember({"SERVICE": TOKEN})
    assert redacted(TOKEN) == HIDDEN


def test_an_environment_that_changes_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of the environment that brings no credential makes no new redactor."""
    monkeypatch.setenv("SERVICE", TOKEN)
    first = current()
    monkeypatch.setenv("MASTER_PORT", "29501")
    assert current() is first


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("X", "postgresql://bob:hun ter2@db/perf", "it said hun ter2"),
        ("X", "bob:hunter2@localhost/db", "it said hunter2"),
        ("CONCORD_HISTORY", "bob:hunter2@localhost/db", "it said hunter2"),
        ("X", "postgresql:/bob:hunter2@localhost/db", "it said hunter2"),
        ("X", '{"a": "x\\nPASSWORD=hunter2"}', "it said hunter2"),
        ("X", "password='hun ter2'", "it said hun ter2"),
    ],
)
def test_credentials_within_values(name: str, value: str, text: str) -> None:
    """Passwords with blanks, and of addresses that lack their slashes, are found in the values of variables."""
    assert Redactor({name: value})(text) == "it said ***"


def test_variables_are_recorded_without_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listed variable with a path that has another variable's credential in it shows the rest."""
    monkeypatch.setenv("DB_PASSWORD", "hunter2")
    monkeypatch.setenv("PYTHONPATH", "/tmp/hunter2!/lib")
    assert environment()["variable PYTHONPATH"] == "/tmp/***!/lib"


def test_the_name_of_the_test_is_no_reason_to_look_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments that differ in pytest's name for the running test alone have one redactor."""
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "a")
    first = current()
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "b")
    assert current() is first


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        *((name, "Summer2026!", "Summer2026!") for name in ("DBPASS", "SMTPPASS", "ROOTPW", "X_PASSCODE", "MY_OTP")),
        *((name, "root:hunter2x", "root:hunter2x") for name in ("DB_CREDS", "ADMIN_LOGIN")),
        ("AWS_SECRET_ACCESS_KEY", "/etc/K7MDENGbPxRfiCYEXAMPLE", "/etc/K7MDENGbPxRfiCYEXAMPLE"),
        ("SUDO_COMMAND", "/usr/bin/curl https://bob:s3cretpw@host/x", "s3cretpw"),
    ],
)
def test_values_that_are_credentials(name: str, value: str, secret: str) -> None:
    """A value whose variable says so is a credential, and so is what a command in one has, whatever it begins with."""
    assert secret not in Redactor({name: value})(f"it said {secret}, and {value}")


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["--junitxml=a.xml", "-k", "sum"], ["--junitxml=a.xml", "-k", "sum"]),
        (["--api-token", "abc", "x"], ["--api-token", HIDDEN, "x"]),
        (["--password=abc"], [f"--password={HIDDEN}"]),
        (["-o", "hub_pat=abc"], ["-o", f"hub_pat={HIDDEN}"]),
        (["--benchmark-storage=elasticsearch+http://u:p@h/i"], ["--benchmark-storage=elasticsearch+http://***@h/i"]),
        (["--history", HISTORY], ["--history", "postgresql://***@db/perf"]),
        (["suites", "-p", "token_plugin"], ["suites", "-p", "token_plugin"]),
    ],
)
def test_command_lines(given: list[str], shown: list[str]) -> None:
    """A command line has no values of options that are called credentials, and no credentials in its URLs."""
    assert Redactor({}).arguments(given) == shown


def test_results_have_no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every text of a record goes through the redactor where records are written, a parametrised test's name too."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    writer = Writer(tmp_path / "results.jsonl")
    writer.write(results.header(["--history", HISTORY, "--token", "abc"]))
    evidence = RankEvidence(rank=0, kind="raised", text=f"x {TOKEN}", output="hunter2\n", collectives=[TOKEN])
    nodeid = f"suites/collectives/test_x.py::test_a[{TOKEN}]"
    writer.write(results.Collected([nodeid]))
    writer.write(
        TestResult(nodeid=nodeid, verdict="failed", headline=f"at {SLACK}", text="Tr0ub4dor&3", ranks=[evidence])
    )
    writer.close()
    text = writer.path.read_text()
    assert not [s for s in (TOKEN, "hunter2", "Tr0ub4dor", "aBc1dEf2", "p%40ssw0rd", '"abc"') if s in text]
    found = results.read(writer.path)
    assert [*found.tests] == ["suites/collectives/test_x.py::test_a[***]"]


def test_a_hash_is_no_credential(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes and versions of a record stay, even where a variable has the same value."""
    digest = "3f" * 32
    monkeypatch.setenv("SOURCE_DIGEST", digest)
    writer = Writer(tmp_path / "results.jsonl")
    writer.write(results.header([], "x", digest, suite_hash=digest, plugins={"conftest.py": digest}))
    writer.close()
    header = results.read(writer.path).header
    assert (header.profile_hash, header.suite_hash, header.plugins) == (digest, digest, {"conftest.py": digest})


def test_audits_have_no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an audit writes down of a test's failure goes through the redactor."""
    monkeypatch.setenv("SERVICE", TOKEN)
    journal = Journal(tmp_path / "audit.jsonl")
    journal.write(Healthy(test="t", verdict="failed", seconds=1.0, headline=f"RuntimeError: {TOKEN} {HISTORY}"))
    (found,) = journal.read()
    journal.close()
    assert found == Healthy(
        test="t", verdict="failed", seconds=1.0, headline="RuntimeError: *** postgresql://***@db/perf"
    )


def test_figures_have_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a night says of the software that it ran on shows variables of the list only, by their kinds."""
    for name, value in {
        "NCCL_TOKEN": TOKEN,
        "NCCL_HOOK": SLACK,
        "NCCL_DEBUG": "INFO",
        "CONCORD_MACHINE": TOKEN,
    }.items():
        monkeypatch.setenv(name, value)
    found = fingerprint()
    assert dict(found.machine).get("label") in (None, NOT_SHOWN)
    assert {name: value for name, value in found.software if name.startswith("NCCL_")} == {
        "NCCL_TOKEN": NOT_SHOWN,
        "NCCL_HOOK": NOT_SHOWN,
        "NCCL_DEBUG": "INFO",
    }


def test_a_reproducer_has_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head of a reproducer shows what was seen, and variables, without credentials."""
    monkeypatch.setenv("SERVICE", TOKEN)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", TOKEN)
    head = reproducer._head(Program(Model((3,), (Linear(4),))), f"RuntimeError: {TOKEN}", "b", "torch")
    assert TOKEN not in head
    assert "RuntimeError: ***" in head
