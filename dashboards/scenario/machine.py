"""Described machines of the scenario: cards of the packaged machines with the load and faults of the scenario."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from dashboards.scenario import Timeline
from exporter import replay

MACHINES = Path(replay.__file__).parent / "described"
HOT_GPU, ILL_GPU, LOST_GPU = 1, 5, 6
"""GPU of the straggler, GPU with memory errors, and GPU that falls off the bus."""

GPUS = 8
AHEAD_SECONDS = 1.7
"""Lead of a replayed GPU over the previous one; in the scenario, all GPUs are synchronous."""
NORMAL_LEVEL, PAUSED_LEVEL, DOWN_LEVEL = 0.93, 0.06, 0.0


STEADY = [{"seconds": "10s", "level": NORMAL_LEVEL}]


def h100(
    timeline: Timeline, *, first_uuid: int, faults: bool = False, steady: bool = False
) -> dict[str, Any]:
    """Eight H100 that work as the run does.

    Args:
        timeline: Of the scenario.
        first_uuid: Number of the first GPU; distinct machines have distinct UUIDs.
        faults: True if one GPU becomes hot, one has memory errors, and one is lost.
        steady: True if its run neither pauses nor crashes.
    """
    machine: dict[str, Any] = yaml.safe_load((MACHINES / "h100.yaml").read_text(encoding="utf-8"))
    machine["description"] = "Eight H100 of the dashboards' scenario."
    model = machine["models"].pop("h100")
    # Memory stays allocated on the card.
    model["values"]["memory_used"] = 71_400_000_000
    machine["gpus"] = []
    for place in range(GPUS):
        kind = f"h100-{place}"
        machine["models"][kind] = model | {
            "load": {"steps": STEADY if steady else _load(timeline, place * AHEAD_SECONDS), "ripple": 0.04}
        }
        machine["gpus"].append(
            {"model": kind, "uuid": f"GPU-{first_uuid + place:08d}-5ca1-ab1e-0000-000000000000"}
        )
    if faults:
        machine["timeline"] = _faults(timeline)
    return machine


def _load(timeline: Timeline, ahead: float) -> list[dict[str, Any]]:
    """Return the utilization of a GPU from start to end, with a lead in seconds."""
    begin, end = timeline.pause
    again = timeline.crash + timeline.restart
    shares = (
        (begin, NORMAL_LEVEL),
        (end, PAUSED_LEVEL),
        (timeline.crash, NORMAL_LEVEL),
        (again, DOWN_LEVEL),
        (1.5, NORMAL_LEVEL),
    )
    steps: list[dict[str, Any]] = []
    since = 0.0
    for until, level in shares:
        seconds = timeline.at(until - since) + (0.0 if steps else ahead)
        steps.append({"seconds": _duration(seconds), "level": level})
        since = until
    return steps


def _faults(timeline: Timeline) -> list[dict[str, Any]]:
    since, until = _duration(timeline.at(timeline.straggle)), _duration(timeline.at(timeline.crash))
    ill = _duration(timeline.at(timeline.nan))
    lost, back = (_duration(timeline.at(share)) for share in timeline.lost)
    return [
        {
            "at": since,
            "until": until,
            "gpus": [HOT_GPU],
            "set": {
                "clock_sm": {"idle": 345, "busy": 1290},
                "temperature": {"idle": 62, "busy": 89},
                "memory_temperature": {"idle": 70, "busy": 97},
                "temperature_margin": {"idle": 12, "busy": 0},
                "power": {"idle": 71_000, "busy": 468_000},
                # 0.6 s of each second, in nanoseconds.
                "throttle_hw_thermal": {"idle": 600_000_000, "busy": 600_000_000, "counter_from": 0},
            },
        },
        {"at": ill, "gpus": [ILL_GPU], "xid": [63], "set": {"ecc_corrected_dram": 4, "remapping_pending": 1}},
        {"at": lost, "gpus": [LOST_GPU], "xid": [79]},
        {"at": lost, "until": back, "gpus": [LOST_GPU], "lost": True},
        {"at": back, "gpus": [LOST_GPU], "set": {"recovery_action": 1}},
    ]


def _duration(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms"
