from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest
from feed_support import needs_root

from exporter.errors import FeedDirectoryError
from exporter.feed.directory import (
    default_directory,
    default_path,
    feed_directory,
    is_trusted,
    prepare_directory,
)

UID = os.geteuid()


def test_the_default_directory_is_in_shared_memory_and_named_by_the_user(tmp_path: Path) -> None:
    missing = str(tmp_path / "none")

    assert default_directory(1000) == Path("/dev/shm/exporter-1000")
    assert default_path(7, shared_memory=missing, fallback=str(tmp_path)) == f"{tmp_path}/exporter-7"


def test_only_the_default_directory_of_the_user_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/dev/shm")

    assert not is_trusted("/dev/shm/exporter-1000", 1000)
    assert not is_trusted("exporter-1000/", 1000)
    assert is_trusted("/dev/shm/exporter-1000", 1001)


def test_the_default_directory_is_made_private_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "feed"
    previous = os.umask(0o777)
    try:
        prepare_directory(path, trusted=False, uid=UID)
    finally:
        os.umask(previous)

    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    prepare_directory(path, trusted=False, uid=UID)  # and again is no error


@pytest.mark.parametrize("kind", ["symlink", "dangling symlink", "file"])
def test_a_default_directory_that_is_none_is_refused(tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / "feed", tmp_path / "other"
    if kind == "file":
        path.touch()
    else:
        path.symlink_to(other)
    if kind == "symlink":
        other.mkdir(mode=0o700)

    with pytest.raises(FeedDirectoryError) as caught:
        prepare_directory(path, trusted=False, uid=UID)

    assert caught.value.path == str(path)
    assert "--feed.dir" in caught.value.remedy


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777])
def test_a_default_directory_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "feed"
    path.mkdir()
    path.chmod(mode)

    with pytest.raises(FeedDirectoryError, match=f"{mode:04o}"):
        prepare_directory(path, trusted=False, uid=UID)


@needs_root
def test_a_default_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "feed"
    path.mkdir(mode=0o700)
    os.chown(path, 12345, -1)

    with pytest.raises(FeedDirectoryError, match="belongs to uid 12345"):
        prepare_directory(path, trusted=False, uid=UID)


def test_a_chosen_directory_may_be_anybodys_but_must_exist(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    with pytest.raises(FeedDirectoryError, match="mkdir -p"):
        prepare_directory(shared, trusted=True, uid=UID)
    shared.mkdir()
    shared.chmod(0o777)
    (tmp_path / "link").symlink_to(shared)

    prepare_directory(shared, trusted=True, uid=UID + 1)
    prepare_directory(tmp_path / "link", trusted=True, uid=UID)


def test_off_linux_every_directory_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")

    with pytest.raises(FeedDirectoryError, match="needs Linux"):
        prepare_directory(tmp_path / "feed", trusted=False, uid=UID)

    assert not list(tmp_path.iterdir())


def test_a_process_finds_its_directory_in_the_environment_or_learns_what_is_wrong(tmp_path: Path) -> None:
    assert feed_directory({"EXPORTER_FEED_DIR": str(tmp_path)}) == str(tmp_path)
    assert feed_directory({"EXPORTER_FEED_DIR": ""}) == default_path(UID)
    with pytest.raises(FeedDirectoryError):
        feed_directory({"EXPORTER_FEED_DIR": str(tmp_path / "missing")})
