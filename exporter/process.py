"""Process-wide API: identity, flush, shutdown and the sidecar as a child process.

`flush`, `shutdown` and `start_sidecar` log errors instead of raising them, and `flush` and `shutdown` wait for a bounded time.
`configure` raises for invalid arguments. An exception that a signal handler of the job raises during a call is not ignored: the call
raises it. A handler without a Python frame, such as a function of a C extension, is an exception to this rule.
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
from exporter.recording.signal_safety import is_from_signal_handler

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
    """Set the identity of this process. The arguments take precedence over the environment.

    After a change of run, rank or labels, the counts restart at zero. Samples that were recorded before the change keep the earlier
    identity if they are already in the feed. Before the first write to the feed, in the first second, all samples get the new identity.

    Args:
        run: Name of the run.
        rank: Global rank of this process.
        labels: Labels that `training_rank_info` has as `label_<name>`.
        session: Name of the training to which the run belongs, such as all restarts of a job. It becomes the `session_tag` of the run and
            of one-logger's records, and takes precedence over `EXPORTER_SESSION`.

    Raises:
        DefinitionError: An argument is invalid. Nothing was changed.
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
    """Write all samples and events recorded so far to the feed, and wait for event handlers and span exporters.

    CUDA tensors that other threads recorded, or that are still being copied, are not included. Errors are logged, not raised.
    Returns False if the recording could not be written, or not within the timeout. Returns True if this process does not record,
    because of `EXPORTER_DISABLED=1` or an unsupported interpreter.
    """
    if not RECORDER.is_recording:
        return True
    try:
        return RECORDER.flush_all(timeout_seconds)
    except Exception as error:  # an error of CUDA must not reach the training loop
        if is_from_signal_handler(error):
            raise
        log_once("flush", f"flush failed: {error!r}")
        return False


def shutdown() -> None:
    """Write the final recording and end the recording thread, as at the exit of the process. Errors are logged, not raised.

    Returns after about 2 s at the latest, also if the file system of the feed does not respond. On a busy machine, the call takes longer
    while the recording thread or the last poll of a bridge uses CPU time: at most 10 s more for each.
    """
    RECORDER.shutdown()


# The sidecar ---------------------------------------------------------------------------------------------------

_SIDECAR_PROGRAM = (
    "import runpy, sys; sys.path[0] = {root!r}; sys.argv[0] = 'exporter';"
    " runpy.run_module('exporter', run_name='__main__', alter_sys=True)"
)
"""Program of the sidecar. `-m exporter` could run a file `exporter.py` in the working directory of the job instead."""


class Sidecar:
    """Sidecar that this process has started, and the registration that keeps the sidecar running.

    If this process is killed, the kernel releases the registration.
    """

    def __init__(self, registration: Registration, process: subprocess.Popen[bytes]) -> None:
        self._registration = registration
        self._process = process

    @property
    def pid(self) -> int:
        """Process id of the started sidecar. The process may have ended, because another sidecar serves the directory."""
        return self._process.pid

    def stop(self) -> None:
        """Remove the registration of this process. Once no process is registered, the sidecar ends after its linger time."""
        self._registration.release()


def start_sidecar(*flags: str, linger_seconds: float = 0.0) -> Sidecar | None:
    """Register this process, and start a sidecar that runs while a process is registered.

    All processes of a node may call this function, because a feed directory has a single sidecar and further sidecars end immediately.
    After the last registered process has exited, the sidecar waits up to `linger_seconds` for a scrape of the final values.

    Returns None with `EXPORTER_DISABLED=1`, and after a failed start, which is logged.

    Args:
        flags: Flags of `python -m exporter`.
        linger_seconds: Maximum time for which the sidecar waits for a last scrape.
    """
    if os.environ.get("EXPORTER_DISABLED") == "1":
        return None
    import subprocess  # noqa: PLC0415  # importing costs 2 MB

    from exporter.feed.runs import ATTACHED_FLAG, Registration  # noqa: PLC0415  # needed only in jobs that start a sidecar

    registration = None
    try:
        directory = feed_directory(os.environ)
        registration = Registration(Path(directory))
        process = subprocess.Popen(
            [
                sys.executable or "python3",
                "-c",
                _SIDECAR_PROGRAM.format(root=str(Path(__file__).parents[1])),
                *flags,
                f"--feed.dir={directory}",
                ATTACHED_FLAG,
                f"--run.linger={max(linger_seconds, 0) * 1000:.0f}ms",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal must end only the job
        )
        # A redundant sidecar ends immediately. Without a call of `wait`, its process would stay a zombie.
        threading.Thread(target=process.wait, name="exporter-sidecar", daemon=True).start()
    except (FeedError, OSError, RuntimeError, TypeError, ValueError) as error:
        log_once("sidecar", f"the sidecar cannot be started: {error}")
        if registration is not None:
            registration.release()
        return None
    sidecar = Sidecar(registration, process)
    atexit.register(sidecar.stop)
    return sidecar
