"""Configuration reload by SIGHUP or POST /-/reload.

An invalid configuration is not applied. An option that needs a restart keeps its value, and each new value is logged once.
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
    help="1 if the last attempt to read and apply the configuration succeeded, 0 if the previous configuration stays in force.",
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
    """Holder of the configuration in force, which `reload` replaces. Options that need a restart keep their first value.

    Args:
        configuration: Initial configuration.
        read: Returns the new configuration. Raises ConfigurationError if it is invalid.
        apply: Changes the running parts from the previous to the new configuration, or raises an exception and changes nothing.

    Attributes:
        current: Configuration in force.
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
        # A background reload waits for this lock until the previous one has ended, and clears `_is_queued` only then: at most one
        # waits, also during a long reload.
        self._background_lock = threading.Lock()
        self._is_queued = threading.Event()  # set while a background reload is queued
        self._logged_values: dict[str, Any] = {}  # values that take effect after a restart, by option
        self._is_successful = True
        self._success_time = time.time()

    def reload(self) -> None:
        """Read and apply the configuration.

        After an exception, the configuration in force does not change.

        Raises:
            ConfigurationError: The new configuration is invalid.
            Exception: `apply` failed, for example because the system refuses a descriptor or a thread to a collector.
        """
        with self._lock:
            try:
                requested = self._read()
            except ConfigurationError as error:
                self._is_successful = False
                for problem in error.problems:
                    _log.error("invalid configuration", extra={"problem": str(problem)})
                _log.error("configuration not reloaded; the previous one stays in force")
                raise
            effective, waiting_values = _keep_restart_options(self.current, requested)
            for key, value in waiting_values.items():
                if key not in self._logged_values or self._logged_values[key] != value:
                    message = "a changed setting needs a restart; the previous value stays in force"
                    _log.warning(message, extra={"setting": key})
            self._logged_values = waiting_values
            self._is_successful = False  # until the end, because `apply` may raise
            self._apply(self.current, effective)
            self.current = effective
            self._is_successful, self._success_time = True, time.time()
            _log.info("configuration reloaded")

    def reload_soon(self) -> None:
        """Reload on another thread, unless a reload is queued already. Problems are logged."""
        if not self._is_queued.is_set():
            self._is_queued.set()
            threading.Thread(target=self._reload_in_background, name="exporter-reload", daemon=True).start()

    def _reload_in_background(self) -> None:
        """Reload after the previous background reload has ended. Never raises."""
        with self._background_lock:
            self._is_queued.clear()  # before the file is read, because a later signal may mean a newer file
            try:
                self.reload()
            except ConfigurationError:
                return  # `reload` has logged the problems
            except Exception:  # noqa: BLE001  (the constructor of a collector may raise any error)
                _log.exception("internal error: configuration not reloaded; the previous one stays in force")

    def families(self) -> list[Metric]:
        """Return the metrics of the last attempt and of the last success."""
        return [
            SUCCESSFUL.family({(): int(self._is_successful)}),
            SUCCESS_TIME.family({(): self._success_time}),
        ]


def _keep_restart_options(
    running: Configuration, requested: Configuration
) -> tuple[Configuration, dict[str, Any]]:
    """Return the requested configuration with the running values of the options that need a restart.

    The second result contains the requested values of these options that differ from the running values, by option.
    """
    waiting_values: dict[str, Any] = {}
    sections: dict[str, Any] = {}
    for field in dataclasses.fields(Configuration):
        running_section, requested_section = getattr(running, field.name), getattr(requested, field.name)
        if dataclasses.is_dataclass(requested_section) and not isinstance(requested_section, type):
            restart_names = [option.name for option in options_of(type(requested_section)) if option.restart]
            kept_values = {name: getattr(running_section, name) for name in restart_names}
            sections[field.name] = dataclasses.replace(requested_section, **kept_values)
            waiting_values |= {
                f"{field.name}.{name}": getattr(requested_section, name)
                for name in restart_names
                if getattr(requested_section, name) != kept_values[name]
            }
    return dataclasses.replace(requested, **sections), waiting_values
