"""The configuration's `events:` rules: read, handed over, obeyed by a running process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_recording_process import run, snapshots

from exporter.cli.configuration import Configuration, EventRule
from exporter.config.loader import dump, load
from exporter.config.options import UNCHANGED
from exporter.errors import ConfigurationError
from exporter.feed.overrides import read_overrides, write_overrides
from exporter.recording.event_values import LEVELS
from exporter.recording.events import EventLog

rules = st.builds(
    EventRule,
    match=st.sampled_from(["*", "ckpt.?", "train.step"]),
    enabled=st.sampled_from([UNCHANGED, True, False]),
    severity=st.sampled_from([UNCHANGED, *LEVELS]),
    sample=st.just(UNCHANGED) | st.floats(0, 1),
    per_second=st.just(UNCHANGED) | st.none() | st.floats(0, 1_000_000),
)


@settings(max_examples=30)  # each writes and reads a whole configuration
@given(st.lists(rules, max_size=3))
def test_rules_are_read_back_as_they_are_shown(several: list[EventRule]) -> None:
    configuration = Configuration(events=tuple(several))

    assert load(dump(configuration), "c", Configuration) == configuration


@given(rules)
def test_a_training_process_accepts_every_rule_that_the_configuration_accepts(rule: EventRule) -> None:
    override = json.loads(json.dumps(rule.as_override()))
    assert override.pop("events") is True

    assert EventLog().override([override]) == []


@pytest.mark.parametrize(
    "text",
    [
        "events: [{enabled: false}]",
        "events: [{match: a, sample: 1.5}]",
        "events: [{match: a, per_second: -1}]",
        "events: [{match: a, severity: loud}]",
        "events: [{match: a, aggregations: [mean]}]",
    ],
)
def test_a_rule_that_makes_no_sense_is_refused_at_start(text: str) -> None:
    with pytest.raises(ConfigurationError):
        load(text, "c", Configuration)


def test_rules_of_both_kinds_travel_in_one_file(tmp_path: Path) -> None:
    text = "recording: [{match: loss, enabled: false}]\nevents: [{match: 'a.*', sample: 0.5}]"
    configuration = load(text, "c", Configuration)
    write_overrides(tmp_path, configuration.overrides())

    assert read_overrides(tmp_path) == (
        {"events": True, "match": "a.*", "sample": 0.5},
        {"match": "loss", "enabled": False},
    )


def test_a_running_process_obeys_and_its_code_goes_first(tmp_path: Path) -> None:
    program = """
        import os, time
        import exporter
        from exporter import Stat, events, log
        from exporter.feed.overrides import write_overrides
        Stat("train.loss", ["mean"])
        def until(condition):
            end = time.monotonic() + 15
            while not condition():
                time.sleep(0.02)
                assert time.monotonic() < end
        events.limit("mine", enabled=True)
        log("noise"); log("mine")
        write_overrides(os.environ["EXPORTER_FEED_DIR"], [
            {"events": True, "match": "*", "enabled": False}, {"match": "train.*", "enabled": False},
        ])
        until(lambda: not events.enabled("noise"))
        log("noise"); log("mine")
        assert not exporter.registry.find("train.loss").enabled
    """
    run(tmp_path / "feed", program)
    (snapshot,) = snapshots(tmp_path / "feed")

    assert snapshot.recording.events.counts == {("noise", "info"): 1, ("mine", "info"): 2}
