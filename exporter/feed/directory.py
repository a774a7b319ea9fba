"""The feed directory: where it is, and whether it may be used.

Used in training processes and in the sidecar. The default one, `/dev/shm/exporter-<uid>` (`/tmp/exporter-<uid>` where
there is no `/dev/shm`), is made with permissions 0700 and refused when it is not ours. A directory given by flag or
`$EXPORTER_FEED_DIR` is trusted, since shared volumes and node-wide sidecars need other owners; it must exist. The feed
needs Linux: elsewhere every directory is refused, and recording goes on without a feed.
"""
# one kind of path within the folder, which the job and the sidecar share:
# ruff: noqa: PTH100, PTH101, PTH102, PTH112, PTH116, PTH118

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from exporter.errors import FeedDirectoryError


def own_uid() -> int:
    """Give the user id that this process creates files with."""
    return os.geteuid() if hasattr(os, "geteuid") else 0  # Windows has none, and is refused below


def default_path(uid: int, *, shared_memory: str = "/dev/shm", fallback: str = "/tmp") -> str:  # noqa: S108  # checked before use
    """Name the directory that the processes of a user share when nobody chose one."""
    return os.path.join(shared_memory if os.path.isdir(shared_memory) else fallback, f"exporter-{uid}")


def default_directory(uid: int) -> Path:
    """Give `default_path` as a Path, for the sidecar."""
    return Path(default_path(uid))


def is_trusted(path: str | os.PathLike[str], uid: int) -> bool:
    """Say whether somebody chose this directory, as opposed to the default one of the user."""
    return os.path.abspath(path) != default_path(uid)


def feed_directory(environment: Mapping[str, str]) -> str:
    """Find the directory of this process, `$EXPORTER_FEED_DIR`, else the default one, and prepare it.

    Raises:
        FeedDirectoryError: It must not or cannot be used.
    """
    uid = own_uid()
    path = environment.get("EXPORTER_FEED_DIR") or default_path(uid)
    prepare_directory(path, trusted=is_trusted(path, uid), uid=uid)
    return path


def prepare_directory(path: str | os.PathLike[str], *, trusted: bool, uid: int) -> None:
    """Make the default directory if it is missing, and check either kind as `check_directory` does."""
    name = os.fspath(path)
    if not trusted and sys.platform == "linux":
        try:
            os.mkdir(name, 0o700)
            os.chmod(name, 0o700)
        except FileExistsError:
            pass
        except OSError as error:
            raise FeedDirectoryError(
                f"cannot create the feed directory ({error.strerror})",
                path=name,
                remedy="choose another with --feed.dir and EXPORTER_FEED_DIR",
            ) from error
    check_directory(name, trusted=trusted, uid=uid)


def check_directory(path: str | os.PathLike[str], *, trusted: bool, uid: int) -> None:
    """Check a directory and change nothing.

    Raises:
        FeedDirectoryError: It must not or cannot be used.
    """
    name = os.fspath(path)
    if sys.platform != "linux":
        raise FeedDirectoryError(
            f"the feed needs Linux, this is {sys.platform}",
            path=name,
            remedy="statistics are recorded, but nothing can export them from here",
        )
    try:
        found = os.stat(name, follow_symlinks=trusted)
    except FileNotFoundError as error:
        remedy = f"create it: mkdir -p -m 0700 {name}" if trusted else "it is made when the first job records"
        raise FeedDirectoryError("there is no feed directory", path=name, remedy=remedy) from error
    except OSError as error:
        raise _refusal(f"cannot look at the feed directory ({error.strerror})", name) from error
    if not stat.S_ISDIR(found.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a directory"
        raise _refusal(f"the feed directory is {kind}", name)
    if trusted:
        return
    if found.st_uid != uid:
        raise _refusal(f"the feed directory belongs to uid {found.st_uid}, not to uid {uid}", name)
    if found.st_mode & 0o022:
        raise FeedDirectoryError(
            f"others may write to the feed directory (mode {stat.S_IMODE(found.st_mode):04o})",
            path=name,
            remedy=f"take that from them: chmod 0700 {name}",
        )


def _refusal(message: str, path: str) -> FeedDirectoryError:
    return FeedDirectoryError(
        message, path=path, remedy="remove it, or choose another with --feed.dir and EXPORTER_FEED_DIR"
    )
