"""What a process leaves in the feed, however it ends: real children, real files, real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from exporter.feed.decoder import Decoder
from exporter.feed.snapshot import Snapshot
from exporter.recording.values import Aggregation, StatReading

IMPORTS = """
import atexit, gc, os, signal, subprocess, sys, threading, time
import exporter
from exporter import Stat, flush, log, training
"""


def run(
    feed: Path, program: str, *, check: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a training program, in front of which stand `IMPORTS`, to its end."""
    script = feed.parent / "train.py"
    script.write_text(IMPORTS + textwrap.dedent(program), encoding="utf-8")
    feed.mkdir(exist_ok=True)
    ours = {"RANK", "EXPORTER_RUN", "EXPORTER_LAUNCH", "EXPORTER_RANK_OWNER"}
    base = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", str(script)],
        env=base | {"EXPORTER_FEED_DIR": str(feed), "EXPORTER_FLUSH_SECONDS": "0.2"} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def snapshots(feed: Path) -> list[Snapshot]:
    """The last snapshot of every process, in order of their beginning."""
    found = [Decoder().decode(path.read_bytes()) for path in feed.glob("*.feed")]
    return sorted(found, key=lambda snapshot: snapshot.process.started)


def only(feed: Path, name: str = "train.loss") -> StatReading:
    """The one reading of a Stat in the one file of the feed."""
    (snapshot,) = snapshots(feed)
    (reading,) = [reading for reading in snapshot.recording.stats if reading.definition.name == name]
    return reading


@pytest.fixture
def feed(tmp_path: Path) -> Path:
    return tmp_path / "feed"


WRITES = """
        from exporter.recording.handlers import JsonLinesHandler
        FILE = os.environ["EXPORTER_FEED_DIR"] + "/../events.jsonl"
        exporter.events.register(JsonLinesHandler(FILE), name="file", queue=100_000)
        loss = Stat("train.loss", ["mean"])
"""


def written(feed: Path) -> list[int]:
    """The numbers of the events in the file of `WRITES`."""
    text = (feed.parent / "events.jsonl").read_text(encoding="utf-8")
    return [json.loads(line)["data"]["n"] for line in text.splitlines()]


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
def test_an_orderly_end_loses_no_sample_and_no_event_and_tells_every_handler(feed: Path, ending: str) -> None:
    program = f"""{WRITES}
        for step in range(100_000):
            loss.add(1.0)
        for n in range(1000):
            log("a", n=n)
        {ending}
    """
    run(feed, program, check=False)
    (snapshot,) = snapshots(feed)
    events = snapshot.recording.events

    assert (only(feed).count, only(feed).sum, only(feed).overflows) == (100_000, 100_000.0, 0)
    assert (events.counts, events.delivered, events.dropped) == ({("a", "info"): 1000}, {"file": 1000}, {})
    assert written(feed) == list(range(1000))
    assert snapshot.recording.final


def test_a_handler_that_hangs_holds_up_the_exit_for_two_seconds_at_most(feed: Path) -> None:
    program = """
        exporter.events.register(lambda event: time.sleep(1000), name="hanging")
        for _ in range(10):
            exporter.log("a")
    """
    began = time.monotonic()
    run(feed, program)
    (snapshot,) = snapshots(feed)

    assert time.monotonic() - began < 12
    assert snapshot.recording.events.dropped == {("hanging", "exit"): 10}


def test_a_process_of_events_alone_leaves_a_file_and_one_without_any_or_its_fork_does_not(feed: Path) -> None:
    program = """
        log('a')
        if os.fork() == 0:
            time.sleep(1.0)
            raise SystemExit
        os.wait()
    """
    run(feed, "")
    assert snapshots(feed) == []
    run(feed, program)

    assert [each.recording.events.counts for each in snapshots(feed)] == [{("a", "info"): 1}]


