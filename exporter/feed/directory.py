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

SHARED_MEMORY = "/dev/shm"  # noqa: S108  # checked before use
FALLBACK = "/tmp"  # noqa: S108  # likewise
_ANOTHER = "choose another with --feed.dir and EXPORTER_FEED_DIR"


def own_uid() -> int:
    """Give the user id that this process creates files with."""
    return os.geteuid() if hasattr(os, "geteuid") else 0  # Windows has none, and is refused below


def default_path() -> str:
    """Name the directory that the processes of this user share when nobody chose one."""
    parent = SHARED_MEMORY if os.path.isdir(SHARED_MEMORY) else FALLBACK
    return os.path.join(parent, f"exporter-{own_uid()}")


def default_directory() -> Path:
    """Give `default_path` as a Path, for the sidecar."""
    return Path(default_path())


def is_trusted(path: str | os.PathLike[str]) -> bool:
    """Say whether somebody chose this directory, as opposed to the default one of the user."""
    return os.path.abspath(path) != default_path()


def feed_directory(environment: Mapping[str, str]) -> str:
    """Find the directory of this process, `$EXPORTER_FEED_DIR`, else the default one, and prepare it.

    Raises:
        FeedDirectoryError: It must not or cannot be used.
    """
    path = environment.get("EXPORTER_FEED_DIR") or default_path()
    prepare_directory(path)
    return path


def prepare_directory(path: str | os.PathLike[str]) -> None:
    """Make the default directory if it is missing, and check either kind as `check_directory` does."""
    if sys.platform == "linux" and not is_trusted(path):
        try:
            os.mkdir(path, 0o700)
            os.chmod(path, 0o700)
        except FileExistsError:
            pass
        except OSError as error:
            raise _refusal(f"cannot create the feed directory ({error.strerror})", path, _ANOTHER) from error
    check_directory(path)


def check_directory(path: str | os.PathLike[str]) -> None:
    """Check a directory and change nothing.

    Raises:
        FeedDirectoryError: It must not or cannot be used.
    """
    if sys.platform != "linux":
        remedy = "statistics are recorded, but nothing can export them from here"
        raise _refusal(f"the feed needs Linux, this is {sys.platform}", path, remedy)
    trusted = is_trusted(path)
    try:
        found = os.stat(path, follow_symlinks=trusted)
    except FileNotFoundError as error:
        remedy = f"create it: mkdir -p -m 0700 {path}" if trusted else "it is made when the first job records"
        raise _refusal("there is no feed directory", path, remedy) from error
    except OSError as error:
        raise _refusal(f"cannot look at the feed directory ({error.strerror})", path) from error
    if not stat.S_ISDIR(found.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a directory"
        raise _refusal(f"the feed directory is {kind}", path)
    if trusted:
        return
    if found.st_uid != own_uid():
        raise _refusal(f"the feed directory belongs to uid {found.st_uid}, not to uid {own_uid()}", path)
    if found.st_mode & 0o022:
        told = f"others may write to the feed directory (mode {stat.S_IMODE(found.st_mode):04o})"
        raise _refusal(told, path, f"take that from them: chmod 0700 {path}")


def _refusal(
    message: str, path: str | os.PathLike[str], remedy: str = f"remove it, or {_ANOTHER}"
) -> FeedDirectoryError:
    return FeedDirectoryError(message, path=os.fspath(path), remedy=remedy)
