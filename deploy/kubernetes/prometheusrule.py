"""Prints deploy/prometheus/rules as one PrometheusRule of the Prometheus operator.

    python deploy/kubernetes/prometheusrule.py [DIRECTORY OF RULE FILES] | kubectl apply -f -

Needs PyYAML.
"""
# ruff: noqa: INP001 - a script, not a package

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

RULES = Path(__file__).resolve().parents[1] / "prometheus/rules"


def prometheus_rule(rules: Path = RULES) -> dict[str, Any]:
    """Make the resource from all rule files of a directory."""
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
                for path in sorted(rules.glob("*.yml"))
                for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
            ]
        },
    }


if __name__ == "__main__":
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else RULES
    yaml.safe_dump(prometheus_rule(directory), sys.stdout, sort_keys=False, width=1000, allow_unicode=True)
