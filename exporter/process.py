"""The recording of this process, put together: Stats, events, training, recording thread, feed writer, identity.

Used in the training process. This is the composition root of the training side, as `exporter.cli.serve` is the
sidecar's: the stages do not know each other, and this file hands each its neighbour.

What a training loop calls never raises and never waits for longer than it was told to: `Stat.add`, `add_tensor`, `time`,
`get`, `exporter.log`, `events.enabled`, `span`, `flush`, `shutdown`. What sets the recording up (`Stat(…)`,
`Stat.passive`, `configure`, `events.register`, `events.limit`) raises for arguments that cannot be.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import isfinite
from time import monotonic

from exporter.errors import DefinitionError, FeedError
from exporter.feed.directory import feed_directory
from exporter.feed.overrides import OverridesReader
from exporter.feed.snapshot import ProcessIdentity
from exporter.feed.writer import FeedWriter
from exporter.recording.definition import check_label
from exporter.recording.events import EVENTS
from exporter.recording.identity import PROCESS, clean_text
from exporter.recording.notices import tell_once
from exporter.recording.recorder import Recorder
from exporter.recording.stat import REGISTRY
from exporter.training.recording import TRAINING
from exporter.version import __version__

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


def _directory() -> str | None:
    try:
        return feed_directory(os.environ, create=True)
    except FeedError as error:
        tell_once("feed directory", f"nothing is exported: {error}")
        return None


def _open_sink(began: float) -> FeedWriter | None:
    """Make this process's feed writer; on the recording thread, at its first flush, until it succeeds."""
    directory = _directory()
    if directory is None:
        return None
    identity = _written_as(os.urandom(16).hex(), began)
    _Opened.writer = FeedWriter(directory, identity, flush_seconds=_flush_seconds(os.environ))
    return _Opened.writer


def _written_as(process_id: str, began: float) -> ProcessIdentity:
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
    EVENTS.renew()
    if _Opened.writer is not None:
        before = _Opened.writer.identity
        _Opened.writer.identity = _written_as(before.id, before.started)


def _changed_rules() -> Sequence[Mapping[str, object]] | None:
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


def _begin_anew() -> None:
    EVENTS.renew()
    RECORDER.renew()


RECORDER = Recorder(
    REGISTRY,
    EVENTS,
    TRAINING,
    _open_sink,
    _changed_rules,
    prepare=PROCESS.begin,
    claim_rank=_claim_rank,
    flush_seconds=_flush_seconds(os.environ),
)
REGISTRY.recording = EVENTS.recording = os.environ.get("EXPORTER_DISABLED") != "1"
REGISTRY.on_first(RECORDER.start)
EVENTS.identify = _who
EVENTS.on_first(RECORDER.start)
TRAINING.record(on=REGISTRY.recording)
TRAINING.since(RECORDER.began)
TRAINING.on_first(RECORDER.start)
TRAINING.on_saved(RECORDER.flush_soon)
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
    """Publish everything recorded so far, values of this thread's CUDA tensors included; never raises.

    Event handlers and exporters of spans are given the same time to take what was logged before.

    Returns:
        Whether it arrived in the feed within the time; with `EXPORTER_DISABLED=1` there is nothing that could.
    """
    if not REGISTRY.recording:
        return True
    try:
        deadline = monotonic() + timeout_seconds
        for state in REGISTRY.states():
            if state.tensors is not None:
                state.tensors.collect()
        TRAINING.collect()
        EVENTS.flush(timeout_seconds)
        arrived = RECORDER.flush(max(deadline - monotonic(), 0.1))
        TRAINING.flush(max(deadline - monotonic(), 0.1))
    except Exception as error:  # noqa: BLE001  # an error of CUDA, or a defect of ours: not the loop's problem
        tell_once("flush", f"not everything could be flushed: {error!r}")
        return False
    return arrived


def shutdown() -> None:
    """Publish the last recording and end the recording thread, as the exit of the process would."""
    RECORDER.shutdown()
