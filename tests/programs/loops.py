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
    for reading in TRAINING.series():
        definition = reading.definition
        if definition.kind == "gauge":
            key = ",".join([definition.name, *(f"{name}={value}" for name, value in definition.labels)])
            values[key.removeprefix("training.")] = reading.value
    return values


def begin(run: str) -> None:
    """Start a new run."""
    from exporter.bridges.sources import ACTIVE

    ACTIVE.fallback.superseded()
    exporter.flush()
    exporter.configure(run=run)


def expect(loss: float | None) -> None:
    """Print the recorded loss beside the job's own loss, which is None if the bridge cannot know the loss."""
    print("loss", gauges().get("loss,mode=train"), loss)


def run(module: ModuleType) -> None:
    """Call each function that a module defines, and print the gauges of its run."""
    for name, function in list(vars(module).items()):  # torch.compile adds names
        if inspect.isfunction(function) and function.__module__ == module.__name__:
            begin(name)
            function()
            print(name, json.dumps(gauges()))
    begin("over")
