"""Lifecycle of the NVML child in real time: hangs, crashes, losses, restarts, detach, and parent death.

Further tests check the isolation of the child, its memory, and the XIDs of the kernel log.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gpu_support import (
    SHORT_TIMINGS,
    gpus_up,
    label_values,
    replaying_collector,
    small_machine,
    value,
    values,
    write_machine,
    xid_counts,
)
from run_support import is_alive
from waiting import WAIT_LIMIT_SECONDS, wait_until

from exporter.collectors.gpu.child_process import command_of
from exporter.collectors.gpu.collector import GpuCollector
from exporter.collectors.gpu.kernel_log import KernelLog
from exporter.collectors.gpu.nvml import encode, parse
from exporter.collectors.gpu.options import GpuOptions
from exporter.replay.machines import PACKAGE_DIRECTORY

HAS_DRIVER = any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/nvidia0"))

ENERGY_JOULES = "gpu_energy_joules_total"
CHILD_RESTARTS = "exporter_nvml_child_restarts_total"


def nvml_up(collector: GpuCollector) -> bool:
    return value(collector, "gpu_nvml_up") == 1


def reason(collector: GpuCollector) -> str:
    """Return the reason why NVML as a whole is down, or "" if it is up."""
    return "".join(label_values(collector.collect(), "gpu_nvml_error_info", "reason"))


def nvml_children() -> list[int]:
    """Return the pids of the running NVML children of this process."""
    tasks = Path("/proc/self/task").glob("*/children")
    pids = [int(pid) for task in tasks for pid in task.read_text().split()]
    return [
        pid
        for pid in pids
        if is_alive(pid) and b"exporter.replay.library" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def child_command(output_expression: str, statement: str) -> list[str]:
    """Return the command of a child that writes the bytes of an expression and then executes a statement."""
    program = f"import os, time; from exporter.collectors.gpu.nvml import encode; os.write(1, {output_expression}); {statement}"
    return [sys.executable, "-c", program]


@pytest.mark.skipif(HAS_DRIVER, reason="this machine has NVIDIA's driver")
@pytest.mark.parametrize(
    ("mode", "visible", "problems", "is_ready"),
    [
        ("auto", None, [], True),
        ("auto", "", [], True),
        ("auto", "0,1", ["nvml_down"], True),
        ("required", None, ["nvml_down"], False),
    ],
)
def test_a_missing_library_is_a_failure_only_if_gpus_are_expected(
    mode: Any, visible: str | None, problems: list[str], *, is_ready: bool
) -> None:
    collector = GpuCollector(GpuOptions(mode=mode), visible=visible, timings=SHORT_TIMINGS)
    collector.start()
    try:
        wait_until(lambda: reason(collector) == "library_not_found")
        collected = collector.collect()
    finally:
        collector.stop()

    (message,) = [*collected.unsupported, *(message for _, message in collected.problems)]
    assert "libnvidia-ml.so.1" in message
    assert "--gpus all" in message
    assert [name for name, _ in collected.problems] == problems
    assert (collector.not_ready() is None) == is_ready
    assert values(collected, "gpu_nvml_up") == {(): 0.0}
    assert values(collected, "gpu_devices_expected") == ({(): 2} if visible else {})


def test_a_killed_child_is_replaced_and_counters_continue(tmp_path: Path) -> None:
    with replaying_collector(write_machine(tmp_path)) as collector:
        wait_until(lambda: (value(collector, ENERGY_JOULES, "0") or 0) > 50)
        first_pid, first_joules = collector.child_pid, value(collector, ENERGY_JOULES, "0")
        assert first_pid is not None
        assert first_joules is not None
        os.kill(first_pid, signal.SIGKILL)
        wait_until(lambda: reason(collector) == "crashed")
        after_crash = collector.collect()
        wait_until(lambda: nvml_up(collector))

        ((_, message),) = after_crash.problems
        assert "SIGKILL" in message
        assert values(after_crash, ENERGY_JOULES) == {}
        assert values(after_crash, "gpu_up") == {}  # unknown, therefore a gap
        assert collector.child_pid != first_pid
        assert (value(collector, ENERGY_JOULES, "0") or 0) >= first_joules
        assert value(collector, CHILD_RESTARTS, "crashed") == 1


def test_a_stopped_child_is_replaced_once(tmp_path: Path) -> None:
    with replaying_collector(write_machine(tmp_path)) as collector:
        wait_until(lambda: nvml_up(collector))
        stopped_pid = collector.child_pid
        assert stopped_pid is not None
        os.kill(stopped_pid, signal.SIGSTOP)
        try:
            wait_until(lambda: reason(collector) == "hung")
            during_hang = collector.collect()
            wait_until(lambda: nvml_up(collector))

            assert values(during_hang, "gpu_power_watts") == {}
            assert values(during_hang, "gpu_up") == {}  # no GPU is identified as the cause
            assert is_alive(stopped_pid)
            assert value(collector, CHILD_RESTARTS, "hung") == 1
        finally:
            os.kill(stopped_pid, signal.SIGCONT)
        wait_until(lambda: not is_alive(stopped_pid))
        assert nvml_up(collector)


def test_a_hanging_gpu_is_skipped_until_its_call_returns(tmp_path: Path) -> None:
    hang = 'at: 1s, until: 17s, gpus: [1], hang: ["*"]'
    # Long enough for a new process on a busy machine.
    timings = dataclasses.replace(SHORT_TIMINGS, deadline_seconds=8.0)
    with replaying_collector(write_machine(tmp_path, hang), timings=timings) as collector:
        wait_until(lambda: gpus_up(collector) == {"0": 1, "1": 1})
        other_readings = [value(collector, "gpu_power_watts", "0")]
        while gpus_up(collector).get("1") != 0:
            other_readings.append(value(collector, "gpu_power_watts", "0"))
            time.sleep(0.02)
        during_hang = collector.collect()
        wait_until(lambda: gpus_up(collector) == {"0": 1, "1": 1})

    assert None not in other_readings
    assert label_values(during_hang, "gpu_error_info", "gpu") == ["1"]
    assert label_values(during_hang, "gpu_error_info", "reason") == ["hung"]
    assert set(label_values(during_hang, "gpu_power_watts", "gpu")) == {"0"}


def test_a_gpu_that_hangs_right_after_its_return_is_skipped(tmp_path: Path) -> None:
    loss = "at: 1s, until: 3s, gpus: [1], lost: true"
    hang = "at: 3s, gpus: [1], hang: [nvmlDeviceGetPowerUsage]"
    # Long enough for a pass on a busy machine.
    timings = dataclasses.replace(SHORT_TIMINGS, deadline_seconds=4.0)
    with replaying_collector(write_machine(tmp_path, loss, hang), timings=timings) as collector:
        wait_until(lambda: gpus_up(collector) == {"0": 1, "1": 1})
        reasons: set[str] = set()
        gpu_reasons: set[str] = set()
        while "hung" not in gpu_reasons | reasons:
            reasons.add(reason(collector))
            gpu_reasons.update(label_values(collector.collect(), "gpu_error_info", "reason"))
            time.sleep(0.02)

    assert "hung" not in reasons  # the call is of a GPU, and NVML as a whole answers


def test_other_gpus_have_readings_while_a_gpu_hangs_repeatedly(tmp_path: Path) -> None:
    hangs = (f'at: {start}s, until: {start + 4}s, gpus: [1], hang: ["*"]' for start in (1, 6))
    # Enough for a new process on a busy machine, and a visible gap.
    timings = dataclasses.replace(
        SHORT_TIMINGS, deadline_seconds=3.0, first_backoff_seconds=5.0, max_backoff_seconds=5.0
    )
    with replaying_collector(write_machine(tmp_path, *hangs), timings=timings) as collector:
        wait_until(lambda: gpus_up(collector) == {"0": 1, "1": 1})
        other_readings: list[float | None] = []
        while value(collector, CHILD_RESTARTS, "hung") != 2 or gpus_up(collector) != {"0": 1, "1": 0}:
            other_readings.append(value(collector, "gpu_power_watts", "0"))
            time.sleep(0.02)
        # On a busy machine the new child process may start later than the last readings expire.
        assert other_readings.count(None) < len(other_readings) / 5
        wait_until(lambda: gpus_up(collector) == {"0": 1, "1": 1})


def test_a_slow_attach_is_not_a_hang(tmp_path: Path) -> None:
    # Without persistence mode, every GPU is initialized again, also by the replacement for a new driver.
    delay = "at: 2500ms, delay: {nvmlDeviceGetHandleByIndex_v2: 1s}"
    with replaying_collector(write_machine(tmp_path, delay, 'at: 3s, driver: "590.44.01"')) as collector:
        wait_until(lambda: nvml_up(collector))
        wait_until(lambda: value(collector, CHILD_RESTARTS, "lib_rm_version_mismatch") == 1)
        wait_until(lambda: any("590.44.01" in labels for labels in values(collector.collect(), "gpu_info")))

        assert gpus_up(collector) == {"0": 1, "1": 1}
        assert value(collector, CHILD_RESTARTS, "hung") == 0


def test_hanging_processes_do_not_pile_up(tmp_path: Path) -> None:
    hang = 'at: 500ms, hang: ["*", nvmlInitWithFlags]'
    timings = dataclasses.replace(
        SHORT_TIMINGS,
        deadline_seconds=0.5,
        start_deadline_seconds=8,
        replacement_delay_seconds=0.1,
        first_backoff_seconds=0.1,
        max_backoff_seconds=0.1,
    )
    with replaying_collector(write_machine(tmp_path, hang), timings=timings) as collector:
        wait_until(lambda: reason(collector) == "hung")
        end_time, max_children = time.monotonic() + 3, 0
        while time.monotonic() < end_time:
            max_children = max(max_children, len(nvml_children()))
            time.sleep(0.05)

        assert value(collector, CHILD_RESTARTS, "hung") == 1
        assert max_children == 2
        stop_time = time.monotonic()
    assert time.monotonic() - stop_time < WAIT_LIMIT_SECONDS  # the collector stops at the end of the block


def test_a_fault_in_the_library_kills_the_child_alone(tmp_path: Path) -> None:
    crash = "at: 1s, until: 6s, gpus: [1], crash: [nvmlDeviceGetPowerUsage]"
    with replaying_collector(write_machine(tmp_path, crash)) as collector:
        wait_until(lambda: reason(collector) == "crashed")
        ((_, message),) = collector.collect().problems
        assert "SIGSEGV" in message

        wait_until(lambda: nvml_up(collector))
        assert gpus_up(collector) == {"0": 1, "1": 1}


def test_a_driver_update_causes_no_gap(tmp_path: Path) -> None:
    update = 'at: 3s, driver: "590.44.01"'
    # Long enough for a new process on a busy machine.
    with replaying_collector(
        write_machine(tmp_path, update), timings=dataclasses.replace(SHORT_TIMINGS, deadline_seconds=8.0)
    ) as collector:
        wait_until(lambda: nvml_up(collector))
        missing_readings = 0

        def is_updated() -> bool:
            nonlocal missing_readings
            missing_readings += not nvml_up(collector)
            return any("590.44.01" in labels for labels in values(collector.collect(), "gpu_info"))

        wait_until(is_updated)

        assert missing_readings == 0
        assert value(collector, CHILD_RESTARTS, "lib_rm_version_mismatch") == 1


def test_a_gpu_that_nvml_no_longer_lists_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with replaying_collector(write_machine(tmp_path, "at: 1s, gpus: [1], removed: true")) as collector:
        wait_until(lambda: value(collector, CHILD_RESTARTS, "devices_changed") == 1)
        wait_until(lambda: list(gpus_up(collector)) == ["0"])
        wait_until(lambda: "NVML no longer lists GPU 1" in caplog.messages)


def test_nvml_is_detached_on_request_and_reattached(tmp_path: Path) -> None:
    with replaying_collector(write_machine(tmp_path)) as collector:
        wait_until(lambda: nvml_up(collector))
        pid = collector.child_pid
        assert pid is not None
        collector.detach()
        wait_until(
            lambda: reason(collector) == "detached" and not is_alive(pid) and collector.child_pid is None
        )
        assert collector.collect().problems == []

        collector.reattach()
        wait_until(lambda: nvml_up(collector))
        assert value(collector, CHILD_RESTARTS, "crashed") == 0


def test_a_detached_child_that_hangs_is_not_polled(tmp_path: Path) -> None:
    clock_reads = 0

    def counting_monotonic() -> float:
        nonlocal clock_reads
        clock_reads += 1
        return time.monotonic()

    with replaying_collector(write_machine(tmp_path), monotonic=counting_monotonic) as collector:
        wait_until(lambda: nvml_up(collector))
        pid = collector.child_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        collector.detach()
        wait_until(lambda: reason(collector) == "detached")
        time.sleep(SHORT_TIMINGS.deadline_seconds)
        clock_reads = 0
        time.sleep(1.0)
        clock_reads_after_deadline = clock_reads
        os.kill(pid, signal.SIGCONT)

    assert clock_reads_after_deadline < 10  # in a second; a thread that polls reads the clock at each poll


def test_the_child_inherits_nothing_but_its_pipes(tmp_path: Path) -> None:
    with (tmp_path / "secret").open("w") as secret:
        os.set_inheritable(secret.fileno(), True)
        with replaying_collector(write_machine(tmp_path)) as collector:
            wait_until(lambda: nvml_up(collector))
            descriptors = Path(f"/proc/{collector.child_pid}/fd")
            links = sorted(str(entry.readlink()).partition(":")[0] for entry in descriptors.iterdir())

            assert links == ["/dev/null", "/dev/null", "pipe", "pipe"]
            assert os.getsid(collector.child_pid or 0) == collector.child_pid
            working_directory = Path(f"/proc/{collector.child_pid}/cwd").readlink()
            assert str(working_directory) == "/"


def test_the_child_is_small_and_the_sidecar_does_not_load_nvml() -> None:
    with replaying_collector(str(PACKAGE_DIRECTORY / "h100.yaml"), options=GpuOptions()) as collector:
        wait_until(lambda: value(collector, "exporter_nvml_child_resident_memory_bytes"))
        assert (value(collector, "exporter_nvml_child_resident_memory_bytes") or 0) <= 48 * 2**20

    program = "import sys, exporter.collectors.gpu.collector; print('pynvml' in sys.modules)"
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert completed.stdout == "False\n"


PARENT_PROGRAM = """
import sys, time
from exporter.collectors.gpu.collector import GpuCollector
from exporter.collectors.gpu.options import GpuOptions
from gpu_support import replay_arguments
collector = GpuCollector(GpuOptions(period=0.1), **replay_arguments(sys.argv[1]))
collector.start()
while not any(family.name == "gpu_power_watts" for family in collector.collect()):
    time.sleep(0.02)
