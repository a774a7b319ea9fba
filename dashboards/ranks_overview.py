"""First row of the dashboard *Ranks*: missing ranks, the slowest rank and its cost, and the nodes of the run."""

from __future__ import annotations

from dashboards.alerts import CLOCK_TIME
from dashboards.palette import (
    BAD,
    NEUTRAL,
    WARNING,
)
from dashboards.panels import (
    NO_VALUE,
    Panel,
    bad_above,
    dashboard_link,
    stat,
    threshold_steps,
    value_mappings,
    warn_above,
)
from dashboards.queries import (
    SLOWEST_RANK,
    SLOWEST_RANK_LEGEND,
    SPEED_RATIO_BY_NODE,
    instant_query,
)
from dashboards.straggler import straggler_cost
from dashboards.tables import ZERO_AS_DASH, Column, percent, placeholder_row, table

FEED_AGE_SECONDS = (
    "max by (instance, rank) (timestamp(training_feed_last_update_timestamp_seconds{@run})"
    " - training_feed_last_update_timestamp_seconds{@run})"
)
"""PromQL for the age of the feed at the time of the scrape. `time()` would add the time since the scrape."""
SILENT_SECONDS = 30
STOPPED_RANKS = f"max by (instance, rank) (training_process_up{{@run}}) == 0 or ({FEED_AGE_SECONDS} > {SILENT_SECONDS}) * 0 + 1"
"""PromQL that is 0 for ended ranks and 1 for live ranks with a feed older than `SILENT_SECONDS`."""
GPUS_LINK = dashboard_link("training-gpus", "GPUs of this node", node="${__data.fields.Node}")
NODE_LINK = dashboard_link("training-node", "Node", node="${__data.fields.Node}")


def overview_panels() -> tuple[Panel, ...]:
    """Return the panels of the row *At a glance*."""
    labels = "function, location, phase"
    hanging = f"max by (instance, rank, {labels}) (training_hang_info{{@run}})"
    odd_group = "run_group:training_hang_odd:count{@run}"
    odd_rank = f"max by (instance, rank, {labels}) (training_hang_info{{@run}} and on (cluster, run, {labels}) {odd_group} == 1)"
    ranks_at_line = f"count by ({labels}) ({hanging})"
    return (
        stat(
            "Ranks alive",
            instant_query("sum(max by (rank) (training_process_up{@run}))", "alive"),
            instant_query("max(training_world_size{@run})", "of"),
            instant_query(
                "count(max by (rank) (training_process_up{@run}) == 0) or 0 * max(training_process_up{@run})",
                "ended",
                BAD,
            ),
            instant_query(
                "clamp_min(max(training_world_size{@run})"
                " - (count(max by (rank) (training_process_up{@run})) or vector(0)), 0)"
                ' unless on () max(training_run_state{@run, state=~"finished|stopped"}) == 1',
                "not seen",
                BAD,
            ),
            unit="none",
            text_mode="value_and_name",
            w=5,
        ),
        stat(
            "Slowest rank",
            instant_query(SLOWEST_RANK, SLOWEST_RANK_LEGEND),
            unit="percentunit",
            decimals=0,
            text_mode="value_and_name",
            thresholds=threshold_steps((None, BAD), (0.75, WARNING), (0.9, NEUTRAL)),
            w=4,
        ),
        straggler_cost(),
        stat(
            "Waiting for data",
            instant_query(
                'topk(1, max by (instance, rank) (rate(training_phase_seconds_total{@run, phase="data_loading"}[$__rate_interval])))',
                "rank {{rank}} on {{instance}}",
            ),
            unit="percentunit",
            decimals=0,
            text_mode="value_and_name",
            thresholds=warn_above(0.1, 0.2),
            w=3,
        ),
        stat(
            "Rank that holds up a hang",
            instant_query(
                f'label_replace({odd_rank} * 0 + 1, "odd", "rank $1:", "rank", "(.+)")'
                f' or label_replace(max by ({labels}) ({odd_group} > 1) * 0 + 1, "odd", "several ranks:", "", "")'
                f' or label_replace(topk(1, {ranks_at_line}) * 0 + 1 unless on () {odd_group}, "odd", "no odd rank:", "", "")'
                f' or label_replace(absent({hanging}) * 0, "odd", "no rank hangs", "", "")',
                "{{odd}} {{function}} {{location}} {{instance}}",
            ),
            unit="none",
            text_mode="name",
            thresholds=threshold_steps((None, NEUTRAL), (1, BAD)),
            w=7,
        ),
        _node_table(),
        _stopped_rank_table(),
    )


def _node_table() -> Panel:
    """Return the table of the nodes of the run, the node with the most missing ranks first."""
    live_ranks = "group by (instance, rank) (training_process_up{@run} == 1)"
    # A rank that has moved to another node is not missing on its former node.
    expected_ranks = (
        f"group by (instance, rank) (last_over_time(training_process_up{{@run}}[$__range]))"
        f" unless on (rank) group by (rank) ({live_ranks}) or {live_ranks}"
    )
    expected = f"count by (instance) ({expected_ranks})"
    reporting = f"(count by (instance) ({live_ranks}) or on (instance) 0 * {expected})"
    last_sample = "max by (instance) (max_over_time(timestamp(training_process_up{@run})[$__range:15s]))"
    return table(
        "Nodes of the run",
        Column("instance", "Node", links=(GPUS_LINK, NODE_LINK)),
        Column(expected, "Ranks", decimals=0, width=80),
        Column(reporting, "Alive", decimals=0, width=80),
        Column(
            f"{expected} - on (instance) {reporting}",
            "Missing",
            decimals=0,
            width=100,
            thresholds=bad_above(1),
            mappings=ZERO_AS_DASH,
        ),
        Column(
            f"(group by (instance) (exporter_build_info{{@cluster}}) and on (instance) {expected})"
            f" or on (instance) 0 * {expected}",
            "Exporter",
            width=100,
            mappings=value_mappings({1: ("up", NEUTRAL), 0: ("no answer", BAD)}),
        ),
        Column(f"1000 * {last_sample}", "Last sample", unit=CLOCK_TIME, width=120),
        percent(
            f"min by (instance) ({SPEED_RATIO_BY_NODE})",
            "Slowest rank",
            110,
            threshold_steps((None, BAD), (0.75, WARNING), (0.9, NEUTRAL)),
        ),
        sort="Missing",
        w=14,
        h=6,
    )


def _stopped_rank_table() -> Panel:
    """Return the table of ranks that have ended or have an old feed."""
    placeholder = placeholder_row(STOPPED_RANKS, "instance", "no such rank seen")
    return table(
        "Ended and silent ranks",
        Column("rank", "Rank", width=70),
        Column("instance", "Node", links=(GPUS_LINK, NODE_LINK)),
        Column(
            f"{STOPPED_RANKS} or {placeholder} + 2",
            "Process",
            width=80,
            mappings=value_mappings({0: ("ended", BAD), 1: ("silent", WARNING), 2: (NO_VALUE, NEUTRAL)}),
        ),
        Column(
            f"{FEED_AGE_SECONDS} and on (instance, rank) ({STOPPED_RANKS}) or {placeholder}",
            "Feed age",
            unit="s",
            decimals=0,
            width=110,
            mappings=ZERO_AS_DASH,
        ),
        sort="Process",
        descending=False,
        w=10,
        h=6,
    )
