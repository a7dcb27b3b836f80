"""The places where leases are kept: folders of this user's that all of this user's sessions on a machine find.

A lease is taken in every shared place that can be trusted, so two sessions exclude each other as soon as they have one
place in common.  If another user takes the name in one place, or a session cannot write there, only that place is lost.
``TMPDIR`` and ``XDG_RUNTIME_DIR`` are not used: they differ between a login, a cron job and a container, and two
places would mean devices that are leased twice.
"""

from __future__ import annotations

import os
import pwd
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.devices import DeviceError

VARIABLE = "CONCORD_LEASES"
"""The environment variable that names one folder for leases, instead of the shared places."""

_SHARED = (Path("/tmp"), Path("/dev/shm"))  # noqa: S108 - the point is a name that every session knows
_RUNTIME = Path("/run/user")


@dataclass(frozen=True)
class Places:
    """The folders for leases, and the places that cannot be used."""

    folders: tuple[Path, ...]
    """In the order in which every process of this user locks them; the first one has the queue."""
    refused: tuple[str, ...] = ()
    """The shared places that cannot be used, a sentence each, with the reason."""


def survey(environ: Mapping[str, str] = os.environ, *, make: bool = False) -> Places:
    """Find the folders for leases.

    environ: where :data:`VARIABLE` may be set; the folder that it names is the only one tried then.  make: make folders
    that are missing; otherwise nothing is touched.
    Returns the shared places that can be used, or if there are none, a place of this user's own.
    Errors: :class:`DeviceError` if no folder can be used.
    """
    asked = environ.get(VARIABLE)
    if asked:
        path = Path(asked)
        why = "not an absolute path" if not path.is_absolute() else unusable(path, make=make)
        if why:
            raise DeviceError(f"{VARIABLE}={asked}: {why}")
        return Places((path,))
    shared, refused = _usable(_shared(), make=make)
    if shared:
        return Places(shared, refused)
    own, as_well = _usable(_own(), make=make)
    if own:
        return Places(own[:1], refused)
    every = "; ".join((*refused, *as_well))
    raise DeviceError(f"leases on devices cannot be kept anywhere: {every}; name a folder in {VARIABLE}")


def unusable(path: Path, *, make: bool = False) -> str:
    """Return why a folder cannot be used for leases, because it must be this user's alone; empty if it can be used.

    path: the folder, which may be missing if it can be made.  make: make it if it is missing.
    """
    try:
        if make:
            _make(path)
        status = path.lstat()
    except FileNotFoundError:
        if make or not path.parent.is_dir():
            return f"{path.parent} does not exist"
        return "" if os.access(path.parent, os.W_OK | os.X_OK) else f"it can't be made: {path.parent} is not writable"
    except OSError as e:
        return f"it can't be made: {e.strerror}"
    if stat.S_ISLNK(status.st_mode):
        return "it is a symbolic link"
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a folder"
    if status.st_uid != os.geteuid():
        return f"it belongs to {_user(status.st_uid)}"
    if status.st_mode & 0o077:
        return f"others have access to it (mode {status.st_mode & 0o7777:o}): chmod 700, or remove it"
    if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
        return "it is not writable"
    return ""


def _make(path: Path) -> None:
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        return
    path.chmod(0o700)  # an umask may have taken the owner's own access


def _shared() -> list[Path]:
    uid = os.geteuid()
    folders = [parent / f"concord-leases-{uid}" for parent in _SHARED]
    runtime = _RUNTIME / str(uid)
    try:
        status = runtime.lstat()
    except OSError:  # no login manager, or nobody is logged in
        return folders
    private = stat.S_ISDIR(status.st_mode) and status.st_uid == uid and not status.st_mode & 0o022
    return [*folders, *([runtime / "concord-leases"] if private else [])]


def _own() -> list[Path]:
    """Return where to keep leases if no shared place can be used.

    Sessions with another home or TMPDIR are not seen there.
    """
    uid = os.geteuid()
    folders = []
    try:
        home = Path(pwd.getpwuid(uid).pw_dir)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()  # several machines may share a home
        folders.append(home / f".concord-leases-{boot}")
    except (KeyError, OSError):
        pass  # a user without an entry has no home; the next candidate is tried
    try:
        folders.append(Path(tempfile.gettempdir()) / f"concord-leases-{uid}")
    except OSError:
        pass  # there is no folder for temporary files at all
    return folders


def _usable(candidates: Sequence[Path], *, make: bool) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    reasons = {path: unusable(path, make=make) for path in candidates}
    return (
        tuple(path for path, why in reasons.items() if not why),
        tuple(f"{path}: {why}" for path, why in reasons.items() if why),
    )


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
