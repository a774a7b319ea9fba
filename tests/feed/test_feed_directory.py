"""Feed directory: default, configured and refused directories."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from feed_support import needs_root, redirect_default_directory

from exporter.errors import FeedDirectoryError
from exporter.feed import directory
from exporter.feed.directory import default_directory, feed_directory, is_trusted, prepare_directory

UID = os.geteuid()


@pytest.fixture
def missing_default_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the user's default directory, which does not exist."""
    return redirect_default_directory(tmp_path, monkeypatch)


def test_the_default_directory_is_in_shared_memory_and_named_by_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir("/dev/shm")

    assert str(default_directory()) == f"/dev/shm/exporter-{UID}"
    assert not is_trusted(default_directory())
    assert not is_trusted(f"exporter-{UID}/")
    assert is_trusted("/dev/shm/exporter-12345")
    monkeypatch.setattr(directory, "SHARED_MEMORY", "/dev/none")
    assert str(default_directory()) == f"/tmp/exporter-{UID}"


def test_the_default_directory_is_private_for_any_umask(missing_default_directory: Path) -> None:
    previous = os.umask(0o777)
    try:
        prepare_directory(missing_default_directory)
    finally:
        os.umask(previous)

    assert stat.S_IMODE(missing_default_directory.stat().st_mode) == 0o700
    prepare_directory(missing_default_directory)  # a second call succeeds


def create_foreign_directory(path: Path) -> None:
    path.mkdir()
    os.chown(path, 12345, -1)


@pytest.mark.parametrize(
    ("create_entry", "problem"),
    [
        (lambda path: path.touch(), "not a directory"),
        (lambda path: path.symlink_to(path.parent), "symbolic link"),
        (lambda path: path.symlink_to("nowhere"), "symbolic link"),
        (lambda path: path.mkdir() or path.chmod(0o720), "0720"),
        (lambda path: path.mkdir() or path.chmod(0o702), "0702"),
        (lambda path: path.mkdir() or path.chmod(0o1777), "1777"),
        pytest.param(create_foreign_directory, "uid 12345", marks=needs_root),
    ],
)
def test_a_default_directory_that_is_not_private_is_refused(
    missing_default_directory: Path, create_entry: Callable[[Path], object], problem: str
) -> None:
    create_entry(missing_default_directory)

    with pytest.raises(FeedDirectoryError, match=problem) as error_info:
        prepare_directory(missing_default_directory)

    assert (error_info.value.path, bool(error_info.value.remedy)) == (str(missing_default_directory), True)


def test_a_chosen_directory_is_created_if_its_parent_exists(tmp_path: Path) -> None:
    prepare_directory(tmp_path / "chosen")

    assert stat.S_IMODE((tmp_path / "chosen").stat().st_mode) == 0o700
    with pytest.raises(FeedDirectoryError, match="No such file"):
        prepare_directory(tmp_path / "missing" / "chosen")


def test_a_chosen_directory_may_belong_to_any_user(tmp_path: Path) -> None:
    shared_directory = tmp_path / "shared"
    shared_directory.mkdir()
    shared_directory.chmod(0o777)
    (tmp_path / "link").symlink_to(shared_directory)

    prepare_directory(shared_directory)
    prepare_directory(tmp_path / "link")


def test_without_linux_every_directory_is_refused_with_the_reason(
    missing_default_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")

    with pytest.raises(FeedDirectoryError, match="needs Linux"):
        prepare_directory(missing_default_directory)

    assert not missing_default_directory.exists()


def test_the_environment_names_the_directory_and_an_unusable_directory_raises(
    missing_default_directory: Path, tmp_path: Path
) -> None:
    assert feed_directory({"EXPORTER_FEED_DIR": str(tmp_path)}) == str(tmp_path)
    assert feed_directory({"EXPORTER_FEED_DIR": ""}) == str(missing_default_directory)
    with pytest.raises(FeedDirectoryError):
        feed_directory({"EXPORTER_FEED_DIR": str(tmp_path / "missing" / "feed")})
