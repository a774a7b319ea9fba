"""Stat rules, which the sidecar writes into the feed directory."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

import pytest
from feed_support import mounted_filesystem, needs_root, redirect_default_directory

from exporter.errors import FeedDirectoryError, FeedFormatError
from exporter.feed import files
from exporter.feed.overrides import OverridesReader, read_overrides, write_overrides
from exporter.recording.definition import check_rules

RULES = (
    {"match": "train.*", "enabled": False},
    {
        "match": "loss",
        "aggregations": ["mean", "p95"],
        "window_seconds": 10.5,
        "window_samples": None,
        "buckets": [0.1, 1],
    },
)


@pytest.fixture
def missing_default_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the user's default directory, which does not exist."""
    return redirect_default_directory(tmp_path, monkeypatch)


def test_rules_round_trip_and_are_accepted_by_recording(tmp_path: Path) -> None:
    assert read_overrides(tmp_path) is read_overrides(tmp_path / "missing") is None
    write_overrides(tmp_path, RULES)

    overrides = read_overrides(tmp_path)

    assert overrides == RULES
    assert check_rules(overrides)[1] == []


def test_a_reader_returns_each_change_and_each_broken_file_once(tmp_path: Path) -> None:
    reader = OverridesReader(tmp_path)
    changes = [OverridesReader(tmp_path / "missing").changed_rules(), reader.changed_rules()]
    for rules in (RULES, RULES[:1], ()):
        write_overrides(tmp_path, rules)
        changes += [reader.changed_rules(), reader.changed_rules()]
    (tmp_path / "overrides.json").write_text("{")
    with pytest.raises(FeedFormatError):
        reader.changed_rules()
    changes.append(reader.changed_rules())
    write_overrides(tmp_path, RULES)
    changes.append(reader.changed_rules())
    (tmp_path / "overrides.json").unlink()
    changes += [reader.changed_rules(), reader.changed_rules()]

    assert changes == [None, None, RULES, None, RULES[:1], None, (), None, None, RULES, (), None]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "content"),
        (b'{"version": 2, "rules": []}', "version"),
        (b"[]", "content"),
        (b'{"version": 1, "rules": [{"match": "\xff"}]}', "content"),
        (b'{"version": 1, "rules": [{"match": 1}]}', "content"),
        (b" " * (1 << 20) + b"{}", "too_large"),
    ],
)
def test_a_damaged_file_of_rules_gives_the_documented_error(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    (tmp_path / "overrides.json").write_bytes(content)

    with pytest.raises(FeedFormatError) as error_info:
        read_overrides(tmp_path)

    assert error_info.value.reason == reason


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSPC, "free some space there"),
        (errno.EACCES, "make the directory writable, or remove overrides.json"),
    ],
)
def test_rules_that_cannot_be_written_have_a_remedy_for_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, remedy: str
) -> None:
    def fail(*_args: object, **_options: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("exporter.feed.overrides.replace_file", fail)

    with pytest.raises(FeedDirectoryError, match=os.strerror(code)) as error_info:
        write_overrides(tmp_path, RULES)
    assert error_info.value.remedy == remedy


def test_world_writable_rules_are_refused(tmp_path: Path) -> None:
    write_overrides(tmp_path, RULES)
    (tmp_path / "overrides.json").chmod(0o646)

    with pytest.raises(FeedDirectoryError, match="all users can write"):
        read_overrides(tmp_path)


@needs_root
def test_rules_are_private_in_the_default_directory_and_those_of_another_user_are_refused(
    missing_default_directory: Path, tmp_path: Path
) -> None:
    missing_default_directory.mkdir(mode=0o700)
    for directory in (missing_default_directory, tmp_path):
        write_overrides(directory, RULES)
    modes = [
        stat.S_IMODE((directory / "overrides.json").stat().st_mode) | 0o022
        for directory in (missing_default_directory, tmp_path)
    ]
    for directory in (missing_default_directory, tmp_path):
        os.chown(directory / "overrides.json", 12345, -1)

    assert modes == [0o622, 0o666]
    for directory in (missing_default_directory, tmp_path):
        with pytest.raises(FeedDirectoryError, match="12345"):
            read_overrides(directory)


def test_a_directory_that_is_removed_while_the_rules_are_read_has_no_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "feed"
    directory.mkdir()
    write_overrides(directory, RULES)

    def read_and_remove_directory(path: str, limit: int) -> tuple[bytes, os.stat_result]:
        content = files.read_file(path, limit)
        shutil.rmtree(directory)
        return content

    monkeypatch.setattr("exporter.feed.overrides.read_file", read_and_remove_directory)

    assert read_overrides(directory) is None


def test_a_full_disk_keeps_the_old_rules(tmp_path: Path) -> None:
    with mounted_filesystem(tmp_path, "-t", "tmpfs", "-o", "size=16k", "tmpfs"):
        write_overrides(tmp_path, RULES)
        with pytest.raises(FeedDirectoryError, match="No space"):
            write_overrides(tmp_path, [{"match": f"{number}" * 500} for number in range(10, 30)])

        assert read_overrides(tmp_path) == RULES
        assert [path.name for path in tmp_path.iterdir()] == ["overrides.json"]
