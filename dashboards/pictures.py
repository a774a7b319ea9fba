"""Command `python -m dashboards.pictures`: draw each dashboard with the data of the scenario.

The program dashrender draws dashboards with Grafana's components in a browser, without a Grafana server. The option
`--dashrender` or the environment variable DASHRENDER names its directory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dashboards.catalogue import BOARDS
from dashboards.scenario import DEFAULT_SECONDS, Timeline
from dashboards.scenario.cluster import BASELINE_RUN, FAULTY_RUN, Cluster

WIDE_PIXELS, NARROW_PIXELS = 1600, 1000
SCRAPE_INTERVAL = "5s"
"""Scrape interval in the settings of the data source.

The scenario scrapes more often. With the scrape interval of the scenario, `$__rate_interval` would cover too few seconds for
smooth rates.
"""


@dataclass(frozen=True)
class PictureSettings:
    """Variables and time range of a dashboard's picture."""

    uid: str  # uid of the dashboard
    values: dict[str, str] = field(default_factory=dict)  # values of the variables by name
    end_fraction: float = 1.0  # end of the time range, as a fraction of the scenario


PICTURE_SETTINGS = {
    settings.uid: settings
    for settings in (
        PictureSettings("training-run", {"run": FAULTY_RUN}),
        # The time range ends before the crash, while the straggler is slow.
        PictureSettings("training-ranks", {"run": FAULTY_RUN, "rank": "3"}, end_fraction=0.67),
        PictureSettings("training-gpus", {"node": "node-2"}, end_fraction=0.67),
        PictureSettings("training-node", {"node": "node-1"}),
        PictureSettings("training-fleet", {"baseline": BASELINE_RUN}),
    )
}


def main(arguments: Sequence[str]) -> int:
    """Draw all dashboards and return the exit status: 1 if a picture failed, 2 if dashrender is missing."""
    parser = argparse.ArgumentParser(prog="python -m dashboards.pictures", description=__doc__)
    parser.add_argument(
        "--dashrender",
        type=Path,
        default=os.environ.get("DASHRENDER"),
        help="directory of dashrender.mjs (default $DASHRENDER)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/dashboards"),
        help="directory of the pictures (default %(default)s)",
    )
    parser.add_argument(
        "--seconds", type=float, default=DEFAULT_SECONDS, help="duration of the scenario in seconds"
    )
    options = parser.parse_args(arguments)
    if options.dashrender is None or not (options.dashrender / "dashrender.mjs").exists():
        sys.stderr.write("dashrender.mjs was not found; set --dashrender or $DASHRENDER to its directory\n")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="exporter-scenario-"))
    try:
        with Cluster(directory, Timeline(duration_seconds=options.seconds)) as cluster:
            cluster.wait_until_end()
            time.sleep(1)
            return _draw_all(options, cluster.url, cluster.start_time)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def draw_picture(command: Sequence[str], picture_path: Path) -> bool:
    """Remove the picture of an earlier run, run a command that draws a new one, and return True if the command has written it.

    Prints the path of the picture, or the output of a command that wrote none. The exit status does not count: it is also 1 if a
    query of the dashboard returns no series.
    """
    picture_path.unlink(missing_ok=True)
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if not picture_path.exists():
        sys.stderr.write(f"{picture_path}: {completed.stdout}{completed.stderr}\n")
        return False
    sys.stdout.write(f"{picture_path}\n")
    return True


def _draw_all(options: argparse.Namespace, url: str, start_time: float) -> int:
    """Draw the dashboards with the data of a Prometheus server, and return the exit status."""
    status = 0
    for board in BOARDS:
        settings = PICTURE_SETTINGS.get(board.uid, PictureSettings(board.uid))
        board_path = options.out / f"{board.uid}.json"
        board_path.write_text(json.dumps(board.model()), encoding="utf-8")
        for theme, width in (("dark", WIDE_PIXELS), ("light", WIDE_PIXELS), ("dark", NARROW_PIXELS)):
            picture_path = options.out / f"{board.uid}-{theme}{'' if width == WIDE_PIXELS else '-narrow'}.png"
            command = [
                "node",
                str(options.dashrender / "dashrender.mjs"),
                "render",
                str(board_path),
                f"--prom={url}",
                f"--from={start_time:.0f}",
                f"--to={start_time + settings.end_fraction * options.seconds:.0f}",
                f"--scrape-interval={SCRAPE_INTERVAL}",
                f"--width={width}",
                f"--theme={theme}",
                "--expand",
                f"--out={picture_path}",
                *(f"--var={name}={value}" for name, value in settings.values.items()),
            ]
            if not draw_picture(command, picture_path):
                status = 1
        board_path.unlink()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
