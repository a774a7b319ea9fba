"""Commands and blocks of code as another user, for tests that run as root."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY = 65534
"""User id of `nobody`."""


def command_as_user(command: Sequence[str | Path], uid: int = NOBODY) -> list[str]:
    """Return a command that runs another command as an unprivileged user, in a mount namespace of its own.

    The interpreter may be below a directory that other users cannot enter, such as /root. In the mount namespace, an empty directory that
    they can enter then replaces this directory, with only the interpreter's directory in it.
    """
    prefix = Path(sys.base_prefix).resolve()
    closed_parent = next(
        (parent for parent in reversed(prefix.parents) if not parent.stat().st_mode & 0o001), None
    )
    mounts = "true"
    if closed_parent is not None:
        quoted_prefix, quoted_parent = shlex.quote(str(prefix)), shlex.quote(str(closed_parent))
        # $copy keeps the interpreter's directory reachable while the tmpfs hides it.
        mounts = (
            f"copy=$(mktemp -d) && mount --bind {quoted_prefix} $copy"
            f" && mount -t tmpfs -o mode=755 tmpfs {quoted_parent}"
            f" && mkdir -p {quoted_prefix} && mount --bind $copy {quoted_prefix} && umount $copy && rmdir $copy"
        )
    identity = f"--reuid={uid} --regid={uid} --clear-groups"
    script = f'{mounts} && exec setpriv {identity} -- "$@"'
    return ["unshare", "--mount", "sh", "-c", script, "sh", *map(str, command)]


def reason_to_skip() -> str:
    """Return the reason why commands cannot run as another user, or "" if they can."""
    if os.geteuid() != 0:
        return "only root can become another user"
    if shutil.which("unshare") is None or shutil.which("setpriv") is None:
        return "needs unshare and setpriv (util-linux)"
    command = command_as_user([sys.executable, "-c", "import exporter"])
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", timeout=60)
    return (
        f"{sys.executable} does not run as another user: {result.stderr.strip()}" if result.returncode else ""
    )


@contextmanager
def without_privileges() -> Iterator[None]:
    """Run a block as the effective user `nobody`, who cannot read private files of root. Skip the test unless it runs as root."""
    if os.geteuid() != 0:
        pytest.skip("only root can change to another user")
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
