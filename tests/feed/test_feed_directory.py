"""The feed directory, chosen or default, and the rules that the sidecar leaves in it."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from feed_support import make_default, mounted, needs_root

from exporter.errors import FeedDirectoryError, FeedFormatError
from exporter.feed import directory
from exporter.feed.directory import (
    OverridesReader,
    default_directory,
    feed_directory,
    is_trusted,
    prepare_directory,
    read_overrides,
    write_overrides,
)
from exporter.recording.definition import check_rules

UID = os.geteuid()
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
def default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's default directory, which is missing."""
    return make_default(tmp_path, monkeypatch)


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


def test_the_default_directory_is_made_private_whatever_the_umask(default: Path) -> None:
    previous = os.umask(0o777)
    try:
        prepare_directory(default)
    finally:
        os.umask(previous)

    assert stat.S_IMODE(default.stat().st_mode) == 0o700
    prepare_directory(default)  # a second call is no error


def give_away(path: Path) -> None:
    path.mkdir()
    os.chown(path, 12345, -1)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: path.touch(), "not a directory"),
        (lambda path: path.symlink_to(path.parent), "symbolic link"),
        (lambda path: path.symlink_to("nowhere"), "symbolic link"),
        (lambda path: path.mkdir() or path.chmod(0o720), "0720"),
        (lambda path: path.mkdir() or path.chmod(0o702), "0702"),
        (lambda path: path.mkdir() or path.chmod(0o1777), "1777"),
        pytest.param(give_away, "uid 12345", marks=needs_root),
    ],
)
def test_a_default_directory_that_is_not_private_is_refused(
    default: Path, make: Callable[[Path], object], problem: str
) -> None:
    make(default)

    with pytest.raises(FeedDirectoryError, match=problem) as caught:
        prepare_directory(default)

    assert (caught.value.path, bool(caught.value.remedy)) == (str(default), True)


def test_a_chosen_directory_is_created_if_its_parent_exists(tmp_path: Path) -> None:
    prepare_directory(tmp_path / "chosen")

    assert stat.S_IMODE((tmp_path / "chosen").stat().st_mode) == 0o700
    with pytest.raises(FeedDirectoryError, match="No such file"):
        prepare_directory(tmp_path / "missing" / "chosen")


def test_a_chosen_directory_may_belong_to_any_user(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    (tmp_path / "link").symlink_to(shared)

    prepare_directory(shared)
    prepare_directory(tmp_path / "link")


def test_off_linux_every_directory_is_refused_with_the_reason(
    default: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")

    with pytest.raises(FeedDirectoryError, match="needs Linux"):
        prepare_directory(default)

    assert not default.exists()


def test_a_process_takes_its_directory_from_the_environment_or_gets_the_reason(
    default: Path, tmp_path: Path
) -> None:
    assert feed_directory({"EXPORTER_FEED_DIR": str(tmp_path)}) == str(tmp_path)
    assert feed_directory({"EXPORTER_FEED_DIR": ""}) == str(default)
    with pytest.raises(FeedDirectoryError):
        feed_directory({"EXPORTER_FEED_DIR": str(tmp_path / "missing" / "feed")})


# Rules


def test_rules_round_trip_and_are_accepted_by_recording(tmp_path: Path) -> None:
    assert read_overrides(tmp_path) is read_overrides(tmp_path / "missing") is None
    write_overrides(tmp_path, RULES)

    read = read_overrides(tmp_path)

    assert read == RULES
    assert check_rules(read)[1] == []


def test_a_follower_sees_each_change_and_each_broken_file_once(tmp_path: Path) -> None:
    follower = OverridesReader(tmp_path)
    seen = [OverridesReader(tmp_path / "missing").changed_rules(), follower.changed_rules()]
    for rules in (RULES, RULES[:1], ()):
        write_overrides(tmp_path, rules)
        seen += [follower.changed_rules(), follower.changed_rules()]
    (tmp_path / "overrides.json").write_text("{")
    with pytest.raises(FeedFormatError):
        follower.changed_rules()
    seen.append(follower.changed_rules())
    write_overrides(tmp_path, RULES)
    seen.append(follower.changed_rules())
    (tmp_path / "overrides.json").unlink()
    seen += [follower.changed_rules(), follower.changed_rules()]

    assert seen == [None, None, RULES, None, RULES[:1], None, (), None, None, RULES, (), None]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "content"),
        (b'{"version": 2, "rules": []}', "version"),
        (b"[]", "content"),
        (b'{"version": 1, "rules": [{"match": "\xff"}]}', "content"),
        (b'{"version": 1, "rules": [{"match": 1}]}', "content"),
        (b" " * (1 << 20) + b"{}", "content"),
    ],
)
def test_a_damaged_file_of_rules_gives_the_documented_error(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    (tmp_path / "overrides.json").write_bytes(content)

    with pytest.raises(FeedFormatError) as caught:
        read_overrides(tmp_path)

    assert caught.value.reason == reason


def test_world_writable_rules_are_refused(tmp_path: Path) -> None:
    write_overrides(tmp_path, RULES)
    (tmp_path / "overrides.json").chmod(0o646)

    with pytest.raises(FeedDirectoryError, match="everybody"):
        read_overrides(tmp_path)


@needs_root
def test_rules_are_private_in_the_default_directory_and_those_of_another_user_are_refused(
    default: Path, tmp_path: Path
) -> None:
    default.mkdir(mode=0o700)
    for where in (default, tmp_path):
        write_overrides(where, RULES)
    modes = [stat.S_IMODE((where / "overrides.json").stat().st_mode) | 0o022 for where in (default, tmp_path)]
    for where in (default, tmp_path):
        os.chown(where / "overrides.json", 12345, -1)

    assert modes == [0o622, 0o666]
    for where in (default, tmp_path):
        with pytest.raises(FeedDirectoryError, match="12345"):
            read_overrides(where)


def test_a_full_disk_keeps_the_old_rules(tmp_path: Path) -> None:
    with mounted(tmp_path, "-t", "tmpfs", "-o", "size=16k", "tmpfs"):
        write_overrides(tmp_path, RULES)
        with pytest.raises(FeedDirectoryError, match="No space"):
            write_overrides(tmp_path, [{"match": f"{n}" * 500} for n in range(10, 30)])

        assert read_overrides(tmp_path) == RULES
        assert [path.name for path in tmp_path.iterdir()] == ["overrides.json"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner of a file")
def test_rules_of_another_user_in_a_shared_directory_are_not_followed(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    rules = tmp_path / "overrides.json"
    rules.write_text('{"version": 1, "rules": [{"match": "*", "enabled": false}]}')
    os.chown(rules, 1234, 1234)

    with pytest.raises(FeedDirectoryError, match="belongs to uid 1234"):
        read_overrides(tmp_path)
