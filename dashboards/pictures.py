"""Command `python -m dashboards.pictures`: draw each dashboard over the scenario with dashrender.

dashrender draws dashboards with Grafana's components in a browser, without a Grafana server. The option `--dashrender` or
$DASHRENDER names its directory.
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
from dashboards.scenario.cluster import BASELINE, RUN, Cluster

WIDE, NARROW = 1600, 1000
AS_SCRAPED_EVERY = "5s"
"""Scrape interval of the data source; longer than the interval of the scenario, so that rates look as in production."""


@dataclass(frozen=True)
class Choice:
    """Variables of a dashboard for its picture."""

    uid: str  # uid of the dashboard
    values: dict[str, str] = field(default_factory=dict)  # values of variables
    until: float = 1.0  # end of the picture, as a share of the scenario


CHOICES = {
    choice.uid: choice
    for choice in (
        Choice("training-run", {"run": RUN}),
        # While the straggler straggles.
        Choice("training-ranks", {"run": RUN, "rank": "3"}, until=0.67),
        Choice("training-gpus", {"node": "node-2"}, until=0.67),
        Choice("training-node", {"node": "node-1"}),
        Choice("training-fleet", {"baseline": BASELINE}),
    )
}


def main(arguments: Sequence[str]) -> int:
    """Draw all dashboards; returns 1 if a picture failed, 2 if dashrender was not found."""
    parser = argparse.ArgumentParser(prog="python -m dashboards.pictures", description=__doc__)
    parser.add_argument(
        "--dashrender", type=Path, default=os.environ.get("DASHRENDER"), help="directory of the tool"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/dashboards"), help="where to (default %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=DEFAULT_SECONDS, help="length of the scenario")
    given = parser.parse_args(arguments)
    if given.dashrender is None or not (given.dashrender / "dashrender.mjs").exists():
        sys.stderr.write("dashrender.mjs was not found; set --dashrender or $DASHRENDER to its directory\n")
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="exporter-scenario-"))
    try:
        with Cluster(work, Timeline(seconds=given.seconds)) as cluster:
            cluster.wait()
            time.sleep(1)
            return _draw_all(given, cluster.url, cluster.started)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _draw_all(given: argparse.Namespace, url: str, begin: float) -> int:
    status = 0
    for board in BOARDS:
        choice = CHOICES.get(board.uid, Choice(board.uid))
        drawn = given.out / f"{board.uid}.json"
        drawn.write_text(json.dumps(board.model()), encoding="utf-8")
        for theme, width in (("dark", WIDE), ("light", WIDE), ("dark", NARROW)):
            picture = given.out / f"{board.uid}-{theme}{'' if width == WIDE else '-narrow'}.png"
            command = [
                "node",
                str(given.dashrender / "dashrender.mjs"),
                "render",
                str(drawn),
                f"--prom={url}",
                f"--from={begin:.0f}",
                f"--to={begin + choice.until * given.seconds:.0f}",
                f"--scrape-interval={AS_SCRAPED_EVERY}",
                f"--width={width}",
                f"--theme={theme}",
                "--expand",
                f"--out={picture}",
                *(f"--var={name}={value}" for name, value in choice.values.items()),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if not picture.exists():
                sys.stderr.write(f"{board.uid}: {done.stdout}{done.stderr}\n")
                status = 1
            else:
                sys.stdout.write(f"{picture}\n")
        drawn.unlink()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
