"""What other libraries call where training-exporter is installed: `import torch`, Lightning's Trainers, one-logger.

Each by an entry point. A module outside of the package, so that nothing of it is imported, and nothing happens, unless
`EXPORTER_AUTO=1`, which `training-exporter run` sets for the job. Whatever goes wrong here stays here: an exception would
make `import torch` fail.
"""

from __future__ import annotations

import os
from functools import partial

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def start() -> None:
    """Install the bridges into this process, if its environment asks for it."""
    if os.environ.get("EXPORTER_AUTO") != "1":
        return
    try:
        from exporter.bridges import install_into_running  # noqa: PLC0415  # see above

        install_into_running()
    except Exception:  # noqa: BLE001, S110  # see above; what a bridge cannot do it tells itself
        pass


def _callbacks(bridge: str, package: str) -> list[Any]:
    if not _wanted():
        return []
    try:
        from importlib import import_module  # noqa: PLC0415  # see above

        return [import_module(f"exporter.bridges.{bridge}").callback(package)]
    except Exception:  # noqa: BLE001  # see above
        return []


lightning_callbacks = partial(_callbacks, "lightning", "lightning.pytorch")
pytorch_lightning_callbacks = partial(_callbacks, "lightning", "pytorch_lightning")
fabric_callbacks = partial(_callbacks, "fabric", "lightning.fabric")
lightning_fabric_callbacks = partial(_callbacks, "fabric", "lightning_fabric")
"""What gives the callbacks of every Trainer, or Fabric, of these packages."""


class OneLoggerExporterConfig:
    """What one-logger asks a package with an exporter."""

    @staticmethod
    def get_default_config() -> dict[str, Any]:
        """Name the exporter, and whether it is wanted."""
        return {
            "class_name": "exporter.bridges.one_logger.OneLoggerExporter",
            "config": {},
            "enabled": _wanted(),
        }


def _wanted() -> bool:
    return os.environ.get("EXPORTER_AUTO") == "1" and os.environ.get("EXPORTER_DISABLED") != "1"
