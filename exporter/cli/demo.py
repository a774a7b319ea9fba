"""`training-exporter demo [flags]`: runs the sidecar with a small simulated job on a replayed machine.

The job is `simulated_job`. The feed directory is a private directory, which is removed at the end, unless --feed.dir is set.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from exporter.cli import run, simulated_job
from exporter.cli.child import end_as, own_command
from exporter.cli.configuration import resolve
from exporter.cli.flags import (
    EXIT_REFUSED,
    PROGRAM,
    Parser,
    add_flags,
    command_line_of,
    flag_error,
    print_notice,
)
from exporter.cli.sections import GpuSection, WebSection
from exporter.errors import FeedError
from exporter.feed import runs
from exporter.feed.directory import check_directory, own_uid
from exporter.replay.machines import DIRECTORY_VARIABLE, PACKAGE_DIRECTORY
from exporter.web.listen import bind, parse_address, url
from exporter.web.webconfig import load_web_config

DESCRIPTION = """\
Serves the metrics of a small simulated training job on a machine with replayed GPUs. Needs no GPU and no torch.
Without --config.file, prices and carbon intensity are examples.

    training-exporter demo
    training-exporter demo --gpu.replay=h100-lost
"""
REPLAYED_MACHINE = "h100"
EXAMPLE_CONFIGURATION = """\
energy:
  pue: 1.2
  carbon_intensity: 350
  currency: EUR
  electricity_price: 0.25
  gpu_hour_price: 2
  lock_dir: {directory}
collectors:
  checkpoint_dirs:
    paths: [{directory}]
