"""The recording of this process, put together: Stats, recording thread, feed writer, identity.

Used in the training process. This is the composition root of the training side, as `exporter.cli.serve` is the
sidecar's: the stages do not know each other, and this file hands each its neighbour.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import isfinite
from time import monotonic

from exporter.errors import DefinitionError, FeedError
from exporter.recording.definition import check_label
from exporter.recording.identity import PROCESS, clean_text
from exporter.recording.late import WHEN_EVENTS_ARE_LOADED, WHEN_TRAINING_IS_LOADED
from exporter.recording.notices import tell_once
from exporter.recording.recorder import Recorder
from exporter.recording.stat import REGISTRY
from exporter.version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from exporter.feed.overrides import OverridesReader
    from exporter.feed.snapshot import ProcessIdentity
    from exporter.feed.writer import FeedWriter
    from exporter.recording.event_log import EventLog
    from exporter.training.recording import TrainingRecording

DEFAULT_FLUSH_SECONDS = 1.0


class _Opened:
    """What the recording thread has opened."""

    overrides: OverridesReader | None = None
    writer: FeedWriter | None = None


def _flush_seconds(environment: Mapping[str, str]) -> float:
    try:
        seconds = float(environment.get("EXPORTER_FLUSH_SECONDS", DEFAULT_FLUSH_SECONDS))
    except ValueError:
        return DEFAULT_FLUSH_SECONDS
    return min(max(seconds, 0.1), 60.0) if isfinite(seconds) else DEFAULT_FLUSH_SECONDS


def _load_feed() -> None:
    """Import what the recording thread will use, on the thread that makes the first Stat.

    Not at the top of this file: the feed is a third of what `import exporter` would cost, and not every process
    that imports the package records.
    """
    import json  # noqa: F401, PLC0415

    import exporter.feed.overrides  # noqa: PLC0415
    import exporter.feed.writer  # noqa: F401, PLC0415


def _prepare() -> None:
    PROCESS.begin()
    _load_feed()


def _directory() -> str | None:
    from exporter.feed.directory import feed_directory  # noqa: PLC0415  # see _load_feed

    try:
        return feed_directory(os.environ, create=True)
    except FeedError as error:
        tell_once("feed directory", f"nothing is exported: {error}")
        return None


def _open_sink(began: float) -> FeedWriter | None:
    """Make this process's feed writer; on the recording thread, at its first flush, until it succeeds."""
    from exporter.feed.writer import FeedWriter  # noqa: PLC0415  # see _load_feed

    directory = _directory()
    if directory is None:
        return None
    identity = _written_as(os.urandom(16).hex(), began)
    _Opened.writer = FeedWriter(directory, identity, flush_seconds=_flush_seconds(os.environ))
    return _Opened.writer


def _written_as(process_id: str, began: float) -> ProcessIdentity:
    from exporter.feed.snapshot import ProcessIdentity  # noqa: PLC0415  # see _load_feed

    found = PROCESS.identity()
    return ProcessIdentity(
        id=process_id,
        pid=os.getpid(),
        started=began,
        run=found.run,
        rank=found.rank,
        local_rank=found.local_rank,
        role=found.role,
        node=found.node,
        labels=found.labels,
        version=__version__,
        run_given=found.run_given,
        trains=found.trains,
    )


def _claim_rank(trains: bool) -> None:
    """Take the rank of a process that trains or records, and say so in its file."""
    PROCESS.claim_rank(trains=trains)
    if _Opened.writer is not None:
        before = _Opened.writer.identity
        _Opened.writer.identity = _written_as(before.id, before.started)


def _changed_rules() -> Sequence[Mapping[str, object]] | None:
    from exporter.feed.overrides import OverridesReader  # noqa: PLC0415  # see _load_feed

    if _Opened.overrides is None:
        directory = _directory()
        if directory is None:
            return None
        _Opened.overrides = OverridesReader(directory)
    try:
        return _Opened.overrides.changed_rules()
    except FeedError as error:
        tell_once(f"overrides {error}", f"the recording rules of the sidecar are left out: {error}")
        return None


def _who() -> tuple[str, int | None]:
    found = PROCESS.identity()
    return found.run, found.rank


RECORDER = Recorder(
    REGISTRY,
    _open_sink,
    _changed_rules,
    prepare=_prepare,
    claim_rank=_claim_rank,
    flush_seconds=_flush_seconds(os.environ),
)
REGISTRY.recording = os.environ.get("EXPORTER_DISABLED") != "1"


def _wire_events(events: EventLog) -> None:
    """Have the event log of this process, which is loaded at its first use, recorded like its Stats."""
    events.recording = REGISTRY.recording
    events.identify_by(_who)
    RECORDER.attach_events(events)
    events.on_first(RECORDER.start)


WHEN_EVENTS_ARE_LOADED.append(_wire_events)


def _wire_training(training: TrainingRecording) -> None:
    """Have the training of this process, which is loaded at its first use, recorded like its Stats."""
    training.record(on=REGISTRY.recording)
    training.since(RECORDER.began)
    training.on_first(RECORDER.start)
    RECORDER.attach_training(training)


WHEN_TRAINING_IS_LOADED.append(_wire_training)


def _begin_anew() -> None:
    RECORDER.events.renew()
    RECORDER.renew()


PROCESS.on_change(_begin_anew)


def configure(
    *, run: str | None = None, rank: int | None = None, labels: Mapping[str, str] | None = None
) -> None:
    """Say who this process is, before what its launcher put into the environment.

    What was recorded before under another run or rank stays with it, and counting begins anew.

    Args:
        run: The run's name, the label `run` of every family.
        rank: Global rank.
        labels: What describes the process; published on `training_process_labels_info` only.

    Raises:
        DefinitionError: A value is not fit for a label.
    """
    if run is not None and (not isinstance(run, str) or not run or clean_text(run) != run):
        raise DefinitionError(
            f"run must be printable text of 1 to 256 characters, not {run!r}",
            field="run",
            found=run,
            allowed="printable text",
        )
    if rank is not None and (type(rank) is not int or not 0 <= rank < 1_000_000_000):
        raise DefinitionError(
            f"rank must be a whole number from 0, not {rank!r}", field="rank", found=rank, allowed="0 and up"
        )
    for name, value in (labels or {}).items():
        check_label(name, value)
    PROCESS.configure(run, rank, None if labels is None else tuple(sorted(labels.items())))


def flush(timeout_seconds: float = 5.0) -> bool:
    """Publish everything recorded so far, values of this thread's CUDA tensors included.

    Event handlers and exporters of spans are given the same time to take what was logged before.

    Returns:
        Whether it arrived in the feed within the time; with `EXPORTER_DISABLED=1` there is nothing that could.
    """
    if not REGISTRY.recording:
        return True
    deadline = monotonic() + timeout_seconds
    for tally in REGISTRY.tallies():
        if tally.collect is not None:
            tally.collect()
    RECORDER.training.collect()
    RECORDER.events.flush(timeout_seconds)
    arrived = RECORDER.flush(max(deadline - monotonic(), 0.1))
    RECORDER.training.flush(max(deadline - monotonic(), 0.1))
    return arrived


def shutdown() -> None:
    """Publish the last recording and end the recording thread, as the exit of the process would."""
    RECORDER.shutdown()
