"""Detached signatures of bundles, made and checked by OpenSSH (``ssh-keygen -Y``, 8.2 or later).

Nothing here computes a signature. A signature says who vouches for a file, and that the file is the one they saw. It
says nothing about whether the results in it are true (docs/reports.md).
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.safe_io.files import FileError, contents
from reports.archive import LARGEST_PACKED
from reports.model import ReportError

NAMESPACE = "concord"
"""The namespace of signatures, so that a signature for another purpose does not count as one of a bundle."""
LARGEST = 64 << 10
"""The largest size of a signature, in bytes; those of the longest RSA keys have 3 KB."""
_LONGEST = 600.0
"""Seconds for one call, in which someone may have to type a passphrase or touch a security key."""
_ARMOR = re.compile(r"-----BEGIN SSH SIGNATURE-----\n([A-Za-z0-9+/=\n]+)-----END SSH SIGNATURE-----\s*")
_NAME = re.compile(r"[^\s,!*?\"#]{1,200}")
"""A signer's name, in which ssh-keygen sees no pattern, no list and no comment."""
_BY = re.compile(r'Good "concord" signature with (\S+ key \S+)')


@dataclass(frozen=True)
class Signed:
    """A signature that has just been made."""

    signature: bytes
    """What belongs into the file beside the bundle."""
    key: str
    """The public key: its type and its base64 text, as in an ``authorized_keys`` file."""
    by: str
    """The key for readers, such as ``ED25519 key SHA256:…``."""

    def line(self, signer: str) -> str:
        """Return the line for a file of those who may sign bundles, and nothing else, under a name."""
        return f'{signer} namespaces="{NAMESPACE}" {self.key}'


def sign(data: bytes, key: Path) -> Signed:
    """Sign data with a key, and check the signature.

    ``key``: a file with a private key, or with a public key whose private key an agent (``ssh-add``) has.
    Errors: :class:`ReportError` that says what to do: no ssh-keygen, no key, a passphrase that nobody can be asked for,
    a private key that others may read, a key that the agent does not have.
    """
    if not key.is_file():
        raise ReportError(f"--sign {key}: no such file")
    with tempfile.TemporaryDirectory(prefix="concord-") as folder:
        file = Path(folder, "bundle")  # on standard input, ssh-keygen would look for a passphrase
        file.write_bytes(data)
        done = _called(["-Y", "sign", "-n", NAMESPACE, "-f", str(key), str(file)], b"", "--sign")
        beside = Path(folder, "bundle.sig")
        if done.returncode or not beside.is_file():
            raise ReportError(f"--sign {key}: {_why_not(done.stderr, key)}")
        signature = beside.read_bytes()
        checked = _called(["-Y", "check-novalidate", "-n", NAMESPACE, "-s", str(beside)], data, "--sign")
    good = _BY.search(checked.stdout.decode(errors="replace"))
    if checked.returncode or good is None:
        raise ReportError(f"--sign {key}: ssh-keygen made a signature that it does not accept: {_last(checked.stderr)}")
    return Signed(signature, key_of(signature), good[1])


def problems_of(file: Path, signature: Path, signers: Path, signer: str) -> list[str]:
    """Say why a signature of a file is not the signer's; empty if it is.

    ``signers``: a file of those who may sign (ssh's ALLOWED SIGNERS); ``signer``: a name in it.
    Errors: :class:`ReportError` if it cannot be checked.
    """
    try:
        data, content = contents(file, LARGEST_PACKED), contents(signature, LARGEST)
    except FileError as e:
        raise ReportError(str(e)) from None
    with tempfile.NamedTemporaryFile(prefix="concord-", suffix=".sig") as copy:  # of which the size is known
        copy.write(content)
        copy.flush()
        command = ["-Y", "verify", "-f", str(signers), "-I", signer, "-n", NAMESPACE, "-s", copy.name]
        done = _called(command, data, "--signature")
    return [f"the signature is not {signer}'s: {_last(done.stdout + done.stderr)}"] if done.returncode else []


