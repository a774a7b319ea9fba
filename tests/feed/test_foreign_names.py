"""Shared feed directory in which another user has created entries with the fixed names of the exporter."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from feed_support import new_identity, new_recording
from users_support import without_privileges

from exporter.feed import runs
from exporter.feed.overrides import OverridesReader, has_overrides, read_overrides, write_overrides
from exporter.feed.reader import FeedReader
from exporter.feed.runs import Job, Registration
from exporter.feed.stacks import (
    StackAnswer,
    StackRequest,
    read_answer,
    read_request,
    request_stamp,
    write_answer,
    write_request,
)
from exporter.feed.writer import FeedWriter
from exporter.recording.stacks import Frame, ThreadStack

OWNER, ATTACKER, FRIEND = 65534, 12345, 1000
DISABLING_RULES = '{"version": 1, "rules": [{"match": "*", "enabled": false}]}'
RULES = ({"match": "loss", "enabled": True},)


@pytest.fixture
def shared_directory() -> Iterator[Path]:
    """Yield a directory of root that all users can write to. The test runs as a user without privileges."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o1777)
        with without_privileges():
            yield Path(directory)


@contextmanager
def as_user(uid: int) -> Iterator[None]:
    """Run the body as a different user."""
    os.seteuid(0)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.seteuid(OWNER)


def occupy(*paths: Path, content: str = "", mode: int = 0o644) -> None:
    """Create files of a different user."""
    with as_user(ATTACKER):
        for path in paths:
            path.write_text(content)
            path.chmod(mode)


def alternatives(directory: Path, name: str) -> list[Path]:
    """Return the path of a name, and the path of the alternative name with the user id."""
    path = directory / name
    return [path, path.with_name(f"{path.stem}-{OWNER}{path.suffix}")]


# Stat rules


@pytest.mark.parametrize("taken_count", [1, 2])
def test_rules_of_a_foreign_user_are_ignored_and_rules_of_the_sidecar_apply(
    shared_directory: Path, taken_count: int
) -> None:
    occupy(*alternatives(shared_directory, "overrides.json")[:taken_count], content=DISABLING_RULES)
    reader = OverridesReader(shared_directory)
    assert reader.changed_rules() is None
    assert not has_overrides(shared_directory)
    write_overrides(shared_directory, RULES)

    assert reader.changed_rules() == read_overrides(shared_directory) == RULES
    write_overrides(shared_directory, ())
    assert reader.changed_rules() == ()


def test_rules_of_root_apply_to_every_user_despite_earlier_foreign_rules(shared_directory: Path) -> None:
    occupy(*alternatives(shared_directory, "overrides.json"), content=DISABLING_RULES)
    with as_user(0):
        write_overrides(shared_directory, RULES)

    assert read_overrides(shared_directory) == RULES


def test_the_newest_trusted_rules_apply(shared_directory: Path) -> None:
    occupy(shared_directory / "overrides.json", content=DISABLING_RULES)
    write_overrides(shared_directory, RULES)
    with as_user(0):
        (shared_directory / "overrides.json").unlink()
        write_overrides(shared_directory, RULES + RULES)

    assert read_overrides(shared_directory) == RULES + RULES


def test_a_temporary_file_of_another_user_does_not_prevent_a_write(shared_directory: Path) -> None:
    occupy(shared_directory / "overrides.json.tmp", mode=0o600)
    write_overrides(shared_directory, RULES)

    assert read_overrides(shared_directory) == RULES


# Snapshots


def test_a_temporary_file_of_another_user_does_not_stop_a_process(shared_directory: Path) -> None:
    writer = FeedWriter(shared_directory, new_identity())
    occupy(shared_directory / f"{writer.identity.id}.tmp", mode=0o600)

    assert [writer.publish(new_recording(count=count)) for count in (1, 2)] == [True, True]
    writer.close()
    reader = FeedReader(shared_directory)
    assert reader.ownership.acquire()
    assert [entry.snapshot.sequence for entry in reader.scan().entries] == [2]
    reader.ownership.release()


def test_a_process_whose_feed_file_name_is_taken_continues_under_another_id(shared_directory: Path) -> None:
    writer = FeedWriter(shared_directory, new_identity())
    initial_id = writer.identity.id
    occupy(shared_directory / f"{initial_id}.feed", mode=0o600)
    outcomes = [writer.publish(new_recording(count=count)) for count in (1, 2)]
    entries = FeedReader(shared_directory).scan().entries

    assert outcomes == [False, True]
    assert [entry.snapshot.process.id for entry in entries] == [writer.identity.id] != [initial_id]
    assert not (shared_directory / f"{initial_id}.lock").exists()
    writer.close()


def test_files_of_a_dead_process_are_removed_beside_names_of_another_user(shared_directory: Path) -> None:
    writer = FeedWriter(shared_directory, new_identity())
    writer.publish(new_recording(final=True))
    writer.close()
    stem = shared_directory / writer.identity.id
    occupy(stem.with_suffix(".tmp"), stem.with_suffix(".stacks"), mode=0o600)
    reader = FeedReader(shared_directory)
    assert reader.ownership.acquire()
    reader.scan()

    assert reader.remove(writer.identity.id)
    assert not stem.with_suffix(".feed").exists()
    assert not stem.with_suffix(".lock").exists()
    reader.ownership.release()


