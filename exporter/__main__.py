"""`python -m exporter`."""

from __future__ import annotations

import signal
import sys

if __name__ == "__main__":
    if not sys.argv[1:] or sys.argv[1].startswith("-"):
        # A SIGHUP before the sidecar can hear it would end it; it is heard as soon as it can.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        from exporter.cli.main import main

        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
