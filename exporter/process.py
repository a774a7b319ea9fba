"""Process-wide API: identity, flush, shutdown and the sidecar as a child process.

`flush` and `shutdown` never raise and wait for a bounded time; `configure` raises for invalid arguments.
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

    Earlier samples keep the earlier identity, and a change of run or rank restarts all counts at zero. The labels are published
    on `training_process_labels_info` only. The session (also `EXPORTER_SESSION`) is the `session_tag` of the run and of
    one-logger's records, which groups the runs of a training.

    Raises:
        DefinitionError: An argument is invalid; nothing was changed.
    """
    with unreadable_values():
        for field, text in (("run", run), ("session", session)):
            is_valid = text is None or (isinstance(text, str) and text and clean_text(text) == text)
            require(bool(is_valid), field, text, "printable text of 1 to 256 characters")
        is_valid = rank is None or (type(rank) is int and 0 <= rank < 1_000_000_000)
        require(is_valid, "rank", rank, "an integer from 0 to 999,999,999")
        checked_labels = None if labels is None else check_labels(labels)
    RECORDER.process.configure(run, rank, checked_labels, session)


def flush(timeout_seconds: float = 5.0) -> bool:
    """Publish all samples and events so far, including CUDA tensors of the calling thread. Never raises.

    Also waits, within the timeout, for event handlers and span exporters. Returns False if the recording was not written to the
    feed in time; always True with `EXPORTER_DISABLED=1`.
    """
    if not RECORDER.is_recording:
        return True
    try:
        return RECORDER.flush_all(timeout_seconds)
    except Exception as error:  # noqa: BLE001  # an error of CUDA must not reach the training loop
        log_once("flush", f"flush failed: {error!r}")
        return False


def shutdown() -> None:
    """Publish the final recording and end the recording thread, as at the exit of the process."""
    RECORDER.shutdown()


# The sidecar ---------------------------------------------------------------------------------------------------

_START = (
    "import runpy, sys; sys.path[0] = {root!r}; sys.argv[0] = 'exporter';"
    " runpy.run_module('exporter', run_name='__main__', alter_sys=True)"
)
"""Program of the sidecar; `-m exporter` could run a file `exporter.py` in the working directory of the job."""


class Sidecar:
    """Sidecar that ends with this process. The kernel releases the registration if the process dies."""

    def __init__(self, registration: Registration, process: subprocess.Popen[bytes]) -> None:
        self._registration = registration
        self._process = process

    @property
    def pid(self) -> int:
        """Process id of the sidecar, which may have ended because another sidecar serves the directory."""
        return self._process.pid

    def stop(self) -> None:
        """Release the sidecar, which ends once no process is registered."""
        self._registration.release()


def start_sidecar(*flags: str, linger_seconds: float = 0.0) -> Sidecar | None:
    """Start a sidecar that ends with this process, with flags of `python -m exporter`. Never raises.

    Every process of a node may call this function: a feed directory has one sidecar, and further sidecars end immediately.
    The sidecar may outlive this process by `linger_seconds`, for a scrape of the final values. Returns None, with a notice,
    if the start fails; also None with `EXPORTER_DISABLED=1`.
    """
    if os.environ.get("EXPORTER_DISABLED") == "1":
        return None
    import subprocess  # noqa: PLC0415  # needs two megabytes, only in jobs that start a sidecar

    from exporter.feed.runs import ATTACHED_FLAG, Registration  # noqa: PLC0415  # needed only in jobs that start a sidecar

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
        # A redundant sidecar ends immediately; without a call of `wait` its process stays a zombie.
        threading.Thread(target=process.wait, name="exporter-sidecar", daemon=True).start()
    except (FeedError, OSError, RuntimeError, TypeError, ValueError) as error:
        log_once("sidecar", f"the sidecar cannot be started: {error}")
        if registration is not None:
            registration.release()
        return None
    sidecar = Sidecar(registration, process)
    atexit.register(sidecar.stop)
    return sidecar
