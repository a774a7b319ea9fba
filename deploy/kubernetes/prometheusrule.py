"""Conversion of rule files to a PrometheusRule, the resource of the Prometheus operator.

    python deploy/kubernetes/prometheusrule.py [DIRECTORY] | kubectl apply --server-side -f -

The default directory is deploy/prometheus/rules. Requires PyYAML.
"""
# ruff: noqa: INP001 - a script, not a package

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

RULES_DIRECTORY = Path(__file__).resolve().parents[1] / "prometheus/rules"


def prometheus_rule(directory: Path = RULES_DIRECTORY) -> dict[str, Any]:
    """Return the PrometheusRule with the groups of all rule files in a directory."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {
            "name": "training-exporter",
            "labels": {"app.kubernetes.io/name": "training-exporter"},
        },
        "spec": {
            "groups": [
                group
                for path in sorted(directory.glob("*.yml"))
                for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
            ]
        },
    }


if __name__ == "__main__":
    rules_directory = Path(sys.argv[1]) if len(sys.argv) > 1 else RULES_DIRECTORY
    yaml.safe_dump(
        prometheus_rule(rules_directory), sys.stdout, sort_keys=False, width=1000, allow_unicode=True
    )
