"""Machine descriptions for the replayed GPUs of the scenario, with the load of the run and the faults of the GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from dashboards.scenario import Timeline
from exporter import replay
from exporter.replay.machine import SHIFT_SECONDS

MACHINE_DIRECTORY = Path(replay.__file__).parent / "described"
HOT_GPU, MEMORY_ERROR_GPU, LOST_GPU = 1, 5, 6
"""Indexes of the GPUs with faults on `node-2`. `HOT_GPU` is the GPU of the straggler; no rank uses the other two."""

GPUS_PER_NODE = 8
USED_MEMORY_BYTES = 71_400_000_000
"""Used memory of each GPU. Constant, for simplicity; a job would free its memory at the crash."""
NORMAL_LEVEL, PAUSED_LEVEL, DOWN_LEVEL = 0.93, 0.06, 0.0
"""Load of a GPU as a fraction: while its run trains, while the run waits for data, and while no run exists."""
STEADY_LOAD = [{"seconds": "10s", "level": NORMAL_LEVEL}]
"""Steps of the load in the notation of the replay, which repeats them."""


def h100_machine(
    timeline: Timeline, *, first_gpu_number: int, has_faults: bool = False, is_steady: bool = False
) -> dict[str, Any]:
    """Return the description of a machine with eight H100 under the load of a run.

    Args:
        timeline: Times of the events in the scenario.
        first_gpu_number: Number in the UUID of the first GPU; each later GPU has the next number. Machines must not share numbers.
        has_faults: Whether a GPU overheats, a second GPU has memory errors, and a third GPU is lost.
        is_steady: Whether the run neither pauses nor crashes.
    """
    machine: dict[str, Any] = yaml.safe_load((MACHINE_DIRECTORY / "h100.yaml").read_text(encoding="utf-8"))
    machine["description"] = "Eight H100 of the dashboards' scenario."
    model = machine["models"].pop("h100")
    model["values"]["memory_used"] = USED_MEMORY_BYTES
    machine["gpus"] = []
    for index in range(GPUS_PER_NODE):
        model_name = f"h100-{index}"
        machine["models"][model_name] = model | {
            "load": {
                "steps": STEADY_LOAD if is_steady else _load_steps(timeline, index * SHIFT_SECONDS),
                "ripple": 0.04,  # amplitude of a wave around the level
            }
        }
        machine["gpus"].append(
            {"model": model_name, "uuid": f"GPU-{first_gpu_number + index:08d}-5ca1-ab1e-0000-000000000000"}
        )
    if has_faults:
        machine["timeline"] = _faults(timeline)  # changes of the machine at given times
    return machine


def _load_steps(timeline: Timeline, shift_seconds: float) -> list[dict[str, Any]]:
    """Return the steps of a GPU's load over the timeline.

    The replay starts the load of this GPU `shift_seconds` after the start of the first step. The first step is longer by this time, so that
    all GPUs change their load at the same time.
    """
    pause_start, pause_end = timeline.pause_range
    restart_time = timeline.crash_time + timeline.downtime
    # End of each step as a fraction of the duration, and the load. The last step is longer than the rest of the scenario, so that the
    # load does not start again before the end.
    level_by_end = {
        pause_start: NORMAL_LEVEL,
        pause_end: PAUSED_LEVEL,
        timeline.crash_time: NORMAL_LEVEL,
        restart_time: DOWN_LEVEL,
        1.5: NORMAL_LEVEL,
    }
    steps: list[dict[str, Any]] = []
    previous_end = 0.0
    for end, level in level_by_end.items():
        seconds = timeline.to_seconds(end - previous_end) + (0.0 if steps else shift_seconds)
        steps.append({"seconds": _duration(seconds), "level": level})
        previous_end = end
    return steps


def _faults(timeline: Timeline) -> list[dict[str, Any]]:
    """Return the GPU faults of the scenario as the entries of a machine description's `timeline`."""
    straggler_start = _duration(timeline.to_seconds(timeline.straggler_start))
    crash_time = _duration(timeline.to_seconds(timeline.crash_time))
    memory_errors_start = _duration(timeline.to_seconds(timeline.memory_errors_start))
    lost_start, lost_end = (_duration(timeline.to_seconds(fraction)) for fraction in timeline.lost_range)
    return [
        {
            "at": straggler_start,
            "until": crash_time,
            "gpus": [HOT_GPU],
            "set": {
                "clock_sm": {"idle": 345, "busy": 1290},  # MHz
                "temperature": {"idle": 62, "busy": 89},  # °C, like the next two
                "memory_temperature": {"idle": 70, "busy": 97},
                "temperature_margin": {"idle": 12, "busy": 0},
                "power": {"idle": 71_000, "busy": 468_000},  # mW
                # Nanoseconds per second: the GPU is throttled for 60 % of the time.
                "throttle_hw_thermal": {"idle": 600_000_000, "busy": 600_000_000, "counter_from": 0},
            },
        },
        {
            "at": memory_errors_start,
            "gpus": [MEMORY_ERROR_GPU],
            "xid": [63],  # a row remapping is recorded
            "set": {"ecc_corrected_dram": 4, "remapping_pending": 1},
        },
        # Xid 79: the GPU has fallen off the bus. Recovery action 1: reset the GPU.
        {"at": lost_start, "gpus": [LOST_GPU], "xid": [79]},
        {"at": lost_start, "until": lost_end, "gpus": [LOST_GPU], "lost": True},
        {"at": lost_end, "gpus": [LOST_GPU], "set": {"recovery_action": 1}},
    ]


def _duration(seconds: float) -> str:
    """Return a duration in the notation of the replay, at least a millisecond."""
    return f"{max(1, round(seconds * 1000))}ms"
