"""Problems of nodes and GPUs: PromQL for each problem, and for the rows of the table *Health of each GPU*."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dashboards import verdicts
from dashboards.availability import EXPORTER_DOWN_SINCE, NOT_SCRAPED_SINCE, last_time
from dashboards.palette import BAD, NEUTRAL, WARNING
from dashboards.panels import NO_VALUE, value_mappings
from dashboards.queries import NODES_OF_RUN
from exporter.status.conditions.gpus import CRITICAL_XIDS, WARNING_XIDS
from exporter.status.xids import XID_MEANINGS

THROTTLED_RATIO_FAMILY = "gpu:gpu_throttled:ratio2m"
"""Family of the share of time with throttling by heat or the power brake, by GPU.

The time is the last two minutes, or five with long scrape intervals.
"""
THROTTLED_START_FAMILY = "gpu:gpu_throttled_start:timestamp_seconds"
"""Family of the start of the throttling, by GPU, which may be before the share exceeds `MAX_THROTTLED_RATIO`.

All dashboards show the same start, whatever their time range.
"""
MAX_THROTTLED_RATIO = 0.05
"""Share of time with throttling by heat or the power brake above which the throttling is a problem."""
CHECK_COOLING, CHECK_POWER_SUPPLY = "check fans, airflow and coolant", "check the power supply of the node"
"""Remedies of a GPU that is throttled by heat, and by the power brake."""
XID_PROBLEM_SECONDS = 3600
"""Time after an Xid for which the Xid counts as a problem."""
LAST_XID_BY_UUID = f"topk by (uuid) (1, max by (uuid, xid) (gpu_xid_last_timestamp_seconds) > time() - {XID_PROBLEM_SECONDS}) * 0 + 1"
"""PromQL for the last Xid of each GPU as a label, if the Xid occurred in the last `XID_PROBLEM_SECONDS`."""
LAST_RANK_BY_GPU = (
    "max by (instance, gpu, run, rank) (0 * last_over_time(gpu_up{@gpu_any_run}[1h])"
    " * on (uuid) group_left (run, rank) max by (uuid, run, rank) (gpu:training_last_rank:info{@cluster}))"
)
"""PromQL with the value 0 for each GPU that a rank used in the last hour, with the labels `instance` and `gpu`, and the last `run` and `rank`."""
SELECTED_NODES = f"on (instance) ({NODES_OF_RUN})"
"""Right operand of `and` that keeps the series of the nodes of the selected runs."""


class Impact(enum.IntEnum):
    """Impact of a problem on the run that uses the node or the GPU: the tables of *GPUs* and *Node* show the largest number first."""

    NO_RUN = 0  # no run uses the GPU
    PAST = 1  # over, such as a restart
    POSSIBLE = 2  # may become a problem of the run
    LOSES_TIME = 3  # steps take longer than necessary
    UNKNOWN = 4  # samples are missing
    ENDANGERS_WORK = 5  # work or the model may be lost, although steps finish
    NO_PROGRESS = 6  # no step finishes, or ranks have ended


IMPACT_NAMES = {
    Impact.NO_PROGRESS: verdicts.NO_PROGRESS,
    Impact.ENDANGERS_WORK: verdicts.ENDANGERS_WORK,
    Impact.UNKNOWN: verdicts.UNKNOWN,
    Impact.LOSES_TIME: verdicts.LOSES_TIME,
    Impact.POSSIBLE: "possible",
    Impact.PAST: "past",
    Impact.NO_RUN: "no run",
}
IMPACT_COLORS = {
    Impact.NO_PROGRESS: BAD,
    Impact.ENDANGERS_WORK: BAD,
    Impact.UNKNOWN: WARNING,
    Impact.LOSES_TIME: WARNING,
    Impact.POSSIBLE: WARNING,
    Impact.PAST: NEUTRAL,
    Impact.NO_RUN: NEUTRAL,
}
NO_PROBLEM = verdicts.NO_PROBLEM
NO_PROBLEM_VALUE = -1
"""Value of the row *no problem* in each column with values, so that Grafana joins the columns to one row."""
IMPACT_TEXTS = value_mappings(
    {impact.value: (text, IMPACT_COLORS[impact]) for impact, text in IMPACT_NAMES.items()}
    | {NO_PROBLEM_VALUE: (NO_VALUE, NEUTRAL)}
)
PROBLEMS_TITLE = "What is wrong"
PRIORITIES_PER_IMPACT = 100
"""Distance between the values of two impacts.

