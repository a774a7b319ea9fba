"""Command line of the exporter: `python -m exporter`."""

from __future__ import annotations

import gc
import signal
import sys

if __name__ == "__main__":
    if not sys.argv[1:] or sys.argv[1].startswith("-"):
        # SIGHUP is blocked until the sidecar has a handler, because the default action ends the process.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        from exporter.cli.main import main

        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        gc.freeze()  # as in training_exporter.py
