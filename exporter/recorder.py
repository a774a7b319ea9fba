"""Composition root of the training process: connects the recorder with the feed and the training."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from time import time

from exporter.errors import FeedError
from exporter.feed.directory import feed_directory
from exporter.feed.overrides import OverridesReader, Rule
from exporter.feed.stacks import StackAnswer
from exporter.feed.writer import FeedWriter
from exporter.recording import events
from exporter.recording.notices import log_once
from exporter.recording.recorder import RECORDER
from exporter.recording.values import ProcessIdentity, Recording
from exporter.responder import FeedLocation, StackResponder, TrainingPosition
from exporter.training.recorder import TRAINING
from exporter.version import __version__

__all__ = ["RECORDER", "FeedSink"]


class FeedSink:
    """Sink that writes recordings to the feed file of this process and reads the sidecar's recording rules."""

    def __init__(self, flush_seconds: float) -> None:
        self._flush_seconds = flush_seconds
        self._writer: FeedWriter | None = None
        self._overrides: OverridesReader | None = None

    def after_fork(self) -> None:
        """Detach from the file of the parent in a forked child."""
        self._writer, self._overrides = None, None

    def is_open(self) -> bool:
        """Return True while a feed file is open."""
        return self._writer is not None

    def location(self) -> FeedLocation | None:
        """Return the directory of the feed file, and its identity, or None before the first recording."""
        writer = self._writer
        if writer is None:
            return None
        identity = writer.identity
        return FeedLocation(writer.directory, identity.id, identity.run, identity.rank)

    def publish(
        self, recording: Recording, identify: Callable[[], ProcessIdentity], *, is_child: bool
    ) -> bool:
        """Replace the recording in the feed file. Return False on a failure.

        A child process without values needs no file, which is a success.
        """
        if self._writer is None:
            if is_child and not _has_values(recording):
                return True  # such as a worker of a DataLoader, which inherits the Stats and adds no samples
            directory = _directory()
            if directory is None:
                return False
            identity = identify().replace(id=os.urandom(16).hex(), version=__version__)
            self._writer = FeedWriter(directory, identity, flush_seconds=self._flush_seconds)
        is_written = self._writer.publish(recording)
        cause = self._writer.problem or "an earlier write has not ended"
        notice = self._writer.notice
        if not is_written:
            log_once(f"feed {cause}", f"the latest snapshot was not written to the feed: {cause}")
        if notice is not None:
            log_once(notice, notice)
        return is_written

    def update_identity(self, identity: ProcessIdentity) -> None:
        """Replace the identity in the open feed file; the id stays the same."""
        if self._writer is not None:
            self._writer.identity = identity.replace(id=self._writer.identity.id, version=__version__)

    def close(self) -> None:
        """Close the file. The next recording opens a new file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def changed_rules(self) -> Iterable[Rule] | None:
        """Return the sidecar's recording rules if they have changed since the last call, otherwise None."""
        if self._overrides is None and (directory := _directory()) is not None:
            self._overrides = OverridesReader(directory)
        try:
            return None if self._overrides is None else self._overrides.changed_rules()
        except FeedError as error:
            log_once(f"overrides {error}", f"the recording rules of the sidecar are ignored: {error}")
            return None


def _has_values(recording: Recording) -> bool:
    """Return True if a recording has samples, events or training data."""
    return bool(
        recording.events
        or recording.training
        or any(reading.count or reading.rejected or reading.overflows for reading in recording.stats)
    )


def _directory() -> str | None:
    """Create and check the feed directory. Log a notice and return None if it cannot be used."""
    try:
        return feed_directory(os.environ)
    except FeedError as error:
        log_once("feed directory", f"nothing is exported: {error}")
        return None


def _training_position() -> TrainingPosition:
    reading = TRAINING.reading()
    if reading is None:
        return TrainingPosition()
    return TrainingPosition(reading.phase, max(time() - reading.phase_since, 0.0), reading.step)


def _log_hang(answer: StackAnswer) -> None:
    """Log the event `training.hang` for the handlers of the job."""
    innermost = answer.main.frames[0] if answer.main.frames else None
    events.log(
        "training.hang",
        "this run hangs: no step completed recently",
        severity="warning",
        phase=answer.phase,
        step=answer.step,
        function=None if innermost is None else innermost.function,
        location=None if innermost is None else f"{innermost.file}:{innermost.line}",
    )


FEED_SINK = FeedSink(RECORDER.flush_seconds)
RECORDER.attach_feed(FEED_SINK)
RECORDER.attach_training(TRAINING)
RECORDER.attach(StackResponder(FEED_SINK.location, _training_position, _log_hang))