print(collector.child_pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("fault", ["at: 1h", 'at: 3s, hang: ["*"]'], ids=["healthy", "hanging"])
@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
def test_the_child_dies_with_its_parent(tmp_path: Path, fault: str, *, is_stopped: bool) -> None:
    command = [sys.executable, "-c", PARENT_PROGRAM, write_machine(tmp_path, fault)]
    parent = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    if "hang" in fault:
        time.sleep(3.5)
    if is_stopped:
        os.kill(pid, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    parent.stdout.close()

    wait_until(lambda: not is_alive(pid))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["/nonexistent/python"], "cannot be started"),
        ([sys.executable, "-c", "raise SystemExit('no way')"], "ended with status 1: no way"),
        # An incomplete message is ignored.
        (
            child_command("encode({'kind': 'sample', 'gpus': []})[:-3]", "os.kill(os.getpid(), 9)"),
            "was killed by SIGKILL",
        ),
        *(
            (child_command(output_expression, "time.sleep(30)"), "sent an invalid message")
            for output_expression in (
                "b'HTTP/1.1 200 OK\\n'",
                "encode({'kind': 'sample'})",
                "encode({'kind': 'sample', 'time': 'noon', 'gpus': 5})",
                "encode({'kind': 'sample', 'time': 10**400, 'gpus': []})",
                "encode({'kind': 'sample', 'time': 1, 'gpus': [{'index': 0, 'uuid': 'u', 'job_index': 0, 'values': [3]}]})",
            )
        ),
    ],
)
def test_a_child_that_fails_to_start_or_sends_garbage_is_reported_with_the_reason(
    tmp_path: Path, command: list[str], message: str
) -> None:
    with replaying_collector(write_machine(tmp_path), command=command) as collector:
        wait_until(lambda: reason(collector) == "crashed")

        # A failure, although no GPUs are expected: on a machine without GPUs, the child ends with a reason.
        ((_, reported_message),) = collector.collect().problems
        assert message in reported_message
        assert set(values(collector.collect(), "gpu_nvml_up").values()) == {0.0}


