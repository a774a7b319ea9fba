"""The dashboard *Ranks and stragglers*: every rank on one page, up to a thousand of them."""

from __future__ import annotations

from dashboards.board import ALERTS_OF_RUN, CHECKPOINTS, NUMERICAL, ONE_RUN, RESTARTS, Board, Row, Variable
from dashboards.palette import BAD, BLUE, GREEN, ORANGE, PLAIN, VERMILION, WARNING
from dashboards.panels import About, Panel, above, heatmap, lines, stat, steps
from dashboards.queries import Query, now
from dashboards.ranks_together import GPU_OF, NO_COMPUTE, TO_GPUS, TO_NODE, chosen, together
from dashboards.tables import Column, percent, table

UID = "training-ranks"
RANKS = Variable(
    "rank",
    "Rank",
    "label_values(training_rank_info{@run}, rank)",
    all_of_them=False,
    sort=NUMERICAL,
    what="For the last row: the ranks to look at closely.",
)
COMPUTE = "max by (rank) (training_rank_compute_seconds{@run} > 0)"
SCORE = f"scalar(min({COMPUTE})) / {COMPUTE}"
SCORE_AT = f"scalar(min({COMPUTE})) / max by (instance, rank) (training_rank_compute_seconds{{@run}} > 0)"


def board() -> Board:
    """The dashboard."""
    return Board(
        uid=UID,
        title="Training / Ranks and stragglers",
        what="Who is slow, where, and since when; on which node and GPU; and who has stopped.",
        variables=(ONE_RUN, RANKS),
        rows=(
            Row("At a glance", _glance()),
            Row("Who is slow, where, since when?", _slow()),
            Row("Do all ranks do the same?", together()),
            Row("The chosen ranks", chosen()),
        ),
        marks=(RESTARTS, CHECKPOINTS, ALERTS_OF_RUN),
    )


def _glance() -> tuple[Panel, ...]:
    return (
        stat(
            "Ranks alive",
            now("sum(max by (rank) (training_process_up{@run}))", "alive"),
            now("count(max by (rank) (training_process_up{@run}))", "of"),
            now("count(max by (rank) (training_process_up{@run}) == 0)", "dead", BAD),
            unit="none",
            text="value_and_name",
            about=About(
                "Ranks whose process lives, of those that were seen.",
                "fewer live than there are: a synchronous run then stands still.",
                "the table says which, and on which node.",
                "no rank of this run is known.",
            ),
            empty="none known",
        ),
        stat(
            "Slowest rank",
            now(f"bottomk(1, {SCORE})", "rank {{rank}}"),
            unit="percentunit",
            decimals=0,
            text="value_and_name",
            w=5,
            thresholds=steps((None, BAD), (0.75, WARNING), (0.9, PLAIN)),
            about=About(
                "How fast the slowest rank computes, compared with the fastest (100 %): its step without waiting for "
                "data and for others.",
                "below 90 %; below 75 % all others wait a quarter of the time.",
                "the table has its node and GPU, its clocks and what holds it back.",
                "the job tells no steps.",
            ),
            empty="no steps told",
        ),
        stat(
            "Below 90 %",
            now(f"count(({SCORE}) < 0.9) or 0 * count({COMPUTE})"),
            unit="none",
            w=3,
            thresholds=above(1),
            about=About(
                "Ranks that compute at less than 90 % of the fastest one's speed.",
                "one: a machine. Many: uneven work.",
                "one: see its GPU. Many: look at how the work is divided.",
                "the job tells no steps.",
            ),
            empty="no steps told",
        ),
        stat(
            "Lost to the slowest",
            now(f"1 - quantile(0.5, {COMPUTE}) / max({COMPUTE})"),
            unit="percentunit",
            decimals=0,
            thresholds=above(0.1, 0.25),
            about=About(
                "Share of the time in which the median rank has nothing to do but wait for the slowest one.",
                "above 10 %.",
                "drain the slow node, or give it less work.",
                "the job tells no steps.",
            ),
            empty="no steps told",
            w=5,
        ),
        stat(
            "Silent",
            now(
                "count(time() - max by (rank) (training_feed_last_update_timestamp_seconds{@run}) > 10)"
                " or 0 * count(max by (rank) (training_process_up{@run}))"
            ),
            unit="none",
            w=3,
            thresholds=above(1),
            about=About(
                "Ranks from which nothing was heard for ten seconds: stopped, hanging, or dead.",
                "any.",
                "*Last news* in the table says who and since when.",
                "no rank of this run is known.",
            ),
            empty="none known",
        ),
        stat(
            "Steps apart",
            now(
                'max(max by (rank) (training_steps_total{@run, mode="train"}))'
                ' - min(max by (rank) (training_steps_total{@run, mode="train"}))'
            ),
            unit="none",
            about=About(
                "Steps between the rank that has made most and the one that has made fewest, repeats included.",
                "a number that grows: a rank has left the others, or was restarted alone.",
                "in a synchronous run it stays small; else see who it is in the table.",
                "the job tells no steps.",
            ),
            empty="no steps told",
        ),
    )


