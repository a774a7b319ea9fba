"""GPU collector, which publishes the readings of the NVML child.

Runs in the sidecar. The child sends readings on its own schedule, and the supervisor's thread receives them.
`collect` never waits: it returns the families of the latest readings and of the kernel log. Without a working child, the families of
the GPUs are absent. Every method except `start` and `stop` may be called from any thread; the lock of the registry guards the readings.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from exporter.collectors.gpu.child_process import CHILD_MODULE, NvmlChild, command_of
from exporter.collectors.gpu.energy import OUTAGE_SECONDS
from exporter.collectors.gpu.kernel_log import KernelLog
from exporter.collectors.gpu.options import DEFAULT_OPTIONS, GpuOptions, expected_devices
from exporter.collectors.gpu.publishing import SPECS, GpuBlock
from exporter.collectors.gpu.state import GpuRegistry
from exporter.collectors.gpu.supervisor import (
    CRASHED,
    DEFAULT_TIMINGS,
    DETACHED,
    HUNG,
    STARTING,
    Supervisor,
    Timings,
)
from exporter.collectors.job import EnergyReading
from exporter.diagnoses import NVML_DOWN, NVML_FAILURES
from exporter.errors import CollectError
from exporter.families import Collected

_log = logging.getLogger("exporter.collectors.gpu")

# The configuration section has more keys than the options that the child receives.
_CHILD_OPTIONS = tuple(field.name for field in dataclasses.fields(GpuOptions))
_NVML_DOWN = "nvml_down"
"""Reason of a failed pass, a value of the label `reason` of exporter_collector_errors_total."""
LATE_SECONDS = 5.0
"""Longest expected delay of a reading on its way from the child. A moment that is longer ago and has no reading is a gap."""
_FAILURES_WITH_DRIVER = frozenset({CRASHED, HUNG, "lib_rm_version_mismatch"})
"""Reasons of NVML's failure that cannot occur on a machine without GPUs."""


