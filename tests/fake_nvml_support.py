"""Build of the stand-in for libnvidia-ml.so.1 (tests/fakenvml), and descriptions of the simulated GPUs."""

from __future__ import annotations

import atexit
import functools
import importlib.metadata
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from gpu_support import value
from waiting import wait_until

from exporter.collectors.gpu.collector import GpuCollector
from exporter.collectors.gpu.options import GpuOptions

SOURCE = Path(__file__).parent / "fakenvml" / "fakenvml.c"
HEADERS_PACKAGE = "nvidia-nvml-dev-cu12"


def _headers() -> Path | None:
    """Return the directory of nvml.h, or None if the package is not installed."""
    try:
        files = importlib.metadata.files(HEADERS_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())).parent for file in files if file.name == "nvml.h"), None)


needs_fake_nvml = pytest.mark.skipif(
    shutil.which("gcc") is None or _headers() is None, reason=f"needs gcc and {HEADERS_PACKAGE}"
)


@functools.cache
def library() -> Path:
    """Build the library once, and return its directory."""
    directory = Path(tempfile.mkdtemp(prefix="fakenvml-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    library_file = directory / "libnvidia-ml.so.1"
    options = ["-O2", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{_headers()}"]
    arguments = ["-Wl,-soname,libnvidia-ml.so.1", "-o", str(library_file), str(SOURCE), "-lm", "-lpthread"]
    subprocess.run(["gcc", *options, *arguments], check=True)
    return directory


@dataclass(frozen=True, slots=True)
class Load:
    """State of a GPU from a given time."""

    watts: float = 300.0
    busy_percent: float = 50.0
    received_mebibytes_per_second: float = 100.0  # over PCIe
    sent_mebibytes_per_second: float = 50.0  # over PCIe
    power_cap_ratio: float = 0.25  # ratio of the time under a power cap


def _schedule_line(gpu: int, start_time: float, load: Load) -> str:
    """Return a line of the file `schedule`. Its fields are described in fakenvml.c."""
    pcie = f"{load.received_mebibytes_per_second} {load.sent_mebibytes_per_second}"
    return f"{gpu} {start_time:.6f} {load.watts} {load.busy_percent} 20 60 40 30 {pcie} {load.power_cap_ratio} 0\n"


@dataclass(slots=True)
class FakeNvml:
    """Machine whose GPUs the stand-in simulates.

    Args:
        directory: Directory of the files that the stand-in reads.
        count: Number of GPUs.
        state: Further keys and values of the file `state`.
    """

    directory: Path
    count: int = 1
    state: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("schedule", "errors", "procs", "xids"):
            self._write(name, "")
        lines = [f"gpus {self.count}", *(f"{key} {text}" for key, text in self.state.items())]
        self._write("state", "\n".join(lines) + "\n")

    def play(self, *loads: tuple[float, Load]) -> None:
        """Let all GPUs follow a schedule: pairs of a start time (Unix time) and the load from that time."""
        self._write(
            "schedule",
            "".join(
                _schedule_line(gpu, start_time, load)
                for gpu in range(self.count)
                for start_time, load in loads
            ),
        )

    def draw(self, *watts: float) -> None:
        """Let the GPUs draw a constant power, one value in watts per GPU."""
        start_time = time.time() - 1000.0
        self._write(
            "schedule",
            "".join(
                _schedule_line(gpu, start_time, Load(power_watts)) for gpu, power_watts in enumerate(watts)
            ),
        )

    def fail(self, *lines: str) -> None:
        """Let NVML functions fail.

        A line has the fields of the file `errors`, which fakenvml.c describes. Required fields: function, GPU (-1 for all), returned code,
        start and end as Unix times. Optional fields: seconds of a hang, kind of impossible values.
        """
        self._write("errors", "".join(f"{line}\n" for line in lines))

    def hold(self, *processes: tuple[int, int]) -> None:
        """Let NVML list these processes: pairs of a process id and the index of its GPU."""
        self._write("procs", "".join(f"{pid} {gpu} 1000000000 50\n" for pid, gpu in processes))

    def report_xid(self, time_seconds: float, gpu: int, xid: int) -> None:
        """Report an Xid error that happens at a Unix time."""
        self._write("xids", f"{time_seconds:.6f} {gpu} {xid}\n")

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_LIBRARY_PATH": str(library()), "FAKE_NVML_DIR": str(self.directory)}

    def _write(self, name: str, text: str) -> None:
        self.directory.mkdir(exist_ok=True)
        draft = self.directory / f".{name}"
        draft.write_text(text)
        draft.rename(self.directory / name)


@contextmanager
def fake_nvml_collector(
    fake: FakeNvml, *, period: float = 1.0, retry: float = 30.0
) -> Iterator[GpuCollector]:
    """Run a collector of the machine, and yield it after its first readings."""
    environment = dict(os.environ)
    os.environ.update(fake.environment)
    collector = GpuCollector(GpuOptions(period=period, retry=retry))
    collector.start()
    try:
        wait_until(lambda: value(collector, "gpu_nvml_up") == 1)
        yield collector
    finally:
        collector.stop()
        os.environ.clear()
        os.environ.update(environment)


def play_constant_load(fake: FakeNvml, load: Load | None = None) -> float:
    """Play a constant load on all GPUs, and return the current Unix time."""
    current_time = time.time()
    fake.play((current_time - 1000.0, load or Load()))
    return current_time
