"""Fixed names of a shared feed directory that another user has taken first."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from energy_support import no_processes
from feed_support import new_identity, new_recording

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
OFF = '{"version": 1, "rules": [{"match": "*", "enabled": false}]}'
RULES = ({"match": "loss", "enabled": True},)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory of root that every user can write to; the test is a user without rights."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o1777)
        with no_processes():
            yield Path(directory)


@contextmanager
def user(uid: int) -> Iterator[None]:
    """Be another user."""
    os.seteuid(0)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.seteuid(OWNER)


def occupy(*paths: Path, content: str = "", mode: int = 0o644) -> None:
    """Make files of another user."""
    with user(ATTACKER):
        for path in paths:
            path.write_text(content)
            path.chmod(mode)


def alternatives(directory: Path, name: str) -> list[Path]:
    """Return the name, and the name with the own user id."""
    path = directory / name
    return [path, path.with_name(f"{path.stem}-{OWNER}{path.suffix}")]


# Recording rules


@pytest.mark.parametrize("taken_count", [1, 2])
def test_rules_of_another_user_are_not_obeyed_and_the_sidecar_s_are(shared: Path, taken_count: int) -> None:
    occupy(*alternatives(shared, "overrides.json")[:taken_count], content=OFF)
    reader = OverridesReader(shared)
    initial = reader.changed_rules(), has_overrides(shared)
    write_overrides(shared, RULES)

    assert initial == (None, False)
    assert reader.changed_rules() == read_overrides(shared) == RULES
    write_overrides(shared, ())
    assert reader.changed_rules() == ()


def test_rules_of_root_count_for_every_user_though_another_user_came_first(shared: Path) -> None:
    occupy(*alternatives(shared, "overrides.json"), content=OFF)
    with user(0):
        write_overrides(shared, RULES)

    assert read_overrides(shared) == RULES


def test_the_newest_rules_that_count_are_obeyed(shared: Path) -> None:
    occupy(shared / "overrides.json", content=OFF)
    write_overrides(shared, RULES)
    with user(0):
        (shared / "overrides.json").unlink()
        write_overrides(shared, RULES + RULES)

    assert read_overrides(shared) == RULES + RULES


def test_a_temporary_file_of_another_user_does_not_prevent_a_write(shared: Path) -> None:
    occupy(shared / "overrides.json.tmp", mode=0o600)
    write_overrides(shared, RULES)

    assert read_overrides(shared) == RULES


# Snapshots


def test_a_temporary_file_of_another_user_does_not_stop_a_process(shared: Path) -> None:
    writer = FeedWriter(shared, new_identity())
    occupy(shared / f"{writer.identity.id}.tmp", mode=0o600)

    assert [writer.publish(new_recording(count=count)) for count in (1, 2)] == [True, True]
    writer.close()
    reader = FeedReader(shared)
    assert reader.ownership.acquire()
    assert [entry.snapshot.sequence for entry in reader.scan().entries] == [2]
    reader.ownership.release()


def test_a_process_whose_feed_file_name_is_taken_continues_under_another_id(shared: Path) -> None:
    writer = FeedWriter(shared, new_identity())
    initial_id = writer.identity.id
    occupy(shared / f"{initial_id}.feed", mode=0o600)
    published = [writer.publish(new_recording(count=count)) for count in (1, 2)]
    entries = FeedReader(shared).scan().entries

    assert published == [False, True]
    assert [entry.snapshot.process.id for entry in entries] == [writer.identity.id] != [initial_id]
    assert not (shared / f"{initial_id}.lock").exists()
    writer.close()


def test_files_of_a_dead_process_are_removed_beside_names_of_another_user(shared: Path) -> None:
    writer = FeedWriter(shared, new_identity())
    writer.publish(new_recording(final=True))
    writer.close()
    stem = shared / writer.identity.id
    occupy(stem.with_suffix(".tmp"), stem.with_suffix(".stacks"), mode=0o600)
    reader = FeedReader(shared)
    assert reader.ownership.acquire()
    reader.scan()

    assert reader.remove(writer.identity.id)
    assert not stem.with_suffix(".feed").exists()
    assert not stem.with_suffix(".lock").exists()
    reader.ownership.release()


# Stacks


@pytest.mark.parametrize("taken_count", [1, 2])
def test_a_stack_request_of_another_user_is_ignored_and_the_sidecar_s_is_read(
    shared: Path, taken_count: int
) -> None:
    with user(ATTACKER):
        for path in alternatives(shared, "stacks.request")[:taken_count]:
            write_request(str(shared), StackRequest("a" * 32, 1.0), shared=True)
            if not path.exists():
                path.write_text("{}")
    initial = read_request(str(shared)), request_stamp(str(shared))
    request = StackRequest("b" * 32, 2.0)
    write_request(str(shared), request, shared=True)

    assert initial == (None, None)
    assert read_request(str(shared)) == request


@pytest.mark.parametrize("taken_count", [0, 1, 2])
def test_an_answer_is_read_by_root_though_another_user_has_taken_its_name(
    shared: Path, taken_count: int
) -> None:
    writer = FeedWriter(shared, new_identity())
    writer.publish(new_recording())
    process = writer.identity.id
    occupy(*alternatives(shared, f"{process}.stacks")[:taken_count], content="{}")
    main = ThreadStack("MainThread", (Frame("/job/train.py", 12, "main"),))
    response = StackAnswer("c" * 32, process, 7, 1.0, "r", 0, main)
    write_answer(str(shared), response)
    with user(0):
        found = read_answer(str(shared), process)

    assert found == response
    writer.close()


# Launches


@pytest.mark.parametrize(
    "taken_names", [[], ["runs"], ["runs-65534"], ["runs", "runs-65534", "runs-65534-65534"]]
)
def test_a_launch_is_registered_though_another_user_has_taken_the_name(
    shared: Path, taken_names: list[str]
) -> None:
    with user(ATTACKER):
        for name in taken_names:
            (shared / name).mkdir(mode=0o755)
    registration = Registration(shared)
    registration.write_job(Job(os.getpid(), "mine", 1.0, launch="x"))
    with user(FRIEND):
        seen_by_others = [job.run for job in runs.jobs(shared)]
    registration.write_end(Job(os.getpid(), "mine", 1.0, launch="x"), 0)

    assert [job.run for job in runs.jobs(shared)] == seen_by_others == ["mine"]
    assert [end.run for end in runs.ends(shared)] == ["mine"]
    assert runs.any_active(shared)
    registration.release()
    assert not runs.any_active(shared)


def test_no_other_user_can_take_the_names_of_a_launch(shared: Path) -> None:
    registration = Registration(shared)
    end = Path(registration.job_file).with_suffix(".ended")

    with user(ATTACKER), pytest.raises(PermissionError):
        end.write_text("{}")
    registration.release()


# Reports


def test_every_foreign_entry_with_a_name_of_the_exporter_is_reported(shared: Path) -> None:
    occupy(shared / "owner.lock", shared / "overrides.json", shared / "stacks.request")
    with user(ATTACKER):
        (shared / f"runs-{OWNER}").mkdir()
    reader = FeedReader(shared)
    reader.scan()

    assert {(Path(file.path).name, file.uid) for file in reader.foreign} == {
        ("owner.lock", ATTACKER),
        ("overrides.json", ATTACKER),
        ("stacks.request", ATTACKER),
        (f"runs-{OWNER}", ATTACKER),
    }
