"""Composition root of the training process: connects the recorder with the feed and the training."""

from __future__ import annotations

import os
from collections.abc import Iterable
from time import time

from exporter.errors import FeedError
from exporter.feed.directory import feed_directory
from exporter.feed.overrides import OverridesReader, StatRule
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
    """Sink that writes recordings to the feed file of this process and reads the Stat rules of the sidecar's configuration."""

    def __init__(self, flush_seconds: float) -> None:
        self._flush_seconds = flush_seconds
        self._writer: FeedWriter | None = None
        self._identity: ProcessIdentity | None = None  # of the latest recording, without id and version
        self._overrides: OverridesReader | None = None

    def after_fork(self) -> None:
        """Detach from the file of the parent in a forked child."""
        self._writer, self._overrides = None, None

    def is_open(self) -> bool:
        """Return True between the first recording and `close`, if the recording could open a feed file."""
        return self._writer is not None

    def location(self) -> FeedLocation | None:
        """Return the directory of the feed file and the identity of this process in it, or None if no feed file is open."""
        writer = self._writer
        if writer is None:
            return None
        identity = writer.identity
        return FeedLocation(
            directory=writer.directory, process_id=identity.id, run=identity.run, rank=identity.rank
        )

    def publish(self, recording: Recording, identity: ProcessIdentity, *, is_child: bool) -> bool:
        """Replace the recording in the feed file. Return False on a failure. The last recording of an identity closes the file.

        A child process without values needs no file, which is a success.
        """
        writer = self._writer
        if writer is None:
            if is_child and not _has_values(recording):
                return True  # such as a worker of a DataLoader, which inherits the Stats and adds no samples
            directory = _usable_feed_directory()
            if directory is None:
                return False
            new_identity = identity.replace(id=os.urandom(16).hex(), version=__version__)
            writer = self._writer = FeedWriter(directory, new_identity, flush_seconds=self._flush_seconds)
        elif identity is not self._identity:
            writer.identity = identity.replace(id=writer.identity.id, version=__version__)
        self._identity = identity
        is_written = writer.publish(recording)
        if not is_written:
            cause = writer.problem or "an earlier write has not ended"
            if recording.final:
                log_once(
                    f"final {cause}",
                    f"the samples since the last snapshot are lost: the final snapshot was not written to the feed: {cause}",
                )
            else:
                log_once(f"feed {cause}", f"the latest snapshot was not written to the feed: {cause}")
        if writer.notice is not None:
            log_once(writer.notice, writer.notice)
        if recording.final:
            self.close()
        return is_written

    def close(self) -> None:
        """Close the feed file, which keeps its last snapshot. The next recording opens a new file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def changed_rules(self) -> Iterable[StatRule] | None:
        """Return the Stat rules of the sidecar's configuration if they have changed since the last call, otherwise None."""
        if self._overrides is None and (directory := _usable_feed_directory()) is not None:
            self._overrides = OverridesReader(directory)
        try:
            return None if self._overrides is None else self._overrides.changed_rules()
        except FeedError as error:
            log_once(
                f"overrides {error}",
                f"the rules of `recording:` in the sidecar's configuration are ignored: {error}",
            )
            return None


def _has_values(recording: Recording) -> bool:
    """Return True if a recording has samples, events or training data."""
    return bool(
        recording.events
        or recording.training
        or any(reading.count or reading.rejected or reading.overflows for reading in recording.stats)
    )


def _usable_feed_directory() -> str | None:
    """Return the feed directory, which is created if necessary. If it cannot be used, log a notice and return None."""
    try:
        return feed_directory(os.environ)
    except FeedError as error:
        log_once("feed directory", f"nothing is exported: {error}")
        return None


def _training_position() -> TrainingPosition:
    """Return the phase and step of the training; without values before the job reports training."""
    reading = TRAINING.training_reading()
    if reading is None:
        return TrainingPosition()
    return TrainingPosition(reading.phase, max(time() - reading.phase_since, 0.0), reading.step)


def _log_hang(answer: StackAnswer) -> None:
    """Log the event `training.hang`, which the event handlers of the job receive."""
    innermost = answer.main.frames[0] if answer.main.frames else None
    events.log(
        "training.hang",
        "this run hangs: no step has completed within the limits of goodput.hang_after and goodput.hang_steps",
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
