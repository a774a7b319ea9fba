"""Entry points that other libraries call in a job: `import torch`, Lightning's Trainer and Fabric, one-logger.

This module is outside of the package, so that `import torch` does not load the package unless `EXPORTER_AUTO=1`, which
`training-exporter run` sets for the job. Exceptions are suppressed, because they would make `import torch` fail.
"""

from __future__ import annotations

import os
from functools import partial

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BRIDGES: dict[str, str] = {
    "elastic": "torch",
    "monitor": "torch",
    "cuda_memory": "torch",
    "plain_torch": "torch",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "fastai": "fastai.optimizer",
    "ignite": "ignite.engine",
    "keras": "keras",
    "one_logger": "nv_one_logger.recorder.default_recorder",
    "prometheus_client": "prometheus_client",
}
"""Library of each bridge: the import of the module on the right calls `install()` of `exporter/bridges/NAME.py`.

The module must not be a namespace package. Lightning and Fabric are not listed: they create their callbacks through the entry
points below.
"""


def start() -> None:
    """Install the bridges in this process if `EXPORTER_AUTO=1`."""
    if os.environ.get("EXPORTER_AUTO") != "1":
        return
    try:
        from exporter.bridges import install  # noqa: PLC0415  # loaded only if EXPORTER_AUTO=1

        install()
    except Exception:  # noqa: BLE001, S110  # an exception would make `import torch` fail
        pass


def _callbacks(bridge: str, package: str) -> list[Any]:
    """Return a list with the callback of a bridge for a package; an empty list if the bridges are off or the callback fails."""
    if not _is_enabled():
        return []
    try:
        from importlib import import_module  # noqa: PLC0415  # loaded only if EXPORTER_AUTO=1

        return [import_module(f"exporter.bridges.{bridge}").callback(package)]
    except Exception:  # noqa: BLE001  # an exception would make the Trainer fail
        return []


lightning_callbacks = partial(_callbacks, "lightning", "lightning.pytorch")
pytorch_lightning_callbacks = partial(_callbacks, "lightning", "pytorch_lightning")
fabric_callbacks = partial(_callbacks, "fabric", "lightning.fabric")
lightning_fabric_callbacks = partial(_callbacks, "fabric", "lightning_fabric")
"""Entry points of Lightning: functions that return the callbacks that each new Trainer or Fabric of a package receives."""


class OneLoggerExporterConfig:
    """Exporter configuration that one-logger reads from installed packages."""

    @staticmethod
    def get_default_config() -> dict[str, Any]:
        """Return the exporter's class name and whether the exporter is enabled."""
        return {
            "class_name": "exporter.bridges.one_logger.OneLoggerExporter",
            "config": {},
            "enabled": _is_enabled(),
        }


def _is_enabled() -> bool:
    """Return True if the job runs with `EXPORTER_AUTO=1` and the exporter is not disabled."""
    return os.environ.get("EXPORTER_AUTO") == "1" and os.environ.get("EXPORTER_DISABLED") != "1"
