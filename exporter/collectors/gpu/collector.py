"""The GPU collector: what the NVML child says, published; the child's life, supervised.

Used in the sidecar. The child pushes its readings on its own schedule; `collect` makes families of what has come, and of
the kernel's log, and waits for nothing. The supervisor's thread takes messages, anything else may be asked from any
thread; one lock guards what is known. While the child is gone or hangs, the families about GPUs are absent.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from exporter.collectors.gpu.child_process import CHILD, Heard, NvmlChild, command_of
from exporter.collectors.gpu.kernel_log import KernelLog
from exporter.collectors.gpu.options import DEFAULT_OPTIONS, GpuOptions, expected_devices
from exporter.collectors.gpu.publishing import SPECS, gpu_families
from exporter.collectors.gpu.state import GpuRegistry
from exporter.collectors.gpu.supervisor import DEFAULT_TIMINGS, RELEASED, STARTING, Supervisor, Timings
from exporter.errors import CollectError
from exporter.families import Collected

LOG = logging.getLogger("exporter.collectors.gpu")

# The configuration's section has more than the options.
_CHILD_OPTIONS = tuple(each.name for each in dataclasses.fields(GpuOptions))
_DOWN = "nvml_down"

_REMEDIES = {
    "library_not_found": "install NVIDIA's driver, or give the container access to the GPUs (docker run --gpus all)",
    "function_not_found": "libnvidia-ml.so.1 is far too old, or not NVIDIA's: see which one is loaded (ldconfig -p)",
    "gpu_not_found": "the driver finds no GPU that it supports: run nvidia-smi, and see the permissions of /dev/nvidia*",
    "driver_not_loaded": "the driver is not loaded: run nvidia-smi, or modprobe nvidia",
    "no_permission": "the driver does not let this user in: see the permissions of /dev/nvidiactl and /dev/nvidia*",
    "binding_not_found": "the Python package nvidia-ml-py is not installed: pip install nvidia-ml-py",
    "lib_rm_version_mismatch": "library and driver are of different versions: reboot, or load the new driver",
    "unknown": "in a container the devices may be gone (systemctl daemon-reload takes them): start it anew; else see the kernel's log",
    "hung": "a call does not return: see the kernel's log for Xid errors",
}


class GpuCollector:
    """Watches the GPUs, or a described machine as plain values in `replay`; `visible` is the job's CUDA_VISIBLE_DEVICES.

    `on_change` is called when NVML, or a GPU, goes or returns, on a thread of the collector's; it must not wait.
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
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._visible = visible if replay is None else None
        self._replay = replay
        self._kernel_log = KernelLog() if kernel_log is None else kernel_log
        self._command = tuple(command or command_of(CHILD))
        self._timings = timings
        self.on_change = on_change
        self._monotonic = monotonic
        # When the first child answered, and with it the timeline of a replay began.
        self._origin: float | None = None
        self.registry = GpuRegistry(monotonic=monotonic)  # its lock also guards the next two
        self._reason, self._message = STARTING, ""
        self._was_up = False
        self._supervisor = Supervisor(
            start=self._start_child,
            take=self._take,
            change=self._change,
            # Nothing is said between two passes.
            timings=dataclasses.replace(timings, deadline=timings.deadline + max(0.0, options.period - 1.0)),
            monotonic=monotonic,
        )
        self._started = False
        # For the log, on the supervisor's thread alone: GPUs that were said to be down, and all there are.
        self._told: dict[int, tuple[str, str]] = {}
        self._seen: set[int] = set()

    def start(self) -> None:
        """Begin to watch; nothing is known before the first pass of the child, a moment later."""
        if self._replay is None:
            self._kernel_log.open()
        self._supervisor.start()
        self._started = True

    def stop(self, timeout_seconds: float = 2.0) -> None:
        """End the child and stop watching."""
        if self._started:
            self._started = False
            self._supervisor.stop(timeout_seconds)
        self._kernel_log.close()

    def collect(self) -> Collected:
        """Make families of what is known; raises CollectError where the supervisor has ended by a fault of its own."""
        if self._started and not self._supervisor.alive:
            raise CollectError("the thread that listens to the NVML child has ended", reason=_DOWN)
        expected = expected_devices(self._visible)
        with self.registry.lock:
            reason, message = self._reason, self._message
            self.registry.take_kernel_xids(self._kernel_log.read())
            collected = gpu_families(
                self.registry,
                reason,
                self._supervisor.restarts,
                expected=expected,
                per_call=self._options.details,
            )
        if reason in {"", STARTING, RELEASED}:
            return collected
        parts = (message, _REMEDIES.get(reason, ""))
        about = f"GPUs are not watched ({reason}): {'; '.join(filter(None, parts)) or 'NVML does not answer'}"
        if self._options.mode == "required" or self._was_up or expected is not None:
            collected.fail(CollectError(about, reason=_DOWN))
        else:
            collected.unsupported.append(about)
        return collected

    def not_ready(self) -> str | None:
        """Why the exporter is not ready; None when it is, or when GPUs are not required."""
        reason = self._reason
        required = self._options.mode == "required" and reason != ""
        return f"NVML does not answer ({reason})" if required else None

    def release(self, *, released: bool = True) -> None:
        """Let go of NVML, so that the driver can be unloaded or a GPU be reset; or take it again."""
        self._supervisor.release(released=released)

    @property
    def apart(self) -> bool:
        """Whether nobody else sees these GPUs: they are described, and not as shared."""
        return self._replay is not None and not self._replay["shared"]

    @property
    def child_pid(self) -> int | None:
        """The process id of the NVML child; None while there is none."""
        return self._supervisor.pid

    def _start_child(
        self, skip: tuple[int, ...], now: float, heard: Callable[[NvmlChild, Heard], None]
    ) -> NvmlChild:
        first = {
            "kind": "start",
            "parent": os.getpid(),
            "options": {name: getattr(self._options, name) for name in _CHILD_OPTIONS},
            "visible": self._visible,
            "skip": skip,
            # In time to know the GPU when the deadline is over.
            "slow_call_seconds": 0.4 * self._timings.deadline,
            "replay": self._replay,
            "origin": self._origin,
        }
        return NvmlChild(first, heard, now=now, command=self._command)

    def _take(self, message: Mapping[str, Any], child: int) -> None:
        if message["kind"] == "machine":
            self.registry.machine = dict(message)
            self._origin = self._origin or self._monotonic()
        elif self.registry.take_sample(message, child):
            self._tell()
            self.on_change()

    def _tell(self) -> None:
        """Log what became of single GPUs; what concerns all of them is told by the collector's verdict."""
        gpus = dict(self.registry.gpus)  # which only this thread changes
        for index, gpu in gpus.items():
            name, down = f"GPU {gpu.number} ({gpu.uuid or 'UUID unknown'})", gpu.down
            if down and self._told.get(index) != (name, down):
                self._told[index] = (name, down)
                LOG.warning("%s does not answer: %s", name, down)
            elif not down and self._told.pop(index, None) is not None:
                LOG.info("%s answers again", name)
        for index in self._seen - gpus.keys():
            self._told.pop(index, None)
            LOG.warning("GPU %s of NVML is no longer there", index)
        self._seen = set(gpus)

    def _change(self, reason: str, message: str, gpu: int | None) -> None:
        with self.registry.lock:
            self._reason, self._message = reason, message
            self._was_up |= reason == ""
            if reason:
                self.registry.forget_readings(hanging=gpu)
        self.on_change()


def visible_devices() -> str | None:
    """CUDA_VISIBLE_DEVICES as it was set for this process, which is the job's when it was started beside it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")
