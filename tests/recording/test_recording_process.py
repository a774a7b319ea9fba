"""Feed of a process after any kind of end: real children, files and signals."""

from __future__ import annotations

import json
import time
from pathlib import Path

import programs.recording
import pytest
from program_support import run_function, run_program, run_with_imports, single_reading, snapshots
from waiting import WAIT_LIMIT_SECONDS

PREPARE_STAT_AND_FILE = """
        from exporter.recording.handlers import JsonLinesHandler
        FILE = os.environ["EXPORTER_FEED_DIR"] + "/../events.jsonl"
        exporter.events.register(JsonLinesHandler(FILE), name="file", queue=100_000)
        loss = Stat("train.loss", ["mean"])
"""


def written_numbers(feed: Path) -> list[int]:
    """Return the numbers of the events in the file of `PREPARE_STAT_AND_FILE`."""
    lines = (feed.parent / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["data"]["n"] for line in lines]


@pytest.mark.parametrize(
    "ending",
    [
        "",
        "raise RuntimeError('mine')",
        "sys.exit(3)",
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); os.kill(os.getpid(), signal.SIGTERM)",
        "os.kill(os.getpid(), signal.SIGINT); time.sleep(1)",
    ],
)
def test_a_normal_exit_delivers_every_sample_and_event(feed: Path, ending: str) -> None:
    program = f"""{PREPARE_STAT_AND_FILE}
        for step in range(100_000):
            loss.add(1.0)
        for n in range(1000):
            log("a", n=n)
        {ending}
    """
    run_with_imports(feed, program, check=False)
    (snapshot,) = snapshots(feed)
    events = snapshot.recording.events

    loss = single_reading(feed)
    assert (loss.count, loss.sum, loss.overflows) == (100_000, 100_000.0, 0)
    assert (events.counts, events.delivered, events.dropped) == ({("a", "info"): 1000}, {"file": 1000}, {})
    assert written_numbers(feed) == list(range(1000))
    assert snapshot.recording.final


