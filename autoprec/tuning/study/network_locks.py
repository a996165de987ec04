"""Which mounts lock files for this machine only, so that two machines could damage a journal.

Two machines that share a folder see each other's files. On a mount whose locks are local, each
takes the lock on its own and both write at once.
"""

from __future__ import annotations

import re
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")

#: File systems on other machines, with the options that make flock local or refuse it.
#: Sources: nfs(5), `local_lock` and `nolock`; mount.lustre(8), `flock`, `localflock`, `noflock`;
#: mount.cifs(8), `nobrl`.
_LOCAL_OPTIONS = {
    "nfs": {"nolock", "local_lock=all", "local_lock=flock"},
    "nfs4": {"nolock", "local_lock=all", "local_lock=flock"},
    "lustre": {"localflock", "noflock"},
    "cifs": {"nobrl"},
    "smb3": {"nobrl"},
}

#: File systems in user space over a network, none of which locks on the other side.
_NEVER_LOCKED = {"fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.goofys", "fuse.rclone"}


def local_locks_reason(path: Path, mounts: str | None = None) -> str:
    """Say why a lock on a file does not keep other machines out; "" where it does.

    `mounts` is the text of /proc/self/mountinfo; where there is none, nothing is known.
    """
    if mounts is None:
        try:
            mounts = _MOUNTS.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
    place, kind, options = _mount_of(path.absolute(), mounts)
    if kind in _NEVER_LOCKED:
        return f"{place} is a {kind} mount, which has no locks that hold on other machines"
    local = sorted(_LOCAL_OPTIONS.get(kind, set()) & options)
    if local:
        return (
            f"{place} is a {kind} mount with the option {local[0]}: its locks hold on this machine "
            "only"
        )
    return ""


def _mount_of(path: Path, mounts: str) -> tuple[str, str, frozenset[str]]:
    """Return the mount point a path is below, its file system and options; "" where unknown."""
    best: tuple[str, str, frozenset[str]] = ("", "", frozenset())
    for line in mounts.splitlines():
        left, separator, right = line.partition(" - ")
        fields, rest = left.split(" "), right.split(" ")
        if not separator or len(fields) < 6 or len(rest) < 3:
            continue
        place = _unescape(fields[4])
        if path.is_relative_to(place) and len(place) >= len(best[0]):  # the last one covers others
            options = frozenset([*fields[5].split(","), *rest[2].split(",")])
            best = (place, rest[0], options)
    return best


def _unescape(text: str) -> str:
    """Return a mount point as it is: the kernel writes blanks and backslashes in octal."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
