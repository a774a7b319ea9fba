"""The status page: what it tells, what it warns of, and that nothing foreign in it can act."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import PROJECT
from prometheus_client.core import Metric

from exporter.collectors.status import CollectorStatus
from exporter.families import Distribution, Family, FamilyType
from exporter.status.document import MANY_RANKS, render
from exporter.status.elements import MOST_ROWS, duration, energy, number, plot, size
from exporter.status.readings import History, Readings
from exporter.status.view import About, concerns, view

NOW = 10_000.0
VOID = {"meta", "link", "path", "rect"}
Rows = dict[str, list[tuple[dict[str, str], float | Distribution]]]


def of(value: float | Distribution, **labels: str) -> list[tuple[dict[str, str], float | Distribution]]:
    return [({"run": "night", **labels}, value)]


JOB: Rows = {
    "training_feed_alive": of(1.0, rank="0") + of(1.0, rank="1"),
    "training_feed_last_update_timestamp_seconds": of(NOW - 1, rank="0") + of(NOW - 2, rank="1"),
    "training_phase_active": of(1.0, rank="0", phase="forward"),
    "training_last_progress_timestamp_seconds": of(NOW - 3, rank="0"),
    "training_run_info": of(1.0, model="llama"),
    "training_step": of(250.0),
    "training_step_target": of(1000.0),
    "training_loss": of(2.5, mode="train"),
    "training_wall_seconds_total": of(1000.0),
    "training_productive_seconds_total": of(900.0),
    "training_badput_seconds_total": of(60.0, cause="data_stall"),
}


class Document(HTMLParser):
    """Collects a page's tags, attributes and text; an element that is not closed in order is an error."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.names: list[str] = []
        self.text: list[str] = []
        self.feed(page.decode())
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert self.open[-2:] != ["dl", "div"] or tag in {"dt", "dd"}
        self.tags.append(tag)
        self.names += [name for name, _ in attrs]
        self.links += [value or "" for name, value in attrs if name in {"href", "src", "action"}]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["style"], ["script"]):
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def families(rows: Rows) -> list[Metric]:
    made = []
    for name, samples in rows.items():
        kind: FamilyType = "histogram" if isinstance(samples[0][1], Distribution) else "gauge"
        labels = tuple(sorted({label for found, _ in samples for label in found}))
        values = {tuple(found.get(label, "") for label in labels): value for found, value in samples}
        made.append(Family(name=name, type=kind, help="", labels=labels).family(values))
    return made


def noted(ticks: int, rows: Callable[[int], Rows], every: float = 5.0) -> History:
    """What was so at each tick."""
    past = History(seconds=5)
    for tick in range(ticks):
        past.note(every * tick, Readings(families(rows(tick))))
    return past


def steps(count: int, seconds: float) -> Rows:
    return {"training_step_duration_seconds": of(Distribution(count, seconds), mode="train")}


def about(**changes: Any) -> About:
    return replace(About("1.2.3", "node7", NOW - 90, NOW, "/dev/shm/x"), **changes)


def status(**changes: Any) -> CollectorStatus:
    return replace(CollectorStatus("cpu", True, "", "", 1.0, 1.0, 0.001, 5.0, 4.0, False, ()), **changes)


def page(
    rows: Rows, *collectors: CollectorStatus, past: History | None = None, **changes: object
) -> Document:
    seen = view(about(**changes), Readings(families(rows)), past or History(), collectors)
    return Document(render(seen))


def warnings(
    rows: Rows, *collectors: CollectorStatus, past: History | None = None, **changes: object
) -> list[str]:
    seen = view(about(**changes), Readings(families(rows)), past or History(), collectors)
    return [each.text for each in concerns(seen)]


