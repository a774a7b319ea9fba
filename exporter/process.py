"""What a job says to the recording of its process as a whole: who it is, and when everything is to be written.

Used in the training process. What a training loop calls never raises and never waits for longer than it was told to:
`Stat.add`, `add_tensor`, `time`, `get`, `exporter.log`, `events.enabled`, `span`, `flush`, `shutdown`. What sets the
recording up (`Stat(…)`, `Stat.passive`, `configure`, `events.register`, `events.limit`) raises for arguments that cannot be.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic

from exporter.recorder import RECORDER
from exporter.recording.definition import check_label, require
from exporter.recording.events import EVENTS
from exporter.recording.identity import PROCESS, clean_text
from exporter.recording.notices import tell_once
from exporter.recording.stat import REGISTRY
from exporter.training.buffers import Hooks
from exporter.training.recording import TRAINING


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
    good = run is None or (isinstance(run, str) and run and clean_text(run) == run)
    require(bool(good), "run", run, "printable text of 1 to 256 characters")
    good = rank is None or (type(rank) is int and 0 <= rank < 1_000_000_000)
    require(good, "rank", rank, "a whole number from 0")
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
        Hooks.collect()
        RECORDER.drain(timeout_seconds)
        EVENTS.flush(max(deadline - monotonic(), 0.1))
        arrived = RECORDER.flush(max(deadline - monotonic(), 0.1))
        TRAINING.flush(max(deadline - monotonic(), 0.1))
    except Exception as error:  # noqa: BLE001  # an error of CUDA, or a defect of ours: not the loop's problem
        tell_once("flush", f"not everything could be flushed: {error!r}")
        return False
    return arrived


def shutdown() -> None:
    """Publish the last recording and end the recording thread, as the exit of the process would."""
    RECORDER.shutdown()