class GpuCollector:
    """Collector of this machine's GPUs, or of the described machine in `replay`.

    Args:
        options: Selection of GPUs and period of the passes.
        replay: Description of a machine, as plain values, that is replayed in place of NVML.
        visible: The job's CUDA_VISIBLE_DEVICES.
        timings: Timeouts and delays of the supervisor. With a period above 1 s, the deadline is extended by the rest of the period.
        kernel_log: Source of Xid errors besides NVML; /dev/kmsg by default.
        command: Command line of the child; by default the module `nvml.child`.
        on_change: Called when NVML fails or works again, and when a GPU is listed, lost, removed or returns; must not block.
        on_sample: Called after each pass of the child; must not block.
        counts_energy: Returns False while another exporter counts the energy of this machine.
        is_detached: True to start without loading NVML.
        monotonic: The clock.
    """

    name = "gpu"
    specs = SPECS

    def __init__(
        self,
        options: GpuOptions = DEFAULT_OPTIONS,
        *,
        replay: Mapping[str, Any] | None = None,
        visible: str | None = None,
        timings: Timings = DEFAULT_TIMINGS,
        kernel_log: KernelLog | None = None,
        command: Sequence[str] = (),
        on_change: Callable[[], None] = lambda: None,
        on_sample: Callable[[], None] = lambda: None,
        counts_energy: Callable[[], bool] = lambda: True,
        is_detached: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._visible = visible if replay is None else None
        self._replay = replay
        self._kernel_log = KernelLog() if kernel_log is None else kernel_log
        self._command = tuple(command or command_of(CHILD_MODULE))
        self._timings = timings
        self.on_change = on_change
        self._on_sample = on_sample
        self._counts_energy = counts_energy
        self.is_detached = is_detached
        self._monotonic = monotonic
        # Start of a replay: monotonic time of the first message of the first child.
        self._replay_origin: float | None = None
        # The lock of the registry also guards `_reason`, `_message` and `_was_up`.
        self.registry = GpuRegistry(outage_seconds=max(OUTAGE_SECONDS, 2.5 * options.period))
        self._reason, self._message = STARTING, ""
        self._was_up = False  # True once NVML was up
        self._supervisor = Supervisor(
            start_child=self._start_child,
            on_message=self._handle_message,
            on_state=self._handle_state,
            # A child sends no message between two passes.
            timings=dataclasses.replace(
                timings, deadline_seconds=timings.deadline_seconds + max(0.0, options.period - 1.0)
            ),
            monotonic=monotonic,
        )
        self._is_started = False
        self._block = GpuBlock()
        # State of the log lines; used only by the supervisor's thread.
        self._logged_failures: dict[int, tuple[str, str]] = {}  # name and reason by NVML's index
        self._known_indices: set[int] = set()

    def start(self) -> None:
        """Start the supervisor if it is not running. The first readings arrive after the first pass of the child.

        Raises RuntimeError if the system refuses a thread.
        """
        if self._is_started:
            return
        if self.is_detached:
            self._supervisor.detach()
        self._supervisor.start()
        if self._replay is None:
            self._kernel_log.open()
        self._is_started = True

    def stop(self, timeout_seconds: float = 2.0) -> None:
        """Stop the child and close the kernel log."""
        if self._is_started:
            self._is_started = False
            self._supervisor.stop(timeout_seconds)
        self._kernel_log.close()

    def collect(self) -> Collected:
        """Return the families of the latest readings.

        A failure of NVML fails the pass if the machine is known to have GPUs: the configuration requires GPUs, CUDA_VISIBLE_DEVICES names
        GPUs, NVML worked before, or the reason is in `_FAILURES_WITH_DRIVER`. Otherwise, NVML is an unsupported source.

        Raises:
            CollectError: The supervisor's thread has exited.
        """
        if self._is_started and not self._supervisor.is_alive:
            raise CollectError("the thread that supervises the NVML child has exited", reason=_NVML_DOWN)
        expected = expected_devices(self._visible)
        is_paused = not (self.is_exclusive_replay or self._counts_energy())
        with self.registry.lock:
            reason, message = self._reason, self._message
            self.registry.energy_is_paused = is_paused
            self.registry.add_kernel_xids(self._kernel_log.read())
            restarts = self._supervisor.restarts
            collected = self._block.families(self.registry, reason, restarts, expected=expected)
            has_gpus = bool(self.registry.gpus)
        if is_paused and has_gpus:
            collected.unsupported.append(
                "another exporter on this machine counts the energy; gpu_energy_joules_total is absent here"
            )
        if reason in {"", STARTING, DETACHED}:
            return collected
        statement = NVML_FAILURES.get(reason, NVML_DOWN).describe(reason=reason)
        message_text = (
            f"GPUs are not monitored ({reason}): {message or statement.sentence}; {statement.remedy}"
        )
        expects_gpus = self._options.mode == "required" or self._was_up or expected is not None
        if expects_gpus or reason in _FAILURES_WITH_DRIVER:
            collected.fail(CollectError(message_text, reason=_NVML_DOWN))
        else:
            collected.unsupported.append(message_text)
        return collected

    def energies(self) -> tuple[EnergyReading, ...]:
        """Return the energy reading of each GPU with a known UUID, with the gap of a current outage."""
        self.registry.count_energy_gaps(self._monotonic() - LATE_SECONDS)
        return self.registry.energies()

    def not_ready(self) -> str | None:
        """Return why the exporter is not ready: in the mode `required`, while NVML does not answer. Return None if the exporter is ready."""
        reason = self._reason
        is_required = self._options.mode == "required" and reason != ""
        return f"NVML does not answer ({reason})" if is_required else None

    def detach(self) -> None:
        """Stop the child, so that the driver can be unloaded or a GPU reset."""
        self.is_detached = True
        self._supervisor.detach()

    def reattach(self) -> None:
        """Restart the child after `detach`."""
        self.is_detached = False
        self._supervisor.reattach()

    def toggle(self) -> bool:
        """Detach from NVML, or reattach if detached. Return True if NVML is detached now."""
        if self.is_detached:
            self.reattach()
        else:
            self.detach()
        return self.is_detached

    @property
    def is_exclusive_replay(self) -> bool:
        """True for a replay whose GPUs no other exporter can read."""
        return self._replay is not None and not self._replay["shared"]

    @property
    def child_pid(self) -> int | None:
        """Process id of the NVML child, or None."""
        return self._supervisor.pid

    def _start_child(self, skip: tuple[int, ...], avoid: tuple[tuple[int, str], ...]) -> NvmlChild:
        """Start a child with the message `start`. Raises OSError."""
        start_message = {
            "kind": "start",
            "parent": os.getpid(),
            "options": {name: getattr(self._options, name) for name in _CHILD_OPTIONS},
            "visible": self._visible,
            "skip": skip,
            "avoid": avoid,
            # Shorter than the deadline, so that the GPU of a hanging call is known at the deadline.
            "slow_call_seconds": 0.75 * self._timings.deadline_seconds,
            "replay": self._replay,
            "origin": self._replay_origin,
        }
        return NvmlChild(start_message, now=self._monotonic(), command=self._command)

    def _handle_message(self, message: Mapping[str, Any], child: int) -> None:
        """Store a message `machine` or `sample`. Log and report the changes of GPUs in a `sample`."""
        if message["kind"] == "machine":
            self.registry.machine = dict(message)
            self._replay_origin = self._replay_origin or self._monotonic()
            return
        if self.registry.add_sample(message, child):
            self._log_changes()
            self.on_change()
        self._log_gaps()
        self._on_sample()

    def _log_gaps(self) -> None:
        """Log the energy that the GPUs used during outages that ended with the last message."""
        for job_index, joules in self.registry.new_energy_gaps():
            _log.warning(
                "GPU %s used %.0f J while its energy was not read; exporter_energy_gap_joules_total counts them",
                job_index,
                joules,
            )

    def _log_changes(self) -> None:
        """Log state changes of single GPUs, which the status of the collector does not show."""
        gpus = dict(self.registry.gpus)  # without the lock: only this thread adds and removes GPUs
        for index, gpu in gpus.items():
            name, failure = f"GPU {gpu.job_index} ({gpu.uuid or 'UUID unknown'})", gpu.failure
            if failure and self._logged_failures.get(index) != (name, failure):
                self._logged_failures[index] = (name, failure)
                _log.warning("%s does not answer: %s", name, failure)
            elif not failure and self._logged_failures.pop(index, None) is not None:
                _log.info("%s answers again", name)
        for index in sorted(self._known_indices - gpus.keys()):
            self._logged_failures.pop(index, None)
            _log.warning("NVML no longer lists GPU %s", index)
        self._known_indices = set(gpus)

    def _handle_state(self, reason: str, message: str, gpu: int | None) -> None:
        """Store the state of NVML. Unless NVML is up, clear the readings.

        Args:
            reason: Reason of the failure; "" if NVML is up.
            message: Text of the failure.
            gpu: NVML's index of the GPU whose call hangs, or None.
        """
        with self.registry.lock:
            self._reason, self._message = reason, message
            self._was_up |= reason == ""
            if reason:
                self.registry.clear_readings(hanging=gpu)
        self.on_change()


def visible_devices() -> str | None:
    """Return CUDA_VISIBLE_DEVICES of this process. The job has the same value if both inherit the variable from the same parent."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")
