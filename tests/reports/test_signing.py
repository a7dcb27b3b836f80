"""``concord bundle --sign`` and ``concord verify --signature``: who vouches for a file, by OpenSSH."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from invented import change, runs
from typer.testing import CliRunner

from harness.commands.main import app
from reports.bundle import MANIFEST, made, manifest_of, packed
from reports.model import ReportError
from reports.signing import key_of, problems_of, sign

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="no ssh-keygen here")

SIGNER = "vendor@example.com"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return generated(tmp_path / "key")


@pytest.fixture
def results(tmp_path: Path) -> list[str]:
    """The results files of two runs."""
    files = []
    for name, data in runs():
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_bytes(data)
    return list(map(str, files))


def generated(path: Path, passphrase: str = "", comment: str = SIGNER) -> Path:
    """A new key."""
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", comment, "-f", str(path)]
    subprocess.run(command, check=True)
    return path


def bundled(results: list[str], output: Path, *more: str) -> tuple[int, str]:
    """What ``concord bundle`` exits with and says."""
    done = CliRunner().invoke(app, ["bundle", *results, "-o", str(output), *more])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def line_in(said: str) -> str:
    """The line for a file of signers that ``concord bundle`` has printed."""
    (line,) = (line.strip() for line in said.splitlines() if 'namespaces="concord"' in line)
    return line


def test_signed(tmp_path: Path, results: list[str], key: Path) -> None:
    """The signature is beside the bundle, and the printed line is all that a customer needs to check it."""
    path, signers = tmp_path / "x.zip", tmp_path / "signers"
    code, said = bundled(results, path, "--sign", str(key))
    assert code == 0, said
    signature = tmp_path / "x.zip.sig"
    assert f"{signature}: by ED25519 key SHA256:" in said
    assert f"concord verify x.zip --signature x.zip.sig --signers FILE --signer {SIGNER}" in said
    signers.write_text(line_in(said) + "\n")
    assert problems_of(path, signature, signers, SIGNER) == []
    arguments = ["verify", str(path), "--no-suite", "--signature", str(signature), "--signers", str(signers)]
    done = CliRunner().invoke(app, [*arguments, "--signer", SIGNER])
    assert "the signature" not in done.output
    path.write_bytes(path.read_bytes() + b"\0")
    (problem,) = problems_of(path, signature, signers, SIGNER)
    assert problem.startswith(f"the signature is not {SIGNER}'s: ")


def test_consistent_forgery(tmp_path: Path, results: list[str], key: Path) -> None:
    """A bundle that someone forges with every checksum made anew is not the one that was signed."""
    path, signers = tmp_path / "x.zip", tmp_path / "signers"
    _, said = bundled(results, path, "--sign", str(key))
    signers.write_text(line_in(said))
    files = made(runs(change("dynamo", seconds=1.5))).files
    path.write_bytes(packed({**files, MANIFEST: manifest_of(files, "0.1.0")}))
    done = CliRunner().invoke(
        app,
        [
            *("verify", str(path), "--no-suite", "--signature", f"{path}.sig"),
            *("--signers", str(signers), "--signer", SIGNER),
        ],
    )
    assert (done.exit_code, f"WRONG     the signature is not {SIGNER}'s" in done.output) == (1, True), done.output


def test_other_signers(tmp_path: Path, results: list[str], key: Path) -> None:
    """A signature of another key, for another name or for another purpose is not the signer's."""
    path, signers, other = tmp_path / "x.zip", tmp_path / "signers", generated(tmp_path / "other")
    _, said = bundled(results, path, "--sign", str(other))
    signature = Path(f"{path}.sig")
    signers.write_text(f"{SIGNER} {key.with_suffix('.pub').read_text()}")
    assert len(problems_of(path, signature, signers, SIGNER)) == 1
    signers.write_text(line_in(said))
    assert problems_of(path, signature, signers, SIGNER) == []
    assert len(problems_of(path, signature, signers, "somebody@example.com")) == 1
    signers.write_text(line_in(said).replace('"concord"', '"git"'))
    assert len(problems_of(path, signature, signers, SIGNER)) == 1


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An agent without keys."""
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(tmp_path / "agent")], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
    yield
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.usefixtures("agent")
def test_agent(tmp_path: Path, results: list[str], key: Path) -> None:
    """A key in an agent signs by its public key; one that the agent lacks is an error that says so."""
    public = key.with_suffix(".pub")
    subprocess.run(["ssh-add", "-q", str(key)], check=True)
    key.unlink()
    assert bundled(results, tmp_path / "x.zip", "--sign", str(public))[0] == 0
    subprocess.run(["ssh-add", "-q", "-D"], check=True, capture_output=True)
    code, said = bundled(results, tmp_path / "y.zip", "--sign", str(public))
    assert (code, f"--sign {public}: no agent has this key (ssh-add adds it)" in said) == (2, True), said
    assert not (tmp_path / "y.zip").exists()


def unreadable(folder: Path) -> Path:
    key = generated(folder / "open")
    key.chmod(0o644)
    return key


def garbage(folder: Path) -> Path:
    key = folder / "garbage"
    key.write_bytes(b"\0\x1b[31m garbage\n" * 100)
    key.chmod(0o600)
    return key


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: folder / "none", "none: no such file"),
        (lambda folder: folder, "no such file"),
        (lambda folder: generated(folder / "locked", "a long passphrase"), "the key has a passphrase, and there is no"),
        (unreadable, "other users may read this key: chmod 600"),
        (garbage, "so that it may be no private key"),
    ],
    ids=["none", "folder", "passphrase", "permissions", "garbage"],
)
def test_bad_keys(tmp_path: Path, results: list[str], make: object, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that can't sign is one clear line, nobody is waited for, and nothing is written."""
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    path = tmp_path / "x.zip"
    path.write_bytes(b"the one before")
    assert callable(make)
    code, said = bundled(results, path, "--sign", str(make(tmp_path)))
    assert code == 2
    (line,) = said.strip().splitlines()
    assert says in line
    assert "\x1b" not in line
    assert path.read_bytes() == b"the one before"
    assert not (tmp_path / "x.zip.sig").exists()


