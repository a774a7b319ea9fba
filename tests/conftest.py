"""What every test needs: a feed directory of its own, so that no test touches the user's."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

from hypothesis import HealthCheck, settings

_FEED = tempfile.mkdtemp(prefix="exporter-tests-")
os.environ["EXPORTER_FEED_DIR"] = _FEED  # before anything imports exporter, which reads it at the first flush
for _name in ("EXPORTER_RUN", "EXPORTER_DISABLED", "EXPORTER_AUTO", "RANK", "LOCAL_RANK", "SLURM_JOB_ID"):
    os.environ.pop(_name, None)
atexit.register(shutil.rmtree, _FEED, ignore_errors=True)

# The machines are shared: how long an example takes says nothing.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")
