"""Programs that use the training API: a fork, many iterations, a kill after a save, and a rank that waits for the test."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import exporter
from exporter import one_logger, training
from exporter.feed.decoder import decode


def fork_in_an_iteration() -> None:
    """Fork in the sixth iteration. The child enters three phases and ends first."""
    config = one_logger.OneLoggerConfig(application_name="a", world_size_or_fn=1, session_tag_or_fn="s")
    one_logger.TrainingTelemetryProvider.instance().with_base_config(config).configure_provider()
    for _ in range(5):
        with training.training_iteration():
            pass
    with training.training_iteration():
        child = os.fork()
        if not child:
            for _ in range(3):
                with training.phase("compile"):
                    pass
            exporter.shutdown()
            os._exit(0)
        os.waitpid(child, 0)


def train_many_iterations() -> None:
    """Train 50,010 iterations, and print by how many bytes the memory has grown during 40,000 of them."""
    with training.application(), training.training_loop(train_iterations_start=5):
        # Flushed explicitly: on a busy machine, the recording thread runs late and its queue grows.
        _train(10_000)
        exporter.flush()
        initial_bytes = _resident_bytes()
        for _ in range(4):
            _train(10_000)
            exporter.flush()
        print(_resident_bytes() - initial_bytes)
        _train(10)


def _train(iterations: int) -> None:
    for _ in range(iterations):
        with training.training_iteration():
            with training.data_loading():
                pass
            with training.model_forward():
                pass
            training.record(loss=0.5, tokens=7, grad_norm=1.0)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def save_and_be_killed() -> None:
    """Train seven iterations, save, and kill this process once the feed has the save."""
    feed = Path(os.environ["EXPORTER_FEED_DIR"])
    with training.application(), training.training_loop(train_iterations_start=0):
        for _ in range(7):
            with training.training_iteration():
                pass
        with training.checkpoint_save(7):
            pass
        deadline = time.monotonic() + 60
        while not _has_committed(feed, step=7) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)


def _has_committed(feed: Path, step: int) -> bool:
    readings = [decode(path.read_bytes()).recording.training for path in feed.glob("*.feed")]
    return any(reading is not None and reading.committed_step == step for reading in readings)


def train_until_the_pages_are_read(directory: str, steps: int) -> None:
    """Train, write the steps and the last loss of the rank to a file, and exit once the file `pages-read` exists."""
    rank, loss = int(os.environ["RANK"]), 0.0
    for step in range(steps):
        with training.training_iteration():
            loss = rank + 1 / (step + 1)
            training.record(loss=loss)
    (Path(directory) / f"rank{rank}").write_text(json.dumps({"steps": steps, "loss": loss}))
    while not (Path(directory) / "pages-read").exists():
        time.sleep(0.05)
