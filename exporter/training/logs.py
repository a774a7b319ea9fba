"""Where misuse is logged: the level and the files of `LoggerConfig`, applied to the logger `exporter`.

Used in the training process, once, when the provider is configured. Nothing is opened, created or changed unless the
job stated it; a file that cannot be opened is reported, and what would go there goes the way of all logging.
"""

from __future__ import annotations

import logging
import os

from exporter.training.configuration import OneLoggerConfig
from exporter.training.reports import report

LOGGER = "exporter"


def apply_logger_config(settings: OneLoggerConfig, logger: logging.Logger | None = None) -> None:
    """Set the level and add the files that were stated; a second call with the same files adds none.

    Args:
        settings: Their `logger_config`, where one was given; a rank that is disabled opens no file.
        logger: The logger; None for the package's.
    """
    if "logger_config" not in settings.given:
        return
    stated = settings.logger_config
    logger = logger or logging.getLogger(LOGGER)
    if "log_level" in stated.given:
        logger.setLevel(stated.log_level)
    if not settings.enable_for_current_rank:
        return
    files = ((stated.log_file_path_for_info, logging.INFO), (stated.log_file_path_for_err, logging.ERROR))
    for path, level in files:
        if path is None:
            continue
        if any(
            isinstance(each, logging.FileHandler) and each.baseFilename == os.path.abspath(path)  # noqa: PTH100  # as there
            for each in logger.handlers
        ):
            continue
        try:
            handler = logging.FileHandler(path)
        except OSError as error:
            report(
                "LoggerConfig", "log_file", f"a file that can be written: {path}: {error.strerror or error}"
            )
            continue
        handler.setLevel(level)
        handler.setFormatter(logging.Formatter(stated.log_format))
        logger.addHandler(handler)
