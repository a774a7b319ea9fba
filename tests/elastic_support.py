"""What the tests of torchelastic's faces and bridges share: readings of this process, children, pages of a feed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from waiting import PATIENCE

import exporter
from exporter.exposition.negotiation import Format
from exporter.exposition.page import Page
from exporter.feed.reader import FeedReader
from exporter.ledger.collector import JobCollector
from exporter.ledger.store import StateStore
from exporter.recording.stat import REGISTRY
from exporter.recording.state import StatState

REPOSITORY = Path(__file__).resolve().parent.parent


def tally(name: str, **labels: str) -> StatState:
    """A Stat of this process, drained."""
    exporter.flush()
    (found,) = [
        each
        for each in REGISTRY.states()
        if each.definition.name == name and each.definition.labels == tuple(sorted(labels.items()))
    ]
    return found


def total(name: str, **labels: str) -> float:
    """Its sum; 0 when there is none yet."""
    exporter.flush()
    return sum(
        each.sum
        for each in REGISTRY.states()
        if each.definition.name == name and each.definition.labels == tuple(sorted(labels.items()))
    )


def child(
    feed: Path, program: str, *, check: bool = True, timeout: float = 60, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program that records into a feed directory."""
    feed.mkdir(exist_ok=True)
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("EXPORTER_", "SLURM_", "TORCHELASTIC_")) and name not in {"RANK", "LOGLEVEL"}
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)],
        env={
            **inherited,
            "EXPORTER_FEED_DIR": str(feed),
            "EXPORTER_FLUSH_SECONDS": "0.2",
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            **environment,
        },
        cwd=feed.parent,  # `-c` looks for modules and distributions there first
        capture_output=True,
        text=True,
        timeout=timeout * PATIENCE,
        check=False,
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def page_of(feed: Path) -> str:
    """The page that a sidecar of a feed directory serves of its job."""
    state = feed.parent / f"{feed.name}-state"
    state.mkdir(exist_ok=True)
    passed = 0.0
    collector = JobCollector(
        FeedReader(feed), StateStore(state, keeper="test"), monotonic=lambda: time.monotonic() + passed
    )
    collector.collect()
    passed = 1.0  # no exit status has come meanwhile, so that the job's own word counts
    page = Page()
    page.publish("feed", collector.collect())
    return page.render(Format.TEXT).decode()


def series(page: str, name: str) -> dict[str, float]:
    """The series of a sample name: labels as they are written, value."""
    found = {}
    for line in page.splitlines():
        head, _, value = line.rpartition(" ")
        if head == name or head.startswith(f"{name}{{"):
            found[head.removeprefix(name)] = float(value)
    return found


def labelled(page: str, name: str, **labels: str) -> float:
    """The sum of a family's series that have these labels."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(value for key, value in series(page, name).items() if all(each in key for each in wanted))
