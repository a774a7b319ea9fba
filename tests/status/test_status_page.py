"""Content and concerns of the status page; foreign text cannot run."""

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

from exporter.cli.endpoints import hang_of
from exporter.collectors.job import OverdueRun
from exporter.collectors.status import CollectorStatus
from exporter.families import Distribution, Family, FamilyType
from exporter.feed.stacks import StackAnswer
from exporter.hangs.collector import Explained
from exporter.hangs.explanation import Explanation, RankGroup
from exporter.recording.stacks import Frame, ThreadStack
from exporter.status.concerns import CRITICAL_XIDS, WARNING_XIDS, concerns
from exporter.status.document import environment, render
from exporter.status.elements import MOST_ROWS, plot
from exporter.status.numbers import duration, energy, number, size
from exporter.status.readings import History, Readings
from exporter.status.sections import MANY_RANKS
from exporter.status.view import About, Hang, StackFrame, StackGroup, view

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
    """Tags, attributes and text of a page; unbalanced elements fail the test."""

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
    """Return a history with a point for each tick; the last point is as old as `every`."""
    times = iter(NOW - every * (ticks - tick) for tick in range(ticks))
    past = History(seconds=5, clock=lambda: next(times))
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
NOTHING_SAVED = "goodput, committed 0 % no save yet|; 85 % if saved"


@pytest.mark.parametrize(
    ("rows", "past", "shown", "not_shown"),
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
            "goodput, committed 0 %",
            "no save yet",
            id="after the first save",
        ),
        pytest.param(
            UNSAVED | {"training_run_state": of(1.0, state="hung")},
            PAST,
            "night hung",
            "steps per second|if saved|loss",
            id="a run that hangs is not praised",
        ),
        pytest.param(ON_A_GPU, None, "GPU rank state 0 up 1 0 up", "", id="a rank on a GPU"),
        pytest.param(
            GAPS, None, "loss_window_mean 1.5 no data on 1 of 2|1 with gaps", "", id="a statistic with gaps"
        ),
    ],
)
def test_the_page_shows_known_numbers_only(
    rows: Rows, past: History | None, shown: str, not_shown: str
) -> None:
    words = page(rows, past=past).words

    assert [each for each in shown.split("|") if each not in words] == []
    assert [each for each in not_shown.split("|") if each and each in words] == []


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
# An agent without a rank waits for other nodes.
ALL_ENDED: Rows = {
    "training_feed_alive": of(0.0, rank="0") + of(0.0, rank="1") + of(1.0, role="agent"),
}
STUCK: Rows = {"training_feed_last_update_timestamp_seconds": of(NOW - 60, rank="0")}
SLOW: Rows = {"training_rank_compute_seconds": of(0.25, rank="0") + of(0.4, rank="1")}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (ENDED, ["rank 1 of night ended 2.0 s ago before the other ranks"]),
        (ALL_ENDED, []),
        (STUCK, ["rank 0 of night is alive but has not reported for 60 s: stopped or blocked"]),
        (silent_since(5000), []),  # only the ledger decides
        (died("failed"), ["night failed 90 s ago and has not restarted: killed by SIGKILL"]),
        (died("lost"), ["night was lost 90 s ago and has not restarted: killed by SIGKILL"]),
        (SLOW | {"training_rank_info": of(1.0, rank="1", label_stage="last")}, []),
        (SLOW, ["rank 1 of night is slow: 0.4 s of own work per step, the fastest rank 0.25 s"]),
        (saving(31.0), ["rank 0 of night has been saving for 31 s, usually 3.0 s"]),
        (saving(29.0), []),
        (
            {"training_rank_conflicts": of(1.0, rank="0")},
            ["a second process trains as rank 0 of night: choose a different run name for either job"],
        ),
    ],
)
def test_a_problem_of_a_run_is_a_concern(rows: Rows, expected: list[str]) -> None:
    assert warnings({**JOB, **rows}) == expected


