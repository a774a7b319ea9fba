"""RecordingRules: the configuration's section `recording:`, handed over to the training processes.

Used in the sidecar by `serve`; may be called from any thread. They go into `overrides.json` in the feed directory,
written by the sidecar that owns it; processes read it at their start and when it changes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from exporter.errors import FeedError
from exporter.feed.overrides import write_overrides
from exporter.feed.reader import FeedReader

_log = logging.getLogger(__name__)


class RecordingRules:
    """The rules in force, and whether the processes can have read them.

    Args:
        rules: To begin with.
        reader: Knows whether this sidecar owns the directory.
        directory: The feed's.
    """

    def __init__(self, rules: Sequence[Mapping[str, object]], reader: FeedReader, directory: Path) -> None:
        self._reader = reader
        self._directory = directory
        self._lock = threading.Lock()  # guards the next three
        self._rules = rules
        self._handed_over = False
        self._failed = False

    def replace(self, rules: Sequence[Mapping[str, object]]) -> None:
        """Hand others over from now on."""
        with self._lock:
            self._rules, self._handed_over = rules, False
        self.hand_over()

    def hand_over(self) -> None:
        """Write them where training processes read them, once this sidecar owns the directory.

        To be called again after every pass over the feed: ownership may come and go, and a full disk may recover.
        """
        with self._lock:
            if not self._reader.owns:
                self._handed_over = False
                return
            if self._handed_over:
                return
            try:
                write_overrides(self._directory, self._rules)
            except FeedError as error:
                if not self._failed:
                    _log.warning(
                        "recording rules do not reach the training processes", extra={"error": error}
                    )
                self._failed = True
            else:
                self._handed_over, self._failed = True, False
