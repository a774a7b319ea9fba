"""What a training loop calls never raises: anything is converted, or left out, counted and said once."""

from __future__ import annotations

import copy
import datetime as dt
import decimal
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_recording_process import only, run, snapshots

import exporter
from exporter import DefinitionError, Stat
from exporter.recording.events import EventLog
from exporter.recording.stat import Registry


class Hostile:
    """An object of the job's that fails wherever it is touched."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("mine")

    @__class__.setter
    def __class__(self, _: Any) -> None:
        raise RuntimeError("mine")

    def __repr__(self) -> str:
        raise RuntimeError("mine")

    __str__ = __repr__
    __hash__ = None  # type: ignore[assignment]  # what is tested


@pytest.fixture
def feed(tmp_path: Path) -> Path:
    return tmp_path / "feed"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (2**64, "18446744073709551616"),
        (Path("/data/x"), "/data/x"),
        ([1, "a", None], "[1, 'a', None]"),
        ({"a": 1}, "{'a': 1}"),
        (b"ab\xff", "ab\\xff"),
        (decimal.Decimal("1.5"), "1.5"),
        (dt.date(2026, 1, 2), "2026-01-02"),
        (SimpleNamespace(item=lambda: 1.5), 1.5),
        (True, True),
    ],
)
def test_log_converts_what_is_no_plain_value(given: object, kept: object) -> None:
    events = EventLog()

    events.log("a", x=given)

    assert events.recent()[0].data == {"x": kept}
    assert not events.reading().suppressed


def test_log_takes_the_numbers_of_numpy_and_torch() -> None:
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    events = EventLog()

    events.log("a", f=numpy.float32(0.5), i=numpy.int64(3), t=torch.tensor(2.0), v=torch.zeros(3), n=None)

    assert events.recent()[0].data == {"f": 0.5, "i": 3, "t": 2.0, "v": "Tensor of shape (3,) on cpu"}


def test_log_never_asks_a_gpu_for_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tensor:
        __module__ = "torch"
        device, shape = "cuda:0", (1,)

        def item(self) -> float:
            raise AssertionError("this would wait for the GPU")

        __repr__ = item  # type: ignore[assignment]  # likewise

    events = EventLog()
    events.log("a", loss=Tensor(), losses=[Tensor()])

    shown = "Tensor of shape (1,) on cuda:0"
    assert events.recent()[0].data == {"loss": shown, "losses": f"[{shown}]"}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("warn", "warning"),
        ("FATAL", "critical"),
        (40, "error"),
        (exporter.Severity.DEBUG, "debug"),
        (None, "info"),
        ("odd", "info"),
    ],
)
def test_log_knows_the_severities_of_others(given: Any, kept: str) -> None:
    events = EventLog()
    events.log("a", severity=given)

    assert events.reading().counts == {("a", kept): 1}


def test_what_cannot_be_logged_is_left_out_counted_and_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    events = EventLog()
    for _ in range(3):
        events.log("hostile", good=1, bad=Hostile())
    events.log("hostile", timestamp="never", parent_ids=5)  # type: ignore[arg-type]  # what is tested
    events.log(None)  # type: ignore[arg-type]  # likewise
    events.log(Hostile())  # type: ignore[arg-type]  # likewise

    assert [event.data for event in events.recent()[:3]] == [{"good": 1}] * 3
    assert events.reading().counts["hostile", "info"] == 4
    assert events.reading().suppressed["hostile", "payload"] == 5


def test_bad_objects_cost_themselves_and_no_good_sample(feed: Path) -> None:
    program = """
        loss = Stat("train.loss", ["mean"])

        class Odd(type):
            __hash__ = None
        class Hostile(metaclass=Odd):
            @property
            def __class__(self): raise RuntimeError
        class Slow:
            def __del__(self): time.sleep(5)
        for _ in range(2000):
            loss.add(1.0)
        loss.add(Hostile())
        loss.add(Slow())
        assert flush(3)
    """
    run(feed, program)

    assert only(feed).count == 2000
    assert only(feed).rejected == {"not_a_number": 2}


def test_a_stat_copies_and_pickles_as_its_definition(feed: Path) -> None:
    stat = Stat("copied.loss", ["mean"], labels={"a": "b"})

    assert copy.deepcopy({"model": [stat]})["model"][0] is stat
    assert copy.copy(stat) is stat
    assert pickle.loads(pickle.dumps(stat)) is stat


def test_a_passive_stat_has_one_callback() -> None:
    def measure() -> float:
        return 1.0

    assert Stat.passive("passive.once", measure) is Stat.passive("passive.once", measure)
    with pytest.raises(DefinitionError, match="is measured by"):
        Stat.passive("passive.once", lambda: 2.0)


def test_every_stat_that_threads_make_at_once_is_listed() -> None:
    from exporter.recording.definition import check_definition

    registry = Registry()
    listing = threading.Thread(target=lambda: [registry.states() for _ in range(3000)])
    making = [
        threading.Thread(
            target=lambda part=part: [registry.obtain(check_definition(f"s{part}.n{n}")) for n in range(100)]
        )
        for part in range(4)
    ]
    for thread in (listing, *making):
        thread.start()
    for thread in (listing, *making):
        thread.join()

    assert len(registry.states()) == 400


def test_stats_beyond_the_most_are_said_and_counted_in_the_feed(feed: Path) -> None:
    program = """
        import exporter.recording.stat as registry
        registry.MOST_STATS = 3
        for number in range(5):
            Stat(f"s{number}").add(1.0)
        flush()
    """
    done = run(feed, program)

    assert snapshots(feed)[0].recording.stats_refused == 2
    assert done.stderr.count("only 3 Stats are recorded") == 1
    assert done.stderr.startswith("exporter: ")


def test_a_sidecar_that_cannot_start_leaves_no_registration_and_one_that_ends_early_no_zombie(
    feed: Path,
) -> None:
    program = """
        runs = os.path.join(os.environ["EXPORTER_FEED_DIR"], "runs")
        python, sys.executable = sys.executable, "/no/such/python"
        assert exporter.start_sidecar() is None
        assert os.listdir(runs) == []
        sys.executable = python
        os.chdir(os.environ["EXPORTER_FEED_DIR"])
        open("exporter.py", "w").write("raise SystemExit(0)")  # a file of the job with our name
        sidecar = exporter.start_sidecar("--no.such.flag")
        until = time.monotonic() + 30
        while os.path.exists(f"/proc/{sidecar.pid}") and time.monotonic() < until:
            time.sleep(0.1)
        assert not os.path.exists(f"/proc/{sidecar.pid}")
    """
    done = run(feed, program)

    assert "the sidecar cannot be started" in done.stderr
    assert "--no.such.flag" in done.stderr