HUNG: Rows = {"training_run_state": [({"run": "night", "state": "hung"}, 1.0)]}


def test_a_hung_run_names_the_rank_without_progress() -> None:
    assert warnings({**JOB, **silent_since(900), **HUNG}) == [
        "rank 0 of night has finished no step for 15 min, phase forward"
    ]


def test_a_hang_is_explained_with_a_fold_of_the_stack_of_each_group() -> None:
    frames = (StackFrame("ShardReader.read", "data.py:40"), StackFrame("<module>", "train.py:9"))
    hang = Hang("run night hung for 15 min.", (StackGroup("Stack of rank 0: read", 0, frames),))
    rows = {**JOB, **silent_since(900), **HUNG}

    assert warnings(rows, hangs={"night": hang}) == ["run night hung for 15 min."]
    document = page(rows, hangs={"night": hang})
    stack = "Stack of rank 0: read Main thread of rank 0, innermost call first"
    assert f"{stack} ShardReader.read data.py:40 <module> train.py:9" in document.words
    assert document.tags.count("li") == 2


def test_the_stack_of_a_group_is_the_one_of_its_first_rank_with_an_answer() -> None:
    frame = Frame("/job/data.py", 40, "ShardReader.read")
    answer = StackAnswer("1", "p", 7, NOW, "night", 1, ThreadStack("MainThread", (frame,)))
    group = RankGroup("read", "data.py:40", (0, 1), "data_loading", None, in_collective=False)
    explanation = Explanation((group,), tie=False, silent={0: "no answer"})
    run = OverdueRun("night", "hung", NOW - 60, 5, ())

    hang = hang_of(Explained(run, explanation, (), (answer,)), NOW)

    assert hang.groups == (
        StackGroup("Stack of ranks 0-1: read", 1, (StackFrame("ShardReader.read", "data.py:40"),)),
    )


@pytest.mark.parametrize(("later", "found"), [(1.3, True), (1.1, False)])
def test_a_run_that_is_slower_than_in_the_hour_before_is_a_concern(later: float, found: bool) -> None:
    spent = [60 * (min(minute, 33) + max(0, minute - 33) * later) for minute in range(40)]
    past = noted(40, lambda minute: steps(60 * minute, spent[minute]), every=60.0)

    slower = [text for text in warnings(JOB, past=past) if "is slower" in text]
    assert slower == (["night is slower: 1.3 s per step, 1.0 s in the hour before"] if found else [])


@pytest.mark.parametrize("reasons", [("hw_thermal",), ("thermal",), ("thermal", "hw_thermal")])
def test_lost_missing_and_throttled_gpus_are_concerns(reasons: tuple[str, ...]) -> None:
    gpu = {"gpu": "3", "uuid": "GPU-3"}
    name = "gpu_clocks_event_seconds_total"
    past = noted(3, lambda tick: {name: [({**gpu, "reason": each}, 4.0 * tick) for each in reasons]})
    rows: Rows = {
        "gpu_up": [({"gpu": "0", "uuid": "GPU-0"}, 0.0), (gpu, 1.0)],
        "gpu_devices_expected": [({}, 8.0)],
        "gpu_recovery_action": [(gpu, 1.0)],
    }

    assert warnings(rows, past=past) == [
        "only 2 of 8 GPUs found",
        "GPU 0 does not answer",
        "the driver requests a recovery of GPU 3",
        "heat or power slowed GPU 3 for 80 % of the last minute",
    ]


GPU_3: Rows = {
    "gpu_up": [({"gpu": "3", "uuid": "GPU-3"}, 1.0)],
    "training_rank_info": of(1.0, rank="5", gpu="3", uuid="GPU-3"),
    "training_feed_alive": of(1.0, rank="5"),
}


def xid(number: int, age: float) -> Rows:
    return {"gpu_xid_last_timestamp_seconds": [({"uuid": "GPU-3", "xid": str(number)}, NOW - age)]}