"""
"""Configuration of a demo without --config.file. The prices are examples. With its own energy lock, the demo leaves the energy of the real
machine to the machine's exporter."""
RANK_GPU_USE = {"memory": 73_014_444_032, "sm": 99}
"""GPU memory in bytes and SM utilization in percent of each rank."""
DIRECTORY_PREFIX = "exporter-demo-"
LEFTOVER_SECONDS = 86400.0
"""Age from which the next demo removes the directory of a killed demo."""
MIN_SPEED = 0.1
"""Minimum speed of the simulation, at which a cycle takes ten minutes."""
MAX_SPEED = 20.0
"""Maximum speed of the simulation. At a higher speed, the windows would be shorter than the minimum window of a Stat."""


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run the demo until a signal. Return the exit status of the job, or 2 if the feed directory is not usable.

    If a signal has ended the job, the same signal ends this process.

    Raises:
        ConfigurationError: The command line or the configuration is invalid.
        ListenError: An address cannot be bound.
    """
    parser = Parser(f"{PROGRAM} demo", DESCRIPTION)
    add_flags(parser)
    demo_group = parser.add_argument_group("demo")
    speed_help = "speed of the simulation (default 1: a cycle takes a minute)"
    demo_group.add_argument("--demo.speed", metavar="X", type=float, default=1.0, help=speed_help)
    flags = parser.parse_flags(arguments)
    configuration = resolve(flags, environ)
    speed = vars(flags)["demo.speed"]
    if not MIN_SPEED <= speed <= MAX_SPEED:
        raise flag_error("--demo.speed", f"{speed:g} is not in {MIN_SPEED:g} to {MAX_SPEED:g}")
    first_url = _choose_addresses(flags, configuration.web)
    shared_memory = Path("/dev/shm")  # noqa: S108  # the demo creates a private directory inside
    parent = shared_memory if os.access(shared_memory, os.W_OK) else None
    for path in (parent or Path(tempfile.gettempdir())).glob(f"{DIRECTORY_PREFIX}*"):
        _remove_leftover(path)
    with tempfile.TemporaryDirectory(
        prefix=DIRECTORY_PREFIX, dir=parent, ignore_cleanup_errors=True
    ) as directory:
        # $EXPORTER_FEED_DIR belongs to the user and must not receive simulated metrics.
        feed_directory = vars(flags)["feed.dir"] = vars(flags)["feed.dir"] or directory
        if refusal := _refusal(feed_directory):
            print_notice(refusal)
            return EXIT_REFUSED
        replay = _choose_replay(flags, configuration.gpu, directory)
        has_example_prices = vars(flags)["config.file"] is None
        if has_example_prices:
            path = Path(directory, "config.yaml")
            path.write_text(EXAMPLE_CONFIGURATION.format(directory=json.dumps(directory)), encoding="utf-8")
            vars(flags)["config.file"] = str(path)
        job_settings = {
            "speed": speed,
            "directory": directory,
            "url": first_url,
            "replay": replay,
            "has_example_prices": has_example_prices,
        }
        job = own_command("-m", "exporter.cli.simulated_job", json.dumps(job_settings))
        # Without the user's settings for jobs; the bridges are not needed.
        environment = {name: value for name, value in environ.items() if not name.startswith("EXPORTER_")}
        environment |= {"EXPORTER_AUTO": "0", "EXPORTER_FLUSH_SECONDS": str(1.0 / speed)}
        sidecar = [*command_line_of(flags), "--run.name=demo", "--run.linger=0s"]
        wait_status = run.JobSupervisor(run.make_plan([*sidecar, "--", *job], environment)).run()
    return end_as(wait_status)


def _choose_addresses(flags: argparse.Namespace, web: WebSection) -> str:
    """Check that the ports are free, replace port 0 in the flags by a free port, and return the URL of the first address."""
    has_tls = web.config_file is not None and load_web_config(web.config_file).tls_server_config is not None
    addresses, urls = [], []
    for address in map(parse_address, web.listen_address):
        with bind(address, backlog=1) as listener:
            host, port = address.text.rpartition(":")[0], listener.getsockname()[1]
            addresses.append(f"{host}:{port}")
            urls.append(url(listener, tls=has_tls))
    vars(flags)["web.listen_address"] = addresses
    return urls[0]


def _refusal(feed_directory: str) -> str:
    """Return the reason why the demo cannot use a feed directory, or an empty string."""
    try:
        check_directory(feed_directory)
    except (OSError, FeedError) as error:
        return f"the demo needs a feed directory: {error}"
    if runs.owner(Path(feed_directory)) is not None:
        return "another exporter serves this feed directory; choose a different directory with --feed.dir"
    return ""


def _choose_replay(flags: argparse.Namespace, gpu: GpuSection, directory: str) -> str:
    """Return the name of the replayed machine for the introduction, or an empty string without a replay.

    If the user has neither chosen nor disabled the replay, write a machine like `REPLAYED_MACHINE` to *directory*, and select that machine
    in the flags and in the environment of this process.
    """
    flag_value = vars(flags)["gpu.replay"]
    if not gpu.enabled:
        return ""
    if flag_value is not None or gpu.replay:
        return flag_value or gpu.replay or ""
    vars(flags)["gpu.replay"] = _write_machine(Path(directory))
    os.environ[DIRECTORY_VARIABLE] = directory  # inherited by the sidecar
    return REPLAYED_MACHINE


def _write_machine(directory: Path) -> str:
    """Write the description of a machine with a GPU for each rank, and return the name of the description."""
    machine_text = (
        (PACKAGE_DIRECTORY / f"{REPLAYED_MACHINE}.yaml").read_text(encoding="utf-8").partition("\ngpus:")[0]
    )
    gpu_groups = [
        {
            "model": REPLAYED_MACHINE,
            "processes": [{"pid_file": str(simulated_job.pid_file(directory, rank)), **RANK_GPU_USE}],
        }
        for rank in range(simulated_job.RANKS)
    ]
    path = directory / "demo.yaml"
    path.write_text(f"{machine_text}\ngpus: {json.dumps(gpu_groups)}\n", encoding="utf-8")
    return path.stem


def _remove_leftover(path: Path) -> None:
    """Remove a directory of this user that is older than `LEFTOVER_SECONDS`. Errors are ignored."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == own_uid()
        if is_own and time.time() - status.st_mtime > LEFTOVER_SECONDS:
            shutil.rmtree(path, ignore_errors=True)
