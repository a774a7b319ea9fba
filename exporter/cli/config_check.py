"""`--config.check`: checks of a configuration that open files and import classes."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from exporter.cli.configuration import Configuration
from exporter.errors import ConfigurationError, Problem
from exporter.web.protection import load_protection


def check_configuration(configuration: Configuration) -> None:
    """Open the TLS files and import the third-party collectors. Raises ConfigurationError with all problems."""
    problems = [*_web_problems(configuration), *_extra_problems(configuration)]
    if problems:
        raise ConfigurationError(problems)


def _web_problems(configuration: Configuration) -> Iterator[Problem]:
    if configuration.web.config_file is not None:
        try:
            load_protection(configuration.web.config_file)
        except ConfigurationError as error:
            yield from error.problems


def _extra_problems(configuration: Configuration) -> Iterator[Problem]:
    extra = configuration.collectors.extra
    for name in extra.classes if extra.enabled else ():
        module, _, attribute = name.partition(":")
        try:
            getattr(importlib.import_module(module), attribute)
        except Exception as error:  # noqa: BLE001  (a third-party module may raise any error)
            message = f"{name} cannot be imported: {type(error).__name__}: {error}"
            yield Problem("collectors.extra.classes", line=None, column=None, message=message)
