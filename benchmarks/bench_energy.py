"""Accuracy of energy by phase on the recorded power of an H100, compared with zeus, and cost of a phase in GPU time.

In the trace, matrix products alternate with copies or pauses of 400, 100 and 40 ms. Phases of 20 ms are cut from the phases of
100 ms. The whole sidecar reads the trace at the speed of the recording. If zeus is installed, its monitor opens and closes a window
for each phase. It reads the energy counter of the trace, which is updated every 100 ms; the result is the mean of ten offsets of
the updates. The cost of a phase with CUDA events is measured on a GPU if there is one, otherwise without the events, which take 1
to 7 µs each. Prints a JSON document, and exits with status 1 if a budget is exceeded.

    python benchmarks/bench_energy.py
"""

from __future__ import annotations

import bisect
import importlib
import importlib.util
import itertools
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from report import REPOSITORY, Row, report

from exporter.training.gpu_time import GpuTimer
from exporter.training.kinds import MODEL_FORWARD, TRAINING_ITERATION

sys.path.insert(0, str(REPOSITORY / "tests"))
from energy_support import energy_of
from power_trace_support import (
    PHASE_SPANS,
    PLAY_END_SECONDS,
    PLAY_START_SECONDS,
    TRACE,
    Node,
    PhaseSpan,
    energy_joules_at,
    joules,
)

TRUE_WATTS = {"product": 775.0, "copy": 410.0, "pause": 137.0}
"""Power in phases of many seconds: 750 to 800 W, 400 to 420 W, and the last three seconds of the trace."""
PHASES = {
    400: {"forward": "product", "logging": "pause"},
    100: {"backward": "product", "data_loading": "copy"},
    40: {"optimizer": "product", "zero_grad": "pause"},
}

NOTES = {
    40: ["shorter than 50 ms (2.5 power samples), so the phase blends with its neighbors"],
    20: ["each phase of 100 ms cut in five; most neighbors are therefore parts of the same phase"],
}
"""Reasons of errors, by length of the phases in ms."""


def windows_of_20_ms() -> list[PhaseSpan]:
    """Return the fifths of the phases of 100 ms, as phases of 20 ms."""
    return [
        (phase, begin + (end - begin) * part / 5, begin + (end - begin) * (part + 1) / 5)
        for phase, begin, end in PHASE_SPANS
        if phase in PHASES[100]
        for part in range(5)
    ]


def counter_updates(offset_seconds: float) -> tuple[list[float], list[float]]:
    """Return the updates of NVML's energy counter, one every 100 ms: their times, and the joules after each."""
    samples = TRACE["power_samples_watts"]
    sample_times, joules_at_samples = [samples[0][0]], [0.0]
    for (previous_time, _), (sample_time, watts) in itertools.pairwise(samples):
        sample_times.append(sample_time)
        joules_at_samples.append(joules_at_samples[-1] + watts * (sample_time - previous_time))
    update_times = [0.1 * number + offset_seconds - 1.0 for number in range(210)]
    last = len(joules_at_samples) - 1
    return update_times, [
        joules_at_samples[min(bisect.bisect(sample_times, update_time), last)] for update_time in update_times
    ]


def zeus(windows: Sequence[PhaseSpan], *, approximate: bool) -> tuple[dict[str, float], float]:
    """Return the mean power by phase from windows of zeus, and the share of the windows with an energy of 0."""
    zeus_energy: Any = importlib.import_module("zeus.monitor.energy")
    joules_by_phase, seconds, are_zero = defaultdict[str, float](float), defaultdict[str, float](float), []
    power_readings = TRACE["field_186_and_power_usage_watts"]
    for offset in range(10):
        update_times, counter_joules = counter_updates(offset / 100)
        clock = SimpleNamespace(now=0.0)
        gpus = SimpleNamespace(
            supports_get_total_energy_consumption=lambda _: True,
            get_total_energy_consumption=lambda _: (
                1000 * counter_joules[bisect.bisect(update_times, clock.now) - 1]  # noqa: B023
            ),
            get_instant_power_usage=lambda _: (
                1000 * next(watts for time_, watts, _ in reversed(power_readings) if time_ <= clock.now)  # noqa: B023
            ),
        )
        zeus_energy.time = lambda: clock.now  # noqa: B023
        monitor: Any = zeus_energy.ZeusMonitor.__new__(zeus_energy.ZeusMonitor)
        monitor.__dict__ |= {
            "measurement_states": {}, "gpu_indices": [0], "cpu_indices": [], "soc_is_present": False, "gpus": gpus,
            "approx_instant_energy": approximate, "power_monitor": None, "log_file": None, "sync_with": [],
        }  # fmt: skip
        for phase, begin, end in windows:
            clock.now = begin
            monitor.begin_window(phase, sync_execution=False)
            clock.now = end
            joules_read = monitor.end_window(phase, sync_execution=False).gpu_energy[0]
            joules_by_phase[phase] += joules_read
            seconds[phase] += end - begin
            are_zero.append(joules_read == 0.0)
    return {phase: joules_by_phase[phase] / seconds[phase] for phase in joules_by_phase}, statistics.mean(
        are_zero
    )


