"""Problems of nodes and GPUs: PromQL for each problem, and the table of the current problems."""

from __future__ import annotations

from dataclasses import dataclass

from dashboards.alerts import CLOCK_TIME
from dashboards.availability import EXPORTER_DOWN_SINCE, NOT_SCRAPED_SINCE, last_time
from dashboards.palette import BAD, GOOD, NEUTRAL
from dashboards.panels import NO_VALUE, Panel, dashboard_link, value_mappings
from dashboards.tables import Column, table
from exporter.status.conditions.gpus import CRITICAL_XIDS
from exporter.status.xids import XID_MEANINGS

THROTTLED = "rate(gpu_clocks_event_seconds_total{@gpu, @throttling}[$__rate_interval])"
THROTTLED_RATIO = 0.05
"""Smallest share of time with thermal or power throttling that is a problem."""
XID_SECONDS = 3600
"""Time for which an Xid is a problem."""
_PRESENT = "(0 * gpu_up{@gpu} or on (instance, gpu) 0 * last_over_time(gpu_up{@gpu}[$__range]))"
"""PromQL for the GPUs of the time range, without former cards of an index that another card has now."""
_LOCAL_RANKS = 'label_replace(last_over_time(training_rank_info{@cluster, uuid="", local_rank!=""}[$__range]), "gpu", "$1", "local_rank", "(.+)")'
GPUS_OF_RANKS = (
    f"topk by (instance, gpu) (1, max by (instance, gpu, run, rank) ({_PRESENT} * on (uuid) group_left (run, rank)"
    ' topk by (uuid) (1, last_over_time(training_rank_info{@cluster, uuid!=""}[$__range])))'
    f" or on (instance, gpu) max by (instance, gpu, run, rank) ({_PRESENT} * on (instance, gpu) group_left (run, rank)"
    f" topk by (instance, gpu) (1, {_LOCAL_RANKS})))"
)
"""PromQL for the GPUs that a rank used in the time range, by UUID, else by local rank, with the last run and rank.

An index has one result, even if several cards had the index or exporters of one node number the cards differently.
"""
GPUS_WITH_RANK = f"{GPUS_OF_RANKS} or on (instance, gpu) max by (instance, gpu) ({_PRESENT})"
"""PromQL for each GPU of the time range, with the last run and rank that used the GPU."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Problem of a node or GPU."""

    text: str  # `$1` is the value of `label`
    since: str  # PromQL for the start in Unix seconds, by node and GPU
    remedy: str
    label: str = "instance"

    @property
    def rows(self) -> str:
        """PromQL for the start of the problem, with text and remedy as labels."""
        with_text = f'label_replace({self.since}, "problem", "{self.text}", "{self.label}", "(.*)")'
        return f'label_replace({with_text}, "remedy", "{self.remedy}", "", "")'


def _gpu_flag(family: str, text: str, remedy: str) -> Problem:
    """Return the problem of a GPU that begins when the values of a family become larger than 0."""
    since = last_time(f"max by (instance, gpu) ({family}) == bool 0")
    return Problem(text, f"{since} and on (instance, gpu) max by (instance, gpu) ({family}) > 0", remedy)


def _xid(matcher: str, remedy: str) -> Problem:
    """Return the problem of recent Xids.

    `matcher` selects or excludes the Xids that point to the hardware.
    """
    selector = matcher.format("|".join(str(xid) for xid in sorted(CRITICAL_XIDS)))
    last = f"max by (instance, gpu, xid) (gpu_xid_last_timestamp_seconds{{@gpu, {selector}}})"
    return Problem("Xid $1", f"{last} > time() - {XID_SECONDS}", remedy, "xid")


_ECC_ERRORS = 'gpu_ecc_errors_total{@gpu, kind="uncorrected"}'
_UNCORRECTED = f"sum by (instance, gpu) ({_ECC_ERRORS})"
_NODE_PROBLEMS = (
    Problem(
        "exporter down, node unknown", EXPORTER_DOWN_SINCE, "check the machine, then the log of the exporter"
    ),
    Problem("exporter not scraped any more", NOT_SCRAPED_SINCE, "check the targets of Prometheus"),
    Problem(
        "driver does not respond: $1",
        "max by (instance, reason) (gpu_nvml_error_info{@node}) * 0 + on (instance) group_left ()"
        f" max by (instance) ({last_time('gpu_nvml_up{@node} == bool 1')})"
        " and on (instance) max by (instance) (gpu_devices_expected{@node}) > 0",
        "run nvidia-smi; reload the driver or reboot",
        "reason",
    ),
)
_GPU_PROBLEMS = (
    Problem(
        "GPU does not respond: $1",
        "max by (instance, gpu, reason) (gpu_error_info{@gpu}) * 0 + on (instance, gpu) group_left ()"
        f" max by (instance, gpu) ({last_time('gpu_up{@gpu} == bool 1')})",
        "drain the node, then reset the GPU",
        "reason",
    ),
    _xid('xid=~"{}"', "drain the node; reset the GPU or reboot"),
    _xid('xid!~"{}"', "read the log of the job; reset the GPU if it returns"),
    _gpu_flag(
        "(gpu_recovery_action{@gpu} == bool 1)",
        "driver requests a GPU reset",
        "drain the GPU, then reset the GPU",
    ),
    _gpu_flag(
        "(gpu_recovery_action{@gpu} > bool 1)",
        "driver requests a recovery",
        "drain the node; the column Recovery action below names the action",
    ),
    Problem(
        "uncorrected memory errors",
        f"{last_time(f'{_UNCORRECTED} < bool sum by (instance, gpu) ({_ECC_ERRORS} @ end())')} and on (instance, gpu) {_UNCORRECTED} > 0",
        "return to a checkpoint from before the error; reset the GPU",
    ),
    _gpu_flag("gpu_remapped_rows_failed{@gpu}", "a memory row could not be remapped", "replace the GPU"),
    _gpu_flag("gpu_remapped_rows_pending{@gpu}", "a memory row waits for a reset", "reset the GPU when free"),
    Problem(
        "throttled by heat or power",
        last_time(f"max by (instance, gpu) ({THROTTLED}) <= bool {THROTTLED_RATIO}")
        + f" and on (instance, gpu) max by (instance, gpu) ({THROTTLED}) > {THROTTLED_RATIO}",
        "check the cooling and the power supply",
    ),
    _gpu_flag(
        'gpu_nvlink_links{@gpu, state="inactive"}', "NVLinks are down", "reset the GPU; check the links"
    ),
)