PAST = noted(4, lambda tick: steps(10 * tick, 20.0 * tick))
UNSAVED: Rows = {
    **JOB,
    "training_productive_seconds_total": of(0.0),
    "training_uncommitted_seconds": of(850.0),
}
IN_A_PHASE: Rows = {
    **JOB,
    "training_feed_last_update_timestamp_seconds": of(NOW - 4, rank="0"),
    "training_phase_active_since_timestamp_seconds": of(NOW - 4.05, rank="0"),
}
ON_A_GPU: Rows = {
    **JOB,
    "gpu_up": [({"gpu": str(each), "uuid": f"GPU-{each}"}, 1.0) for each in range(2)],
    "training_rank_info": of(1.0, rank="0", gpu="1", uuid="GPU-1"),
}
GAPS: Rows = {
    "loss_window_samples": of(3.0, rank="0") + of(0.0, rank="1"),
    "loss_window_mean": of(1.5, rank="0"),
}
NO_JOB = "1.2.3|node7|ready|up 90 s|/dev/shm/x|No job has recorded anything yet|GPUs No GPU."
PLACE = "model llama|step 250 of 1,000|25 %|2.0 s|about 25 min left|90 %|data_stall 60 s|steps per second 2"
NOTHING_SAVED = "goodput 0 % nothing is saved yet|with it 85 %"


@pytest.mark.parametrize(
    ("rows", "past", "told", "not_told"),
    [
        pytest.param({}, None, NO_JOB, "", id="no job"),
        pytest.param(JOB, PAST, PLACE, "", id="a run"),
        pytest.param(
            {"training_feed_alive": of(1.0, rank="0")}, None, "night Ranks (1)", "loss|goodput", id="no data"
        ),
        pytest.param(IN_A_PHASE, None, "forward 50 ms|3.0 s ago", "worker", id="a rank in a phase"),
        pytest.param(UNSAVED, PAST, f"{NOTHING_SAVED}|steps per second 2", "", id="before the first save"),
        pytest.param(
            UNSAVED | {"training_checkpoint_last_success_timestamp_seconds": of(NOW - 5)},
            None,
            "goodput 0 %",
            "nothing is saved yet",
            id="after the first save",
        ),
        pytest.param(
            UNSAVED | {"training_run_state": of(1.0, state="hung")},
            PAST,
            "night hung",
            "steps per second|with it",
            id="a run that hangs is not praised",
        ),
        pytest.param(ON_A_GPU, None, "GPU rank state 0 up 1 0 up", "", id="a rank on a GPU"),
        pytest.param(
            GAPS, None, "loss_window_mean 1.5 no data on 1 of 2|1 with gaps", "", id="a statistic with gaps"
        ),
    ],
)
def test_the_page_tells_what_is_known_and_nothing_else(
    rows: Rows, past: History | None, told: str, not_told: str
) -> None:
    words = page(rows, past=past).words

    assert [each for each in told.split("|") if each not in words] == []
    assert [each for each in not_told.split("|") if each and each in words] == []


def silent_since(still: float, phase: str = "forward") -> Rows:
    return {
        "training_last_progress_timestamp_seconds": of(NOW - still, rank="0"),
        "training_phase_active": of(1.0, rank="0", phase=phase),
    }


def died(state: str) -> Rows:
    states = of(0.0, state="running") + of(1.0, state=state)
    return {
        "training_run_state": states,
        "training_run_state_since_timestamp_seconds": of(NOW - 90),
        "training_run_outcome_info": of(1.0, outcome=state, reason="killed by SIGKILL"),
    }


def saving(spent: float) -> Rows:
    return {
        "training_phase_active": of(1.0, rank="0", phase="checkpoint_save_sync"),
        "training_phase_active_since_timestamp_seconds": of(NOW - 1 - spent, rank="0"),
        "training_checkpoint_duration_seconds": of(Distribution(5, 15.0), kind="sync", part="blocking"),
    }


