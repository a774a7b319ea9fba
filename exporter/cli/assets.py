"""`training-exporter assets --output DIR`: writes the dashboards, rules and examples of the package.

The files are in `exporter/assets`, which contains links to the sources in the repository.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from exporter.cli.flags import EXIT_FAILED, PROGRAM, Parser, print_notice

DESCRIPTION = """\
Writes the files that go with the exporter:

    grafana/dashboards/            dashboards
    grafana/provisioning/          provisioning for the dashboards and a data source
    prometheus/rules/              recording rules and alerts, for rule_files
    prometheus/scrape/             scrape configurations for fixed hosts, Slurm, Kubernetes and agents
    prometheus/alertmanager.yaml   an example of routes for the alerts
    runbook.md                     the runbook of the alerts
    systemd/                       a service for a machine and all of its jobs

    training-exporter assets --output=/etc/training-exporter
"""
SOURCE = Path(__file__).resolve().parents[1] / "assets"


def main(arguments: Sequence[str], _environ: Mapping[str, str] = os.environ) -> int:
    """Write the files, and return 0.

    Returns 1 if the package has no files or a file cannot be written. Without --force, returns 1 and writes nothing if an existing
    file has other content. Raises ConfigurationError for an invalid command line.
    """
    parser = Parser(f"{PROGRAM} assets", DESCRIPTION, " --output DIR")
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="write to this directory")
    parser.add_argument("--force", action="store_true", help="overwrite files that have been changed")
    flags = parser.parse_flags(arguments)
    output: Path = flags.output
    source_paths = [
        Path(folder, name) for folder, _, names in os.walk(SOURCE, followlinks=True) for name in names
    ]
    files = {output / source.relative_to(SOURCE): source for source in sorted(source_paths)}
    if not files:
        print_notice(f"{SOURCE} has no files; install the wheel, or run the command in the repository")
        return EXIT_FAILED
    try:
        existing_files = {target: source for target, source in files.items() if target.exists()}
        changed_paths = [
            target for target, source in existing_files.items() if target.read_bytes() != source.read_bytes()
        ]
        if changed_paths and not flags.force:
            for target in changed_paths:
                print_notice(f"{target} has been changed")
            print_notice("nothing is written; --force replaces these files")
            return EXIT_FAILED
        for target, source in files.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    except OSError as error:
        # SameFileError, for an output in the package itself, has no attributes.
        print_notice(f"{error.filename or output}: {error.strerror or error}")
        return EXIT_FAILED
    print(f"{len(files)} files in {output}")
    return 0
