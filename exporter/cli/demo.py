"""`training-exporter demo [flags]`: runs the sidecar with a small simulated job on a replayed machine.

The job is `simulated_job`. The feed directory is a private directory, which is removed at the end, unless --feed.dir is set.
"""

from __future__ import annotations

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
CONFIGURATION = """\
energy:
  pue: 1.2
  carbon_intensity: 350
  currency: EUR
  electricity_price: 0.25
  gpu_hour_price: 2
  lock_dir: {directory}
"""
"""Configuration of a demo without --config.file. The prices are examples; the lock is not the one of the real machine."""
RANK_GPU_USE = {"memory": 73_014_444_032, "sm": 99}
"""GPU memory in bytes and SM utilization in percent of each rank."""
PREFIX = "exporter-demo-"
OLD_SECONDS = 86400.0
"""Age from which the directory of a killed demo is removed by the next demo."""
# At a higher speed, the windows would be shorter than the minimum of a Stat.
MIN_SPEED, MAX_SPEED = 0.1, 20.0


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run the demo until a signal. Return 2 if the feed directory is not usable.

    Raises ConfigurationError: The command line or the configuration is invalid.
    Raises ListenError: A port is in use.
    """
    parser = Parser(f"{PROGRAM} demo", DESCRIPTION)
    add_flags(parser)
    demo_group = parser.add_argument_group("demo")
    speed_help = "speed of the simulation (default 1: a cycle takes a minute)"
    demo_group.add_argument("--demo.speed", metavar="X", type=float, default=1.0, help=speed_help)
    flags = parser.parse_flags(arguments)
    flag_values, configuration = vars(flags), resolve(flags, environ)
    speed = flag_values["demo.speed"]
    if not MIN_SPEED <= speed <= MAX_SPEED:
        raise flag_error("--demo.speed", f"{speed:g} is not in {MIN_SPEED:g} to {MAX_SPEED:g}")
    web, gpu = configuration.web, configuration.gpu
    tls = web.config_file is not None and load_web_config(web.config_file).tls_server_config is not None
    flag_values["web.listen_address"], urls = [], []
    for address in map(parse_address, web.listen_address):
        # The bind checks that the port is free, and replaces port 0 by a port of the kernel's choice.
        with bind(address, backlog=1) as listener:
            host, port = address.text.rpartition(":")[0], listener.getsockname()[1]
            flag_values["web.listen_address"].append(f"{host}:{port}")
            urls.append(url(listener, tls=tls))
    replay = (flag_values["gpu.replay"] or gpu.replay or "") if gpu.enabled else ""
    writes_machine = gpu.enabled and not replay and flag_values["gpu.replay"] is None
    shared_memory = Path("/dev/shm")  # noqa: S108  # the demo creates a private directory inside
    parent = shared_memory if os.access(shared_memory, os.W_OK) else None
    for path in (parent or Path(tempfile.gettempdir())).glob(f"{PREFIX}*"):
        _remove_old(path)
    with tempfile.TemporaryDirectory(
        prefix=PREFIX, dir=parent, ignore_cleanup_errors=True
    ) as private_directory:
        # $EXPORTER_FEED_DIR belongs to the user and must not receive simulated metrics.
        feed = flag_values["feed.dir"] = flag_values["feed.dir"] or private_directory
        try:
            check_directory(feed)
        except (OSError, FeedError) as error:
            print_notice(f"the demo needs a feed directory: {error}")
            return EXIT_REFUSED
        if runs.owner(Path(feed)) is not None:
            print_notice(
                "another exporter serves this feed directory; choose a different directory with --feed.dir"
            )
            return EXIT_REFUSED
        if writes_machine:
            replay = REPLAYED_MACHINE
            flag_values["gpu.replay"] = _write_machine(Path(private_directory))
            os.environ[DIRECTORY_VARIABLE] = private_directory  # inherited by the sidecar
        if flag_values["config.file"] is None:
            path = Path(private_directory, "config.yaml")
            path.write_text(CONFIGURATION.format(directory=json.dumps(private_directory)), encoding="utf-8")
            flag_values["config.file"] = str(path)
        job_settings = {"speed": speed, "directory": private_directory, "url": urls[0], "replay": replay}
        job = own_command("-m", "exporter.cli.simulated_job", json.dumps(job_settings))
        # Without the user's settings for jobs; the bridges are not needed.
        environment = {name: value for name, value in environ.items() if not name.startswith("EXPORTER_")}
        environment |= {"EXPORTER_AUTO": "0", "EXPORTER_FLUSH_SECONDS": str(1.0 / speed)}
        sidecar = [*command_line_of(flags), "--run.name=demo", "--run.linger=0s"]
        wait_status = run.Supervision(run.make_plan([*sidecar, "--", *job], environment)).run()
    return end_as(wait_status)


def _write_machine(directory: Path) -> str:
    """Write the description of a machine with a GPU for each rank, and return the name of the description."""
    machine_text = (
        (PACKAGE_DIRECTORY / f"{REPLAYED_MACHINE}.yaml").read_text(encoding="utf-8").partition("\ngpus:")[0]
    )
    cards = [
        {
            "model": REPLAYED_MACHINE,
            "processes": [{"pid_file": str(simulated_job.pid_file(directory, rank)), **RANK_GPU_USE}],
        }
        for rank in range(simulated_job.RANKS)
    ]
    path = directory / "demo.yaml"
    path.write_text(f"{machine_text}\ngpus: {json.dumps(cards)}\n", encoding="utf-8")
    return path.stem


def _remove_old(path: Path) -> None:
    with contextlib.suppress(OSError):
        status = path.lstat()
        is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == own_uid()
        if is_own and time.time() - status.st_mtime > OLD_SECONDS:
            shutil.rmtree(path, ignore_errors=True)