ENDED: Rows = {"training_feed_alive": of(1.0, rank="0") + of(0.0, rank="1")}
# An agent that waits for other nodes lives on, without a rank.
ALL_ENDED: Rows = {
    "training_feed_alive": of(0.0, rank="0") + of(0.0, rank="1") + of(1.0, role="agent"),
}
STUCK: Rows = {"training_feed_last_update_timestamp_seconds": of(NOW - 60, rank="0")}
SLOW: Rows = {"training_rank_compute_seconds": of(0.25, rank="0") + of(0.4, rank="1")}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (ENDED, ["rank 1 of night has ended while other ranks live"]),
        (ALL_ENDED, []),
        (STUCK, ["rank 0 of night lives but has told nothing for 60 s: stopped, or stuck"]),
        (silent_since(5000), []),  # the ledger's rule alone decides
        (died("failed"), ["night failed 90 s ago and has not begun again: killed by SIGKILL"]),
        (died("lost"), ["night was lost 90 s ago and has not begun again: killed by SIGKILL"]),
        (SLOW | {"training_rank_info": of(1.0, rank="1", label_stage="last")}, []),
        (SLOW, ["rank 1 of night is slow: 0.4 s of its own in a step, the fastest 0.25 s"]),
        (saving(31.0), ["rank 0 of night has been saving for 31 s, usually 3.0 s"]),
        (saving(29.0), []),
        (
            {"training_rank_conflicts": of(1.0, rank="0")},
            ["another living process trains as rank 0 of night: give one of the jobs another run name"],
        ),
    ],
)
def test_what_is_wrong_with_a_run_is_called_out(rows: Rows, expected: list[str]) -> None:
    assert warnings({**JOB, **rows}) == expected


HUNG: Rows = {"training_run_state": [({"run": "night", "state": "hung"}, 1.0)]}


def test_a_hung_run_names_the_rank_without_progress() -> None:
    assert warnings({**JOB, **silent_since(900), **HUNG}) == [
        "rank 0 of night has finished no step for 15 min, now in forward"
    ]


def test_the_explanation_of_a_hang_takes_the_place_of_its_ranks() -> None:
    explanation = "run night hung for 15 min. Rank 0: read_shard (data.py:40)."

    assert warnings({**JOB, **silent_since(900), **HUNG}, hangs={"night": explanation}) == [explanation]


@pytest.mark.parametrize(("later", "found"), [(1.3, True), (1.1, False)])
def test_a_run_that_is_slower_than_in_its_own_hour_before_is_called_out(
    later: float, found: bool
) -> None:  # a parameter of the test
    spent = [60 * (min(minute, 33) + max(0, minute - 33) * later) for minute in range(40)]
    past = noted(40, lambda minute: steps(60 * minute, spent[minute]), every=60.0)

    told = [text for text in warnings(JOB, past=past) if "is slower" in text]
    assert told == (["night is slower: 1.3 s a step, 1.0 s in the hour before"] if found else [])


@pytest.mark.parametrize("reasons", [("hw_thermal",), ("thermal",), ("thermal", "hw_thermal")])
def test_lost_missing_and_throttled_gpus_are_called_out(reasons: tuple[str, ...]) -> None:
    gpu = {"gpu": "3", "uuid": "GPU-3"}
    name = "gpu_clocks_event_seconds_total"
    past = noted(3, lambda tick: {name: [({**gpu, "reason": each}, 4.0 * tick) for each in reasons]})
    rows: Rows = {
        "gpu_up": [({"gpu": "0", "uuid": "GPU-0"}, 0.0), (gpu, 1.0)],
        "gpu_devices_expected": [({}, 8.0)],
        "gpu_recovery_action": [(gpu, 1.0)],
    }

    assert warnings(rows, past=past) == [
        "2 of 8 GPUs are there",
        "GPU 0 does not answer",
        "the driver asks for a recovery of GPU 3",
        "heat or power held GPU 3 back for 80 % of the last minute",
    ]


def test_a_machine_without_a_gpu_says_so_with_the_reason() -> None:
    words = page({}, status(name="gpu", unsupported=("GPUs are not watched (library_not_found)",))).words

    assert "GPUs No GPU. GPUs are not watched (library_not_found)" in words


