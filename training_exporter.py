"""The command line, whatever else is called `exporter`: `training-exporter`, `python -m training_exporter`.

A job's directory often holds an `exporter.py` or `exporter/` of its own, which Python would import in place of ours from
the working directory or PYTHONPATH. So this module, whose name nobody else has, loads the package that lies beside it.
Standard library only. The sidecar and the ranks of the demo are started by this file's path:

    python /path/to/training_exporter.py [FLAGS]                     the command line
    python /path/to/training_exporter.py -m exporter.cli.NAME [ARG]  `main` of another module
"""

from __future__ import annotations

import importlib
import importlib.util
import signal
import sys
from pathlib import Path


def load_package() -> None:
    """Make `import exporter` find the package beside this file, also where another one was found first."""
    folder = Path(__file__).resolve().parent / "exporter"
    spec = importlib.util.spec_from_file_location(
        "exporter", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"no package in {folder}")
    package = importlib.util.module_from_spec(spec)
    sys.modules["exporter"] = package
    spec.loader.exec_module(package)


def main() -> int:
    """Do what the process's command line asks for; its exit status."""
    module = "exporter.cli.main"
    if sys.argv[1:2] == ["-m"]:
        module = sys.argv[2]
        del sys.argv[1:3]
    elif not sys.argv[1:] or sys.argv[1].startswith("-"):
        # A SIGHUP before the sidecar can hear it would end it, and a Ctrl-C amid an import may be lost; both are heard
        # as soon as it can.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGINT})
    try:
        load_package()
        status: int = importlib.import_module(module).main(sys.argv[1:])
    except KeyboardInterrupt:
        return 130
    return status


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[
            0
        ]  # the working directory, or the folder that this file lies in: neither is for other imports
    sys.exit(main())