def problem_counts() -> str:
    """Return PromQL for the number of problems of each GPU."""
    conditions = (
        ("lost", "gpu_up{@gpu} == bool 0"),
        ("recovery", "gpu_recovery_action{@gpu} > bool 0"),
        ("ecc", 'gpu_ecc_errors_total{@gpu, kind="uncorrected"} > bool 0'),
        ("row remap failed", "gpu_remapped_rows_failed{@gpu} > bool 0"),
        ("row remap pending", "gpu_remapped_rows_pending{@gpu} > bool 0"),
        ("xid", f"time() - gpu_xid_last_timestamp_seconds{{@gpu}} < bool {XID_SECONDS}"),
        ("heat", f"{THROTTLED} > bool {THROTTLED_RATIO}"),
        ("nvlink", 'gpu_nvlink_links{@gpu, state="inactive"} > bool 0'),
    )
    terms = (
        f'label_replace(max by (instance, gpu) ({expression}), "condition", "{name}", "", "")'
        for name, expression in conditions
    )
    return f"sum by (instance, gpu) ({' or '.join(terms)})"


XID_TEXTS = value_mappings(
    {str(xid): (f"{xid}: {meaning}", NEUTRAL) for xid, meaning in XID_MEANINGS.items()}
)
"""Value mappings from the number of an Xid to the number with its meaning."""


NO_PROBLEM = "nothing is wrong"
PROBLEM_TEXTS = [
    *value_mappings(
        {NO_PROBLEM: (NO_PROBLEM, GOOD)}
        | {f"Xid {xid}": (f"Xid {xid}: {meaning}", BAD) for xid, meaning in XID_MEANINGS.items()}
    ),
    {"type": "regex", "options": {"pattern": ".+", "result": {"color": BAD, "index": len(XID_MEANINGS) + 1}}},
]
"""Value mappings of the column *Problem*: an Xid with its meaning, and the colour of all other problems."""
NODE_LINK = dashboard_link("training-node", "Node", node="${__value.raw}")


def current_problems() -> Panel:
    """Return the table of the current problems of nodes and GPUs, with their start and remedy."""
    nodes = " or ".join(problem.rows for problem in _NODE_PROBLEMS)
    gpus = " or ".join(problem.rows for problem in _GPU_PROBLEMS)
    with_rank = f"({gpus}) + on (instance, gpu) group_left (run, rank) ({GPUS_WITH_RANK})"
    rows = f"max without (reason, xid) ({with_rank} or {nodes})"
    held = f"max without (reason, xid) (({gpus}) * 0 + 1 + on (instance, gpu) group_left (run, rank) {GPUS_OF_RANKS})"
    no_problem = f'label_replace(vector(-1), "problem", "{NO_PROBLEM}", "", "")'
    return table(
        "What is wrong",
        Column("instance", "Node", width=110, links=(NODE_LINK,)),
        Column("gpu", "GPU", width=60),
        Column("run", "Run", width=170, links=(dashboard_link("training-run", "Run", run="${__value.raw}"),)),
        Column("rank", "Rank", width=70),
        Column("problem", "Problem", mappings=PROBLEM_TEXTS),
        Column(
            f"{rows} * 1000 or on () {no_problem}",
            "Since",
            unit=CLOCK_TIME,
            width=170,
            mappings=value_mappings({0: ("before this time range", NEUTRAL), -1: (NO_VALUE, NEUTRAL)}),
        ),
        Column(
            f"(time() - ({rows} > 0)) or on () {no_problem}",
            "For",
            unit="s",
            decimals=0,
            width=90,
            mappings=value_mappings({-1: (NO_VALUE, NEUTRAL)}),
        ),
        Column("remedy", "Remedy"),
        Column(
            f"{held} or max without (reason, xid) ({nodes}) * 0 + 1 or {rows} * 0",
            "In use",
            width=75,
            mappings=value_mappings({1: ("yes", BAD), 0: ("no", NEUTRAL)}),
        ),
        sort="In use",
        w=24,
        h=8,
        max_data_points=120,
    )
