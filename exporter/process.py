"""What a job says to the recording of its process as a whole: who it is, when everything is to be written, who serves it.

Used in the training process. What a training loop calls never raises and never waits for longer than it was told to; what
sets the recording up (`Stat(…)`, `configure`, `events.register`, …) raises for arguments that cannot be.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from exporter.errors import FeedError
from exporter.feed.directory import feed_directory
from exporter.recorder import RECORDER
from exporter.recording.definition import check_labels, require, unreadable_values
from exporter.recording.identity import clean_text
from exporter.recording.notices import log_once

if TYPE_CHECKING:
    import subprocess

    from exporter.feed.runs import Registration


def configure(
    *,
    run: str | None = None,
    rank: int | None = None,
    labels: Mapping[str, str] | None = None,
    session: str | None = None,
) -> None:
    """Set the identity of this process; the arguments take precedence over the environment.

    Samples recorded before under another run or rank keep that identity, and all counts restart at zero. The labels are
    published on `training_process_labels_info` only. The session (also `EXPORTER_SESSION`) is the `session_tag` of the run and
    of one-logger's records: it groups the runs of one training and changes nothing else.

    Raises:
        DefinitionError: An argument is invalid; nothing was changed.
    """
    with unreadable_values():
        for field, text in (("run", run), ("session", session)):
            good = text is None or (isinstance(text, str) and text and clean_text(text) == text)
            require(bool(good), field, text, "printable text of 1 to 256 characters")
        good = rank is None or (type(rank) is int and 0 <= rank < 1_000_000_000)
        require(good, "rank", rank, "a whole number from 0")
        checked = None if labels is None else check_labels(labels)
    RECORDER.process.configure(run, rank, checked, session)


def flush(timeout_seconds: float = 5.0) -> bool:
    """Publish everything recorded so far, values of this thread's CUDA tensors included; never raises.

    Event handlers and exporters of spans are given the same time to take what was logged before. Says whether it arrived
    in the feed within the time; with `EXPORTER_DISABLED=1` there is nothing that could.
    """
    if not RECORDER.recording:
        return True
    try:
        return RECORDER.flush_all(timeout_seconds)
    except Exception as error:  # noqa: BLE001  # an error of CUDA, or a defect of ours: not the loop's problem
        log_once("flush", f"not everything could be flushed: {error!r}")
        return False


def shutdown() -> None:
    """Publish the last recording and end the recording thread, as the exit of the process would."""
    RECORDER.shutdown()


# The sidecar ---------------------------------------------------------------------------------------------------

_START = (
    "import runpy, sys; sys.path[0] = {root!r}; sys.argv[0] = 'exporter';"
    " runpy.run_module('exporter', run_name='__main__', alter_sys=True)"
)
"""Not `-m exporter`: a file of that name in the job's working directory would be run in its place."""


class Sidecar:
    """A sidecar, as `run` starts it, that ends with this process; the kernel takes the registration back when it dies."""

    def __init__(self, registration: Registration, process: subprocess.Popen[bytes]) -> None:
        self._registration = registration
        self._process = process

    @property
    def pid(self) -> int:
        """Its process id; it may have ended, having found another sidecar at work."""
        return self._process.pid

    def stop(self) -> None:
        """Say that this process needs it no longer; it ends when nobody does."""
        self._registration.release()


def start_sidecar(*flags: str, linger_seconds: float = 0.0) -> Sidecar | None:
    """Start the sidecar, with flags of `python -m exporter`, as a child process that ends with this one; never raises.

    Every process of a node may ask: one sidecar serves a feed directory, the others find it owned and end at once. It may
    outlive this process by `linger_seconds`, so that a last scrape sees the final values. Gives None when it could not
    be started, the log then says why; and with `EXPORTER_DISABLED=1`.
    """
    if os.environ.get("EXPORTER_DISABLED") == "1":
        return None
    import subprocess  # noqa: PLC0415  # two megabytes that only those pay who start a sidecar from the job

    from exporter.feed.runs import ATTACHED_FLAG, Registration  # noqa: PLC0415  # likewise

    registration = None
    try:
        directory = feed_directory(os.environ)
        registration = Registration(Path(directory))
        process = subprocess.Popen(
            [
                *(sys.executable or "python3", "-c", _START.format(root=str(Path(__file__).parents[1]))),
                *flags,
                f"--feed.dir={directory}",
                ATTACHED_FLAG,
                f"--run.linger={max(linger_seconds, 0) * 1000:.0f}ms",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # the terminal's Ctrl-C is for the job
        )
        # One that finds another at work ends at once: somebody has to ask for its status, or it stays a zombie.
        threading.Thread(target=process.wait, name="exporter-sidecar", daemon=True).start()
    except (FeedError, OSError, RuntimeError, TypeError, ValueError) as error:
        log_once("sidecar", f"the sidecar cannot be started: {error}")
        if registration is not None:
            registration.release()
        return None
    sidecar = Sidecar(registration, process)
    atexit.register(sidecar.stop)
    return sidecar