The value of a problem is `impact * PRIORITIES_PER_IMPACT + priority`. The priority is larger for an earlier problem in the list of problems.
The maximum is therefore the problem with the largest impact and, among equal impacts, the earliest in the list.
"""
RECOVERY_ACTION_TEXTS = value_mappings(
    {
        NO_PROBLEM_VALUE: (NO_VALUE, NEUTRAL),
        0: ("nothing", NEUTRAL),
        1: ("GPU reset", BAD),
        2: ("node reboot", BAD),
        3: ("drain peer to peer", WARNING),
        4: ("drain and GPU reset", BAD),
        5: ("IMEX recovery", BAD),
        6: ("bus reset", BAD),
        7: ("system reboot", BAD),
    }
)
NO_RESPONSE_PREFIX = "GPU does not respond: "
"""Start of the text of a GPU that does not respond, before the name of the NVML error."""
ERROR_TEXTS = {
    "gpu_is_lost": "GPU lost: fell off the bus",
    "reset_required": "GPU does not respond: needs a reset",
    "gpu_not_found": "GPU lost: the driver does not list it",
}
"""Texts shown instead of the names of some NVML errors."""
RUNS_ON_NODES = "group by (instance, run) (last_over_time(instance:training_ranks:count{@cluster}[1h]))"
"""PromQL with the value 1 for each node and each run that had a process on the node in the last hour."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Problem of a node, or of a GPU, a rank or a run on the node."""

    name: str
    condition: str  # PromQL with a value for each node, GPU, rank or run with the problem
    start: str  # PromQL for the start in Unix seconds; the start of an Xid is its last occurrence
    remedy: str  # empty with `remedies`
    impact: Impact
    label: str = "instance"  # label whose value is part of the text in the table
    text: str = ""  # the name with `$1` for the value of `label`; empty if the text in the table is the name
    remedies: str = ""  # PromQL with the remedy as the label `remedy`, by run, in place of `remedy`

    def row(self, priority: int) -> str:
        """Return PromQL for impact and priority as one number (see `PRIORITIES_PER_IMPACT`), with text and remedy as labels."""
        value = PRIORITIES_PER_IMPACT * self.impact + priority
        text = self.text or self.name
        with_text = (
            f'label_replace(0 * ({self.condition}) + {value}, "problem", "{text}", "{self.label}", "(.*)")'
        )
        if self.remedies:
            return f"{with_text} + on (run) group_left (remedy) 0 * {self.remedies}"
        return f'label_replace({with_text}, "remedy", "{self.remedy}", "", "")'

    def row_start(self, priority: int, by: str) -> str:
        """Return PromQL for the start of the problem, by the labels *by* and the label `priority`.

        *priority* is that of the call of `row`. It joins the start with the row; a start without a current problem finds no row.
        """
        start = f"min by ({by}) ({self.start})"
        return f'label_replace({start}, "priority", "{priority}", "", "")'


def query_start_of_worst(starts: str, worst: str, by: str, text_labels: str = "") -> str:
    """Return PromQL for the start of the worst problem of each row of a table, in Unix seconds.

    Args:
        starts: PromQL for the starts of all problems, from `Problem.row_start`.
        worst: PromQL for the impact and priority of the worst problem of each row, from `Problem.row`.
        by: Labels that identify a row.
        text_labels: Further labels of a row to keep, such as its text.
    """
    if text_labels:
        rows = f'count_values by ({by}, {text_labels}) ("priority", ({worst}) % {PRIORITIES_PER_IMPACT})'
        start = f"max by ({by}, priority) ({starts})"
        return f"max by ({by}, {text_labels}) (0 * {rows} + on ({by}, priority) group_left () {start})"
    priorities = f'count_values by ({by}) ("priority", ({worst}) % {PRIORITIES_PER_IMPACT})'
    return f"max by ({by}) (({starts}) and on ({by}, priority) {priorities})"


