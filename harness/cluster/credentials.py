"""The key of a session: one certificate with its private key, which the controller and every agent present and require.

Whoever has the key is trusted, and nobody else is: each side refuses a peer that cannot prove that it holds the same
private key.  TLS does all of it, so there is no protocol of our own, and nothing is parsed before the proof.
"""

from __future__ import annotations

import datetime
import os
import ssl
import stat
from pathlib import Path

_VALID = datetime.timedelta(days=30)
_MOST = 65536
_CERTIFICATE = "-----BEGIN CERTIFICATE-----"


class KeyProblem(ValueError):
    """The error for a key that cannot be used; it says which one, why, and what to do."""


class Key(str):
    """A key, as PEM.  Its representation does not show it: tracebacks have those of arguments."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<the key of a session>"


def made() -> Key:
    """Return a new key, as PEM: a private key on the curve P-256, and its own certificate for 30 days.

    Errors: :class:`KeyProblem` if the package cryptography is not installed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise KeyProblem(
            "a key for agents needs the package cryptography: pip install 'concord-harness[cluster]'"
        ) from None
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a session of Concord")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks of hosts differ
        .not_valid_after(now + _VALID)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(private, hashes.SHA256())
    )
    secret = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Key((secret + certificate.public_bytes(serialization.Encoding.PEM)).decode())


def write(path: Path, key: Key) -> None:
    """Write a key to a new file that only its owner can read.  Errors: OSError, if the file exists, too."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w") as file:
        os.fchmod(fd, 0o600)  # whatever the umask says
        file.write(key)


def read(path: Path) -> Key:
    """Read a key from a file.

    Errors: :class:`KeyProblem` if there is none, or if somebody else could have read or written it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as e:
        raise KeyProblem(f"{path}: {e.strerror}; `concord agent --new-key {path}` makes a key") from None
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise KeyProblem(f"{path}: a key is a regular file")
        if status.st_uid != os.geteuid():
            raise KeyProblem(f"{path}: it belongs to another user (uid {status.st_uid})")
        if status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise KeyProblem(f"{path}: others may read or write it (mode {mode:04o}): chmod 600, or make a new key")
        return checked(file.read(_MOST).decode(errors="replace"), str(path))


def checked(key: str, where: str) -> Key:
    """Return a key that can be used.  ``where``: where it is from.  Errors: :class:`KeyProblem`."""
    try:
        context(Key(key), server=True)
    except (ssl.SSLError, ValueError, OSError) as e:
        raise KeyProblem(
            f"{where}: it is not a key of Concord ({type(e).__name__}); see concord agent --help"
        ) from None
    return Key(key)


def context(key: Key, *, server: bool) -> ssl.SSLContext:
    """Return what TLS needs to prove to a peer that we have the key, and to require the same of the peer.

    Errors: ssl.SSLError or ValueError if the text is not a key.
    """
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False  # the key says who the peer is, and hosts have several names
    made.verify_mode = ssl.CERT_REQUIRED
    # A file without a name: the module ssl reads a private key only from a path.
    fd = os.memfd_create("concord-key", os.MFD_CLOEXEC)
    try:
        os.write(fd, key.encode())
        made.load_cert_chain(f"/proc/self/fd/{fd}", password="")
    finally:
        os.close(fd)
    made.load_verify_locations(cadata=key[key.index(_CERTIFICATE) :])
    return made
