"""Fixtures and settings of all tests. A private feed directory protects the user's directory."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from fork_server import open_session
from hypothesis import HealthCheck, settings
from places import TESTS
from waiting import PATIENCE
from xdist.scheduler import LoadFileScheduling

_FEED_DIRECTORY = tempfile.mkdtemp(prefix="exporter-tests-")
os.environ["EXPORTER_FEED_DIR"] = _FEED_DIRECTORY  # before the first flush, which reads the variable
for _name in ("EXPORTER_RUN", "EXPORTER_DISABLED", "EXPORTER_AUTO", "RANK", "LOCAL_RANK", "SLURM_JOB_ID"):
    os.environ.pop(_name, None)
# Workers and child processes share the compiled modules, as with `make test`.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
atexit.register(shutil.rmtree, _FEED_DIRECTORY, ignore_errors=True)
open_session()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores SIGINT

# The slowest files start first, because a slow file that starts last would run alone. Files that mostly compute alternate with files
# that mostly wait, which limits the number of concurrent jobs with torch. Files that measure energy in real time start after most
# jobs with torch.
SLOWEST_FILES = [
    *("test_bridges_plain_torch", "test_hang_page", "test_dashboards_scenario", "test_gpu_fake_nvml"),
    *("test_conditions_and_alerts", "test_bridges_lightning", "test_status_browser", "test_soak"),
    *("test_goodput_scenarios", "test_dashboards_fleet_runs", "test_bridges_torchrun", "test_gpu_life"),
    *("test_dashboards_losses_now", "test_serve_gpu", "test_foreign_jobs", "test_run_sidecar"),
    *("test_dashboards_run_problems", "test_dashboards_run"),
    *("test_end_to_end", "test_truth", "test_demo_command", "test_serve_reload", "test_stacks_live"),
    *("test_run_silence", "test_serve_life", "test_bridges_ranks", "test_bridges_transformers"),
    *("test_energy_of_gpus", "test_energy_of_runs", "test_bridges_examples", "test_one_logger_lightning"),
    *("test_rules_faults", "test_run_job", "test_assets_command", "test_serve_attached", "test_run_launches"),
    *("test_bridges_prometheus_client", "test_check_command", "test_deploy"),
    *("test_rules_live", "test_bridges", "test_alertmanager", "test_bridges_accelerate", "test_shares"),
    *("test_goodput_torchrun", "test_ledger_bounds", "test_feed_limits", "test_recording_running"),
    *("test_web_prometheus", "test_identity", "test_web_auth", "test_web_memory", "test_web_attacks"),
    *("test_recording_process", "test_web_answers"),
]

FILES_THAT_IMPORT_TORCH = {
    *("test_elastic_events", "test_elastic_metrics", "test_monitor", "test_monitor_rfc", "test_step_loss"),
    *(
        "test_conversion",
        "test_event_data",
        "test_recording_tensors",
        "test_gpu_time",
        "test_training_arguments",
    ),
}
"""Files whose tests import torch into the process of pytest. The files run in the same worker, which imports torch once."""

RUNS_SLOW_TESTS = bool(os.environ.get("CI") or os.environ.get("SLOW"))

# Test machines are shared, so that the duration of an example is meaningless. `make fuzz` tries more examples.
settings.register_profile(
    "shared", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("fuzz", settings.get_profile("shared"), max_examples=2000)
settings.load_profile("shared")


@pytest.fixture(autouse=True)
def _remove_launch_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the launch id that a recording test sets in this process, so that children of later tests do not inherit it."""
    for name in ("EXPORTER_LAUNCH", "EXPORTER_RANK_OWNER"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def feed(tmp_path: Path) -> Path:
    """Return the path of a feed directory that does not exist yet."""
    return tmp_path / "feed"


@pytest.fixture
def initial_recorder() -> Iterator[None]:
    """Run a test with the recorder of this process in its initial state."""
    from training_support import fresh_recorder

    with fresh_recorder():
        yield


@pytest.fixture
def unconfigured_process() -> Iterator[None]:
    """Run a test in a process that records no training and in which one-logger is not configured."""
    from one_logger_support import unconfigured

    with unconfigured():
        yield


def pytest_configure(config: pytest.Config) -> None:
    """Collect the folders in a different order in each worker.

    After a change, a worker compiles the tests of its first folders. Other workers have compiled the tests of the other folders.
    """
    worker = getattr(config, "workerinput", None)  # of pytest-xdist
    if worker and [Path(argument).resolve() for argument in config.args] == [TESTS]:
        folders = sorted(path for path in TESTS.iterdir() if any(path.glob("test_*.py")))
        paths = [*map(str, folders), *map(str, sorted(TESTS.glob("test_*.py")))]
        first_index = len(paths) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        config.args = paths[first_index:] + paths[:first_index]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without garbage collection, which takes a third of the time, and exclude them from later collections."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Evaluate the panels that a test checks, at the end of the test."""
    panel_support = sys.modules.get("panel_support")  # imported by the tests of panels
    with panel_support.evaluated_panels() if panel_support else nullcontext():
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Return the scheduler for `--dist loadfile`, and None for other values."""
    return _Scheduler(config, log) if config.getoption("dist") == "loadfile" else None


class _Scheduler(LoadFileScheduling):  # type: ignore[misc]  # pytest-xdist has no types
    """Scheduler that gives a worker a whole file, and all `FILES_THAT_IMPORT_TORCH` to one worker."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "torch" if Path(file).stem in FILES_THAT_IMPORT_TORCH else file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the slowest files first, multiply the timeouts of tests by `PATIENCE`, and skip slow tests unless requested."""
    order = {name: position for position, name in enumerate(SLOWEST_FILES)}
    items.sort(key=lambda item: (order.get(item.path.stem, len(order)), item.path))
    for item in items:
        if limit := item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(limit.args[0] * PATIENCE), append=False)
        if not RUNS_SLOW_TESTS and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow; make test SLOW=1 runs it"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the packages that the skipped tests need."""
    skipped_reports = terminalreporter.stats.get("skipped", [])
    reasons = [str(report.longrepr[2]) for report in skipped_reports if isinstance(report.longrepr, tuple)]
    missing_package_reasons = [
        reason for reason in reasons if "not installed" in reason or "could not import" in reason
    ]
    if missing_package_reasons:
        terminalreporter.write_line(
            f"{len(missing_package_reasons)} tests were skipped because a program or package is missing; install them with scripts/install-system-packages and "
            "pip install torch -e '.[test,frameworks]' (gigabytes), or run make test CI=true, which installs both",
            yellow=True,
        )
