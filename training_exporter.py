"""Entry point of the command line: `training-exporter`, or `python -m training_exporter`.

The directory of a job often contains a module `exporter.py` or a package `exporter/` of the job, which Python would import from the
working directory or PYTHONPATH instead of this project's package. This module has an unambiguous name, and loads the package from
the directory of the module. The module imports only the standard library. The exporter starts the sidecar, and the ranks of the
demo, by the path of this file:

    python /path/to/training_exporter.py [FLAGS]                     the command line
    python /path/to/training_exporter.py -m exporter.cli.NAME [ARG]  `main` of another module
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import signal
import sys
from pathlib import Path


def load_package() -> None:
    """Import the package `exporter` from the directory of this file, regardless of the module search path."""
    package_directory = Path(__file__).resolve().parent / "exporter"
    spec = importlib.util.spec_from_file_location(
        "exporter", package_directory / "__init__.py", submodule_search_locations=[str(package_directory)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"no package in {package_directory}")
    package = importlib.util.module_from_spec(spec)
    sys.modules["exporter"] = package
    spec.loader.exec_module(package)


def main() -> int:
    """Run the command of the command line, or `main` of the module after `-m`, and return the exit status."""
    module = "exporter.cli.main"
    if sys.argv[1:2] == ["-m"]:
        module = sys.argv[2]
        del sys.argv[1:3]
    elif not sys.argv[1:] or sys.argv[1].startswith("-"):
        # Until the sidecar has installed its handlers, SIGHUP would end the process, and a Ctrl-C during an import may be lost.
        # Blocked signals are delivered when the sidecar unblocks them.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGINT})
    # The imports create objects that stay, among which the search for cycles finds nothing to free.
    gc.disable()
    try:
        load_package()
        command_line = importlib.import_module(module)
        gc.enable()
        status: int = command_line.main(sys.argv[1:])
    except KeyboardInterrupt:
        return 130
    finally:
        gc.freeze()  # the exit of the interpreter would search all objects for cycles, whose memory the kernel frees
    return status


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        # The first entry is the working directory or the directory of this file. No further module may be imported from there.
        del sys.path[0]
    sys.exit(main())