def _slow() -> tuple[Panel, ...]:
    return (
        heatmap(
            "How much slower than the fastest is each rank?",
            Query(f"{COMPUTE} / scalar(min({COMPUTE})) - 1", "{{rank}}"),
            unit="percentunit",
            between=(0, 0.5),
            w=14,
            h=16,
            about=About(
                "One line for each rank, from the lowest number at the bottom to the highest; the colour is how much longer "
                "it computes than the fastest one in the same moment: blue as long, yellow half as long again or more. Up to "
                "a thousand ranks fit.",
                "a line that stands out: a slow machine, since where its colour changes. A block of eight lines: a node. "
                "All but one stand out: that one has less work.",
                "point at the line for its number; node and GPU are in the table below.",
                "empty: the rank did not live, or made no step.",
            ),
            empty=NO_COMPUTE,
        ),
        heatmap(
            "How much slower is the slowest rank of each node?",
            Query(
                f"max by (instance) (max by (instance, rank) (training_rank_compute_seconds{{@run}} > 0))"
                f" / scalar(min({COMPUTE})) - 1",
                "{{instance}}",
            ),
            unit="percentunit",
            between=(0, 0.5),
            w=10,
            h=8,
            about=About(
                "One line for each node: at a thousand ranks a single rank's line is thinner than a pixel, and this one is not.",
                "a line that stands out.",
                "*GPUs* and *Node and container* of that node; the table has the links.",
                "empty: no rank of that node lived, or made a step.",
            ),
            empty=NO_COMPUTE,
        ),
        lines(
            "How far are they apart?",
            Query(f"max({COMPUTE})", "slowest", VERMILION),
            Query(f"quantile(0.95, {COMPUTE})", "19 of 20 are faster", ORANGE),
            Query(f"quantile(0.5, {COMPUTE})", "median", BLUE),
            Query(f"min({COMPUTE})", "fastest", GREEN),
            unit="s",
            w=10,
            h=8,
            about=About(
                "Time that ranks compute in a step, without waiting.",
                "the upper line leaves the others: one straggler. All spread: uneven work.",
                "see the table for who it is.",
                "no rank made a step.",
            ),
            empty=NO_COMPUTE,
        ),
        table(
            "Every rank with its machine, the slowest first",
            Column("rank", "Rank", width=70),
            Column("instance", "Node", links=(TO_GPUS, TO_NODE)),
            Column("gpu", "GPU", width=60),
            percent(SCORE_AT, "Speed", 160, steps((None, BAD), (0.75, WARNING), (0.9, BLUE)), bar=(0, 1)),
            percent(
                f"avg_over_time((({SCORE_AT}) < bool 0.9)[$__range:$__interval])",
                "Slow, of the time",
                160,
            ),
            percent(
                f"max by (instance, rank) ({GPU_OF} * on (instance, gpu) group_left () max by (instance, gpu)"
                " (rate(gpu_clocks_event_seconds_total{@heat}[$__rate_interval])))",
                "Held back",
                100,
                above(0.01, 0.1),
            ),
            Column(
                "max by (instance, rank) (training_rank_compute_seconds{@run} > 0)",
                "Computes",
                unit="s",
                decimals=3,
                width=100,
            ),
            percent(
                'max by (instance, rank) (rate(training_phase_seconds_total{@run, phase="data_loading"}[$__rate_interval]))',
                "Waits for data",
                120,
                above(0.2),
            ),
            Column(
                f'max by (instance, rank) ({GPU_OF} * on (instance, gpu) group_left () max by (instance, gpu) (gpu_clock_hertz{{clock="sm"}}))',
                "SM clock",
                unit="hertz",
                width=100,
            ),
            Column(
                f'max by (instance, rank) ({GPU_OF} * on (instance, gpu) group_left () max by (instance, gpu) (gpu_temperature_celsius{{sensor="gpu"}}))',
                "Heat",
                unit="celsius",
                width=80,
            ),
            Column(
                "time() - max by (instance, rank) (training_feed_last_update_timestamp_seconds{@run})",
                "Last news",
                unit="s",
                decimals=0,
                width=100,
                thresholds=above(10),
            ),
            of=f"max by (instance, rank, gpu) ({GPU_OF})",
            sort="Speed",
            descending=False,
            points=100,
            h=11,
            about=About(
                "The slowest first, with node and GPU. Where the driver does not say which process holds a GPU, the GPU is "
                "the one with the local rank's number. *Held back*: share of time in which heat or the power supply "
                "slowed that GPU.",
                "a low speed with *held back*: the hardware. A low speed without it, at full clocks: uneven work, or "
                "something else runs on the node.",
                "follow the link on the node; drain it if it is the hardware.",
                "the job tells no steps; an empty cell is not known for that rank.",
            ),
            empty=NO_COMPUTE,
        ),
    )
