"""`training-exporter demo [flags]`: the sidecar and a small simulated job.

The command runs `simulated_job` on a replayed machine, in a private feed directory that is removed at the end.
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
from exporter.cli.flags import PROGRAM, REFUSED, Parser, add_flags, command_line_of, mistake, say
from exporter.errors import FeedError
from exporter.feed import runs
from exporter.feed.directory import check_directory, own_uid
from exporter.replay.machines import DIRECTORY_VARIABLE, MACHINES
from exporter.web.listen import bind, parse_address, url
from exporter.web.webconfig import load_web_config

DESCRIPTION = """\
Serves the metrics of a small simulated training job on a machine with replayed GPUs. Needs no GPU and no torch.
Without --config.file, prices and carbon intensity are examples.

    training-exporter demo
    training-exporter demo --gpu.replay=h100-lost
"""
REPLAYED = "h100"
CONFIGURATION = """\
energy:
  pue: 1.2
  carbon_intensity: 350
  currency: EUR
  electricity_price: 0.25
  gpu_hour_price: 2
  lock_dir: {directory}
"""
"""Configuration of a demo without --config.file, with example prices; the energy is the demo's own."""
USED = {"memory": 73_014_444_032, "sm": 99}
"""Memory and SMs that a rank uses."""
PREFIX = "exporter-demo-"
OLD_SECONDS = 86400.0
"""A killed demo leaves a directory; the next demo removes directories that are unchanged for this long."""
# At a higher speed, windows would be shorter than a Stat allows.
SLOWEST, FASTEST = 0.1, 20.0


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run the demo until a signal; returns 2 after a failed start. Raises ConfigurationError, and ListenError for a port in use."""
    parser = Parser(f"{PROGRAM} demo", DESCRIPTION)
    add_flags(parser)
    own = parser.add_argument_group("demo")
    text = "speed of the simulation (default 1: a cycle takes a minute)"
    own.add_argument("--demo.speed", metavar="X", type=float, default=1.0, help=text)
    flags = parser.parse_flags(arguments)
    given, configuration = vars(flags), resolve(flags, environ)
    speed = given["demo.speed"]
    if not SLOWEST <= speed <= FASTEST:
        raise mistake("--demo.speed", f"{speed:g} is not in {SLOWEST:g} to {FASTEST:g}")
    web, gpu = configuration.web, configuration.gpu
    tls = web.config_file is not None and load_web_config(web.config_file).tls_server_config is not None
    given["web.listen_address"], urls = [], []
    for address in map(parse_address, web.listen_address):
        # A bind checks before the start that the port is free, and replaces port 0 by the kernel's choice.
        with bind(address, backlog=1) as listener:
            host, port = address.text.rpartition(":")[0], listener.getsockname()[1]
            given["web.listen_address"].append(f"{host}:{port}")
            urls.append(url(listener, tls=tls))
    replay = given["gpu.replay"] or gpu.replay or "" if gpu.enabled else ""
    own_machine = gpu.enabled and not replay and given["gpu.replay"] is None
    shared = Path("/dev/shm")  # noqa: S108  # a private directory is made in it
    within = shared if os.access(shared, os.W_OK) else None
    for path in (within or Path(tempfile.gettempdir())).glob(f"{PREFIX}*"):
        _remove_old(path)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=within, ignore_cleanup_errors=True) as private:
        # $EXPORTER_FEED_DIR belongs to the user and must not receive simulated metrics.
        feed = given["feed.dir"] = given["feed.dir"] or private
        try:
            check_directory(feed)
        except (OSError, FeedError) as error:
            say(f"the demo needs a feed directory: {error}")
            return REFUSED
        if runs.owner(Path(feed)) is not None:
            say("another exporter serves this feed directory; choose another with --feed.dir")
            return REFUSED
        if own_machine:
            replay = REPLAYED
            given["gpu.replay"] = _write_machine(Path(private))
            os.environ[DIRECTORY_VARIABLE] = private  # of the sidecar
        if given["config.file"] is None:
            path = Path(private, "config.yaml")
            path.write_text(CONFIGURATION.format(directory=json.dumps(private)), encoding="utf-8")
            given["config.file"] = str(path)
        about = {"speed": speed, "directory": private, "url": urls[0], "replay": replay}
        job = own_command("-m", "exporter.cli.simulated_job", json.dumps(about))
        # The environment of a rank under torchrun, without the user's settings for jobs.
        environment = {name: value for name, value in environ.items() if not name.startswith("EXPORTER_")}
        environment |= {"EXPORTER_AUTO": "0", "EXPORTER_FLUSH_SECONDS": str(1.0 / speed)}
        sidecar = [*command_line_of(flags), "--run.name=demo", "--run.linger=0s"]
        wait_status = run.Supervision(run.make_plan([*sidecar, "--", *job], environment)).run()
    return end_as(wait_status)


def _write_machine(directory: Path) -> str:
    """Write and name the description of a machine with one GPU for each rank, which the rank's process holds."""
    described = (MACHINES / f"{REPLAYED}.yaml").read_text(encoding="utf-8").partition("\ngpus:")[0]
    cards = [
        {"model": REPLAYED, "processes": [{"pid_file": str(simulated_job.pid_file(directory, rank)), **USED}]}
        for rank in range(simulated_job.RANKS)
    ]
    path = directory / "demo.yaml"
    path.write_text(f"{described}\ngpus: {json.dumps(cards)}\n", encoding="utf-8")
    return path.stem


def _remove_old(path: Path) -> None:
    with contextlib.suppress(OSError):
        found = path.lstat()
        ours = stat.S_ISDIR(found.st_mode) and found.st_uid == own_uid()
        if ours and time.time() - found.st_mtime > OLD_SECONDS:
            shutil.rmtree(path, ignore_errors=True)