def test_a_run_tells_its_state_and_where_the_last_minute_went() -> None:
    def phases(tick: int) -> Rows:
        loading = of(1.0 * tick, rank="1", phase="data_loading")
        return {"training_phase_seconds_total": of(3.0 * tick, rank="0", phase="forward") + loading}

    past = noted(4, lambda tick: phases(tick) | steps(10 * tick, 20.0 * tick))
    words = page({**JOB, "training_run_state": of(1.0, state="running")}, past=past).words

    assert "night running" in words
    assert "last minute of all ranks: forward 75 % data_loading 25 %" in words
    assert "steps per second 2" in words


def test_the_machine_shows_memory_disks_network_and_shared_memory() -> None:
    moved = ("network_receive_bytes", "network_transmit_bytes", "disk_read_bytes")
    past = noted(
        3, lambda tick: {f"host_{name}_total": [({"device": "x"}, 2**20 * 5.0 * tick)] for name in moved}
    )
    mounts = [("/", 2.0**40, 2.0**39), ("/data", 2.0**40, 2.0**38), ("/tiny", 4096.0, 0.0)]
    rows: Rows = {
        "host_filesystem_size_bytes": [({"mountpoint": name}, whole) for name, whole, _ in mounts],
        "host_filesystem_avail_bytes": [({"mountpoint": name}, room) for name, _, room in mounts],
        "host_shm_size_bytes": [({}, 2.0**30)],
        "host_shm_used_bytes": [({}, 2.0**28)],
    }
    words = page(rows, past=past).words

    assert "fullest disk, /data 75 % of 1 TiB" in words
    assert "shared memory used 25 % of 1 GiB" in words
    assert "disks, read and written 1 MiB/s network, in and out 2 MiB/s" in words


def test_collectors_that_fail_come_first_with_their_reason() -> None:
    failing = status(name="rapl", success=False, message="permission denied (energy_uj)")
    document = page({}, status(unsupported=("no memory controllers",)), failing)

    assert document.words.index("rapl") < document.words.index("no memory controllers")
    assert "collector rapl fails: permission denied (energy_uj)" in document.words


@given(st.text(max_size=40))
def test_foreign_text_is_shown_and_cannot_act(text: str) -> None:
    hostile = f"<script>alert(1)</script>\"'&--><img src=x onerror=y>{text}"
    rows = {
        name: [
            ({label: hostile if label != "mode" else "train" for label in labels}, value)
            for labels, value in samples
        ]
        for name, samples in JOB.items()
    }
    rows["gpu_up"] = [({"gpu": hostile, "uuid": hostile}, 0.0)]
    rows["gpu_info"] = [({"gpu": hostile, "uuid": hostile, "name": hostile}, 1.0)]
    rows["training_rank_info"] = [
        ({"run": hostile, "rank": "", "role": hostile, "node": hostile, "gpu": hostile}, 1.0)
    ]
    rows["training_cost_total"] = [({"run": hostile, "currency": hostile, "kind": hostile}, 1.0)]
    rows["gpu_power_watts"] = [({"gpu": hostile, "uuid": hostile}, 500.0)]
    past = History(seconds=5, clock=lambda: NOW - 5)
    for tick in range(2):
        past.note(5.0 * tick, Readings(families(rows)))
    bad = status(name=hostile, success=False, message=hostile)
    document = page(rows, bad, past=past, node=hostile, not_ready=hostile, feed_directory=hostile)

    assert (document.tags.count("script"), document.tags.count("figure")) == (2, 2)
    assert document.links == ["data:,", "/metrics", "/-/ready", "/-/healthy", "/config"]
    assert "img" not in document.tags
    assert not [name for name in document.names if name.startswith("on")]
    assert "<script>alert(1)</script>" in document.words


def test_a_crowd_does_not_make_a_crowd_of_rows() -> None:
    crowd: Rows = {
        "training_feed_alive": [({"run": "r", "rank": str(n)}, 1.0) for n in range(MOST_ROWS + 50)]
    }
    document = page(crowd)

    assert document.words.count(" alive ") == MANY_RANKS + MOST_ROWS
    assert f"and {50 - MANY_RANKS} more" in document.words