def test_no_ssh_keygen(tmp_path: Path, results: list[str], key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without OpenSSH, the error names it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    code, said = bundled(results, tmp_path / "x.zip", "--sign", str(key))
    assert (code, "--sign needs ssh-keygen (OpenSSH 8.2 or later), which is not on the PATH" in said) == (2, True)


@pytest.mark.parametrize("name", ["a b", "*", "a,b", "!a", '"', "#", "\n", "x" * 201])
def test_bad_names(tmp_path: Path, results: list[str], key: Path, name: str) -> None:
    """A name that a list of signers would read as something else is refused."""
    code, said = bundled(results, tmp_path / "x.zip", "--sign", str(key), "--signer", name)
    assert (code, "--signer" in said, "such as a@b.org" in said) == (2, True, True)


def test_names(tmp_path: Path, results: list[str], key: Path) -> None:
    """The name is the one given, or else the comment of the key if a list of signers can have it."""
    assert " --signer somebody" in bundled(results, tmp_path / "x.zip", "--sign", str(key), "--signer", "somebody")[1]
    odd = generated(tmp_path / "odd", comment="*")
    assert " --signer vendor\n" in bundled(results, tmp_path / "x.zip", "--sign", str(odd))[1]
    assert bundled(results, tmp_path / "x.zip", "--signer", "somebody")[0] == 2


def test_not_over_a_run(tmp_path: Path, results: list[str], key: Path) -> None:
    """A signature is not written over a run."""
    run = Path(results[0]).rename(tmp_path / "x.zip.sig")
    code, said = bundled([str(run)], tmp_path / "x.zip", "--sign", str(key))
    assert (code, "it is a run that is read" in said) == (2, True)


def armored(blob: bytes) -> bytes:
    import base64

    return b"-----BEGIN SSH SIGNATURE-----\n" + base64.b64encode(blob) + b"\n-----END SSH SIGNATURE-----\n"


@pytest.mark.parametrize(
    "signature",
    [
        b"",
        b"garbage",
        b"-----BEGIN SSH SIGNATURE-----\n!!!\n-----END SSH SIGNATURE-----\n",
        armored(b""),
        armored(b"SSHSIG"),
        armored(b"SSHSIG" + b"\xff" * 8),
        armored(b"SSHSIG\0\0\0\1\0\0\0\x08\0\0\0\x04\xff\xff\xff\xff"),
        armored(b"SSHSIG\0\0\0\1\0\0\0\x08\0\0\0\x04a\nb "),
        armored(b"GITSIG\0\0\0\1\0\0\0\x08\0\0\0\x04abcd"),
    ],
)
def test_no_signature(tmp_path: Path, key: Path, signature: bytes) -> None:
    """What is no signature has no key, and is not the signer's."""
    with pytest.raises(ReportError, match="not a signature of OpenSSH"):
        key_of(signature)
    file, signers = tmp_path / "x.sig", tmp_path / "signers"
    file.write_bytes(signature)
    signers.write_text(f"{SIGNER} {key.with_suffix('.pub').read_text()}")
    (problem,) = problems_of(key, file, signers, SIGNER)
    assert problem.startswith("the signature is not")


def test_huge_signature(tmp_path: Path, key: Path) -> None:
    """A signature of a megabyte is not read."""
    (tmp_path / "x.sig").write_bytes(b"x" * (1 << 20))
    with pytest.raises(ReportError, match="larger than 64 KiB"):
        problems_of(key, tmp_path / "x.sig", tmp_path / "signers", SIGNER)


def test_key_of(tmp_path: Path, key: Path) -> None:
    """The key in a signature is the one that made it."""
    kind, text = key.with_suffix(".pub").read_text().split()[:2]
    assert sign(b"data", key).key == f"{kind} {text}"
    assert set(os.listdir(tmp_path)) == {"key", "key.pub"}
