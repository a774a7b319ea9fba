"""Exit of a process with hanging handlers and busy threads."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest
from program_support import run_with_imports, single_reading, snapshots

from exporter.recording.recorder import EXIT_SECONDS

HANGING_JOB = """
    def hang(*_):
        time.sleep(60)

    loss = Stat("train.loss", ["mean"], window_seconds=0.2)
    loss.on_window(hang)
    for _ in range(3):
        exporter.events.register(hang)
    Stat.passive("train.passive", hang)
    import exporter.monitor as monitor
    monitor.register_event_handler(hang)
    loss.add(1.0)
    time.sleep(1.0)
    log("hung")
    loss.add(2.0)
    print(time.monotonic(), flush=True)
"""
"""Program with hanging handlers of a window, of events and of torch.monitor, and a hanging passive Stat. It prints the time of its end."""

SLOW_FEED_JOB = """
    loss = Stat("train.loss", ["mean"])
    loss.add(1.0)
    flush()
    replace = os.replace

    def replace_slowly(*paths):
        time.sleep({write_seconds})
        replace(*paths)

    os.replace = replace_slowly
    loss.add(2.0)
    {call}
    print(time.monotonic(), flush=True)
"""
"""Program whose feed is on a slow filesystem after the first flush. It prints the time of its end."""


def seconds_to_exit(feed: Path, program: str, **environment: str) -> float:
    """Return the seconds between the time that a program prints last and its exit."""
    completed = run_with_imports(feed, program, check=True, **environment)
    return time.monotonic() - float(completed.stdout.splitlines()[-1])


def children_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def cpu_seconds_to_exit(feed: Path, program: str) -> float:
    """Return the CPU seconds of a program after the CPU time that the program prints last."""
    earlier_seconds = children_cpu_seconds()
    completed = run_with_imports(feed, program, check=True)
    return children_cpu_seconds() - earlier_seconds - float(completed.stdout.splitlines()[-1])


def exits_within(limit_seconds: float, feed: Path, program: str, **environment: str) -> bool:
    """Return True if one of five runs exits in time. A busy machine can delay single runs."""
    return any(seconds_to_exit(feed, program, **environment) < limit_seconds for _ in range(5))


def test_all_hanging_parts_share_one_deadline_at_exit(tmp_path: Path) -> None:
    assert exits_within(EXIT_SECONDS + 0.7, tmp_path / "feed", HANGING_JOB)
    counts = [
        reading.count
        for snapshot in snapshots(tmp_path / "feed")
        for reading in snapshot.recording.stats
        if reading.definition.name == "train.loss"
    ]
    assert set(counts) == {2}  # in each of the runs


def test_a_final_write_that_hangs_does_not_keep_the_process_from_exiting(tmp_path: Path) -> None:
    program = SLOW_FEED_JOB.format(write_seconds=30, call="")

    assert exits_within(EXIT_SECONDS + 0.7, tmp_path / "feed", program, EXPORTER_FLUSH_SECONDS="60")


def test_a_final_write_that_hangs_is_reported(tmp_path: Path) -> None:
    program = SLOW_FEED_JOB.format(write_seconds=30, call="")
    completed = run_with_imports(tmp_path / "feed", program, EXPORTER_FLUSH_SECONDS="60")

    assert completed.stderr.startswith("exporter: the samples since the last snapshot are lost: ")
    assert single_reading(tmp_path / "feed", "train.loss").count == 1


def test_a_final_write_that_is_slow_loses_no_sample(tmp_path: Path) -> None:
    program = SLOW_FEED_JOB.format(write_seconds=0.5, call="")
    completed = run_with_imports(tmp_path / "feed", program, EXPORTER_FLUSH_SECONDS="60")

    assert completed.stderr == ""
    assert single_reading(tmp_path / "feed", "train.loss").count == 2


def test_a_flush_returns_false_after_its_timeout_while_its_write_hangs(tmp_path: Path) -> None:
    call = "start = time.monotonic(); print(flush(0.5), time.monotonic() - start < 15)"
    program = SLOW_FEED_JOB.format(write_seconds=30, call=call)
    completed = run_with_imports(tmp_path / "feed", program, EXPORTER_FLUSH_SECONDS="60")

    assert completed.stdout.startswith("False True\n")


def test_configure_does_not_wait_for_the_write_of_the_earlier_identity(tmp_path: Path) -> None:
    call = "start = time.monotonic(); exporter.configure(run='second'); print(time.monotonic() - start < 15)"
    program = SLOW_FEED_JOB.format(write_seconds=30, call=call)
    completed = run_with_imports(tmp_path / "feed", program, EXPORTER_FLUSH_SECONDS="60")

    assert completed.stdout.startswith("True\n")


@pytest.mark.parametrize("exporter_disabled", ["0", "1"])
def test_a_log_handler_that_hangs_does_not_delay_the_exit(tmp_path: Path, exporter_disabled: str) -> None:
    program = """
        import logging

        class Hanging(logging.Handler):
            def emit(self, record):
                time.sleep(30)

        class Hostile:
            def __repr__(self):
                raise RuntimeError("mine")

        logging.getLogger().addHandler(Hanging())
        log("event", datum=Hostile())
        time.sleep(0.5)
        print(time.monotonic(), flush=True)
    """
    assert exits_within(2.0, tmp_path / "feed", program, EXPORTER_DISABLED=exporter_disabled)


def test_a_shutdown_writes_the_final_recording_although_a_task_raises(tmp_path: Path) -> None:
    program = """
        from exporter.recording.recorder import RECORDER

        class Failing:
            def tick(self): pass
            def after_fork(self): pass
            def finish(self): raise RuntimeError("broken task")

        RECORDER.attach(Failing())
        loss = Stat("train.loss", ["mean"])
        loss.add(1.0)
        exporter.shutdown()
        print("returned")
    """
    completed = run_with_imports(tmp_path / "feed", program, check=True)

    assert completed.stdout == "returned\n"
    assert "broken task" in completed.stderr
    assert single_reading(tmp_path / "feed", "train.loss").count == 1


def test_the_exit_beside_busy_daemon_threads_takes_at_most_three_seconds(tmp_path: Path) -> None:
    program = """
        loss = Stat("train.loss", ["mean"])

        def work():
            while True:
                loss.add(1.0)

        for _ in range(4):
            threading.Thread(target=work, daemon=True).start()
        time.sleep(0.3)
        print(time.process_time(), flush=True)
    """
    # The threads share the interpreter lock, so that the process uses at most one second of CPU time per second, also on a busy machine.
    assert cpu_seconds_to_exit(tmp_path / "feed", program) < 3.0


def test_busy_threads_release_the_interpreter_lock_more_often_during_a_shutdown(tmp_path: Path) -> None:
    program = """
        from exporter.recording.recorder import RECORDER

        class PrintingTask:
            def tick(self): pass
            def after_fork(self): pass
            def finish(self): print(sys.getswitchinterval())

        print(sys.getswitchinterval())
        RECORDER.attach(PrintingTask())
        Stat("train.loss", ["mean"]).add(1.0)
        exporter.shutdown()
        print(sys.getswitchinterval())
    """
    completed = run_with_imports(tmp_path / "feed", program, check=True)
    before_seconds, during_seconds, after_seconds = map(float, completed.stdout.split())

    assert during_seconds <= before_seconds / 10
    assert after_seconds == before_seconds


def test_notices_beyond_the_limit_are_not_written_but_counted(tmp_path: Path) -> None:
    program = """
        from exporter.recording.notices import NOTICES, log_once

        for number in range(1000):
            log_once(str(number), "notice")
        NOTICES.flush(60)
        log("event")
        flush()
        print(NOTICES.dropped_notices, flush=True)
    """
    completed = run_with_imports(tmp_path / "feed", program)

    assert completed.stdout == "900\n"
    assert completed.stderr.count("exporter: notice\n") == 100


def test_a_notice_is_written_although_no_thread_can_be_started(tmp_path: Path) -> None:
    program = """
        from exporter.recording.notices import log_once

        def refuse(self):
            raise RuntimeError("can't create new thread at interpreter shutdown")

        threading.Thread.start = refuse
        log_once("key", "the last words")
    """
    assert run_with_imports(tmp_path / "feed", program).stderr == "exporter: the last words\n"