def sidecar_power(windows: Sequence[PhaseSpan]) -> tuple[dict[str, float], float]:
    """Return the mean power by phase from the sidecar, and the relative error of the energy of all phases."""
    seconds = defaultdict[str, float](float)
    for phase, begin, end in windows:
        seconds[phase] += end - begin
    with tempfile.TemporaryDirectory() as directory:
        page = Node(Path(directory), phase_spans=windows).play()
    joules_by_phase = joules(page, "training_phase_energy_joules_total", method="power_samples")
    counter_joules = energy_joules_at(PLAY_END_SECONDS) - energy_joules_at(PLAY_START_SECONDS)
    watts = {phase: joules_by_phase[phase] / seconds[phase] for phase in seconds}
    return watts, energy_of(page) / counter_joules - 1


def timed_phase_seconds() -> tuple[float, bool]:
    """Return the time that a GPU-timed phase takes on the job's thread, and True if it was measured on a GPU."""
    torch: Any = importlib.import_module("torch") if importlib.util.find_spec("torch") else None
    has_gpu = torch is not None and torch.cuda.is_available()
    if has_gpu:
        torch.zeros(1, device="cuda")
    else:
        event = SimpleNamespace(record=lambda: None, query=lambda: True, elapsed_time=lambda _: 1.0)
        sys.modules["torch"] = SimpleNamespace(  # type: ignore[assignment]  # the required part of torch
            cuda=SimpleNamespace(
                is_initialized=lambda: True,
                is_current_stream_capturing=lambda: False,
                Event=lambda **_: event,
            )
        )
    timer = GpuTimer({"EXPORTER_GPU_TIME": "1"}, clock=itertools.count(0.0, 1.0).__next__)
    timer.turn_on_or_off(threading.get_ident(), 1.0)
    durations = []
    for _ in range(200):
        timer.begin(TRAINING_ITERATION, "iteration")
        started = time.perf_counter()
        for _ in range(50):
            timer.begin(MODEL_FORWARD, "forward")
            timer.end(MODEL_FORWARD)
        durations.append((time.perf_counter() - started) / 50)
        timer.end(TRAINING_ITERATION)
    return statistics.median(durations), has_gpu


def main() -> None:
    """Measure, and print the report."""
    warnings.simplefilter("ignore")
    has_zeus = importlib.util.find_spec("zeus") is not None
    rows, details = [], dict[str, Mapping[str, float]]()
    for length, windows in (
        (400, PHASE_SPANS),
        (100, PHASE_SPANS),
        (40, PHASE_SPANS),
        (20, windows_of_20_ms()),
    ):
        loads = PHASES[100 if length == 20 else length]
        own_watts, energy_error = sidecar_power(windows)
        watts_by_tool = {"training-exporter": own_watts}
        if has_zeus:
            selected_windows = [window for window in windows if window[0] in loads]
            watts_by_tool["zeus"], zero_ratio = zeus(selected_windows, approximate=False)
            watts_by_tool["zeus, approx_instant_energy"], _ = zeus(selected_windows, approximate=True)
            details[f"{length} ms, share of zeus' windows that read 0"] = {"": round(zero_ratio, 3)}
        errors = {}
        for tool, watts_by_phase in watts_by_tool.items():
            watts_by_load = {load: round(watts_by_phase[phase], 1) for phase, load in loads.items()}
            details[f"{length} ms, {tool}, watts"] = watts_by_load
            errors[tool] = max(abs(watts / TRUE_WATTS[load] - 1) for load, watts in watts_by_load.items())
        budget = 5.0 if length >= 100 else None
        peers = {tool: round(value * 100, 1) for tool, value in errors.items() if tool != "training-exporter"}
        title = f"Largest error of the mean power of a phase, phases of {length} ms"
        error_percent = round(errors["training-exporter"] * 100, 1)
        rows.append(Row(title, error_percent, "%", budget, peers, NOTES.get(length, ())))
    rows.append(
        Row(
            "Error of the energy of all phases, relative to the energy counter",
            abs(round(energy_error * 100, 3)),
            "%",
            0.3,
        )
    )
    seconds, has_gpu = timed_phase_seconds()
    suffix = "" if has_gpu else ", without the CUDA events"
    title = f"Time that the training thread needs for a GPU-timed phase{suffix}"
    rows.append(Row(title, round(1e6 * seconds, 2), "µs", 10.0))
    report(rows, **details)


if __name__ == "__main__":
    main()