def only_power_brake(by: str, selector: str = "") -> str:
    """Return PromQL for the GPUs that the external power brake throttles, and that no heat throttles, over five minutes.

    Args:
        by: Labels of the result.
        selector: Matchers of the GPUs; empty for all.
    """
    prefix = f"{selector}, " if selector else ""
    brake = f'max by ({by}) (rate(gpu_clocks_event_seconds_total{{{prefix}reason="hw_power_brake"}}[5m])) > 0'
    heat = f'max by ({by}) (rate(gpu_clocks_event_seconds_total{{{prefix}reason=~"thermal|hw_thermal|sw_thermal"}}[5m])) > 0'
    return f"({brake} unless on ({by}) {heat})"


_LAST_DRIVER_READING = "max by (instance) (max_over_time(timestamp(gpu_devices{@node})[1m:5s]))"
"""PromQL for the time of the last reading of each node's driver within a minute, in Unix seconds."""
_TWO_SCRAPES = "35s"
"""Time that contains at least two scrapes at a scrape interval of 15 s."""
DRIVER_NOT_READ = (
    f"(max by (instance) (last_over_time(gpu_devices{{@node}}[{_TWO_SCRAPES}])) unless on (instance) gpu_devices{{@node}}"
    " and on (instance) up{@target} == 1)"
)
"""PromQL with a value for each node whose driver was read within `_TWO_SCRAPES`, but not at the last scrape, while its exporter is up.

The GPUs of the node are unknown.
"""

_NVML_DOWN = "(max by (instance) (gpu_nvml_up{@node}) == 0)"
"""PromQL with a value for each node whose driver does not respond, or whose GPUs are not read for another reason: the GPUs are unknown."""
_READER_CRASHED = 'max by (instance) (gpu_nvml_error_info{@node, reason="crashed"})'
"""PromQL with a value for each node on which the exporter's process that calls NVML has crashed. The driver and the GPUs may be healthy.

The impact is that of the alert NvmlDown, as on *Fleet* and *Run*: the crash repeats, because the exporter restarts the process.
"""
_UNLISTED_GPUS = (
    "max by (instance) (last_over_time(gpu_devices_expected{@node}[1m]) - last_over_time(gpu_devices{@node}[1m]))"
    " - on (instance) (sum by (instance) (min by (instance, gpu) (last_over_time(gpu_up{@node}[1m])) == bool 0)"
    " or on (instance) 0 * max by (instance) (gpu_devices{@node})) > 0"
)
"""PromQL for the number of expected GPUs of each node that the driver does not list; a lost GPU has a problem of its own."""
_EXPORTER_PROBLEMS = (
    Problem(
        "exporter down: node, GPUs unknown",
        condition="min by (instance) (up{@target}) == 0",
        start=EXPORTER_DOWN_SINCE,
        remedy="check the machine and the exporter's log",
        impact=Impact.UNKNOWN,
    ),
    Problem(
        "exporter not scraped any more",
        condition=NOT_SCRAPED_SINCE,
        start=NOT_SCRAPED_SINCE,
        remedy="check the targets of Prometheus",
        impact=Impact.UNKNOWN,
    ),
)
_DRIVER_DOWN_START = (
    "(max by (instance) (instance:gpu_driver_down_start:timestamp_seconds{@node_any_job})"
    f" or on (instance) max by (instance) ({last_time('gpu_nvml_up{@node} == bool 1')}))"
)
"""PromQL for the recorded start of the time without an answer of the driver, as on *Run* and *Fleet*.

Before the evaluation of the rule, the result is the time of the last answer in the time range.
"""
NODE_PROBLEMS = (
    Problem(
        "driver does not respond",
        condition='max by (instance, reason) (gpu_nvml_error_info{@node, reason!="crashed"})'
        " and on (instance) max by (instance) (gpu_devices_expected{@node}) > 0"
        f" unless on (instance) last_over_time(gpu_devices{{@node}}[{_TWO_SCRAPES}])",
        start=_DRIVER_DOWN_START,
        remedy="nvidia-smi; reload the driver or reboot",
        impact=Impact.NO_PROGRESS,
        label="reason",
        text="driver does not respond: $1",
    ),
    Problem(
        "GPUs not read: the NVML process crashed",
        condition=f"{_READER_CRASHED} and on (instance) max by (instance) (gpu_devices_expected{{@node}}) > 0"
        f" unless on (instance) last_over_time(gpu_devices{{@node}}[{_TWO_SCRAPES}])",
        start=_DRIVER_DOWN_START,
        remedy="nvidia-smi; read the exporter's log",
        impact=Impact.ENDANGERS_WORK,
    ),
    Problem(
        "no reading of the driver",
        condition=f'count_values by (instance) ("seconds", round(time() - {_LAST_DRIVER_READING} and on (instance) {DRIVER_NOT_READ}))',
        start=_LAST_DRIVER_READING,
        remedy="wait; check again",
        impact=Impact.UNKNOWN,
        label="seconds",
        text="no reading of the driver for $1 s",
    ),
    Problem(
        "GPUs not listed by the driver",
        condition=f'count_values by (instance) ("gpus", {_UNLISTED_GPUS})',
        start=f"max by (instance) ({last_time('gpu_devices{@node} >= bool gpu_devices_expected{@node}')})",
        remedy="read the kernel log; reboot",
        impact=Impact.POSSIBLE,
        label="gpus",
        text="GPUs not listed by the driver: $1",
    ),
    *_EXPORTER_PROBLEMS,
)


