"""Identity of a process: run of a launch, and rank of a training process."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import programs.recording
import pytest
from feed_support import new_identity, new_recording
from program_support import run_function, run_program, run_with_imports, snapshots
from programs import code_of
from waiting import WAIT_LIMIT_SECONDS

import exporter
from exporter.recording.identity import Process, _IdentitySettings
from exporter.recording.write_queue import MAX_RECORDINGS, UnwrittenRecording, WriteQueue


class Unreadable:
    """Object whose every access raises, as an unbound proxy."""

    def __getattribute__(self, name: str) -> object:
        raise RuntimeError("unbound")

    def __repr__(self) -> str:
        raise RuntimeError("unbound")


@pytest.mark.parametrize("field", ["run", "rank", "labels", "session"])
def test_configure_refuses_a_value_that_cannot_be_shown(field: str) -> None:
    values: dict[str, Any] = {field: Unreadable()}

    with pytest.raises(exporter.DefinitionError):
        exporter.configure(**values)


@pytest.mark.parametrize(
    ("call", "environment"),
    [("exporter.configure(session='night')", {}), ("", {"EXPORTER_SESSION": "night"})],
)
def test_the_session_is_a_tag_of_the_run_and_changes_nothing_else(
    feed: Path, call: str, environment: dict[str, str]
) -> None:
    run_with_imports(
        feed, f"{call}\nwith training.training_iteration():\n    pass", check=True, **environment
    )

    (snapshot,) = snapshots(feed)
    reading = snapshot.recording.training
    assert reading is not None
    assert dict(reading.facts)["session_tag"] == "night"
    assert reading.steps == 1


def test_an_unnamed_launch_is_a_separate_run_with_a_readable_name(feed: Path) -> None:
    program = "Stat('loss').add(1.0)"
    run_with_imports(feed, program)
    time.sleep(1.0)  # the generated name has the second of the start
    run_with_imports(feed, program)

    first, second = (snapshot.process for snapshot in snapshots(feed))
    assert re.fullmatch(r"train-\d{8}-\d{4}-[0-9a-z]{2}", first.run)
    assert first.run != second.run
    assert not first.run_given
    assert (first.rank, first.role, first.trains) == (0, "trainer", False)


@pytest.mark.parametrize(
    ("environment", "name", "run_given"),
    [
        ({"EXPORTER_RUN": "mine", "SLURM_JOB_ID": "7"}, "mine", True),
        ({"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "job"}, "7", True),
        ({"TORCHELASTIC_RUN_ID": "job", "EXPORTER_LAUNCH": "x"}, "job", True),
        ({"TORCHELASTIC_RUN_ID": "none", "EXPORTER_LAUNCH": "x"}, "x", False),
        ({"TORCHELASTIC_RUN_ID": "f6a9ef93-1c4b-4d5a-9a0c-1f1e5a2b3c4d", "EXPORTER_LAUNCH": "x"}, "x", False),
        ({"EXPORTER_RUN": "a\nb", "RANK": "x"}, "a?b", True),
        ({"EXPORTER_RUN": "  ", "SLURM_JOB_ID": "7", "RANK": "²", "LOCAL_RANK": "-1"}, "7", True),
    ],
)
def test_the_run_name_comes_from_the_first_source_in_order_and_an_invalid_rank_is_ignored(
    feed: Path, environment: dict[str, str], name: str, run_given: bool
) -> None:
    run_with_imports(feed, "Stat('loss').add(1.0)", check=True, **environment)

    (process,) = (snapshot.process for snapshot in snapshots(feed))
    assert (process.run, process.run_given) == (name, run_given)
    assert (process.rank, process.local_rank) == (0, None)


def test_the_ranks_of_one_torchrun_share_the_run(feed: Path) -> None:
    program = """
        if "RANK" not in os.environ:
            ranks = [
                subprocess.Popen([sys.executable, __file__], env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "2",
                    "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"})
                for rank in range(2)
            ]
            for rank in ranks:
                rank.wait()
        else:
            Stat("loss").add(1.0)
    """
    run_with_imports(feed, program)

    assert sorted(snapshot.process.rank or 0 for snapshot in snapshots(feed)) == [0, 1]
    assert len({snapshot.process.run for snapshot in snapshots(feed)}) == 1


HELPER = """
        log("start")
        flush()
        if len(sys.argv) == 1:
            subprocess.run([sys.executable, __file__, "helper"], check=True)
