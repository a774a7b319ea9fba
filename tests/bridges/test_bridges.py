"""Bridges: an unchanged job is recorded, and runs as without the exporter.

Further tests check the installation of bridges, the recognition of torchrun, and statistics of the allocator of GPU memory.
"""

from __future__ import annotations

import datetime as dt
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from bridges_support import PRINT_PAGE, STEPS, create_distribution, needs, run_job
from places import PROJECT, TESTS
from program_support import page_of_feed, run_program, series, sum_by_labels, total

import exporter
import exporter_auto
from exporter import bridges
from exporter.bridges.monitor import MonitorBridge
from exporter.elastic.bridge import is_launcher
from exporter.recording.events import EVENTS

needs_torch = needs("torch")


# Installation --------------------------------------------------------------------------------------------------


def test_an_unknown_bridge_raises_an_error_that_lists_the_known_bridges() -> None:
    with pytest.raises(ValueError, match="available: elastic, monitor"):
        bridges.install("elastc")


def run_bare(program: str, path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program with a single directory on the import path."""
    command = [sys.executable, "-S", "-c", program]
    return subprocess.run(command, cwd=path, env=environment, capture_output=True, text=True, check=False)


def test_the_entry_point_imports_nothing_unless_it_is_enabled() -> None:
    program = """
import os, sys
import exporter_auto
before = set(sys.modules)
exporter_auto.start()
print(sorted(set(sys.modules) - before))
"""
    for environment in ({}, {"EXPORTER_AUTO": "0"}, {"EXPORTER_AUTO": ""}):
        assert run_bare(program, PROJECT, **environment).stdout == "[]\n"
    assert "'exporter.bridges'" in run_bare(program, PROJECT, EXPORTER_AUTO="1").stdout


def test_the_entry_point_of_a_broken_installation_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "exporter").mkdir()
    (tmp_path / "exporter/__init__.py").write_text("raise RuntimeError('a broken installation')")
    (tmp_path / "exporter_auto.py").write_text((PROJECT / "exporter_auto.py").read_text())

    completed_run = run_bare("import exporter_auto; exporter_auto.start()", tmp_path, EXPORTER_AUTO="1")

    assert completed_run.returncode == 0, completed_run.stderr
    assert completed_run.stdout == ""
    assert completed_run.stderr == ""


def test_installing_bridges_does_not_import_torch(tmp_path: Path) -> None:
    program = """
import sys
import exporter_auto
exporter_auto.start()
from exporter.bridges import install
print("torch" in sys.modules, install() == tuple(exporter_auto.BRIDGES))
"""
    completed_run = run_program(tmp_path / "feed", program, EXPORTER_AUTO="1")

    assert completed_run.stdout == "False True\n"
    assert completed_run.stderr == ""


@pytest.mark.parametrize("name", exporter_auto.BRIDGES)
def test_every_registered_bridge_has_a_file_and_a_row_in_the_documentation(name: str) -> None:
    assert callable(importlib.import_module(f"exporter.bridges.{name}").install)
    assert f"`{name}`" in (PROJECT / "docs/bridges.md").read_text()


def test_a_bridge_that_cannot_be_installed_is_logged_and_left_out(tmp_path: Path) -> None:
    (tmp_path / "keras.py").touch()
    program = """
import exporter.bridges.keras as bridge
from exporter import bridges
bridge.install = lambda: 1 / 0
bridges.install("keras")
import keras
print(bridges.install("accelerate"))
"""
    completed_run = run_program(tmp_path / "feed", program, PYTHONPATH=f"{tmp_path}:{PROJECT}")

    assert completed_run.stdout == "('accelerate',)\n"
    assert "the bridge keras could not be installed: ZeroDivisionError" in completed_run.stderr


@needs("torch")
def test_a_torch_without_the_optional_interfaces_is_recorded_without_a_message(tmp_path: Path) -> None:
    program = """
import torch, torch.distributed.checkpoint as checkpoint
del checkpoint.async_save
from exporter import bridges
bridges.install()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
print("gauges", json.dumps(gauges()))
"""
    ended_job = run_job(tmp_path, program)

    assert ended_job.differences({STEPS: 1}) == {}
    assert ended_job.process.stderr == ""


UNCHANGED_PROGRAM = (
    "from programs.torchrun import use_events_metrics_and_monitor; use_events_metrics_and_monitor()"
)
"""Program without a call of the exporter. A function in a string, because the import of the module needs torch."""


@needs_torch
@pytest.mark.timeout(90)
@pytest.mark.parametrize("loglevel", ["INFO", "ERROR"])
def test_an_unchanged_program_is_recorded_through_the_entry_point(tmp_path: Path, loglevel: str) -> None:
    paths = f"{create_distribution(tmp_path / 'site')}:{PROJECT}:{TESTS}"
    unrecorded_run = run_program(
        tmp_path / "nothing", UNCHANGED_PROGRAM, library="torch", PYTHONPATH=paths, LOGLEVEL=loglevel
    )
    recorded_run = run_program(
        tmp_path / "feed", UNCHANGED_PROGRAM, PYTHONPATH=paths, LOGLEVEL=loglevel, EXPORTER_AUTO="1"
    )
    page = page_of_feed(tmp_path / "feed")

    *lines, last_line = unrecorded_run.stdout.splitlines()
    assert lines == ["sink my_app loss 0.5", 'raised "the job\'s own"']
    assert last_line == "False []"
    assert recorded_run.stdout.splitlines()[:-1] == lines
    assert recorded_run.stdout.splitlines()[-1].startswith("True ['exporter-recording'")
    assert recorded_run.stderr == unrecorded_run.stderr
    assert ('"on.console"' in recorded_run.stderr) is (loglevel == "INFO")
    assert not list((tmp_path / "nothing").iterdir())
    assert sum_by_labels(page, "torchelastic_train_step_seconds_sum") == 0.012
    assert sum_by_labels(page, "my_app_loss_sum") == 0.5
    assert sum_by_labels(page, "raising_x_sum") == 1
    for event_type in ("my.event", "on.console", "my.monitor.event", "torch.monitor.Stat"):
        assert sum_by_labels(page, "training_events_total", type=event_type) == 1
    assert sum_by_labels(page, "train_batch_mean_seconds_sum") == pytest.approx(0.015)
    assert sum_by_labels(page, "train_batch_samples_total") == 2


@needs_torch
@pytest.mark.timeout(90)
def test_every_event_of_threads_that_flood_torch_monitor_is_counted(tmp_path: Path) -> None:
    program = "from programs.torch_monitor import log_from_three_threads; log_from_three_threads()"
    prebuilt, built = map(int, run_program(tmp_path / "feed", program, library="torch").stdout.split())
    page = page_of_feed(tmp_path / "feed")

    assert prebuilt > 1000
    assert sum_by_labels(page, "training_events_total", type="prebuilt") == prebuilt
    assert sum_by_labels(page, "training_events_total", type="built") == built
    delivered_events = sum_by_labels(page, "training_event_handler_events_total", handler="delivered")
    dropped_events = sum_by_labels(page, "training_event_handler_dropped_total", handler="delivered")
    suppressed_events = sum_by_labels(
        page, "training_events_suppressed_total", type="built", reason="rate_limit"
    )
    assert delivered_events + dropped_events + suppressed_events == built
    assert sum_by_labels(page, "training_torch_monitor_overflows_total") == 0
    assert sum_by_labels(page, "flood_samples_total") >= 1


PROGRAM_WITH_HANGING_POLL = """
import datetime, time
import torch.monitor as monitor
from exporter.bridges import install
from exporter.bridges.monitor import MonitorBridge
unregister = monitor.unregister_event_handler
def report_unregistration(handle):
    unregister(handle)
    print("unregistered", flush=True)
monitor.unregister_event_handler = report_unregistration
MonitorBridge.drain = lambda self: time.sleep(600)
install("monitor")
monitor.log_event(monitor.Event("logged", datetime.datetime.now(), {}))
time.sleep(1)
"""


@needs_torch
@pytest.mark.timeout(90)
def test_the_handler_of_torch_monitor_is_unregistered_although_a_poll_hangs(tmp_path: Path) -> None:
    completed = run_program(tmp_path / "feed", PROGRAM_WITH_HANGING_POLL, library="torch")

    assert completed.stdout == "unregistered\n"


PROGRAM_WITH_SLOW_LAST_POLL = """
import datetime, time
import torch.monitor as monitor
from exporter.bridges import install
from exporter.bridges.monitor import MonitorBridge
drain = MonitorBridge.drain
def drain_slowly(self):
    end = time.thread_time() + 2.5
    while time.thread_time() < end:
        pass
    drain(self)
MonitorBridge.drain = drain_slowly
install("monitor")
monitor.log_event(monitor.Event("logged", datetime.datetime.now(), {}))
"""


@needs_torch
@pytest.mark.timeout(90)
def test_a_last_poll_that_makes_progress_is_finished_after_the_time_limit(tmp_path: Path) -> None:
    completed = run_program(tmp_path / "feed", PROGRAM_WITH_SLOW_LAST_POLL, library="torch")

    assert completed.stderr == ""
    assert sum_by_labels(page_of_feed(tmp_path / "feed"), "training_events_total", type="logged") == 1


@needs_torch
def test_events_are_delivered_in_order_also_from_subclasses_of_the_job() -> None:
    torch = importlib.import_module("torch.monitor")

    class Unreadable(torch.Event):  # type: ignore[misc, name-defined]  # torch has no types here
        data = timestamp = property(lambda _self: 1 // 0)
        __hash__ = None  # type: ignore[assignment]  # as a class of the job may be

    timestamp, delivered_numbers = dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc), list[int]()
    windows = [torch.Event(torch.STAT_EVENT, timestamp, {"part.sum": 1.0})] * 7
    handle = exporter.events.register(
        lambda event: delivered_numbers.append(event.data["number"]), types="part.numbered"
    )
    bridge = MonitorBridge(torch.Event, torch.STAT_EVENT)
    bridge.queue.extend(torch.Event("part.numbered", timestamp, {"number": number}) for number in range(500))
    bridge.queue.extend([*windows, Unreadable("part.unreadable", timestamp, {})])
    bridge.drain()
    handle.unregister()

    assert EVENTS.reading().counts["part.numbered", "info"] == 500
    assert EVENTS.reading().counts["part.unreadable", "info"] == 1
    assert delivered_numbers == list(range(500))
    assert total("part.added") == 7


FORKING_PROGRAM = """
import datetime, os
import torch, torch.monitor as monitor
from exporter import bridges
bridges.install()
torch.distributed.TCPStore("127.0.0.1", 0, 1, True).set("a", "b")
def log(name):
    monitor.log_event(monitor.Event(name, datetime.datetime.now(), {}))
log("parent")
if os.fork() == 0:
    log("child")
    raise SystemExit(7)
_, status = os.wait()
log("parent")
print(os.waitstatus_to_exitcode(status))
"""


@needs_torch
@pytest.mark.timeout(90)
def test_a_forked_child_reports_only_its_own_values(tmp_path: Path) -> None:
    completed = run_program(tmp_path / "feed", FORKING_PROGRAM, library="torch")
    page = page_of_feed(tmp_path / "feed")

    assert completed.stdout == "7\n"
    assert sum_by_labels(page, "training_events_total", type="parent") == 2
    assert sum_by_labels(page, "training_events_total", type="child") == 1


# The agent process ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "is_torchrun"),
    [
        ("python -u -X dev /usr/bin/torchrun train.py", True),
        ("python -W ignore -m torch.distributed.run train.py", True),
        ("python -mtorch.distributed.run train.py", True),
        ("python -uX dev -Bm torch.distributed.run train.py", True),
        ("python -Wignore::FutureWarning:m /usr/bin/torchrun train.py", True),
        ("python - torchrun", False),
        ("python train.py -m torch.distributed.run", False),
        ("python -u train.py torchrun", False),
        ("python -m train", False),
        ("python -c torchrun", False),
        ("python", False),
    ],
)
def test_torchrun_is_recognized_by_its_command_line(command: str, is_torchrun: bool) -> None:
    assert is_launcher(command.split()) is is_torchrun


# Allocator of GPU memory: recorded statistics of torch ------------------------------------

ALLOCATOR_PROGRAM = """
from exporter.bridges.cuda_memory import CudaMemory

def stats(allocated, reserved, retries, ooms):
    def current_and_peak(current):
        return {"all": {"current": current, "peak": 2 * current, "allocated": 0, "freed": 0}}
    return {"allocated_bytes": current_and_peak(allocated), "reserved_bytes": current_and_peak(reserved),
            "num_alloc_retries": retries, "num_ooms": ooms, "max_split_size": -1}

device, other = ("0", "GPU-a"), ("1", "GPU-b")
polls = [{device: stats(10, 20, 3, 0)}, {device: stats(30, 40, 5, 1), other: stats(1, 2, 0, 0)},
         {device: stats(5, 40, 1, 0)}]
memory = CudaMemory(lambda: polls.pop(0))
exporter.configure(run="mine")
for _ in range(3):
    memory.poll()
"""


def test_allocator_statistics_become_the_documented_families(tmp_path: Path) -> None:
    # The live process prints its page, because an ended process has no gauges of memory.
    page = run_job(tmp_path, ALLOCATOR_PROGRAM + PRINT_PAGE).process.stdout

    retries = "training_gpu_alloc_retries_total"
    assert series(page, retries).keys() == {
        '{gpu="0",role="helper",run="mine",uuid="GPU-a"}',
        '{gpu="1",role="helper",run="mine",uuid="GPU-b"}',
    }
    assert sum_by_labels(page, retries, gpu="0") == 5 + 1  # a fall from 5 to 1 is a reset
    assert sum_by_labels(page, "training_gpu_oom_total", gpu="0") == 1
    assert sum_by_labels(page, "training_gpu_oom_total", gpu="1") == 0
    states = {"allocated": 5, "reserved": 40, "peak_allocated": 10, "peak_reserved": 80}
    for state, expected_bytes in states.items():
        assert sum_by_labels(page, "training_gpu_memory_bytes", gpu="0", state=state) == expected_bytes