@pytest.mark.parametrize(
    ("number", "age", "urgent"), [(48, 300.0, True), (48, 7000.0, False), (94, 300.0, False)]
)
def test_an_xid_is_a_concern_with_card_rank_and_time(number: int, age: float, urgent: bool) -> None:
    seen = view(about(), Readings(families(GPU_3 | xid(number, age))), History())

    concern = concerns(seen)[0]
    assert concern.urgent is urgent
    assert (
        concern.text
        == f"GPU 3 (rank 5 of night) reported Xid {number} {'5 min' if age < 400 else '117 min'} ago"
    )


def test_an_xid_of_the_program_is_no_concern() -> None:
    assert warnings(GPU_3 | xid(13, 5)) == []


def test_the_xids_are_those_of_the_alerts() -> None:
    rules = (PROJECT / "deploy/prometheus/rules/alerts-gpu.yml").read_text()
    critical, warning = re.findall(r"gpu_xid_last_timestamp_seconds\{xid=~\"([^\"]+)\"", rules)[:2]

    assert {n for n in range(1, 300) if re.fullmatch(critical, str(n))} == CRITICAL_XIDS
    assert {n for n in range(1, 300) if re.fullmatch(warning, str(n))} == WARNING_XIDS


def ecc(count: float) -> Rows:
    return {"gpu_ecc_errors_total": [({"uuid": "GPU-3", "kind": "uncorrected", "location": "dram"}, count)]}


def test_uncorrected_memory_errors_are_a_concern_with_card_and_time() -> None:
    past = noted(60, lambda minute: ecc(0.0 if minute < 30 else 2.0), every=60.0)
    text = "GPU 3 (rank 5 of night): 2 uncorrected ECC errors since the driver was loaded"

    assert warnings(GPU_3 | ecc(2.0), past=past) == [f"{text}, last 30 min ago"]
    assert warnings(GPU_3 | ecc(2.0)) == [f"{text}, none in the recorded hour"]
    assert warnings(GPU_3 | ecc(0.0)) == []


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("gpu_remapped_rows_failed", "a memory row could not be remapped; replace the card"),
        ("gpu_remapped_rows_pending", "a remapped memory row needs a reset of the card"),
    ],
)
def test_memory_rows_that_are_not_remapped_are_a_concern(family: str, text: str) -> None:
    rows = GPU_3 | {family: [({"uuid": "GPU-3"}, 1.0)]}

    assert warnings(rows) == [f"GPU 3 (rank 5 of night): {text}"]


def nonfinite(minute: int) -> Rows:
    counts: Rows = {"training_nonfinite_total": of(float(minute - 27), kind="loss")}
    return JOB | (counts if minute in {28, 29} else {})


def test_a_nan_is_a_concern_of_a_living_run_with_its_times() -> None:
    past = noted(40, nonfinite, every=60.0)

    text = "2 losses or gradient norms of night NaN or infinite, first 12 min ago, last 11 min ago"
    assert warnings(JOB, past=past) == [text]
    assert warnings(JOB | {"training_run_state": of(1.0, state="finished")}, past=past) == []


def test_an_old_nan_is_not_urgent() -> None:
    seen = view(about(), Readings(families(JOB)), noted(40, nonfinite, every=60.0))

    assert [concern.urgent for concern in concerns(seen)] == [False]


def test_an_ended_run_shows_no_rates_and_no_loss_but_its_totals() -> None:
    ended = of(1.0, state="finished")
    since = {"training_run_state_since_timestamp_seconds": of(NOW - 600)}
    words = page(JOB | {"training_run_state": ended} | since, past=PAST).words

    assert "night finished 10 min ago" in words
    assert "goodput, committed 90 %" in words
    assert not [each for each in ("loss 2.5", "steps per second", "step time", "left at") if each in words]


def test_saves_without_a_time_are_saves() -> None:
    rows = UNSAVED | {"training_checkpoints_total": of(14.0, kind="sync", result="ok")}

    assert "no save yet" not in page(rows).words