@pytest.mark.parametrize("ending", ["os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_kill_loses_at_most_one_flush_interval(feed: Path, ending: str) -> None:
    program = f"""{PREPARE_STAT_AND_FILE}
        for n in range(100):
            loss.add(1.0)
            log("step", n=n)
        time.sleep(1.0)
        loss.add(1.0)
        {ending}
    """
    run_with_imports(feed, program, check=False)

    assert single_reading(feed).count in {100, 101}
    assert snapshots(feed)[0].recording.events.counts == {("step", "info"): 100}
    assert written_numbers(feed) == list(range(100))
    assert not snapshots(feed)[0].recording.final


def test_a_hanging_handler_does_not_prevent_the_exit(feed: Path) -> None:
    program = """
        exporter.events.register(lambda event: time.sleep(1000), name="hanging")
        for _ in range(10):
            exporter.log("a")
    """
    start_time = time.monotonic()
    run_with_imports(feed, program)
    (snapshot,) = snapshots(feed)

    assert time.monotonic() - start_time < WAIT_LIMIT_SECONDS
    assert snapshot.recording.events.dropped == {("hanging", "exit"): 10}


def test_only_a_process_with_values_or_events_leaves_a_file(feed: Path) -> None:
    program = """
        log('a')
        if os.fork() == 0:
            time.sleep(1.0)
            raise SystemExit
        os.wait()
    """
    run_with_imports(feed, "")
    assert snapshots(feed) == []
    run_with_imports(feed, program)

    assert [snapshot.recording.events.counts for snapshot in snapshots(feed)] == [{("a", "info"): 1}]


def test_a_thread_that_outlives_main_and_exit_handlers_are_recorded(feed: Path) -> None:
    program = f"""{PREPARE_STAT_AND_FILE}
        atexit.register(loss.add, 4.0)
        atexit.register(log, "end", n=1)
        def later():
            time.sleep(0.5)
            loss.add(2.0)
        threading.Thread(target=later).start()
        loss.add(1.0)
    """
    run_with_imports(feed, program)

    assert (single_reading(feed).count, single_reading(feed).sum, written_numbers(feed)) == (3, 7.0, [1])


def test_a_daemon_thread_that_adds_forever_does_not_prevent_the_exit(feed: Path) -> None:
    program = """
        loss = Stat("train.loss", ["mean"])
        def forever():
            while True:
                loss.add(1.0)
        threading.Thread(target=forever, daemon=True).start()
        loss.add(1.0)
    """
    start_time = time.monotonic()
    run_with_imports(feed, program)

    assert time.monotonic() - start_time < WAIT_LIMIT_SECONDS
    assert single_reading(feed).count >= 1


def test_a_normal_exit_joins_every_exporter_thread(feed: Path) -> None:
    program = """
        def print_threads():
            print(sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("exporter")))
        atexit.unregister(exporter.process.RECORDER.shutdown)
        atexit.register(print_threads)
        atexit.register(exporter.process.RECORDER.shutdown)
        exporter.Stat("train.loss", ["mean"]).add(1.0)
        exporter.Stat.passive("train.good", lambda: 3.0)
        exporter.Stat.passive("train.bad", lambda: 1 / 0)
        time.sleep(0.7)
    """
    completed = run_with_imports(feed, program)

    assert completed.stdout == "[]\n"


# Forks and other children ------------------------------------------------------------------------------------


def test_a_forked_child_has_its_own_counts_and_handlers(feed: Path) -> None:
    program = f"""{PREPARE_STAT_AND_FILE}
        add = loss.add
        for n in range(10):
            add(1.0)
            log("a", n=n)
        ids = [event.id for event in exporter.events.recent()]
        if os.fork() == 0:
            add(100.0)
            log("a", n=100)
            log("child", n=101)
            child_ids = [event.id for event in exporter.events.recent()]
            print(len(child_ids), set(ids).isdisjoint(child_ids))
            sys.exit(0)
        os.wait()
        add(1.0)
        log("a", n=10)
    """
    completed = run_with_imports(feed, program, RANK="3")
    parent, child = snapshots(feed)
    events = [snapshot.recording.events for snapshot in (parent, child)]

    assert completed.stdout == "2 True\n"
    assert [snapshot.recording.stats[0].sum for snapshot in (parent, child)] == [11.0, 100.0]
    assert parent.process.id != child.process.id
    assert [snapshot.process.rank for snapshot in (parent, child)] == [3, 3]
    assert [reading.counts for reading in events] == [
        {("a", "info"): 11},
        {("a", "info"): 1, ("child", "info"): 1},
    ]
    assert [reading.delivered for reading in events] == [{"file": 11}, {"file": 2}]
    assert sorted(written_numbers(feed)) == [*range(11), 100, 101]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_multiprocessing_share_the_run_and_lose_nothing(feed: Path, method: str) -> None:
    program = f"""
        import multiprocessing
        loss = Stat("train.loss", ["mean"])
        def work(number):
            for _ in range(1000):
                loss.add(float(number))
                log(f"child.{{number}}")
        if __name__ == "__main__":
            context = multiprocessing.get_context("{method}")
            children = [context.Process(target=work, args=(number,)) for number in (1, 2)]
            for child in children:
                child.start()
            for child in children:
                child.join()
            loss.add(5.0)
    """
    run_with_imports(feed, program)
    totals = sorted(
        (reading.count, reading.sum)
        for snapshot in snapshots(feed)
        for reading in snapshot.recording.stats
        if reading.count
    )
    counts = {
        event: count
        for snapshot in snapshots(feed)
        for event, count in snapshot.recording.events.counts.items()
    }

    assert totals == [(1, 5.0), (1000, 1000.0), (1000, 2000.0)]
    assert len({snapshot.process.run for snapshot in snapshots(feed)}) == 1
    assert counts == {("child.1", "info"): 1000, ("child.2", "info"): 1000}


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_child_terminated_soon_after_its_work_has_flushed(feed: Path, method: str) -> None:
    program = f"""
        import multiprocessing
        loss = Stat("train.loss", ["mean"])
        def work(done):
            for _ in range(100):
                loss.add(1.0)
            done.set()
            time.sleep(60)
        if __name__ == "__main__":
            context = multiprocessing.get_context("{method}")
            done = context.Event()
            child = context.Process(target=work, args=(done,))
            child.start()
            done.wait(60)
            time.sleep(2.0)
            child.terminate()
            child.join()
    """
    run_with_imports(feed, program, EXPORTER_FLUSH_SECONDS="30")

    assert sum(snapshot.recording.stats[0].count for snapshot in snapshots(feed)) == 100


def test_forks_while_threads_record_do_not_hang(feed: Path) -> None:
    run_function(feed, programs.recording.fork_while_threads_record)

    assert len(snapshots(feed)) == 11


@pytest.mark.parametrize("wait_seconds", [0.0, 0.002, 0.005, 0.01, 0.02, 0.04])
def test_a_fork_while_another_thread_starts_recording_does_not_hang(feed: Path, wait_seconds: float) -> None:
    run_function(feed, programs.recording.fork_while_a_thread_starts_recording, wait_seconds)

    counts = [reading.count for snapshot in snapshots(feed) for reading in snapshot.recording.stats]
    assert 1 in counts


def test_an_interpreter_without_a_lock_runs_the_job_and_records_nothing(feed: Path) -> None:
    program = """
        import sys
        sys._is_gil_enabled = lambda: False
        import exporter
        from exporter import training

        stat = exporter.Stat("train.loss")
        with training.training_iteration():
            stat.add(1.0)
            exporter.log("event")
        print(exporter.flush())
    """
    completed = run_program(feed, program)

    assert completed.stdout == "True\n"
    notice = "exporter: nothing is recorded: this Python runs without the interpreter lock"
    assert completed.stderr.count(notice) == 1
    assert "PYTHON_GIL=1" in completed.stderr
    assert not list(feed.iterdir())