def test_a_growing_child_requests_its_replacement() -> None:
    start_message = {
        "kind": "start",
        "parent": os.getpid(),
        "replay": small_machine().plain(),
        "memory_limit_bytes": 1 << 20,
    }
    command = command_of("exporter.replay.library")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(encode(start_message))
        child.stdin.flush()

        assert parse(child.stdout.read().splitlines()[-1])["reason"] == "memory"


def test_xids_come_from_the_kernel_log_without_nvml_events(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text("6,1,1,-;NVRM: Xid (PCI:0000:10:00): 31, before the start\n")
    kernel_log = KernelLog(path=log, clock=lambda: 1234.0)
    kernel_log.open()
    with replaying_collector(write_machine(tmp_path), kernel_log=kernel_log) as collector:
        wait_until(lambda: nvml_up(collector))
        with log.open("a") as file:
            file.write("4,2,2,-;NVRM: Xid (PCI:0000:10:00): 79, pid=7, GPU has fallen off the bus.\n")
            file.write("4,3,3,-;NVRM: Xid (PCI:0000:99:00): 79, a GPU of another machine\n")
            file.write("4,4,4,-;\xff\xfe NVRM: Xid (PCI:zz)\n4,5,5,-;half of a li")

        assert xid_counts(collector.collect()) == {("0", "79"): 1}
        times = values(collector.collect(), "gpu_xid_last_timestamp_seconds")
        assert set(times.values()) == {1234.0}


@pytest.mark.parametrize("shadow", ["exporter.py", "exporter/__init__.py", "json.py"])
def test_modules_in_the_current_directory_do_not_replace_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shadow: str
) -> None:
    (tmp_path / shadow).parent.mkdir(exist_ok=True)
    (tmp_path / shadow).write_text("raise SystemExit('the file of the user')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ".")
    with replaying_collector(write_machine(tmp_path)) as collector:
        wait_until(lambda: nvml_up(collector))

        assert value(collector, CHILD_RESTARTS, "crashed") == 0
