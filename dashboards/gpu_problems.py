"""Problems of nodes and GPUs: PromQL for each problem, and the table of the current problems."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from dashboards.alerts import CLOCK_TIME, CLOCK_TIME_WIDTH
from dashboards.availability import EXPORTER_DOWN_SINCE, NOT_SCRAPED_SINCE, last_time
from dashboards.palette import BAD, GOOD, NEUTRAL, WARNING
from dashboards.panels import NO_VALUE, Panel, dashboard_link, value_mappings
from dashboards.queries import NODES_OF_RUN
from dashboards.tables import Column, table
from exporter.status.conditions.gpus import CRITICAL_XIDS, WARNING_XIDS
from exporter.status.xids import XID_MEANINGS

THROTTLED = "rate(gpu_clocks_event_seconds_total{@gpu, @throttling}[$__rate_interval])"
THROTTLED_RATIO = 0.05
"""Share of time with throttling by heat or the power brake above which the throttling is a problem."""
XID_SECONDS = 3600
"""Time for which an Xid is a problem."""
_ZERO_FOR_EACH_GPU = (
    "(0 * gpu_up{@gpu_any_run} or on (instance, gpu) 0 * last_over_time(gpu_up{@gpu_any_run}[$__range]))"
)
"""PromQL with the value 0 for each GPU of the time range, except former cards whose index another card has now."""
_LOCAL_RANKS = 'label_replace(last_over_time(training_rank_info{@cluster, uuid="", local_rank!=""}[$__range]), "gpu", "$1", "local_rank", "(.+)")'
GPUS_OF_RANKS = (
    f"topk by (instance, gpu) (1, max by (instance, gpu, run, rank) ({_ZERO_FOR_EACH_GPU} * on (uuid) group_left (run, rank)"
    ' topk by (uuid) (1, last_over_time(training_rank_info{@cluster, uuid!=""}[$__range])))'
    f" or on (instance, gpu) max by (instance, gpu, run, rank) ({_ZERO_FOR_EACH_GPU} * on (instance, gpu) group_left (run, rank)"
    f" topk by (instance, gpu) (1, {_LOCAL_RANKS})))"
)
"""PromQL for the GPUs that a rank used in the time range, by UUID, else by local rank, with the last run and rank.

