"""The configuration's rules for Stats, as a training process takes them."""

from __future__ import annotations

from exporter.recording.definition import apply_rules, check_definition, check_rules
from exporter.recording.values import Aggregation


def test_the_later_rule_wins_field_by_field() -> None:
    rules, wrong = check_rules(
        [
            {"match": "train.*", "aggregations": ["mean", "p99"], "window_seconds": 10},
            {"match": "train.loss", "window_seconds": None, "window_samples": 5},
            {"match": "val.*", "enabled": False},
        ]
    )
    changed, enabled = apply_rules(check_definition("train.loss", ["histogram"], unit="seconds"), rules)

    assert wrong == []
    assert changed.aggregations == {Aggregation.MEAN, Aggregation.P99}
    assert (changed.window_seconds, changed.window_samples, changed.buckets) == (None, 5, ())
    assert enabled
    assert not apply_rules(check_definition("val.loss"), rules)[1]


def test_a_histogram_that_only_the_configuration_asks_for_gets_the_units_buckets() -> None:
    rules, _ = check_rules([{"match": "*", "aggregations": ["histogram"]}])

    changed, _ = apply_rules(check_definition("a", ["mean"], unit="ratio"), rules)

    assert changed.buckets[-1] == 1.0


def test_rules_that_make_no_sense_are_left_out_and_told() -> None:
    rules, wrong = check_rules(
        [
            {"match": "a", "aggregations": ["median"]},
            {"match": "a", "window_seconds": 0.01},
            {"match": "a", "buckets": [2, 1]},
            {"match": 3},
            {"match": "a", "enabled": "yes"},
            {"match": "b", "enabled": False},
        ]
    )

    assert [rule["match"] for rule in rules] == ["b"]
    assert len(wrong) == 5
    assert "unknown aggregation 'median'" in wrong[0]


def test_a_rule_with_shorter_windows_than_a_stat_asks_samples_of_lowers_what_it_asks() -> None:
    definition = check_definition("a", ["mean"], window_samples=20, min_samples=10)

    changed, _ = apply_rules(definition, [{"match": "a", "window_samples": 5}])

    assert (changed.window_samples, changed.min_samples) == (5, 5)


def test_a_rule_that_takes_both_windows_away_leaves_them_as_they_were() -> None:
    rules, _ = check_rules([{"match": "a", "window_seconds": None}])

    changed, _ = apply_rules(check_definition("a", window_seconds=5), rules)

    assert changed.window_seconds == 5
