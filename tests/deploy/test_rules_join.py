"""Joins of the rules with the run of a node or GPU, while the series of an ended run is still in the look-back of Prometheus.

Prometheus ends a recorded series with a staleness marker. The marker is missing after a restart of Prometheus, in blocks that
promtool writes from rules, and after federation. Then the series of the ended run stays for five minutes.
"""

import re
from pathlib import Path

import pytest
import yaml
from rules_support import PROMETHEUS, Rule, alerts, needs_promtool, promtool, rules

pytestmark = needs_promtool

JOIN = re.compile(
    r"\* on \((?P<labels>cluster, \w+)\) group_left \(\w+\) (?P<one_side>[^\n]*\b(?:group|gpu_up)\b[^\n]*)"
)
"""Join whose right-hand side is a recorded series of a run, or the index of a GPU, to the end of the line."""


def joins() -> list[tuple[Rule, str]]:
    """Return each rule with each right-hand side of its joins."""
    matches = [(rule, match["one_side"]) for rule in rules() for match in JOIN.finditer(rule.expr)]
    # If a parenthesis opens before the join, the text to the end of the line is not an expression.
    return [(rule, one_side) for rule, one_side in matches if one_side.count("(") == one_side.count(")")]


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    text = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return {"series": f"{name}{{{text}}}", "values": values}


def test_every_alert_that_reads_the_run_of_a_node_or_gpu_is_checked() -> None:
    names = {
        alert.name for alert in alerts() if re.search(r"\b(?:instance|gpu):training_run:group", alert.expr)
    }

    assert len(names) > 20
    assert names == {rule.name for rule, _ in joins()}


@pytest.mark.timeout(90)  # promtool writes each evaluation to a database on disk
def test_each_join_uses_the_latest_run_of_a_node_and_of_a_gpu(tmp_path: Path) -> None:
    gpu_labels = {"instance": "n1", "uuid": "GPU-0"}
    ended_values, new_values = "1x2", "_x3 1x10"
    sides = sorted({one_side for _, one_side in joins()})
    checks = []
    for side in sides:
        if "gpu_up" in side:
            query, samples = (
                f"label_one * on (cluster, uuid) group_left (gpu) {side}",
                ['{uuid="GPU-0",gpu="1"}'],
            )
        else:
            labels = "instance" if "instance:training_run:group" in side else "uuid"
            query = f"label_one * on (cluster, {labels}) group_left (run) {side}"
            samples = [
                '{instance="n1",run="new"}',
                '{instance="n2"}',
                '{uuid="GPU-0",run="new"}',
                '{uuid="GPU-1"}',
            ]
            samples = [sample for sample in samples if labels in sample]
        checks.append(
            {
                "expr": query,
                "eval_time": "5m",
                "exp_samples": [{"labels": sample, "value": 7} for sample in samples],
            }
        )
    case = {
        "rule_files": [],
        "evaluation_interval": "30s",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    *(series("label_one", "7x10", instance=name) for name in ("n1", "n2")),
                    *(series("label_one", "7x10", uuid=name) for name in ("GPU-0", "GPU-1")),
                    series("instance:training_run:group", ended_values, instance="n1", run="zz_ended"),
                    series("instance:training_run:group", new_values, instance="n1", run="new"),
                    # Two runs on a node have no common run.
                    series("instance:training_run:group", ended_values, instance="n2", run="zz_ended"),
                    series("instance:training_run:group", new_values, instance="n2"),
                    series("gpu:training_run:group", ended_values, uuid="GPU-0", run="zz_ended"),
                    series("gpu:training_run:group", new_values, uuid="GPU-0", run="new"),
                    series("gpu:training_run:group", ended_values, uuid="GPU-1", run="zz_ended"),
                    series("gpu:training_run:group", new_values, uuid="GPU-1"),
                    series("gpu_up", "1x2", gpu="0", **gpu_labels),
                    series("gpu_up", new_values, gpu="1", **gpu_labels),
                ],
                "promql_expr_test": checks,
            }
        ],
    }
    path = tmp_path / "case.yaml"
    path.write_text(yaml.safe_dump(case))
    completed_run = promtool("test", "rules", path)

    assert len(sides) == 3
    assert completed_run.returncode == 0, completed_run.stdout + completed_run.stderr


@pytest.mark.timeout(90)
def test_an_alert_fires_for_the_new_run_while_the_series_of_the_ended_run_remains(tmp_path: Path) -> None:
    node = {"instance": "n1"}
    files = [
        PROMETHEUS / "rules" / name
        for name in ("thresholds.yml", "recording-node.yml", "recording-gpu.yml", "alerts-gpu.yml")
    ]
    case = {
        "rule_files": [str(file) for file in files],
        "evaluation_interval": "30s",
        "tests": [
            {
                "interval": "30s",
                "input_series": [
                    series("instance:training_run:group", "1x3", run="zz_ended", **node),
                    series("training_process_up", "_x3 1x30", run="new", rank="0", **node),
                    series("exporter_build_info", "1x30", **node),
                    series("gpu_nvml_up", "0x30", **node),
                    series("gpu_devices_expected", "8x30", **node),
                    series("gpu_devices", "0x30", **node),
                ],
                "promql_expr_test": [
                    {
                        "expr": 'count by (run) (ALERTS{alertname=~"NvmlDown|GpuMissing"})',
                        "eval_time": "4m",
                        "exp_samples": [{"labels": '{run="new"}', "value": 2}],
                    }
                ],
            }
        ],
    }
    path = tmp_path / "case.yaml"
    path.write_text(yaml.safe_dump(case))
    completed_run = promtool("test", "rules", path)

    assert completed_run.returncode == 0, completed_run.stdout + completed_run.stderr


def test_the_compute_time_of_a_rank_whose_labels_have_changed_has_the_latest_labels(tmp_path: Path) -> None:
    rank = {"instance": "n1", "run": "r", "rank": "0"}
    case = {
        "rule_files": [str(PROMETHEUS / "rules" / "recording-training.yml")],
        "evaluation_interval": "30s",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    series("training_rank_compute_seconds", "2x10", **rank),
                    series("training_rank_info", "1x2", **rank),  # before the GPU of the rank was known
                    series("training_rank_info", "_x3 1x10", **rank, gpu="3"),
                ],
                "promql_expr_test": [
                    {
                        "expr": "rank:training_compute:seconds",
                        "eval_time": "4m",
                        "exp_samples": [
                            {
                                "labels": 'rank:training_compute:seconds{instance="n1",run="r",rank="0",gpu="3"}',
                                "value": 2,
                            }
                        ],
                    }
                ],
            }
        ],
    }
    path = tmp_path / "case.yaml"
    path.write_text(yaml.safe_dump(case))
    completed_run = promtool("test", "rules", path)

    assert completed_run.returncode == 0, completed_run.stdout + completed_run.stderr