def test_of_many_ranks_the_slow_and_the_silent_one_come_first() -> None:
    ranks = range(64)
    rows: Rows = {
        "training_feed_alive": [({"run": "night", "rank": str(n)}, 1.0) for n in ranks],
        "training_rank_compute_seconds": [
            ({"run": "night", "rank": str(n)}, 0.5 if n == 47 else 0.2) for n in ranks
        ],
        "training_feed_last_update_timestamp_seconds": of(NOW - 60, rank="33"),
    }
    table = page(rows).words.split("Ranks (64)")[1]

    assert re.findall(r"(\d+) (silent|slow|alive)", table)[:3] == [
        ("33", "silent"),
        ("47", "slow"),
        ("0", "alive"),
    ]
    assert "48 more ranks" in table


def test_a_plot_has_axes_in_words_a_gap_where_there_was_none_and_its_numbers_for_the_script() -> None:
    line = [(NOW - 1800 + 300 * place, value) for place, value in enumerate([1.0, 2.0, None, 2.0, 1.5])]
    drawn = plot("step time", {"step time": line}, "seconds", NOW, of="<night>")
    document = Document(drawn.encode())

    assert "step time 1.5 s 2.0 s 1.5 s 1.0 s 30 min ago 15 min now" in document.words
    assert re.findall(r"[ML]", drawn.split('class="c0" d="')[1].split('"')[0]) == ["M", "L", "M", "L"]
    assert 'id="step time-&lt;night&gt;"' in drawn
    assert "[1.0,2.0,null,2.0,1.5]" in drawn
    assert plot("x", {"x": [(NOW - 5, None), (NOW, 3.0)]}, "", NOW) == ""


def test_history_has_gaps_where_a_counter_fell_or_was_missing() -> None:
    now = [0.0]
    past = History(seconds=5, clock=lambda: NOW + now[0])
    for at, tokens in ((0, 0.0), (5, 50.0), (10, None), (15, 100.0), (20, 20.0), (25, 70.0)):
        rows: Rows = (
            {} if tokens is None else {"training_tokens_total": [({"run": "r", "mode": "train"}, tokens)]}
        )
        now[0] = at
        past.note(now[0], Readings(families(rows)))

    assert past.rates("tokens", "r") == [
        *((NOW + 5, 10.0), (NOW + 10, None), (NOW + 15, None), (NOW + 20, None), (NOW + 25, 10.0))
    ]


def test_history_is_bounded_however_many_runs_come_and_go() -> None:
    past = History(seconds=5, kept=500)
    for tick in range(300):
        runs = range(10 * tick, 10 * tick + 10)
        rows: Rows = {"training_loss": [({"run": str(run), "mode": "train"}, 1.0) for run in runs]}
        past.note(5.0 * tick, Readings(families(rows)))

    assert [value for _, value in past.levels("loss", "2999")][-2:] == [None, 1.0]
    assert past.levels("loss", "2500") == []


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (duration(0.0021), "2.1 ms"),
        (duration(0.21), "0.21 s"),
        (duration(None), "\N{EN DASH}"),
        (duration(86400 * 9), "9 d"),
        (size(80 * 1024**3), "80 GiB"),
        (number(5130.0, "W"), "5130 W"),
        (number(1.5e9), "1.5G"),
        (number(float("nan")), "\N{EN DASH}"),
        (energy(7.2e6), "2 kWh"),
    ],
)
def test_numbers_are_written_as_people_read_them(made: str, expected: str) -> None:
    assert made == expected


def test_every_family_that_the_page_asks_for_exists() -> None:
    sources = "".join(path.read_text() for path in (PROJECT / "exporter/status").glob("*.py"))
    asked = set(re.findall(r'"((?:training|gpu|host|exporter)_[a-z0-9_]+)"', sources))
    written = (PROJECT / "docs/METRICS.md").read_text()

    assert len(asked) > 30
    assert {name for name in asked if f"`{name}`" not in written} == set()
