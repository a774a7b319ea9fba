"""The configuration's rules for Stats, as a training process takes them."""

from __future__ import annotations

import pytest

from exporter.recording.definition import DEFAULT_BUCKETS, apply_rules, check_definition, check_rules
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


@pytest.mark.parametrize(
    ("rule", "given", "field", "kept"),
    [
        ({"aggregations": ["histogram"]}, {"unit": "ratio"}, "buckets", DEFAULT_BUCKETS["ratio"]),
        ({"window_samples": 5}, {"window_samples": 20, "min_samples": 10}, "min_samples", 5),
        ({"window_seconds": None}, {"window_seconds": 5}, "window_seconds", 5),
    ],
)
def test_what_a_rule_does_not_say_is_made_to_fit(
    rule: dict[str, object], given: dict[str, object], field: str, kept: object
) -> None:
    rules, _ = check_rules([{"match": "a", **rule}])

    assert getattr(apply_rules(check_definition("a", ["mean"], **given), rules)[0], field) == kept