An index has one result, even if several cards had the index or exporters of one node number the cards differently.
"""
SELECTED_GPUS = "on (instance, gpu) last_over_time(gpu_up{@gpu}[$__range])"
"""PromQL for the condition that a series belongs to a GPU of the selected runs."""
GPUS_WITH_RANK = f"({GPUS_OF_RANKS} or on (instance, gpu) max by (instance, gpu) ({_ZERO_FOR_EACH_GPU})) and {SELECTED_GPUS}"
"""PromQL for each GPU of the selected runs in the time range, with the last run and rank that used the GPU."""
SELECTED_NODES = f"on (instance) ({NODES_OF_RUN})"
"""PromQL for the condition that a series belongs to a node of the selected runs."""


class Impact(enum.IntEnum):
    """Effect of a problem on the run that uses the node or the GPU, in ascending order; the tables show the largest first."""

    NO_RUN = 0
    POSSIBLE = 1
    SLOW = 2
    UNKNOWN = 3
    WRONG_RESULTS = 4
    STANDSTILL = 5


IMPACT_TEXTS = value_mappings(
    {
        Impact.STANDSTILL.value: ("stops the run", BAD),
        Impact.WRONG_RESULTS.value: ("may damage results", BAD),
        Impact.UNKNOWN.value: ("unknown", WARNING),
        Impact.SLOW.value: ("slows the run", WARNING),
        Impact.POSSIBLE.value: ("possible", WARNING),
        Impact.NO_RUN.value: ("no run", NEUTRAL),
        -1: (NO_VALUE, NEUTRAL),
    }
)
PRIORITIES_PER_IMPACT = 100
"""Distance between the values of two impacts. A value is `impact * PRIORITIES_PER_IMPACT + priority`, so that the maximum is the problem with
the largest impact, and the earliest in the list of problems among equal impacts."""
RECOVERY_ACTION_TEXTS = value_mappings(
    {
        -1: (NO_VALUE, NEUTRAL),
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
NO_RESPONSE = "GPU does not respond: "
ERROR_TEXTS = {
    "gpu_is_lost": "GPU lost: fell off the bus",
    "reset_required": "GPU does not respond: needs a reset",
    "gpu_not_found": "GPU does not respond: the driver no longer lists the GPU",
}
"""Texts of errors of NVML."""
_RUNS_ON_NODES = "group by (instance, run) (last_over_time(training_process_up{@cluster}[$__range]))"


@dataclass(frozen=True, slots=True)
class Problem:
    """Problem of a node or GPU."""

    text: str  # `$1` is the value of `label`
    condition: str  # PromQL with a value for each node or GPU with the problem
    since: str  # PromQL for the start in Unix seconds, at least where `condition` has a value; of an Xid, the last occurrence
    remedy: str
    impact: Impact
    label: str = "instance"

    def row(self, priority: int) -> str:
        """Return PromQL for impact and priority as one number (see `PRIORITIES_PER_IMPACT`), with text and remedy as labels."""
        value = PRIORITIES_PER_IMPACT * self.impact + priority
        with_text = f'label_replace(0 * ({self.condition}) + {value}, "problem", "{self.text}", "{self.label}", "(.*)")'
        return f'label_replace({with_text}, "remedy", "{self.remedy}", "", "")'

    @property
    def start_by_gpu(self) -> str:
        """PromQL for the start of the problem by node and GPU."""
        return f"min by (instance, gpu) ({self.since} and on (instance, gpu) ({self.condition}))"


def _gpu_flag(family: str, text: str, remedy: str, impact: Impact) -> Problem:
    """Return the problem of a GPU that begins when the values of a family become larger than 0."""
    value = f"max by (instance, gpu) ({family})"
    return Problem(text, f"{value} > 0", last_time(f"{value} == bool 0"), remedy, impact)


def _xid(matcher: str, remedy: str, impact: Impact) -> Problem:
    """Return the problem of recent Xids.

    `matcher` selects or excludes the Xids that point to the hardware. The problem starts at the last occurrence.
    """
    selector = matcher.format("|".join(str(xid) for xid in sorted(CRITICAL_XIDS)))
    last = f"max by (instance, gpu, xid) (gpu_xid_last_timestamp_seconds{{@gpu_any_run, {selector}}})"
    recent = f"({last} > time() - {XID_SECONDS})"
    return Problem("Xid $1", recent, recent, remedy, impact, "xid")


_ECC_ERRORS = 'gpu_ecc_errors_total{@gpu_any_run, kind="uncorrected"}'
_UNCORRECTED = f"sum by (instance, gpu) ({_ECC_ERRORS})"
_MAX_THROTTLED = f"max by (instance, gpu) ({THROTTLED})"
NODE_PROBLEMS = (
    Problem(
        "driver does not respond: $1",
        "max by (instance, reason) (gpu_nvml_error_info{@node})"
        " and on (instance) max by (instance) (gpu_devices_expected{@node}) > 0",
        f"max by (instance) ({last_time('gpu_nvml_up{@node} == bool 1')})",
        "run nvidia-smi; reload the driver or reboot",
        Impact.STANDSTILL,
        "reason",
    ),
    Problem(
        "exporter down, node unknown",
        "min by (instance) (up{@target}) == 0",
        EXPORTER_DOWN_SINCE,
        "check the machine, then the log of the exporter",
        Impact.UNKNOWN,
    ),
    Problem(
        "exporter not scraped any more",
        NOT_SCRAPED_SINCE,
        NOT_SCRAPED_SINCE,
        "check the targets of Prometheus",
        Impact.UNKNOWN,
    ),
)
GPU_PROBLEMS = (
    Problem(
        f"{NO_RESPONSE}$1",
        "max by (instance, gpu, reason) (gpu_error_info{@gpu_any_run})",
        f"max by (instance, gpu) ({last_time('gpu_up{@gpu_any_run} == bool 1')})",
        "drain the node, then reset the GPU",
        Impact.STANDSTILL,
        "reason",
    ),
    _xid('xid=~"{}"', "drain the node; reset the GPU or reboot", Impact.WRONG_RESULTS),
    Problem(
        "uncorrected memory errors",
        f"{_UNCORRECTED} > 0",
        last_time(f"{_UNCORRECTED} < bool sum by (instance, gpu) ({_ECC_ERRORS} @ end())"),
        "return to a checkpoint from before the error; reset the GPU",
        Impact.WRONG_RESULTS,
    ),
    _gpu_flag(
        "gpu_remapped_rows_failed{@gpu_any_run}",
        "a memory row could not be remapped",
        "replace the GPU",
        Impact.WRONG_RESULTS,
    ),
    _gpu_flag(
        "gpu_recovery_action{@gpu_any_run}",
        "the driver requests a recovery",
        "drain the node, then do what the driver requests",
        Impact.WRONG_RESULTS,
    ),
    Problem(
        "throttled by heat or the power brake",
        f"{_MAX_THROTTLED} > {THROTTLED_RATIO}",
        last_time(f"{_MAX_THROTTLED} <= bool {THROTTLED_RATIO}"),
        "check the cooling and the power supply",
        Impact.SLOW,
    ),
    _gpu_flag(
        'gpu_nvlink_links{@gpu_any_run, state="inactive"}',
        "NVLinks are down",
        "reset the GPU; check the links",
        Impact.SLOW,
    ),
    _xid('xid!~"{}"', "read the log of the job; reset the GPU if it returns", Impact.POSSIBLE),
    _gpu_flag(
        "gpu_remapped_rows_pending{@gpu_any_run}",
        "a memory row waits for a reset",
        "reset the GPU when free",
        Impact.POSSIBLE,
    ),
)


def problem_counts() -> str:
    """Return PromQL for the number of problems of each GPU."""
    conditions = (
        ("lost", "gpu_up{@gpu_any_run} == bool 0"),
        ("recovery", "gpu_recovery_action{@gpu_any_run} > bool 0"),
        ("ecc", 'gpu_ecc_errors_total{@gpu_any_run, kind="uncorrected"} > bool 0'),
        ("row remap failed", "gpu_remapped_rows_failed{@gpu_any_run} > bool 0"),
        ("row remap pending", "gpu_remapped_rows_pending{@gpu_any_run} > bool 0"),
        ("xid", f"time() - gpu_xid_last_timestamp_seconds{{@gpu_any_run}} < bool {XID_SECONDS}"),
        ("heat", f"{THROTTLED} > bool {THROTTLED_RATIO}"),
        ("nvlink", 'gpu_nvlink_links{@gpu_any_run, state="inactive"} > bool 0'),
    )
    terms = (
        f'label_replace(max by (instance, gpu) ({expression}), "condition", "{name}", "", "")'
        for name, expression in conditions
    )
    return f"(sum by (instance, gpu) ({' or '.join(terms)}) and {SELECTED_GPUS})"


def _xid_color(xid: int) -> str:
    """Return the color of an Xid: bad if the Xid points to the hardware, neutral if a program caused the Xid."""
    return BAD if xid in CRITICAL_XIDS else WARNING if xid in WARNING_XIDS else NEUTRAL


XID_TEXTS = value_mappings(
    {str(xid): (f"{xid}: {meaning}", _xid_color(xid)) for xid, meaning in XID_MEANINGS.items()}
)
"""Value mappings from the number of an Xid to the number with its meaning."""


PROBLEMS_TITLE = "What is wrong"
NO_PROBLEM = "nothing is wrong"
PROBLEM_TEXTS = [
    *value_mappings(
        {NO_PROBLEM: (NO_PROBLEM, GOOD)}
        | {f"{NO_RESPONSE}{error}": (text, BAD) for error, text in ERROR_TEXTS.items()}
        | {f"Xid {xid}": (f"Xid {xid}: {meaning}", _xid_color(xid)) for xid, meaning in XID_MEANINGS.items()}
    ),
    {
        "type": "regex",
        "options": {
            "pattern": ".+",
            "result": {"color": BAD, "index": len(XID_MEANINGS) + len(ERROR_TEXTS) + 1},
        },
    },
]
"""Value mappings of the column *Problem*: an Xid with its meaning, and the color of all other problems."""
NODE_LINK = dashboard_link("training-node", "Node", node="${__value.raw}")


def _rows(problems: Sequence[Problem]) -> str:
    """Return PromQL for the impact and priority of all current problems; an earlier problem has a higher priority."""
    return " or ".join(problem.row(len(problems) - index) for index, problem in enumerate(problems))


def _starts(problems: Sequence[Problem]) -> str:
    """Return PromQL for the start of the first of the problems of each node and GPU."""
    starts = " or ".join(
        f'label_replace({problem.start_by_gpu}, "problem", "{index}", "", "")'
        for index, problem in enumerate(problems)
    )
    return f"min by (instance, gpu) ({starts})"


def current_problems() -> Panel:
    """Return the table of the nodes and GPUs with a problem, with the worst problem of each, the largest impact first."""
    return table(PROBLEMS_TITLE, *_problem_columns(), sort="Impact", w=24, h=7, max_data_points=120)


def _problem_columns() -> tuple[Column, ...]:
    gpus = f"(({_rows(GPU_PROBLEMS)}) and {SELECTED_GPUS})"
    nodes = f"(({_rows(NODE_PROBLEMS)}) and {SELECTED_NODES})"
    labels = ", ".join(sorted({problem.label for problem in (*GPU_PROBLEMS, *NODE_PROBLEMS)} - {"instance"}))
    # Adding 0 joins the labels `run` and `rank` of the last rank on the GPU.
    gpus_of_runs = f"({gpus}) + on (instance, gpu) group_left (run, rank) 0 * ({GPUS_OF_RANKS})"
    # The remainder removes the impact and keeps the priority: without a run, the impact is NO_RUN, which is 0.
    gpus_without_run = f"(({gpus}) unless on (instance, gpu) ({GPUS_OF_RANKS})) % {PRIORITIES_PER_IMPACT}"
    runs_of_nodes = f"0 * topk by (instance) (1, {_RUNS_ON_NODES})"
    nodes_with_run = f"(({nodes}) + on (instance) group_left (run) {runs_of_nodes} or ({nodes}) unless on (instance) {runs_of_nodes})"
    # The worst problem of each GPU and node. `max without` removes the labels that only the text of a problem needs.
    rows = f"max without ({labels}) (topk by (instance, gpu) (1, {gpus_of_runs} or {gpus_without_run} or {nodes_with_run}))"
    gpu_starts, node_starts = _starts(GPU_PROBLEMS), _starts(NODE_PROBLEMS)
    start = f"min by (instance, gpu) ({gpu_starts} and {SELECTED_GPUS} or {node_starts} and {SELECTED_NODES})"
    no_problem = (
        f'label_replace(vector(-1), "problem", "{NO_PROBLEM}", "", "") unless on () ({gpus} or {nodes})'
    )
    return (
        Column(
            f"floor(({rows}) / {PRIORITIES_PER_IMPACT}) or {no_problem}",
            "Impact",
            decimals=0,
            width=145,
            mappings=IMPACT_TEXTS,
        ),
        Column("instance", "Node", width=100, links=(NODE_LINK,)),
        Column("gpu", "GPU", width=60),
        Column("run", "Run", width=130, links=(dashboard_link("training-run", "Run", run="${__value.raw}"),)),
        Column("rank", "Rank", width=70),
        Column("problem", "Problem", width=300, mappings=PROBLEM_TEXTS),
        Column(
            f"count by (instance, gpu) ({gpus} or {nodes}) - 1 or {no_problem}",
            "Other problems",
            decimals=0,
            width=140,
            mappings=value_mappings({0: (NO_VALUE, NEUTRAL), -1: (NO_VALUE, NEUTRAL)}),
        ),
        Column(
            f"max by (instance, gpu) (gpu_recovery_action{{@gpu_any_run}}) and on (instance, gpu) ({gpus}) or {no_problem}",
            "Driver requests",
            width=140,
            mappings=RECOVERY_ACTION_TEXTS,
        ),
        Column("remedy", "Remedy"),
        Column(
            f"{start} * 1000 or {no_problem}",
            "Since",
            unit=CLOCK_TIME,
            width=CLOCK_TIME_WIDTH,
            mappings=value_mappings({0: ("before this range", NEUTRAL), -1: (NO_VALUE, NEUTRAL)}),
        ),
        Column(
            f"time() - ({start} > 0) or {no_problem}",
            "For",
            unit="s",
            decimals=0,
            width=65,
            mappings=value_mappings({-1: (NO_VALUE, NEUTRAL)}),
        ),
    )
