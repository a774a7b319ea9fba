"""Stats of this process, and programs in child processes with their feed and metrics page."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

from fork_server import Program, run_forked
from places import PROJECT, TESTS
from programs import code_of
from waiting import PATIENCE

import exporter
from exporter.exposition.negotiation import Format
from exporter.exposition.page import Page
from exporter.feed.decoder import Decoder
from exporter.feed.reader import FeedReader
from exporter.feed.snapshot import Snapshot
from exporter.ledger.collector import JobCollector
from exporter.ledger.state.store import StateStore
from exporter.recording.stat import REGISTRY
from exporter.recording.stat_state import StatState
from exporter.recording.values import StatReading

IMPORTS = """
import atexit, gc, os, signal, subprocess, sys, threading, time
import exporter
from exporter import Stat, flush, log, training
"""


def stat_state(name: str, **labels: str) -> StatState:
    """Return the state of a Stat of this process after a flush."""
    (state,) = _states(name, labels)
    return state


def total(name: str, **labels: str) -> float:
    """Return the sum of the samples of a Stat of this process after a flush; 0 before the first sample."""
    return sum(state.sum for state in _states(name, labels))


def _states(name: str, labels: dict[str, str]) -> list[StatState]:
    exporter.flush()
    identity = name, tuple(sorted(labels.items()))
    return [
        state for state in REGISTRY.states() if (state.definition.name, state.definition.labels) == identity
    ]


def run_program(
    feed: Path,
    program: str | Path,
    *,
    check: bool = True,
    timeout: float = 60,
    library: str | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run a program (source text, or the path of a script) that records into a feed directory.

    With *library*, the program runs in a process that has imported this library, see `fork_server.MODULES`; otherwise in a new
    interpreter.
    """
    feed.mkdir(exist_ok=True)
    inherited_variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("EXPORTER_", "SLURM_", "TORCHELASTIC_")) and name not in {"RANK", "LOGLEVEL"}
    }
    program_arguments = [str(program)] if isinstance(program, Path) else ["-c", textwrap.dedent(program)]
    variables = {
        **inherited_variables,
        "EXPORTER_FEED_DIR": str(feed),
        "EXPORTER_FLUSH_SECONDS": "0.2",
        "PYTHONPATH": f"{PROJECT}{os.pathsep}{TESTS}",
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    if library is not None:
        forked_program = Program(program_arguments, directory=str(feed.parent), environment=variables)
        completed = run_forked(library, forked_program, timeout * PATIENCE)
    else:
        completed = subprocess.run(
            [sys.executable, "-W", "ignore", *program_arguments],
            env=variables,
            cwd=feed.parent,  # `-c` searches the current directory first
            capture_output=True,
            text=True,
            timeout=timeout * PATIENCE,
            check=False,
        )
    assert not check or completed.returncode == 0, f"status {completed.returncode}: {completed.stderr}"
    return completed


def run_function(
    feed: Path, function: Callable[..., None], *arguments: object, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a function of `programs` in a new interpreter that records into a feed directory."""
    return run_program(feed, code_of(function, *arguments), check=True, timeout=60, **environment)


def run_with_imports(
    feed: Path, program: str, *, check: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a training program, prefixed with `IMPORTS`, as a script."""
    script = feed.parent / "train.py"
    script.write_text(IMPORTS + textwrap.dedent(program), encoding="utf-8")
    return run_program(feed, script, check=check, timeout=60, **environment)


def snapshots(feed: Path) -> list[Snapshot]:
    """Return the last snapshot of each process, ordered by start time."""
    unordered = [Decoder().decode(path.read_bytes()) for path in feed.glob("*.feed")]
    return sorted(unordered, key=lambda snapshot: snapshot.process.started)


def single_reading(feed: Path, name: str = "train.loss") -> StatReading:
    """Return the only reading of a Stat in the only file of the feed."""
    (snapshot,) = snapshots(feed)
    (reading,) = [reading for reading in snapshot.recording.stats if reading.definition.name == name]
    return reading


def page_of_feed(feed: Path) -> str:
    """Return the metrics page of a sidecar that reads a feed directory 12 s after the exit of the processes."""
    state_directory = feed.parent / f"{feed.name}-state"
    state_directory.mkdir(exist_ok=True)
    elapsed_seconds = 0.0
    collector = JobCollector(
        FeedReader(feed),
        StateStore(state_directory, sidecar="test"),
        monotonic=lambda: time.monotonic() + elapsed_seconds,
        max_exited_runs=1000,  # a program of a test may have a run for each of its loops
    )
    collector.collect()
    elapsed_seconds = 12.0  # the sidecar no longer waits for an exit status, and uses the report of the job
    page = Page()
    page.publish("feed", collector.collect())
    return page.render(Format.TEXT).decode()


def series(page: str, name: str) -> dict[str, float]:
    """Return the values of the series of a sample name, by the text of the labels on the page."""
    values = {}
    for line in page.splitlines():
        name_and_labels, _, value = line.rpartition(" ")
        if name_and_labels == name or name_and_labels.startswith(f"{name}{{"):
            values[name_and_labels.removeprefix(name)] = float(value)
    return values


def sum_by_labels(page: str, name: str, **labels: str) -> float:
    """Return the sum of the series of a family that have these labels."""
    matchers = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        value
        for series_labels, value in series(page, name).items()
        if all(matcher in series_labels for matcher in matchers)
    )