@dataclass(frozen=True, slots=True)
class GpuProblem:
    """Problem of a GPU. The rule `gpu:gpu_fault:urgency` has the condition, and a number that follows from impact and position."""

    name: str  # text in the table *Health of each GPU*
    remedy: str
    impact: Impact  # on a run that uses the GPU
    pattern: str = ""  # regular expression of the label `problem` of the rule; empty if the label is the name

    @property
    def matcher(self) -> str:
        """Regular expression of the label `problem`."""
        return self.pattern or self.name


_CRITICAL_XID_PATTERN = f"Xid ({'|'.join(str(xid) for xid in sorted(CRITICAL_XIDS))})"
_RESET_GPU = "drain; reset the GPU or reboot"
GPU_PROBLEMS = (
    GpuProblem("GPU does not respond", _RESET_GPU, Impact.ENDANGERS_WORK, pattern=f"{NO_RESPONSE_PREFIX}.+"),
    GpuProblem("critical Xid", _RESET_GPU, Impact.ENDANGERS_WORK, pattern=_CRITICAL_XID_PATTERN),
    GpuProblem(
        "uncorrected memory errors", "resume from an older save; reset the GPU", Impact.ENDANGERS_WORK
    ),
    GpuProblem("a memory row could not be remapped", "replace the GPU", Impact.ENDANGERS_WORK),
    GpuProblem(
        "the driver requests a recovery", "drain, then do what the driver requests", Impact.ENDANGERS_WORK
    ),
    GpuProblem("throttled by heat", CHECK_COOLING, Impact.LOSES_TIME, pattern="throttled by heat.*"),
    GpuProblem("throttled by the power brake", CHECK_POWER_SUPPLY, Impact.LOSES_TIME),
    GpuProblem("NVLinks are down", "reset the GPU; check the links", Impact.LOSES_TIME),
    GpuProblem("other Xid", "read the job's log; reset if repeated", Impact.POSSIBLE, pattern="Xid .+"),
    GpuProblem("a memory row waits for a reset", "reset the GPU when free", Impact.POSSIBLE),
)
"""Problems of GPUs, the worst first. Of several problems whose pattern matches the label `problem`, the first counts."""


