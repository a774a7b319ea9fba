"""What a process tells of its training, in the feed: what is written is read back, and nothing else is read."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_feed_codec import changed as changed_example
from test_feed_codec import example, reason_of, texts, times

from exporter.errors import FeedFormatError
from exporter.feed.decoder import SLUG, decode
from exporter.feed.encoder import Encoder, encode
from exporter.recording.values import Recording, TrainingReading

slugs = st.from_regex(SLUG, fullmatch=True)
seconds = st.floats(0, 1e9)
wholes = st.integers(0, 2**63 - 1)
steps = st.none() | st.integers(-(2**63) + 1, 2**63 - 1)
parts = st.lists(st.tuples(slugs, seconds), max_size=3).map(tuple)
segments = st.builds(
    lambda loop, ends, spent: (loop, min(ends), max(ends), spent),
    wholes,
    st.tuples(st.integers(-100, 10**6), st.integers(-100, 10**6)),
    seconds,
)


@st.composite
def timelines(draw: st.DrawFn) -> tuple[tuple[float, tuple[tuple[str, float], ...]], ...]:
    gaps = draw(st.lists(st.integers(1, 100), max_size=5))
    return tuple(
        (0.1 * tenths, draw(parts)) for tenths in accumulate(gaps, initial=draw(st.integers(0, 10**6)))
    )


@st.composite
def training_readings(draw: st.DrawFn) -> TrainingReading:
    positive = st.none() | seconds
    return TrainingReading(
        facts=tuple(sorted(draw(st.dictionaries(slugs, texts, max_size=4)).items())),
        phase=draw(slugs),
        phase_since=draw(times),
        phases=draw(st.dictionaries(slugs, seconds, max_size=4)),
        last_progress=draw(st.none() | times),
        first_step=draw(steps),
        loop=draw(wholes),
        step=draw(steps),
        steps=draw(wholes),
        work_seconds=draw(seconds),
        open_seconds=draw(seconds),
        failed_seconds=draw(seconds),
        committed_step=draw(steps),
        committed_seconds=draw(seconds),
        segments=tuple(draw(st.lists(segments, max_size=4))),
        finished=draw(st.booleans()),
        failure=draw(st.just("") | slugs),
        longest_step_seconds=draw(positive),
        timeline=draw(timelines()),
        flops_per_token=draw(positive),
        hardware_flops_per_token=draw(positive),
        peak_flops=draw(positive),
    )


@given(st.none() | training_readings())
def test_what_is_told_of_the_training_is_read_back(training: TrainingReading | None) -> None:
    snapshot = example().replace(recording=Recording((), training=training))

    assert decode(encode(snapshot)) == snapshot


@settings(max_examples=50)
@given(st.lists(training_readings(), min_size=2, max_size=3))
def test_an_encoder_that_remembers_writes_what_a_new_one_writes(several: list[TrainingReading]) -> None:
    encoder = Encoder()
    first, second = several[:2]
    # The next reading shares objects with the one before, as the interpreter's do.
    grown = second.replace(facts=first.facts, segments=first.segments, timeline=first.timeline)
    for training in [*several, several[-1], grown, None, first]:
        snapshot = example().replace(recording=Recording((), training=training))

        assert encoder.encode(snapshot) == encode(snapshot)


def test_a_reading_that_cannot_be_written_does_not_stick() -> None:
    encoder = Encoder()
    bad = TrainingReading(facts=(("application", "half a pair: \ud800"),), segments=((1, 1, 2, "long"),))  # type: ignore[arg-type]  # what is tested
    good = TrainingReading(facts=(("application", "a"),))
    with pytest.raises(FeedFormatError):
        encoder.encode(example().replace(recording=Recording((), training=bad)))

    written = encoder.encode(example().replace(recording=Recording((), training=good)))

    assert decode(written).recording.training == good


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_left_out(number: float) -> None:
    training = TrainingReading(
        phases={"init": number, "other": 1.0},
        work_seconds=number,
        last_progress=number,
        segments=((1, 1, 2, number), (1, 3, 4, 0.5)),
        timeline=((0.1, (("init", number), ("other", 0.1))),),
        step=2**70,
    )
    expected = TrainingReading(
        phases={"other": 1.0}, segments=((1, 3, 4, 0.5),), timeline=((0.1, (("other", 0.1),)),)
    )

    read = decode(encode(example().replace(recording=Recording((), training=training))))

    assert read.recording.training == expected


BODY: dict[str, Any] = {"facts": [["session_tag", "s"]], "phase": "forward", "work_seconds": 1.5}


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    def put(_what: Any, _when: Any, totals: dict[str, Any]) -> None:
        totals["training"] = dict(BODY)
        change(totals["training"])

    return changed_example(put)


def test_what_is_missing_has_the_contracts_default_and_what_is_unknown_is_passed_over() -> None:
    read = decode(changed(lambda body: body.update(of_a_later_version=[1, 2]))).recording.training

    assert read == TrainingReading(facts=(("session_tag", "s"),), phase="forward", work_seconds=1.5)


@pytest.mark.parametrize(
    "changes",
    [
        {"facts": {}},
        {"facts": [["a", "1"], ["a", "2"]]},
        {"facts": [["b", "1"], ["a", "2"]]},
        {"facts": [["Not a name", "1"]]},
        {"facts": [["a", 1]]},
        {"facts": [["a"]]},
        {"facts": [["a", "x" * 1025]]},
        {"facts": [[f"a{number:03d}", ""] for number in range(65)]},
        {"phase": ""},
        {"phase": "Forward!"},
        {"phase": None},
        {"phase_since": "now"},
        {"phase_since": 1.1e11},
        {"last_progress": -1e300},
        {"phases": []},
        {"phases": {"init": -1.0}},
        {"phases": {"No": 1.0}},
        {"phases": {f"p{number}": 1.0 for number in range(65)}},
        {"loop": -1},
        {"loop": 1.0},
        {"steps": True},
        {"step": 1.5},
        {"step": 2**63},
        {"first_step": -(2**63)},
        {"committed_step": "1"},
        {"work_seconds": -0.5},
        {"work_seconds": None},
        {"open_seconds": "1"},
        {"open_seconds": 1e11},
        {"phases": {"init": 1e300}},
        {"segments": [[1, 1, 2]]},
        {"segments": [[1, 3, 2, 0.5]]},
        {"segments": [[1, 1, 2, -0.5]]},
        {"segments": [[-1, 1, 2, 0.5]]},
        {"segments": [[1, 1, 2, 0.5]] * 257},
        {"finished": 1},
        {"failure": "Some Thing"},
        {"failure": None},
        {"longest_step_seconds": -1.0},
        {"timeline": [[0.1, []], [0.1, []]]},
        {"timeline": [[0.2, []], [0.1, []]]},
        {"timeline": [[0.1, [["init"]]]]},
        {"timeline": [[0.1, [["init", -0.1]]]]},
        {"timeline": [[0.1, {}]]},
        {"timeline": [[float(number), []] for number in range(257)]},
        {"flops_per_token": -1.0},
        {"peak_flops": "fast"},
    ],
    ids=str,
)
def test_a_training_against_the_contract_is_refused(changes: dict[str, Any]) -> None:
    assert reason_of(changed(lambda body: body.update(changes))) == "content"


@pytest.mark.parametrize("body", [[], None, 1, "training"])
def test_what_is_no_object_is_refused(body: object) -> None:
    assert reason_of(changed_example(lambda _what, _when, totals: totals.update(training=body))) == "content"