# Stacks


@pytest.mark.parametrize("taken_count", [1, 2])
def test_a_foreign_stack_request_is_ignored_and_the_request_of_the_sidecar_is_read(
    shared_directory: Path, taken_count: int
) -> None:
    with as_user(ATTACKER):
        for path in alternatives(shared_directory, "stacks.request")[:taken_count]:
            write_request(str(shared_directory), StackRequest("a" * 32, 1.0), is_shared=True)
            if not path.exists():
                path.write_text("{}")
    assert read_request(str(shared_directory)) is None
    assert request_stamp(str(shared_directory)) is None
    request = StackRequest("b" * 32, 2.0)
    write_request(str(shared_directory), request, is_shared=True)

    assert read_request(str(shared_directory)) == request


@pytest.mark.parametrize("taken_count", [0, 1, 2])
def test_an_answer_is_read_by_root_despite_foreign_files_with_its_name(
    shared_directory: Path, taken_count: int
) -> None:
    writer = FeedWriter(shared_directory, new_identity())
    writer.publish(new_recording())
    process_id = writer.identity.id
    occupy(*alternatives(shared_directory, f"{process_id}.stacks")[:taken_count], content="{}")
    main = ThreadStack("MainThread", (Frame("/job/train.py", 12, "main"),))
    expected_answer = StackAnswer("c" * 32, process_id, 7, 1.0, "r", 0, main)
    write_answer(str(shared_directory), expected_answer)
    with as_user(0):
        answer = read_answer(str(shared_directory), process_id)

    assert answer == expected_answer
    writer.close()


# Launches


@pytest.mark.parametrize(
    "taken_names", [[], ["runs"], ["runs-65534"], ["runs", "runs-65534", "runs-65534-65534"]]
)
def test_a_launch_is_registered_despite_foreign_directories_with_its_name(
    shared_directory: Path, taken_names: list[str]
) -> None:
    with as_user(ATTACKER):
        for name in taken_names:
            (shared_directory / name).mkdir(mode=0o755)
    registration = Registration(shared_directory)
    registration.write_job(Job(os.getpid(), "mine", 1.0, launch="x"))
    with as_user(FRIEND):
        runs_read_by_others = [job.run for job in runs.jobs(shared_directory)]
    registration.write_end(Job(os.getpid(), "mine", 1.0, launch="x"), 0)

    assert [job.run for job in runs.jobs(shared_directory)] == runs_read_by_others == ["mine"]
    assert [end.run for end in runs.process_ends(shared_directory)] == ["mine"]
    assert runs.needs_sidecar(shared_directory)
    registration.release()
    assert not runs.needs_sidecar(shared_directory)


def test_no_other_user_can_take_the_names_of_a_launch(shared_directory: Path) -> None:
    registration = Registration(shared_directory)
    end_file = Path(registration.job_file).with_suffix(".ended")

    with as_user(ATTACKER), pytest.raises(PermissionError):
        end_file.write_text("{}")
    registration.release()


def test_a_foreign_directory_of_launches_without_search_permission_is_ignored(shared_directory: Path) -> None:
    with as_user(ATTACKER):
        foreign_directory = shared_directory / f"runs-{ATTACKER}"
        foreign_directory.mkdir()
        (foreign_directory / "1-00000000.lock").touch()
        foreign_directory.chmod(0o744)  # the names can be listed, and the files are inaccessible

    assert not runs.needs_sidecar(shared_directory)


@pytest.mark.parametrize("number", ["Infinity", "1e999", "9" * 400])
def test_a_report_of_another_user_with_a_number_out_of_range_is_ignored(
    shared_directory: Path, number: str
) -> None:
    registration = Registration(shared_directory)
    job = Job(os.getpid(), "mine", 1.0, launch="x")
    registration.write_job(job)
    registration.write_end(job, 0)
    with as_user(ATTACKER):
        foreign_directory = shared_directory / f"runs-{ATTACKER}"
        foreign_directory.mkdir(mode=0o755)
        for field in ("pid", "started", "status", "at"):
            report = {"pid": "1", "started": "1", "status": "1", "at": "1", "run": '"r"'} | {field: number}
            # json.dumps would not write the number as it is.
            report_json = "{" + ", ".join(f'"{key}": {value}' for key, value in report.items()) + "}"
            (foreign_directory / f"{field}.job").write_text(report_json)
            (foreign_directory / f"{field}.ended").write_text(report_json)

    assert [job.run for job in runs.jobs(shared_directory)] == ["mine"]
    assert "mine" in [end.run for end in runs.process_ends(shared_directory)]
    registration.release()


# Reports


def test_every_foreign_entry_with_a_name_of_the_exporter_is_reported(shared_directory: Path) -> None:
    occupy(
        shared_directory / "owner.lock",
        shared_directory / "overrides.json",
        shared_directory / "stacks.request",
    )
    with as_user(ATTACKER):
        (shared_directory / f"runs-{OWNER}").mkdir()
    reader = FeedReader(shared_directory)
    reader.scan()

    assert {(Path(file.path).name, file.uid) for file in reader.foreign_entries} == {
        ("owner.lock", ATTACKER),
        ("overrides.json", ATTACKER),
        ("stacks.request", ATTACKER),
        (f"runs-{OWNER}", ATTACKER),
    }
