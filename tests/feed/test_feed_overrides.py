from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from feed_support import mounted, needs_root

from exporter.errors import FeedDirectoryError, FeedFormatError
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


def test_what_is_written_is_what_is_read_and_what_recording_takes(tmp_path: Path) -> None:
    write_overrides(tmp_path, RULES)

    read = read_overrides(tmp_path)

    assert read == RULES
    assert check_rules(read)[1] == []


def test_no_file_and_no_directory_are_no_rules(tmp_path: Path) -> None:
    assert read_overrides(tmp_path) is None
    assert read_overrides(tmp_path / "missing") is None
    assert OverridesReader(tmp_path / "missing").changed_rules() is None


def test_a_follower_sees_each_change_once(tmp_path: Path) -> None:
    follower = OverridesReader(tmp_path)
    seen = [follower.changed_rules()]
    for rules in (RULES, RULES[:1], ()):
        write_overrides(tmp_path, rules)
        seen += [follower.changed_rules(), follower.changed_rules()]
    write_overrides(tmp_path, RULES)
    seen.append(follower.changed_rules())
    (tmp_path / "overrides.json").unlink()
    seen += [follower.changed_rules(), follower.changed_rules()]

    assert seen == [None, RULES, None, RULES[:1], None, (), None, RULES, (), None]


def test_a_follower_reports_a_broken_file_once_and_recovers(tmp_path: Path) -> None:
    follower = OverridesReader(tmp_path)
    (tmp_path / "overrides.json").write_text("{")
    with pytest.raises(FeedFormatError):
        follower.changed_rules()

    assert follower.changed_rules() is None
    write_overrides(tmp_path, RULES)
    assert follower.changed_rules() == RULES


def test_keys_of_the_future_are_passed_over(tmp_path: Path) -> None:
    rules = {"version": 1, "rules": [{"match": "a", "later": {}}], "later": 1}
    (tmp_path / "overrides.json").write_text(json.dumps(rules))

    assert read_overrides(tmp_path) == ({"match": "a"},)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "truncated"),
        (b'{"version": 2, "rules": []}', "version"),
        (b'{"version": 1', "content"),
        (b"[]", "content"),
        (b'{"version": 1, "rules": [{"match": "\xff"}]}', "content"),
        (b'{"version": 1, "rules": [{"match": "a", "window_seconds": NaN}]}', "content"),
        (b'{"version": 1, "rules": [{"match": 1}]}', "content"),
        (b'{"version": 1, "rules": [' + b'{"match": "a"},' * 1001 + b'{"match": "a"}]}', "content"),
        (b" " * (1 << 20) + b"{}", "content"),
    ],
)
def test_a_damaged_file_gives_the_documented_error(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "overrides.json").write_bytes(content)

    with pytest.raises(FeedFormatError) as caught:
        read_overrides(tmp_path)

    assert caught.value.reason == reason


def test_a_file_that_everybody_may_write_to_is_refused(tmp_path: Path) -> None:
    write_overrides(tmp_path, RULES)
    (tmp_path / "overrides.json").chmod(0o646)

    with pytest.raises(FeedDirectoryError, match="everybody"):
        read_overrides(tmp_path)


@needs_root
def test_a_file_of_somebody_else_is_refused_in_the_default_directory_only(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    write_overrides(tmp_path, RULES)
    os.chown(tmp_path / "overrides.json", 12345, -1)

    assert read_overrides(tmp_path, trusted=True) == RULES
    with pytest.raises(FeedDirectoryError, match="12345"):
        read_overrides(tmp_path, trusted=False)


def test_the_file_is_private_in_the_default_directory(tmp_path: Path) -> None:
    modes = []
    for trusted in (False, True):
        write_overrides(tmp_path, RULES, trusted=trusted)
        modes.append(stat.S_IMODE((tmp_path / "overrides.json").stat().st_mode) | 0o022)

    assert modes == [0o622, 0o666]
    assert [path.name for path in tmp_path.iterdir()] == ["overrides.json"]


@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"match": "a", "window_seconds": float("nan")},
        {"match": "a", "buckets": [object()]},
    ],
)
def test_rules_that_nobody_could_read_are_not_written(tmp_path: Path, rule: dict[str, Any]) -> None:
    with pytest.raises(FeedFormatError):
        write_overrides(tmp_path, [rule])

    assert not list(tmp_path.iterdir())


def test_a_full_disk_keeps_the_old_rules(tmp_path: Path) -> None:
    with mounted(tmp_path, "-t", "tmpfs", "-o", "size=16k", "tmpfs"):
        write_overrides(tmp_path, RULES)
        with pytest.raises(FeedDirectoryError, match="No space"):
            write_overrides(tmp_path, [{"match": f"{n}" * 500} for n in range(10, 30)])

        assert read_overrides(tmp_path) == RULES
        assert [path.name for path in tmp_path.iterdir()] == ["overrides.json"]
