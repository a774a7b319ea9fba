"""Path and checks of the feed directory.

Used in training processes and in the sidecar. The default directory is refused if it is a symbolic link, belongs to another user,
or if other users can write to it. A configured directory at any other path is trusted. On systems other than Linux there is no
feed: every directory is refused.
"""
# This package uses string paths in the job and in the sidecar.
# ruff: noqa: PTH100, PTH101, PTH102, PTH112, PTH116

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from exporter.errors import FeedDirectoryError

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - checked before use
FALLBACK = "/tmp"  # noqa: S108 - checked before use
_CHOOSE_ANOTHER = "choose a different directory with --feed.dir and EXPORTER_FEED_DIR"


def own_uid() -> int:
    """Return the user id of files that this process creates."""
    # Windows has no user ids; `check_directory` refuses every directory there.
    return os.geteuid() if hasattr(os, "geteuid") else 0


def default_directory() -> Path:
    """Return the feed directory of this user, which is used if no directory is configured."""
    return Path(SHARED_MEMORY if os.path.isdir(SHARED_MEMORY) else FALLBACK, f"exporter-{own_uid()}")


def is_trusted(path: str | os.PathLike[str]) -> bool:
    """Return False for the path of the default directory, configured or not, and True for all other paths."""
    return os.path.abspath(path) != str(default_directory())


def feed_directory(environment: Mapping[str, str]) -> str:
    """Prepare the feed directory (`$EXPORTER_FEED_DIR`, otherwise the default), and return its path.

    Raises `FeedDirectoryError` if the directory cannot be used.
    """
    path = environment.get("EXPORTER_FEED_DIR") or str(default_directory())
    prepare_directory(path)
    return path


def prepare_directory(path: str | os.PathLike[str]) -> None:
    """Create a missing directory with mode 0700, and check the directory.

    Raises `FeedDirectoryError` if the directory cannot be used, or if its parent is missing.
    """
    if sys.platform == "linux" and not os.path.isdir(path):
        try:
            os.mkdir(path, 0o700)
            os.chmod(path, 0o700)
        except FileExistsError:
            pass
        except OSError as error:
            raise refusal(
                f"cannot create the feed directory ({error.strerror})", path, _CHOOSE_ANOTHER
            ) from error
    check_directory(path)


def check_directory(path: str | os.PathLike[str]) -> None:
    """Raise `FeedDirectoryError` if a directory cannot be used."""
    if sys.platform != "linux":
        remedy = "statistics are recorded, but cannot be exported on this system"
        raise refusal(f"the feed needs Linux, this is {sys.platform}", path, remedy)
    is_trusted_path = is_trusted(path)
    try:
        status = os.stat(path, follow_symlinks=is_trusted_path)
    except FileNotFoundError as error:
        remedy = (
            f"create it: mkdir -p -m 0700 {path}" if is_trusted_path else "the first recording job creates it"
        )
        raise refusal("the feed directory does not exist", path, remedy) from error
    except OSError as error:
        raise refusal(f"cannot access the feed directory ({error.strerror})", path) from error
    if not stat.S_ISDIR(status.st_mode):
        description = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a directory"
        raise refusal(f"the feed directory is {description}", path)
    if not is_trusted_path and status.st_uid != own_uid():
        raise refusal(f"the feed directory belongs to uid {status.st_uid}, not to uid {own_uid()}", path)
    if not is_trusted_path and status.st_mode & 0o022:
        problem = f"other users can write to the feed directory (mode {stat.S_IMODE(status.st_mode):04o})"
        raise refusal(problem, path, f"remove the permission: chmod 0700 {path}")


def refusal(
    message: str, path: str | os.PathLike[str], remedy: str = f"remove it, or {_CHOOSE_ANOTHER}"
) -> FeedDirectoryError:
    """Return the error of an unusable directory."""
    return FeedDirectoryError(message, path=os.fspath(path), remedy=remedy)
