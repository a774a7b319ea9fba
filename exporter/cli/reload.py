"""Reload, by SIGHUP or POST /-/reload, one at a time: another configuration takes the place of the one in force.

One with any problem changes nothing; what cannot change in a running process keeps its value and is told once.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from prometheus_client.core import Metric

from exporter.cli.configuration import Configuration
from exporter.config.options import options_of
from exporter.errors import ConfigurationError
from exporter.families import FamilySpec

SUCCESSFUL = FamilySpec(
    name="exporter_config_last_reload_successful",
    type="gauge",
    help="1 if the last attempt to read the configuration succeeded, 0 if the previous configuration stays in force.",
    source="start, SIGHUP and POST /-/reload",
)
SUCCESS_TIME = FamilySpec(
    name="exporter_config_last_reload_success_timestamp_seconds",
    type="gauge",
    unit="seconds",
    help="Unix time at which the configuration in force was read.",
    source="wall clock",
)
SPECS = (SUCCESSFUL, SUCCESS_TIME)

_log = logging.getLogger(__name__)


class Reloader:
    """Holds the configuration in force, `current`, and replaces it; what needs a restart has the value from the start.

    `read` gives a new one or raises ConfigurationError; `apply` makes the running parts follow from one to the next.
    """

    def __init__(
        self,
        configuration: Configuration,
        *,
        read: Callable[[], Configuration],
        apply: Callable[[Configuration, Configuration], None],
    ) -> None:
        self.current = configuration
        self._read = read
        self._apply = apply
        self._lock = threading.Lock()
        self._wanted = threading.Event()
        self._told: dict[str, Any] = {}  # values that wait for a restart
        self._successful = True
        self._success_time = time.time()

    def reload(self) -> None:
        """Read the configuration again and use it; raises ConfigurationError for one with problems, which changes nothing."""
        with self._lock:
            try:
                wanted = self._read()
            except ConfigurationError as error:
                self._successful = False
                for problem in error.problems:
                    _log.error("the configuration is wrong", extra={"problem": str(problem)})
                _log.error("configuration not reloaded; the old one stays in force")
                raise
            effective, waiting = _with_restart_values_of(self.current, wanted)
            for key, value in waiting.items():
                if key not in self._told or self._told[key] != value:
                    told = "a changed setting needs a restart; the old value stays in force"
                    _log.warning(told, extra={"setting": key})
            self._told = waiting
            self._successful = False  # should a defect end this half-way
            self._apply(self.current, effective)
            self.current = effective
            self._successful, self._success_time = True, time.time()
            _log.info("configuration reloaded")

    def start_listening(self) -> None:
        """Begin to serve `reload_soon`."""
        threading.Thread(target=self._reload_when_wanted, name="exporter-reload", daemon=True).start()

    def reload_soon(self) -> None:
        """Reload in the background; its problems are in the log. Never waits, so that a signal may call it."""
        self._wanted.set()

    def _reload_when_wanted(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()  # before reading: a signal that comes now means a newer file
            try:
                self.reload()
            except ConfigurationError:
                continue  # logged
            except Exception:  # noqa: BLE001  (a collector's constructor; the next reload must still be heard)
                _log.exception("the reload failed")

    def families(self) -> list[Metric]:
        """Whether the last attempt succeeded, and when the last one that did was made."""
        return [SUCCESSFUL.family({(): int(self._successful)}), SUCCESS_TIME.family({(): self._success_time})]


def _with_restart_values_of(
    running: Configuration, wanted: Configuration
) -> tuple[Configuration, dict[str, Any]]:
    """The wanted configuration with what only a restart changes as it is; and those values as they were wanted."""
    waiting: dict[str, Any] = {}
    changes: dict[str, Any] = {}
    for section in options_of(Configuration, wanted):
        new, old = section.default, getattr(running, section.name)
        if dataclasses.is_dataclass(new) and not isinstance(new, type):
            fixed = [option.name for option in options_of(type(new)) if option.restart]
            kept = {name: getattr(old, name) for name in fixed}
            changes[section.name] = dataclasses.replace(new, **kept)
            changed = {name: getattr(new, name) for name in fixed if getattr(new, name) != kept[name]}
            waiting |= {f"{section.name}.{name}": value for name, value in changed.items()}
    return dataclasses.replace(wanted, **changes), waiting