def gpu_problem_values() -> dict[int, GpuProblem]:
    """Return the problems of GPUs by their number in the rule `gpu:gpu_fault:urgency`, the worst first."""
    count = len(GPU_PROBLEMS)
    return {
        PRIORITIES_PER_IMPACT * problem.impact + count - index: problem
        for index, problem in enumerate(GPU_PROBLEMS)
    }


def recorded_gpu_problems(selector: str) -> str:
    """Return PromQL for the recorded problems of GPUs: impact and priority as one number, by node, GPU, last run and rank, and problem."""
    return f"max by (instance, gpu, run, rank, problem) (gpu:gpu_problem:urgency{{{selector}}})"


def with_remedies_of_gpus(rows: str, selector: str) -> str:
    """Return PromQL that adds the label `remedy` to problems of GPUs, and the temperature to the text of hot GPUs.

    Args:
        rows: PromQL for series with the labels of `recorded_gpu_problems`.
        selector: Matchers of the GPUs.
    """
    celsius = f"max by (instance, gpu) (gpu:gpu_throttled_temperature:celsius{{{selector}}})"
    temperatures = (
        f'label_replace(label_replace(count_values by (instance, gpu) ("celsius", {celsius}), "celsius", "$1 °C", "celsius", "(.+)"),'
        ' "problem", "throttled by heat", "", "")'
    )
    same_problem = "on (instance, gpu, problem)"
    texts = (
        f'label_join({rows} + {same_problem} group_left (celsius) 0 * {temperatures}, "problem", ", ", "problem", "celsius")'
        f" or {rows} unless {same_problem} {temperatures}"
    )
    for problem in reversed(GPU_PROBLEMS):
        texts = f'label_replace({texts}, "remedy", "{problem.remedy}", "problem", "{problem.matcher}")'
    return f"max by (instance, gpu, run, rank, problem, remedy) ({texts})"


NODES_WITH_EXPORTER_DOWN = f"({' or '.join(problem.condition for problem in _EXPORTER_PROBLEMS)})"
"""PromQL for the nodes with an exporter that is down or not scraped any more: some of their runs or GPUs are unknown."""


def _last_of(family: str, selector: str) -> str:
    """Return PromQL for the last values of a family within `_TWO_SCRAPES`."""
    return f"({family}{{{selector}}} or last_over_time({family}{{{selector}}}[{_TWO_SCRAPES}]))"


def count_lost_gpus(selector: str, target_selector: str) -> str:
    """Return PromQL for the number of lost GPUs of all selected nodes, as the rule `instance:gpu_lost:sum`, without labels.

    Lost GPUs are the expected GPUs that do not answer. The result is absent if no node has a number of expected GPUs. Three cases differ:

    - While the driver of a node is not read, the last numbers of the node within `_TWO_SCRAPES` count.
    - On a node of `_NVML_DOWN`, only the GPUs that were lost before count: a lost GPU remains lost until it answers again.
    - Nodes whose exporter is down do not count.
    """
    all_expected = _last_of("gpu_devices_expected", selector)
    expected = (
        f"({all_expected} unless on (instance) {_NVML_DOWN} and on (instance) up{{{target_selector}}} == 1)"
    )
    unanswered = f"clamp_min(sum({expected}) - sum({_last_of('gpu_devices', selector)} and on (instance) {expected} or 0 * {expected}), 0)"
    lost_before = (
        f"count(group by (instance, gpu) (gpu_up{{{selector}}} == 0 and on (instance) {_NVML_DOWN}))"
    )
    return f"(({unanswered} or 0 * sum({all_expected})) + ({lost_before} or 0 * sum({all_expected})))"


