"""Runner of training loops: each function of a module in the same process, as a separate run."""

from __future__ import annotations

import inspect
import json
from types import ModuleType

import exporter


def gauges() -> dict[str, float | None]:
    """Return the last values of this process's gauges, which a sidecar no longer exports after the exit."""
    from exporter.training.recorder import TRAINING

    exporter.flush()
    values = {}
    for reading in TRAINING.stat_readings():
        definition = reading.definition
        if definition.kind == "gauge":
            key = ",".join([definition.name, *(f"{name}={value}" for name, value in definition.labels)])
            values[key.removeprefix("training.")] = reading.value
    return values


def start_run(name: str) -> None:
    """Start a new run. The blocks that the previous loop without a framework has left open are closed first."""
    from exporter.bridges.sources import ACTIVE

    ACTIVE.fallback.superseded()
    exporter.flush()
    exporter.configure(run=name)


def print_losses(own_loss: float | None) -> None:
    """Print the recorded loss and the job's own loss, which is None if the bridge cannot know the loss."""
    print("loss", gauges().get("loss,mode=train"), own_loss)


def run_loops(module: ModuleType) -> None:
    """Call each function that a module defines, and print the gauges of its run."""
    for name, function in list(vars(module).items()):  # torch.compile adds names
        if inspect.isfunction(function) and function.__module__ == module.__name__:
            start_run(name)
            function()
            print(name, json.dumps(gauges()))
    start_run("over")