def test_sums_of_a_run_on_several_nodes_are_labelled_as_those_of_this_node() -> None:
    def tokens(tick: int) -> Rows:
        return {"training_tokens_total": of(500.0 * tick, rank="8", mode="train")}

    rows: Rows = {
        "training_feed_alive": of(1.0, rank="8"),
        "training_world_size": of(16.0),
        "training_energy_joules_total": of(50.0),
    }
    words = page(rows, past=noted(3, tokens)).words

    assert "tokens per second (this node) 100 energy (this node) 50 J" in words
    assert "Rank 0 runs on a different node" in words


def test_figure_and_plot_of_the_processors_agree() -> None:
    past = noted(5, lambda _: {"host_cpu_utilization_ratio": [({}, 0.59)]})
    document = page({"host_cpu_utilization_ratio": [({}, 1.0)]}, past=past)

    assert document.words.count("CPU 100 %") == 2
    assert "CPU 59 %" not in document.words


def test_a_machine_without_a_gpu_shows_the_reason() -> None:
    words = page({}, status(name="gpu", unsupported=("GPUs are not watched (library_not_found)",))).words

    assert "GPUs No GPU. GPUs are not watched (library_not_found)" in words


def test_a_run_shows_state_and_phases_of_the_last_minute() -> None:
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


def test_failing_collectors_are_listed_first_with_the_reason() -> None:
    failing = status(name="rapl", success=False, message="permission denied (energy_uj)")
    document = page({}, status(unsupported=("no memory controllers",)), failing)

    assert document.words.index("rapl") < document.words.index("no memory controllers")
    assert "collector rapl fails: permission denied (energy_uj)" in document.words


@given(st.text(max_size=40))
def test_foreign_text_is_escaped(text: str) -> None:
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


def test_many_runs_are_shortened_to_a_bounded_number_of_rows() -> None:
    crowd: Rows = {
        "training_feed_alive": [({"run": "r", "rank": str(n)}, 1.0) for n in range(MOST_ROWS + 50)]
    }
    document = page(crowd)

    assert document.words.count(" alive ") == MANY_RANKS + MOST_ROWS
    assert f"and {50 - MANY_RANKS} more" in document.words


def test_slow_and_silent_ranks_are_listed_first() -> None:
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


def test_a_plot_has_axes_gaps_and_data_for_the_script() -> None:
    line = [(NOW - 1800 + 300 * place, value) for place, value in enumerate([1.0, 2.0, None, 2.0, 1.5])]
    (made,) = plot("step time", {"step time": line}, "seconds", NOW, owner="<night>", latest=1.5)
    template = environment().from_string('{% import "elements.html" as elements %}{{ elements.plot(made) }}')
    drawn = template.render(made=made)
    document = Document(drawn.encode())

    assert "step time 1.5 s 2.0 s 1.5 s 1.0 s 30 min ago 15 min now" in document.words
    assert re.findall(r"[ML]", drawn.split('class="c0" d="')[1].split('"', maxsplit=1)[0]) == [
        "M",
        "L",
        "M",
        "L",
    ]
    assert 'id="step time-&lt;night&gt;"' in drawn
    assert "[1.0,2.0,null,2.0,1.5]" in drawn
    assert plot("x", {"x": [(NOW - 5, None), (NOW, 3.0)]}, "", NOW) == []


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


def test_history_is_bounded_for_any_number_of_runs() -> None:
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
def test_numbers_are_formatted_for_people(made: str, expected: str) -> None:
    assert made == expected


def test_every_family_of_the_status_page_exists() -> None:
    sources = "".join(path.read_text() for path in (PROJECT / "exporter/status").glob("*.py"))
    asked = set(re.findall(r'"((?:training|gpu|host|exporter)_[a-z0-9_]+)"', sources))
    written = (PROJECT / "docs/METRICS.md").read_text()

    assert len(asked) > 30
    assert {name for name in asked if f"`{name}`" not in written} == set()