def count_unknown_gpus(selector: str, target_selector: str) -> str:
    """Return PromQL for the number of GPUs of the last hour whose state is unknown, without labels; absent if there is none.

    The state of a GPU that is not lost is unknown if no exporter of its node is up, and on the nodes of `DRIVER_NOT_READ` and `_NVML_DOWN`.
    """
    read_nodes = (
        f"(group by (instance) (up{{{target_selector}}} == 1) unless on (instance) {DRIVER_NOT_READ}"
        f" unless on (instance) {_NVML_DOWN})"
    )
    return (
        f"count(group by (instance, gpu) (last_over_time(gpu_up{{{selector}}}[1h])) unless on (instance) {read_nodes}"
        f" unless on (instance, gpu) (gpu_up{{{selector}}} == 0 and on (instance) up{{{target_selector}}} == 1))"
    )


EXPORTER_IS_UP = "up{@target} == 1"
"""PromQL for the exporters that are up. The state of a GPU is unknown if no exporter of its node is up."""


UNKNOWN_GPU_VALUE = PRIORITIES_PER_IMPACT * Impact.UNKNOWN
"""Value of the table *Health of each GPU* for a GPU that is not read: no exporter of the node is up, or NVML is not up."""
MAX_GPUS = 200
"""Number of GPUs above which the table *Health of each GPU* omits GPUs in a known state without a problem."""
_GPUS_OF_LAST_HOUR = "max by (instance, gpu) (0 * last_over_time(gpu_up{@gpu}[1h]))"
"""PromQL with the value 0 for each GPU of the selected runs in the last hour."""


def query_worst_gpu_problems() -> str:
    """Return PromQL for one series for each GPU with a problem or an unknown state, with the labels `instance` and `gpu`.

    The value is:

    - the number of the worst problem in the rule `gpu:gpu_fault:urgency`
    - `UNKNOWN_GPU_VALUE` for a GPU without a known problem while NVML is not up
    - `UNKNOWN_GPU_VALUE` for every GPU of the last hour while no exporter of the node is up
    """
    read_nodes = f"({EXPORTER_IS_UP} unless on (instance) {_NVML_DOWN})"
    known = f"max by (instance, gpu) (gpu:gpu_fault:urgency{{@gpu}}) and on (instance) {EXPORTER_IS_UP}"
    unknown = f"{_GPUS_OF_LAST_HOUR} + {UNKNOWN_GPU_VALUE} unless on (instance) {read_nodes}"
    return f"({known} or on (instance, gpu) {unknown})"


_UP_GPUS = "max by (instance, gpu) (0 * gpu_up{@gpu})"
GPUS_OF_HEALTH_TABLE = f"({query_worst_gpu_problems()} or on (instance, gpu) {_UP_GPUS} unless on () count({_UP_GPUS}) > {MAX_GPUS})"
"""PromQL for the rows of the table *Health of each GPU*: GPUs with a problem or an unknown state, and all others unless there are too many."""
GPUS_AND_LAST_RANKS = f"({LAST_RANK_BY_GPU} or on (instance, gpu) {_GPUS_OF_LAST_HOUR})"
"""PromQL with the value 0 for each GPU of the selected runs in the last hour, with the last run and rank if a rank used the GPU."""


def xid_color(xid: int) -> str:
    """Return the color of an Xid: bad for `CRITICAL_XIDS`, warning for `WARNING_XIDS`, neutral for others."""
    return BAD if xid in CRITICAL_XIDS else WARNING if xid in WARNING_XIDS else NEUTRAL


XID_TEXTS = value_mappings(
    {str(xid): (f"{xid}: {meaning}", xid_color(xid)) for xid, meaning in XID_MEANINGS.items()}
)
"""Value mappings from the number of an Xid to the number with its meaning."""


WORST_PROBLEM_TEXTS = value_mappings(
    {
        value: (problem.name, BAD if problem.impact >= Impact.ENDANGERS_WORK else WARNING)
        for value, problem in gpu_problem_values().items()
    }
    | {0: (NO_VALUE, NEUTRAL), UNKNOWN_GPU_VALUE: ("unknown: no reading", WARNING)}
)
"""Value mappings from the number of `query_worst_gpu_problems` to the name of the problem."""