"""
"""First lines of a program that logs an event and runs itself once more, as a helper."""


def test_a_process_has_no_rank_until_it_trains(feed: Path) -> None:
    program = f"""{HELPER}
            with training.training_loop(train_iterations_start=0):
                with training.training_iteration():
                    pass
    """
    run_with_imports(feed, program)

    trainer, helper = (snapshot.process for snapshot in snapshots(feed))
    assert (trainer.rank, trainer.role, trainer.trains) == (0, "trainer", True)
    assert (helper.rank, helper.role, helper.trains) == (None, "helper", False)


def test_a_child_inherits_the_variable_of_a_rank_and_not_the_rank(feed: Path) -> None:
    run_with_imports(feed, HELPER, RANK="3")

    assert [snapshot.process.rank for snapshot in snapshots(feed)] == [3, None]


def test_a_second_live_trainer_of_a_rank_is_reported_once_if_the_run_is_named(feed: Path) -> None:
    program = """
        import exporter.feed.writer
        exporter.feed.writer.CONFLICT_SECONDS = 0.5
        with training.training_loop(train_iterations_start=0):
            with training.training_iteration():
                time.sleep(1)
            if len(sys.argv) == 1:
                second = subprocess.run([sys.executable, __file__, "second"], check=True, capture_output=True, text=True)
                print(second.stderr)
            else:
                time.sleep(2)
    """
    completed = run_with_imports(feed, program, EXPORTER_RUN="mine")
    unnamed_run = run_with_imports(feed, program)

    assert completed.stdout.count("also records as rank 0 of run 'mine'") == 1
    assert "also records" not in completed.stderr + unnamed_run.stdout + unnamed_run.stderr


def test_identity_comes_from_the_launcher_and_configure_restarts_the_totals(feed: Path) -> None:
    run_function(
        feed,
        programs.recording.change_the_identity,
        SLURM_JOB_ID="77",
        SLURM_PROCID="2",
        TORCHELASTIC_RUN_ID="none",
    )
    first, second = snapshots(feed)

    assert (first.process.run, first.process.rank, first.recording.stats[0].count) == ("77", 2, 1)
    assert (second.process.run, second.process.rank, second.recording.stats[0].count) == ("second", 7, 2)
    assert [snapshot.recording.events.delivered for snapshot in (first, second)] == [{"mine": 1}, {"mine": 2}]
    assert first.recording.final
    assert second.process.labels == (("model", "tiny"),)


def test_a_sample_before_configure_keeps_the_identity_although_it_is_the_first_of_the_process(
    feed: Path,
) -> None:
    run_function(feed, programs.recording.change_the_identity_after_the_first_sample, EXPORTER_RUN="first")
    first, second = snapshots(feed)

    assert (first.process.run, first.process.rank, first.recording.stats[0].count) == ("first", 0, 1)
    assert (second.process.run, second.process.rank, second.recording.stats[0].count) == ("second", 0, 0)


def test_no_value_and_no_background_work_is_lost_while_configure_changes_the_identity(feed: Path) -> None:
    completed = run_function(feed, programs.recording.change_the_identity_while_other_threads_record)
    recorded_count = int(completed.stdout)
    readings = [reading for snapshot in snapshots(feed) for reading in snapshot.recording.stats]
    samples = sum(reading.count for reading in readings if reading.definition.name == "train.loss")
    tasks = sum(reading.count for reading in readings if reading.definition.name == "training.background")
    totals = {
        name: sum(reading.sum or 0.0 for reading in readings if reading.definition.name == f"training.{name}")
        for name in ("samples", "microbatches")
    }

    assert (samples, tasks) == (recorded_count, recorded_count)
    assert totals == {"samples": recorded_count, "microbatches": recorded_count}


def test_numbers_that_are_recorded_during_a_change_of_the_identity_belong_to_the_new_identity(
    feed: Path,
) -> None:
    run_function(feed, programs.recording.record_numbers_during_a_change_of_the_identity)
    totals = [
        {
            name: sum(
                reading.sum or 0.0
                for reading in snapshot.recording.stats
                if reading.definition.name == f"training.{name}"
            )
            for name in ("samples", "tokens", "microbatches")
        }
        for snapshot in snapshots(feed)
    ]

    assert totals == [
        {"samples": 1, "tokens": 10, "microbatches": 1},
        {"samples": 2, "tokens": 20, "microbatches": 2},
    ]


def test_the_seconds_of_a_phase_during_a_change_of_the_identity_are_counted_once(feed: Path) -> None:
    program = programs.recording.train_during_a_slow_change_of_the_identity
    completed = run_function(feed, program, EXPORTER_RUN="first")
    seconds = [
        snapshot.recording.training.phases["checkpoint_load"]
        for snapshot in snapshots(feed)
        if snapshot.recording.training is not None
    ]

    assert len(seconds) == 2
    assert sum(seconds) == pytest.approx(float(completed.stdout), abs=0.2)


def test_samples_after_configure_have_the_new_identity_although_a_step_of_the_recording_takes_long(
    feed: Path,
) -> None:
    run_function(feed, programs.recording.change_the_identity_during_long_work, EXPORTER_RUN="first")
    first, second = snapshots(feed)

    assert (first.process.run, first.recording.stats[0].count) == ("first", 1)
    assert (second.process.run, second.recording.stats[0].count) == ("second", 2)


def test_samples_of_each_identity_are_recorded_under_it_while_a_write_of_the_feed_hangs(feed: Path) -> None:
    run_function(feed, programs.recording.change_the_identity_while_the_feed_hangs, EXPORTER_RUN="first")
    counts = {snapshot.process.run: snapshot.recording.stats[0].count for snapshot in snapshots(feed)}

    assert counts == {"first": 1, "second": 1, "third": 2}


def unwritten(*, final: bool) -> UnwrittenRecording:
    """Return a recording that is not written yet."""
    return UnwrittenRecording(new_recording(final=final), new_identity())


def written_by_queue() -> tuple[list[UnwrittenRecording], WriteQueue]:
    """Return a list and a queue, which writes by appending to the list."""
    written: list[UnwrittenRecording] = []

    def write(recording: UnwrittenRecording) -> bool:
        written.append(recording)
        return True

    return written, WriteQueue(write)


def test_configure_writes_no_recordings_that_other_threads_add_during_its_write() -> None:
    written: list[UnwrittenRecording] = []
    recordings = [unwritten(final=True) for _ in range(5)]

    def write(recording: UnwrittenRecording) -> bool:
        written.append(recording)
        if len(written) < len(recordings):
            queue.add(recordings[len(written)])
        return True

    queue = WriteQueue(write)
    queue.add(recordings[0])

    assert queue.write_all(0.0)
    assert written == recordings[:1]
    assert queue.write_all(0.0)
    assert written == recordings[:2]


def test_flushes_during_a_write_that_hangs_leave_room_for_the_last_recording_of_the_identity() -> None:
    written, queue = written_by_queue()
    flushed = [unwritten(final=False) for _ in range(MAX_RECORDINGS + 1)]
    last = unwritten(final=True)

    assert all(queue.add(recording) for recording in flushed)
    assert (queue.is_full(), queue.latest()) == (False, flushed[-1])
    assert queue.add(last)
    assert queue.write_all(0.0)
    assert written == [last]


def test_a_full_queue_accepts_the_last_recording_of_the_process() -> None:
    written, queue = written_by_queue()
    ended = [unwritten(final=True) for _ in range(MAX_RECORDINGS + 1)]

    for recording in ended[:-1]:
        queue.add(recording)
    assert queue.is_full()
    assert not queue.add(unwritten(final=False))
    assert queue.add(ended[-1])
    assert queue.write_all(0.0)
    assert written == ended


def test_the_exit_reason_of_a_python_process_is_in_its_last_snapshot(feed: Path) -> None:
    for ending in ("raise LookupError('mine')", "raise SystemExit(3)", ""):
        run_with_imports(feed, f"Stat('loss').add(1.0); {ending}", check=False)

    endings = [snapshot.ending for snapshot in snapshots(feed)]
    assert [ending and ending.exception for ending in endings] == ["LookupError", None, None]
    assert endings[0] is not None
    assert abs(endings[0].at - time.time()) < 60


def test_the_exception_that_ends_the_process_does_not_end_an_earlier_run(feed: Path) -> None:
    run_program(
        feed,
        code_of(programs.recording.fail_before_a_new_identity_is_recorded),
        check=False,
        EXPORTER_RUN="first",
    )
    ending_by_run = {snapshot.process.run: snapshot.ending for snapshot in snapshots(feed)}

    assert ending_by_run["first"] is None
    assert ending_by_run["second"] is not None
    assert ending_by_run["second"].exception == "LookupError"


def test_a_change_of_the_session_keeps_the_identity_of_a_recording_that_is_about_to_end() -> None:
    process = Process(renew=lambda: None)  # the recording of the earlier identity ends later
    process.configure("first", None, None)
    process.begin_recording()
    process.configure("second", None, None)
    process.configure(None, None, None, session="night")
    earlier = (process.recorded_identity().run, process.recorded_session)
    process.begin_recording()

    assert earlier == ("first", "")
    assert (process.recorded_identity().run, process.recorded_session) == ("second", "night")


def test_a_signal_handler_that_interrupts_configure_can_change_the_identity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = Process()
    replace = _IdentitySettings.replace

    def interrupted_replace(settings: _IdentitySettings, **changes: Any) -> _IdentitySettings:
        if changes == {"rank": 3}:
            monkeypatch.undo()
            process.configure("named by the handler", None, None)
        return replace(settings, **changes)

    monkeypatch.setattr(_IdentitySettings, "replace", interrupted_replace)
    caller = threading.Thread(target=process.configure, args=(None, 3, None), daemon=True)
    caller.start()
    caller.join(WAIT_LIMIT_SECONDS)

    assert not caller.is_alive()
    assert (process.identity().run, process.identity().rank) == ("named by the handler", 3)