def signer_in(file: Path, signature: Path, signers: Path) -> str:
    """Return who of those who may sign has signed a file; empty if nobody has.

    Errors: :class:`ReportError` if it cannot be checked.
    """
    try:
        content = contents(signature, LARGEST)
    except FileError as e:
        raise ReportError(str(e)) from None
    with tempfile.NamedTemporaryFile(prefix="concord-", suffix=".sig") as copy:
        copy.write(content)
        copy.flush()
        found = _called(["-Y", "find-principals", "-f", str(signers), "-s", copy.name], b"", "--signers")
    names = found.stdout.decode(errors="replace").split() if not found.returncode else []
    return next((name for name in names if not problems_of(file, signature, signers, name)), "")


def signer_of(key: Path, given: str) -> str:
    """Return the name under which a customer lists a key: the one given, or the comment of the public key.

    Errors: :class:`ReportError` for a name that a list of signers cannot have.
    """
    if given and not _NAME.fullmatch(given):
        raise ReportError(f"--signer {given!r}: a name without blanks, commas, quotes, #, !, * and ?, such as a@b.org")
    public = key if key.suffix == ".pub" else key.with_name(f"{key.name}.pub")
    try:
        words = contents(public, LARGEST).decode(errors="replace").split()
    except FileError:
        words = []
    comment = words[2] if len(words) == 3 else ""
    return given or (comment if _NAME.fullmatch(comment) else "vendor")


def key_of(signature: bytes) -> str:
    """Return the public key that a signature carries (``PROTOCOL.sshsig`` of OpenSSH).

    Errors: :class:`ReportError` for anything but a signature of OpenSSH.
    """
    armor = _ARMOR.fullmatch(signature.decode(errors="replace"))
    try:
        blob = base64.b64decode(armor[1].replace("\n", ""), validate=True) if armor is not None else b""
        magic, _, length = struct.unpack_from(">6sII", blob)
        key = blob[14 : 14 + length]
        (of_kind,) = struct.unpack_from(">I", key)
        kind = key[4 : 4 + of_kind].decode("ascii")
    except (binascii.Error, struct.error, UnicodeDecodeError):
        magic, key, kind = b"", b"", ""
    if magic != b"SSHSIG" or not re.fullmatch(r"[a-z0-9@.-]{1,100}", kind):
        raise ReportError("not a signature of OpenSSH")
    return f"{kind} {base64.b64encode(key).decode()}"


def require(option: str) -> str:
    """Return the path of ssh-keygen, which an option needs.  Errors: :class:`ReportError` if there is none."""
    program = shutil.which("ssh-keygen")
    if program is None:
        raise ReportError(f"{option} needs ssh-keygen (OpenSSH 8.2 or later), which is not on the PATH")
    return program


def _called(arguments: Sequence[str], data: bytes, option: str) -> subprocess.CompletedProcess[bytes]:
    """Call ssh-keygen with data on its standard input.  Errors: :class:`ReportError`."""
    program = require(option)
    somebody = sys.stdin is not None and sys.stdin.isatty()
    environment = dict(os.environ) if somebody else {**os.environ, "SSH_ASKPASS_REQUIRE": "never"}
    try:
        return subprocess.run(
            [program, *arguments],
            input=data,
            capture_output=True,
            timeout=_LONGEST,
            env=environment,
            start_new_session=not somebody,  # without a terminal it fails, and does not wait for a passphrase
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ReportError(f"{option}: ssh-keygen did not answer in {_LONGEST:g} s") from None


def _why_not(said: bytes, key: Path) -> str:
    """Say why a key does not sign, and what to do."""
    text = said.decode(errors="replace")
    if "UNPROTECTED PRIVATE KEY" in text or "bad permissions" in text:
        return f"other users may read this key: chmod 600 {key}"
    if "passphrase" in text:
        return (
            "the key has a passphrase, and there is no terminal to ask for it, or it was wrong: "
            f"ssh-add {key}, then --sign {key}.pub"
        )
    if "agent" in text or key.suffix == ".pub":
        return f"no agent has this key (ssh-add adds it): {_last(said)}"
    return f"ssh-keygen can't sign with it, so that it may be no private key: {_last(said)}"


def _last(said: bytes) -> str:
    return said.decode(errors="replace").strip().rpartition("\n")[2].strip() or "it gave no reason"