@pytest.mark.parametrize("ending", ["os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_an_abrupt_end_loses_at_most_one_flush_interval(feed: Path, ending: str) -> None:
    program = f"""
        loss = Stat("train.loss", ["mean"])
        for step in range(100):
            loss.add(1.0)
            log("step")
        time.sleep(1.0)
        loss.add(1.0)
        {ending}
    """
    run(feed, program, check=False)

    assert only(feed).count in {100, 101}
    assert snapshots(feed)[0].recording.events.counts == {("step", "info"): 100}
    assert not snapshots(feed)[0].recording.final


def test_a_thread_that_outlives_main_and_exit_handlers_are_recorded(feed: Path) -> None:
    program = f"""{WRITES}
        import atexit, threading
        atexit.register(loss.add, 4.0)
        atexit.register(log, "end", n=1)
        def later():
            time.sleep(0.5)
            loss.add(2.0)
        threading.Thread(target=later).start()
        loss.add(1.0)
    """
    run(feed, program)

    assert (only(feed).count, only(feed).sum, written(feed)) == (3, 7.0, [1])


def test_a_daemon_thread_that_never_stops_adding_does_not_hold_up_the_exit(feed: Path) -> None:
    program = """
        loss = Stat("train.loss", ["mean"])
        def forever():
            while True:
                loss.add(1.0)
        threading.Thread(target=forever, daemon=True).start()
        loss.add(1.0)
    """
    began = time.monotonic()
    run(feed, program)

    assert time.monotonic() - began < 15
    assert only(feed).count >= 1


def test_a_forked_child_counts_its_own_and_tells_its_own_handlers(feed: Path) -> None:
    program = f"""{WRITES}
        add = loss.add
        for n in range(10):
            add(1.0)
            log("a", n=n)
        ids = [event.id for event in exporter.events.recent()]
        if os.fork() == 0:
            add(100.0)
            log("a", n=100)
            log("child", n=101)
            assert not set(ids) & {{event.id for event in exporter.events.recent()}}
            assert len(exporter.events.recent()) == 2
            sys.exit(0)
        os.wait()
        add(1.0)
        log("a", n=10)
    """
    run(feed, program, RANK="3")
    parent, child = snapshots(feed)
    events = [snapshot.recording.events for snapshot in (parent, child)]

    assert [snapshot.recording.stats[0].sum for snapshot in (parent, child)] == [11.0, 100.0]
    assert parent.process.id != child.process.id
    assert [snapshot.process.rank for snapshot in (parent, child)] == [3, 3]
    assert [each.counts for each in events] == [{("a", "info"): 11}, {("a", "info"): 1, ("child", "info"): 1}]
    assert [each.delivered for each in events] == [{"file": 11}, {"file": 2}]
    assert sorted(written(feed)) == [*range(11), 100, 101]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_multiprocessing_lose_nothing_though_they_skip_exit_handlers(
    feed: Path, method: str
) -> None:
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
    run(feed, program)
    totals = sorted(
        (reading.count, reading.sum)
        for snapshot in snapshots(feed)
        for reading in snapshot.recording.stats
        if reading.count
    )
    counts = dict(pair for snapshot in snapshots(feed) for pair in snapshot.recording.events.counts.items())

    assert totals == [(1, 5.0), (1000, 1000.0), (1000, 2000.0)]
    assert counts == {("child.1", "info"): 1000, ("child.2", "info"): 1000}


def test_a_fork_in_the_middle_of_recording_never_hangs(feed: Path) -> None:
    program = """
        stats = [Stat(f"train.s{number}", ["mean", "p99"]) for number in range(20)]
        exporter.events.register(lambda event: None)
        stop = False
        def work():
            while not stop:
                for number, stat in enumerate(stats):
                    stat.add(1.0)
                    exporter.log(f"a{number}")
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(10):
            if os.fork() == 0:
                stats[0].add(1.0)
                exporter.log("child")
                exporter.flush()
                counts = exporter.events.EVENTS.reading().counts
                os._exit(0 if stats[0].count == sum(counts.values()) == 1 else 1)
            assert os.wait()[1] == 0
        stop = True
    """
    run(feed, program)

    assert len(snapshots(feed)) == 11


@pytest.mark.parametrize("wait", [0.0, 0.002, 0.005, 0.01, 0.02, 0.04])
def test_a_fork_while_another_thread_begins_to_record_never_hangs(feed: Path, wait: float) -> None:
    program = f"""
        def begin():
            with exporter.training.model_forward():  # loads it, and starts the recording thread
                exporter.log("begun")
        thread = threading.Thread(target=begin)
        thread.start()
        time.sleep({wait})
        child = os.fork()
        if child == 0:
            with exporter.training.training_iteration():
                exporter.Stat("train.loss", ["mean"]).add(1.0)
            exporter.flush()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        thread.join()
    """
    run(feed, program)

    counts = [reading.count for snapshot in snapshots(feed) for reading in snapshot.recording.stats]
    assert 1 in counts


def test_windows_close_by_the_clock_when_nothing_is_added_and_from_many_threads(feed: Path) -> None:
    program = """
        loss = Stat("train.loss", ["mean", "max"], window_seconds=0.5)
        busy = Stat("train.busy", ["mean"], window_seconds=0.5)
        loss.add(7.0)
        stop = False
        def work():
            while not stop:
                busy.add(1.0)
                time.sleep(0.0005)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        seen = []
        end = time.monotonic() + 3.0
        while time.monotonic() < end:
            seen.append((loss.window, busy.window))
            time.sleep(0.01)
        stop = True
        filled = [window for window, _ in seen if window.samples]
        assert filled and filled[0].samples == 1, filled
        assert not loss.get(), loss.get()
        closed = {window.ended: window for _, window in seen if window.samples}
        assert len(closed) >= 5, closed
        assert all(abs(ended / 0.5 - round(ended / 0.5)) < 1e-6 for ended in closed), closed
        assert sum(window.samples for window in closed.values()) <= busy.count
    """
    run(feed, program)

    assert only(feed, "train.busy").count > 100


def test_a_passive_stat_is_measured_and_one_that_hangs_costs_nothing_else(feed: Path) -> None:
    program = """
        exporter.recorder.STUCK_SECONDS = 0.5
        loss = Stat("train.loss", ["mean"])
        Stat.passive("train.good", lambda: 3.0, unit="bytes")
        Stat.passive("train.bad", lambda: 1 / 0)
        time.sleep(1.0)
        Stat.passive("train.hang", lambda: time.sleep(1000))
        time.sleep(1.5)
        loss.add(1.0)
    """
    done = run(feed, program)
    (snapshot,) = snapshots(feed)
    readings = {reading.definition.name: reading for reading in snapshot.recording.stats}

    assert readings["train.good"].count >= 2
    assert readings["train.good"].definition.aggregations == {Aggregation.VALUE, Aggregation.MAX}
    assert readings["train.bad"].rejected["error"] >= 2
    assert done.stderr.count("train.bad") == 1
    assert readings["train.loss"].count == 1
    assert done.stderr.count("a callback of a passive Stat hangs") == 1


def test_who_a_process_is_comes_from_its_launcher_and_configure_begins_anew(feed: Path) -> None:
    program = f"""{WRITES}
        def record(times):
            for n in range(times):
                loss.add(1.0)
                log("a", n=n)
        record(1)
        exporter.flush()
        exporter.configure(run="second", rank=7, labels={{"model": "tiny"}})
        record(2)
        assert exporter.events.recent()[-1].run == "second"
    """
    run(feed, program, SLURM_JOB_ID="77", SLURM_PROCID="2", TORCHELASTIC_RUN_ID="none")
    first, second = snapshots(feed)

    assert (first.process.run, first.process.rank, first.recording.stats[0].count) == ("77", 2, 1)
    assert (second.process.run, second.process.rank, second.recording.stats[0].count) == ("second", 7, 2)
    assert [each.recording.events.delivered for each in (first, second)] == [{"file": 1}, {"file": 2}]
    assert first.recording.final
    assert second.process.labels == (("model", "tiny"),)


def test_what_a_job_imports_loads_nothing_large_that_it_has_no_use_for(feed: Path) -> None:
    program = """
        import exporter.elastic.events, exporter.elastic.metrics, exporter.monitor, exporter.one_logger
        print(sorted({"asyncio", "decimal", "importlib.abc", "random", "shutil", "tempfile"} & set(sys.modules)))
    """

    assert run(feed, program).stdout == "[]\n"


def test_disabled_means_no_thread_no_file_and_bounded_memory(feed: Path) -> None:
    program = """
        loss = Stat("train.loss", ["mean"])
        for _ in range(1000):
            loss.add(1.0)
        with loss.time():
            pass
        exporter.events.register(print)
        log("a.b", "text")
        with training.training_iteration():
            pass
        exporter.configure(run="other")
        assert exporter.flush()
        exporter.shutdown()
        assert len(loss._state.buffer) == 0
        assert threading.active_count() == 1
    """
    run(feed, program, EXPORTER_DISABLED="1")

    assert list(feed.iterdir()) == []


@pytest.mark.parametrize("directory", ["/nonexistent/feed", "/dev/null", "/proc/self/feed"])
def test_a_feed_directory_that_cannot_be_used_is_told_once_and_harms_nothing(
    feed: Path, directory: str
) -> None:
    program = """
        loss = Stat("train.loss", ["mean"])
        for _ in range(5):
            loss.add(1.0)
            time.sleep(0.2)
        flush()
        assert loss.count == 5
        print("done")
    """
    done = run(feed, program, EXPORTER_FEED_DIR=directory)

    assert done.stdout == "done\n"
    assert done.stderr.startswith("exporter: nothing is exported: ")
    assert done.stderr.count("exporter: ") == 1


def test_without_a_standard_error_a_notice_is_not_written_to_the_jobs_standard_output(feed: Path) -> None:
    program = """
        sys.stderr = None  # as Python has it when it is started with 2>&-
        Stat("train.loss", ["mean"]).add(1.0)
        print("done")
    """
    done = run(feed, program, EXPORTER_FEED_DIR="/nonexistent/feed")

    assert done.stdout == "done\n"


def test_a_notice_is_not_written_again_by_a_forked_child(feed: Path) -> None:
    program = """
        sys.stderr = open(2, "w", closefd=False)  # writes when its buffer is full, or the process ends
        Stat("train.loss", ["mean"]).add(1.0)
        flush()
        time.sleep(0.3)
        if os.fork():
            os.wait()
    """

    assert run(feed, program, EXPORTER_FEED_DIR="/nonexistent/feed").stderr.count("exporter: ") == 1


def test_no_thread_to_be_had_for_callbacks_costs_the_passive_stats_only(feed: Path) -> None:
    program = """
        loss = Stat("train.loss", ["mean"])
        start = threading.Thread.start
        def refused(thread):
            if thread.name == "exporter-passive":
                raise RuntimeError("can't start new thread")
            start(thread)
        threading.Thread.start = refused  # as under RLIMIT_NPROC, which root does not obey
        Stat.passive("train.good", lambda: 3.0)
        loss.add(1.0)
        time.sleep(0.7)
        threading.Thread.start = start
        time.sleep(0.7)
    """
    done = run(feed, program)

    assert only(feed).count == 1
    assert only(feed, "train.good").count >= 1
    assert done.stderr == "exporter: passive loses its measurements: can't start new thread\n"


def test_a_job_stopped_by_a_signal_closes_its_windows_as_no_data_when_it_goes_on(feed: Path) -> None:
    program = """
        loss = Stat("train.loss", ["mean"], window_seconds=0.5)
        loss.add(1.0)
        print("ready", flush=True)
        time.sleep(60)
    """
    script = feed.parent / "train.py"
    script.write_text(IMPORTS + textwrap.dedent(program), encoding="utf-8")
    feed.mkdir()
    environment = os.environ | {"EXPORTER_FEED_DIR": str(feed), "EXPORTER_FLUSH_SECONDS": "0.2"}
    job = subprocess.Popen([sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        time.sleep(0.3)
        job.send_signal(signal.SIGSTOP)
        time.sleep(2.0)
        job.send_signal(signal.SIGCONT)
        time.sleep(0.6)
        reading = only(feed)
    finally:
        job.kill()
        job.communicate()

    assert reading.count == 1
    assert reading.window is not None
    assert reading.window.samples == 0


def test_the_sidecars_rules_change_a_running_stat_at_its_next_window(feed: Path) -> None:
    program = """
        from exporter.feed.directory import write_overrides
        loss = Stat("train.loss", ["mean"], window_seconds=0.5)
        other = Stat("train.other", ["mean"], window_seconds=0.5)
        def until(condition):
            end = time.monotonic() + 15
            while not condition():
                loss.add(2.0)
                other.add(1.0)
                time.sleep(0.02)
                assert time.monotonic() < end
        until(lambda: loss.get())
        assert set(loss.get()) == {exporter.Aggregation.MEAN}
        write_overrides(os.environ["EXPORTER_FEED_DIR"], [
            {"match": "train.l*", "aggregations": ["max", "p99"]}, {"match": "train.other", "enabled": False},
        ])
        until(lambda: set(loss.get()) == {exporter.Aggregation.MAX, exporter.Aggregation.P99})
        assert not other.enabled
        write_overrides(os.environ["EXPORTER_FEED_DIR"], [])
        until(lambda: set(loss.get()) == {exporter.Aggregation.MEAN} and other.enabled)
    """
    run(feed, program)
    (snapshot,) = snapshots(feed)

    assert {reading.definition.name for reading in snapshot.recording.stats} == {"train.loss", "train.other"}


def test_a_signal_handler_and_a_finalizer_may_ask_for_a_stat_while_the_job_makes_one(feed: Path) -> None:
    program = """
        def handler(*_):
            Stat("sig.usr1", ["mean"]).add(1.0)
            Stat(f"sig.fresh{len(made)}", ["mean"]).add(1.0)
        signal.signal(signal.SIGUSR1, handler)
        class Freed:
            def __init__(self):
                self.me = self
            def __del__(self):
                Stat("batch.freed", ["mean"]).add(1.0)
        gc.set_threshold(50)
        def shoot():
            for _ in range(300):
                os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(0.003)
        made = []
        shooter = threading.Thread(target=shoot)
        shooter.start()
        while shooter.is_alive():
            made.append(len(made))
            Freed()
            Stat("train.step", ["mean"], unit="seconds").add(1.0)
            if len(made) < 2000:
                Stat(f"train.s{len(made)}", ["mean"]).add(1.0)
    """
    run(feed, program)

    assert only(feed, "sig.usr1").count > 50
    assert only(feed, "batch.freed").count > 50
    assert only(feed, "train.step").count > 1000


def test_a_normal_exit_leaves_no_thread_of_ours_to_die_in_the_interpreters_end(feed: Path) -> None:
    program = """
        def left():
            print(sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("exporter")))
        atexit.unregister(exporter.process.RECORDER.shutdown)
        atexit.register(left)
        atexit.register(exporter.process.RECORDER.shutdown)
        exporter.Stat("train.loss", ["mean"]).add(1.0)
        exporter.Stat.passive("train.good", lambda: 3.0)
        exporter.Stat.passive("train.bad", lambda: 1 / 0)
        time.sleep(0.7)
    """
    done = run(feed, program)

    assert done.stdout == "[]\n"


def test_another_identity_is_taken_though_the_feed_hangs_and_nobody_waits_for_it(feed: Path) -> None:
    program = """
        from exporter.feed.writer import FeedWriter
        hang, publish = threading.Event(), FeedWriter.publish
        def slow(self, recording):
            hang.wait()
            return publish(self, recording)
        loss = exporter.Stat("train.loss", ["mean"])
        loss.add(1.0)
        exporter.flush()
        FeedWriter.publish = slow
        time.sleep(0.5)
        began = time.monotonic()
        exporter.configure(run="second")
        assert time.monotonic() - began < 1.5
        hang.set()
        time.sleep(1.0)
        loss.add(1.0)
        loss.add(1.0)
    """
    run(feed, program, EXPORTER_RUN="first")
    first, second = snapshots(feed)

    assert (first.process.run, first.recording.stats[0].count) == ("first", 1)
    assert (second.process.run, second.recording.stats[0].count) == ("second", 2)


def test_a_child_that_is_ended_by_a_signal_soon_after_its_work_has_flushed(feed: Path) -> None:
    program = """
        import multiprocessing
        loss = Stat("train.loss", ["mean"])
        def work():
            for _ in range(100):
                loss.add(1.0)
            time.sleep(60)
        if __name__ == "__main__":
            child = multiprocessing.get_context("fork").Process(target=work)
            child.start()
            time.sleep(2.0)
            child.terminate()
            child.join()
    """
    run(feed, program, EXPORTER_FLUSH_SECONDS="30")

    assert sum(snapshot.recording.stats[0].count for snapshot in snapshots(feed)) == 100
