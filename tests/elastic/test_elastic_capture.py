"""Replay of a captured torchrun job: the page accounts for every metric and event."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from places import DATA
from program_support import page_of_feed, run_function, series, sum_by_labels
from programs.elastic import replay_capture

CAPTURE = DATA / "torchelastic-capture.json"


@pytest.fixture(scope="module")
def job() -> Any:
    return json.loads(CAPTURE.read_text())


@pytest.fixture(scope="module")
def page(job: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    feed = tmp_path_factory.mktemp("capture") / "feed"
    for process in job["processes"]:
        is_worker = process["kind"] == "worker"
        variables = {"RANK": str(process["rank"]), "TORCHELASTIC_RUN_ID": "run0"} if is_worker else {}
        replay = run_function(feed, replay_capture, str(CAPTURE), process["id"], **variables)
        assert replay.stdout == "0\n", "events were not replayed"
    return page_of_feed(feed)


def captured_metrics(job: Any, role: str) -> dict[tuple[str, str], list[float]]:
    """Return the captured values by group and name, of the agent or of all workers."""
    values_by_metric: dict[tuple[str, str], list[float]] = {}
    for process in job["processes"]:
        for _, group, name, value in process["metrics"] if process["kind"] == role else ():
            values_by_metric.setdefault((group, name), []).append(value)
    return values_by_metric


def test_every_metric_of_the_agent_is_accounted_for(job: Any, page: str) -> None:
    value_count = 0
    for (group, name), values in captured_metrics(job, "agent").items():
        assert group == "torchelastic"
        count, total = len(values), sum(values)
        value_count += count
        if name.startswith("workers."):
            field = name.removeprefix("workers.default.")
            if field == "remaining_restarts":
                assert sum_by_labels(page, "training_elastic_failure_restarts_total") == 1  # from 1 to 0
            elif field == "flakiness":
                assert sum_by_labels(page, "training_elastic_flakiness_count") == count
                assert sum_by_labels(page, "training_elastic_flakiness_sum") == total / 100
            elif field == "run_total":
                assert sum_by_labels(page, "training_elastic_runs_total") == total
            elif field.startswith("run_"):
                outcome = field.removeprefix("run_")
                assert sum_by_labels(page, "training_elastic_runs_total", outcome=outcome) == total
            else:
                assert sum_by_labels(page, "training_elastic_worker_state_checks_total", state=field) == count
            continue
        function, _, field = name.removesuffix(".ms").rpartition(".")
        if field in {"success", "failure"}:
            family = "training_elastic_function_calls_total"
            assert sum_by_labels(page, family, function=function, outcome=field) == count
        elif function.endswith("_rendezvous"):
            assert sum_by_labels(page, "training_elastic_rendezvous_seconds_count") == count
            assert sum_by_labels(page, "training_elastic_rendezvous_seconds_sum") == pytest.approx(
                total / 1000
            )
        else:
            family = "training_elastic_function_seconds"
            assert sum_by_labels(page, f"{family}_count", function=function) == count
            assert sum_by_labels(page, f"{family}_sum", function=function) == pytest.approx(total / 1000)
    assert value_count == 288
    assert sum_by_labels(page, "training_elastic_restarts_total") == 1


def test_every_metric_of_the_workers_is_accounted_for(job: Any, page: str) -> None:
    families = {
        ("torchelastic", "train.step_ms"): ("torchelastic_train_step_seconds", 1000),
        ("my_app", "train.loss"): ("my_app_train_loss", 1),
        ("torchelastic", "__main__.step.success"): ("torchelastic___main___step_success", 1),
        ("torchelastic", "__main__.step.duration.ms"): ("torchelastic___main___step_duration_seconds", 1000),
        ("my_app", "__main__.step2.success"): ("my_app___main___step2_success", 1),
        ("my_app", "__main__.step2.duration.ms"): ("my_app___main___step2_duration_seconds", 1000),
    }
    values_by_metric = captured_metrics(job, "worker")

    assert values_by_metric.keys() == families.keys()
    for metric, (family, divisor) in families.items():
        assert sum_by_labels(page, f"{family}_count", rank="0") == 2
        assert sum_by_labels(page, f"{family}_count", rank="1") == 2
        assert sum_by_labels(page, f"{family}_sum") == pytest.approx(sum(values_by_metric[metric]) / divisor)


def test_every_event_is_accounted_for(job: Any, page: str) -> None:
    types: Counter[str] = Counter()
    for process in job["processes"]:
        for entry in process["events"]:
            event = entry["event"]
            if entry["destination"] == "dynamic_rendezvous":
                types[f"torchelastic.rendezvous.{event['node_state']}"] += 1
            elif event["source"] == "AGENT":
                types[event["name"].replace("worker", "agent", 1)] += 1
            else:
                types[event["name"]] += 1

    assert sum(types.values()) == 33
    assert sum_by_labels(page, "training_events_total") == 33
    for event_type, count in types.items():
        assert sum_by_labels(page, "training_events_total", type=event_type) == count
    assert sum_by_labels(page, "training_elastic_worker_starts_total") == 4
    assert (
        sum_by_labels(page, "training_elastic_worker_results_total", result="succeeded", exit_code="0") == 2
    )


def test_agent_and_ranks_are_distinct_and_nothing_is_refused(page: str) -> None:
    ranks = sorted(series(page, "training_rank_info"))

    assert len(ranks) == 3
    assert 'role="agent",run="run0"' in "".join(ranks)
    assert 'rank="0"' in "".join(ranks)
    assert 'rank="1"' in "".join(ranks)
    assert series(page, "training_elastic_refused_total") == {}
    assert sum_by_labels(page, "training_feed_dropped_total") == 0
