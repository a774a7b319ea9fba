"""Recording in a running process with faults of threads, clock, feed directory and output."""

from __future__ import annotations

from pathlib import Path

import programs.recording
import pytest
from program_support import run_function, run_with_imports, single_reading, snapshots

from exporter.recording.values import Aggregation


def test_windows_close_by_the_clock_without_new_values_and_with_values_of_many_threads(feed: Path) -> None:
    run_function(feed, programs.recording.add_from_threads_and_read_windows)

    assert single_reading(feed, "train.busy").count > 100


def test_a_resumed_job_closes_missed_windows_as_no_data(feed: Path) -> None:
    run_function(feed, programs.recording.stop_and_continue)
    reading = single_reading(feed)

    assert reading.count == 1
    assert reading.window is not None
    assert reading.window.samples == 0


def test_rules_of_the_sidecar_change_a_stat_at_its_next_window(feed: Path) -> None:
    run_function(feed, programs.recording.change_rules_while_recording)
    (snapshot,) = snapshots(feed)

    assert {reading.definition.name for reading in snapshot.recording.stats} == {"train.loss", "train.other"}


def test_a_hanging_passive_stat_affects_no_other_stat(feed: Path) -> None:
    program = """
        exporter.recording.passive.STUCK_SECONDS = 0.5
        loss = Stat("train.loss", ["mean"])
        good = Stat.passive("train.good", lambda: 3.0, unit="bytes")
        Stat.passive("train.bad", lambda: 1 / 0)
        while good.count < 3:
            time.sleep(0.05)
        is_called = threading.Event()
        def hang():
            is_called.set()
            time.sleep(1000)
        Stat.passive("train.hang", hang)
        is_called.wait()
        time.sleep(1.5)  # longer than the limit and the interval of the callbacks
        loss.add(1.0)
    """
    completed = run_with_imports(feed, program)
    (snapshot,) = snapshots(feed)
    readings = {reading.definition.name: reading for reading in snapshot.recording.stats}

    assert readings["train.good"].count >= 2
    assert readings["train.good"].definition.aggregations == {Aggregation.VALUE, Aggregation.MAX}
    assert readings["train.bad"].rejected["error"] >= 2
    assert completed.stderr.count("train.bad") == 1
    assert readings["train.loss"].count == 1
    assert completed.stderr.count("a passive Stat callback has not returned") == 1


def test_without_a_thread_for_callbacks_only_passive_stats_are_absent(feed: Path) -> None:
    program = """
        loss = Stat("train.loss", ["mean"])
        start = threading.Thread.start
        def refuse_passive(thread):
            if thread.name == "exporter-passive":
                raise RuntimeError("can't start new thread")
            start(thread)
        threading.Thread.start = refuse_passive  # as under RLIMIT_NPROC, which does not apply to root
        good = Stat.passive("train.good", lambda: 3.0)
        loss.add(1.0)
        time.sleep(0.7)  # longer than the interval of the callbacks
        assert good.count == 0
        threading.Thread.start = start
        while good.count < 1:
            time.sleep(0.05)
    """
    completed = run_with_imports(feed, program)

    assert single_reading(feed).count == 1
    assert single_reading(feed, "train.good").count >= 1
    assert (
        completed.stderr
        == "exporter: the thread passive cannot start, and its items are lost: can't start new thread\n"
    )


def test_invalid_objects_do_not_affect_valid_samples(feed: Path) -> None:
    run_function(feed, programs.recording.add_invalid_objects)

    assert single_reading(feed).count == 2000
    assert single_reading(feed).rejected == {"not_a_number": 2}


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_finalizer_of_an_invalid_object_does_not_run_on_the_recording_thread(
    is_enabled: bool, feed: Path
) -> None:
    program = f"""
        class Invalid:
            def __del__(self):
                print(threading.current_thread().name)
                is_finalized.set()
        is_finalized = threading.Event()
        exporter.registry.set_enabled("train.*", enabled={is_enabled})
        Stat("train.loss", ["mean"]).add(Invalid())
        assert is_finalized.wait(60)
    """

    assert run_with_imports(feed, program).stdout == "exporter-disposal\n"


def test_a_signal_handler_or_finalizer_can_create_a_stat_during_creation_of_another(feed: Path) -> None:
    run_function(feed, programs.recording.create_stats_in_signal_handlers_and_finalizers)

    assert single_reading(feed, "sig.usr1").count > 50
    assert single_reading(feed, "batch.freed").count > 50
    assert single_reading(feed, "train.step").count > 1000


@pytest.mark.parametrize("directory", ["/nonexistent/feed", "/dev/null", "/proc/self/feed"])
def test_an_unusable_feed_directory_is_reported_once_and_not_by_a_fork(feed: Path, directory: str) -> None:
    completed = run_function(
        feed, programs.recording.record_without_a_feed_directory, EXPORTER_FEED_DIR=directory
    )

    assert completed.stdout == "done\n"
    assert completed.stderr.startswith("exporter: nothing is exported: ")
    assert completed.stderr.count("exporter: ") == 1


def test_a_last_snapshot_that_cannot_be_written_is_reported(feed: Path) -> None:
    program = """
        loss = Stat("train.loss")
        loss.add(1.0)
        flush()
        feed = os.environ["EXPORTER_FEED_DIR"]
        subprocess.run(["sh", "-c", f"rm -r {feed} && touch {feed}"], check=True)
        loss.add(1.0)
    """
    # Without a flush meanwhile, which could create the directory again or a file in it.
    completed = run_with_imports(feed, program, EXPORTER_FLUSH_SECONDS="60")

    assert completed.stderr.startswith("exporter: the samples since the last snapshot are lost: ")


def test_a_snapshot_that_waits_for_an_earlier_write_is_reported_with_its_cause(feed: Path) -> None:
    program = """
        loss = Stat("train.loss")
        loss.add(1.0)
        flush()
        from exporter.recorder import RECORDER
        RECORDER._sink._writer._write_lock.acquire()  # as a write to a disk that hangs
        loss.add(1.0)
    """

    assert "not written to the feed: an earlier write has not ended" in run_with_imports(feed, program).stderr


def test_without_stderr_a_notice_is_not_written_to_stdout(feed: Path) -> None:
    program = """
        sys.stderr = None  # as after a start with 2>&-
        Stat("train.loss", ["mean"]).add(1.0)
        print("done")
    """
    completed = run_with_imports(feed, program, EXPORTER_FEED_DIR="/nonexistent/feed")

    assert completed.stdout == "done\n"


def test_disabled_means_no_thread_no_file_and_bounded_memory(feed: Path) -> None:
    run_function(feed, programs.recording.record_while_disabled, EXPORTER_DISABLED="1")

    assert list(feed.iterdir()) == []


def test_the_compatibility_modules_import_no_large_package_and_start_no_thread(feed: Path) -> None:
    program = """
        import exporter.elastic.events, exporter.elastic.metrics, exporter.monitor.rfc, exporter.one_logger
        large = {"asyncio", "decimal", "importlib.abc", "random", "shutil", "tempfile", "torch"}
        print(sorted(large & set(sys.modules)), threading.active_count())
    """

    assert run_with_imports(feed, program).stdout == "[] 1\n"


def test_a_failed_sidecar_leaves_no_registration_and_no_zombie(feed: Path) -> None:
    completed = run_function(feed, programs.recording.start_sidecars_that_fail)

    assert "the sidecar cannot be started" in completed.stderr
    assert "--no.such.flag" in completed.stderr
