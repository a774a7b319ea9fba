"""PrometheusMetricHandler: torchelastic's metrics as Stats, hence as families on the sidecar's page.

Used in the training process and in torchrun's agent, on the thread that emits. A pair (group, name) is looked up
once and is from then on a function that takes values; it never raises and takes no lock. The Stats it feeds are
drained by the recording thread, and what holds for them when a process dies holds here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from exporter.elastic.metrics.handler import MetricData, MetricHandler
from exporter.elastic.metrics.naming import MetricName, metric_name, text_of
from exporter.elastic.platform import GROUP, PLATFORM
from exporter.elastic.refusals import refuse
from exporter.errors import DefinitionError
from exporter.recording.notices import tell_once
from exporter.recording.stat import Stat
from exporter.recording.values import Aggregation

Record = Callable[[object], None]

MOST_NAMES = 1000
"""Pairs of one process; what comes beyond them is refused and counted. Names made of steps or of hosts run away."""
MOST_REFUSED = 1000
"""Refused pairs that are remembered, so that they need not be looked at again."""

_NUMBER = frozenset({Aggregation.VALUE, Aggregation.MEAN, Aggregation.MAX})
_DURATION = frozenset({Aggregation.HISTOGRAM, Aggregation.MEAN, Aggregation.MAX})


class MetricStats:
    """The Stats behind the pairs of one process."""

    def __init__(self) -> None:
        self._owners: dict[str, tuple[object, object]] = {}
        self._accepted: dict[tuple[object, object], Record] = {}
        self._refused: dict[tuple[object, object], Record] = {}

    def accepted(self, group: object, name: object) -> Record | None:
        """Give the function that takes the values of a pair, None where the pair is refused; never raises."""
        try:
            pair = (group, name)
            record = self._accepted.get(pair)
            if record is None and pair not in self._refused:
                self._look_at(pair)
                record = self._accepted.get(pair)
        except Exception:  # noqa: BLE001  # their own __hash__, __eq__ and the like
            return None
        return record

    def record(self, group: object, name: object, value: object) -> None:
        """Take one value; never raises."""
        record = self.accepted(group, name)
        if record is not None:
            record(value)
            return
        try:
            self._refused.get((group, name), refuse("too_many"))(value)
        except Exception:  # noqa: BLE001  # as above
            refuse("name")(value)

    def _look_at(self, pair: tuple[object, object]) -> None:
        """Accept or refuse a new pair; two threads may do so at once, and come to the same end."""
        platform = PLATFORM.recorder(pair[1]) if pair[0] == GROUP else None
        if platform is not None:
            self._accepted[pair] = platform
            return
        named = metric_name(*pair)
        if named is None:
            reason = "name"
        elif len(self._owners) >= MOST_NAMES and named.family not in self._owners:
            reason = "too_many"
        elif self._owners.setdefault(named.family, pair) != pair:
            reason = "collision"
            _tell(pair, f"another pair is the family {named.family} already; choose other names")
        else:
            try:
                self._accepted[pair] = _recorder(named, pair)
            except DefinitionError as error:
                reason = "definition"
                _tell(pair, str(error))
            else:
                return
        # Only of a bounded size and number: a name may be of any length.
        if named is not None and len(self._refused) < MOST_REFUSED:
            self._refused[pair] = refuse(reason)


class PrometheusMetricHandler(MetricHandler):
    """Records every metric under `<group>_<name>`, seconds instead of milliseconds.

    It belongs to every group of `exporter.elastic.metrics` unless it is switched off there. In torch's own module it
    can be configured like any other handler.
    """

    def emit(self, metric_data: MetricData) -> None:
        """Record one value; never raises."""
        try:
            _, group, name, value = metric_data
        except (TypeError, ValueError):
            refuse("name")(None)
            return
        STATS.record(group, name, value)


def _recorder(named: MetricName, pair: tuple[object, object]) -> Record:
    group, name = map(text_of, pair)
    stat = Stat(
        named.stat,
        _DURATION if named.unit == "seconds" else _NUMBER,
        unit=named.unit,
        help=f"Metric {name} of torchelastic's group {group}.",
    )
    add, add_tensor, times, per = stat.add, stat.add_tensor, named.times, named.per

    def record_other(value: object) -> None:
        """Take what is neither int nor float; the Stat counts what is no number."""
        torch = sys.modules.get("torch")
        try:
            if per != 1 or times != 1:
                value = value * times / per  # type: ignore[operator]  # what cannot is left as it is
        except Exception:  # noqa: BLE001, S110  # any object's own arithmetic
            pass
        if torch is not None and isinstance(value, torch.Tensor):
            add_tensor(value)
        else:
            add(value)  # type: ignore[arg-type]  # as above

    def record(value: object) -> None:
        kind = type(value)
        if kind is int or kind is float:
            add(value)  # type: ignore[arg-type]  # mypy does not narrow by a type in a variable
        else:
            record_other(value)

    def record_scaled(value: object) -> None:
        kind = type(value)
        if kind is int or kind is float:
            try:
                add(value * times / per)  # type: ignore[operator]  # as above
            except OverflowError:  # such an int is beyond floating point; the Stat counts it
                add(value)  # type: ignore[arg-type]  # as above
        else:
            record_other(value)

    return record if times == 1 and per == 1 else record_scaled


def _tell(pair: tuple[object, object], why: str) -> None:
    group, name = map(text_of, pair)
    tell_once(f"elastic {group} {name}", f"the metric {name} of group {group} is not recorded: {why}")


STATS = MetricStats()
"""Those of this process; a forked child goes on with the same Stats, which begin at zero there."""
