"""The dashboard *Training run*: is it progressing, what is it doing, and what did its time go into."""

from __future__ import annotations

from dashboards.board import ALERTS_OF_RUN, CHECKPOINTS, ONE_RUN, RANK, RESTARTS, Board, Row
from dashboards.palette import (
    BAD,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PALE,
    PHASES,
    PLAIN,
    PURPLE,
    VERMILION,
    WARNING,
    Override,
    fixed,
    named,
    shades,
)
from dashboards.panels import About, Panel, above, below, heatmap, lines, stat, steps, to
from dashboards.queries import Query, events, now
from dashboards.run_cost import WALL, allocator, checkpoints, goodput, identity

UID = "training-run"
NOT_TOLD = "The job does not tell it: see the table of bridges, or call exporter.training."
NO_STEPS = "No steps: the job does not use exporter.training or a bridge, or has not begun."
TO_RANKS = to("training-ranks", "Ranks and stragglers", run="${run}")
STEP_BUCKETS = (
    'sum by (le) (rate(training_step_duration_seconds_bucket{@run, mode="train"}[$__rate_interval]))'
)
MFU = (
    "sum(rate(training_{work}_flops_total{{@run}}[$__rate_interval]) and on (instance, run, rank) training_peak_flops{{@run}})"
    " / sum(training_peak_flops{{@run}})"
)
"""Of the ranks whose peak is known: totals of dead ones linger, their peak does not."""


def board() -> Board:
    """The dashboard."""
    return Board(
        uid=UID,
        title="Training / Run",
        what="Is this run progressing, how fast, what is it waiting for, and what did its failures cost?",
        variables=(ONE_RUN, RANK),
        rows=(
            Row("At a glance", _glance()),
            Row("Is it progressing, and how fast?", _progress()),
            Row("What does its time go into?", _phases()),
            Row("Is it learning?", _learning()),
            Row("Checkpoints", checkpoints()),
            Row("What did failures and waiting cost?", goodput()),
            Row("Memory as PyTorch's allocator sees it", allocator(), collapsed=True),
            Row("Events, and who the run is", identity(), collapsed=True),
        ),
        marks=(RESTARTS, CHECKPOINTS, ALERTS_OF_RUN),
    )


def _glance() -> tuple[Panel, ...]:
    return (
        stat(
            "Since the last step",
            now("time() - max(training_last_progress_timestamp_seconds{@run})"),
            unit="s",
            decimals=0,
            thresholds=above(60, 300),
            about=About(
                "Time since a rank finished a step or a batch of validation.",
                "much longer than the longest step (*How long does a step take?*); above five minutes it hangs, "
                "unless it validates, saves or starts, which the next panel says.",
                "*Ranks and stragglers* shows which rank stopped first and in which phase; `py-spy dump` on that one.",
                "no rank has made a step yet, or none is known any more.",
            ),
            empty="no steps",
        ),
        stat(
            "What is it doing now?",
            now("count by (phase) (training_phase_active{@run} == 1)", "{{phase}}"),
            unit="none",
            text="value_and_name",
            color={"mode": "fixed", "fixedColor": PLAIN},
            w=8,
            about=About(
                "Ranks by the phase that they are in at the moment.",
                "all but one wait in `grad_sync` or `backward`: they wait for the one that is elsewhere.",
                "*Ranks and stragglers* names it, with its node and GPU.",
                "the job tells no phases, or no process of it lives.",
            ),
            empty="no phases",
        ),
        stat(
            "Step",
            now("max(training_step{@run})", "now"),
            now("max(training_step_target{@run})", "of"),
            unit="locale",
            text="value_and_name",
            about=About(
                "The step that the run is at, and the one that it ends at.",
                "it goes back after a restart: those steps are done again (*Lost steps*).",
                "save more often: *Checkpoints* says how often.",
                "the job does not tell.",
            ),
        ),
        stat(
            "Time left",
            now(
                "clamp_min(max(training_step_target{@run}) - max(training_step{@run}), 0)"
                ' / (max(rate(training_steps_total{@run, mode="train"}[5m])) > 0)'
            ),
            unit="dtdurations",
            about=About(
                "Steps that are left, at the speed of the last five minutes.",
                "it grows: the run slows down, or stands still now and then.",
                "see what its time goes into.",
                "it stands still now, or has no target.",
            ),
            empty="stands still, or no target",
        ),
        stat(
            "Goodput so far",
            now(f"max(training_productive_seconds_total{{@run}}) / max({WALL})"),
            unit="percentunit",
            decimals=1,
            thresholds=below(0.9, 0.7),
            about=About(
                "Share of the time since the first attempt that went into steps which a checkpoint has made safe.",
                "below 90 % after some hours; just after the start it is low since nothing is saved yet.",
                "*What did failures and waiting cost?* says what the rest went into.",
                "no time is counted for this run.",
            ),
        ),
    )


def _progress() -> tuple[Panel, ...]:
    return (
        lines(
            "Which step is it at?",
            Query("max(training_step{@run})", "step", BLUE),
            unit="locale",
            w=8,
            about=About(
                "The number of the step; a straight climb is a steady run. Orange-red lines mark attempts, purple ones "
                "checkpoints.",
                "a flat part (it waits or hangs), or a fall (a restart from an older checkpoint).",
                "flat: the phases below say what it does. Fall: *What did failures cost?*.",
                "no process of the job lives, or it does not tell its step.",
            ),
            empty=NO_STEPS,
        ),
        lines(
            "How many tokens or samples a second?",
            Query('sum(rate(training_tokens_total{@run, mode="train"}[$__rate_interval]))', "tokens", BLUE),
            Query(
                'sum(rate(training_samples_total{@run, mode="train"}[$__rate_interval]))',
                "samples",
                ORANGE,
                right=True,
            ),
            unit="cps",
            w=8,
            about=About(
                "Throughput of the whole run: tokens on the left, samples dashed and on the right.",
                "a step down that lasts: something was changed or throttled; zeros at intervals: it saves or validates.",
                "compare with *GPUs* (clocks) and with the data wait below.",
            ),
            empty=NOT_TOLD,
        ),
        lines(
            "How much of the GPUs' arithmetic is used?",
            Query(MFU.format(work="model"), "MFU: the model's own", BLUE),
            Query(MFU.format(work="hardware"), "HFU: with recomputation", ORANGE),
            unit="percentunit",
            w=8,
            about=About(
                "Floating point operations of the model as a share of what the GPUs could do (the peak is exported "
                "with its source). Formulas differ: compare only runs of one `flops_method`.",
                "below 30 % for large transformers.",
                "tensor activity on *GPUs* says whether the kernels or the waiting are at fault.",
            ),
            empty="The job tells no FLOPs, or the peak of its device is not known.",
        ),
        lines(
            "How long does a step take?",
            Query(f"histogram_quantile(0.5, {STEP_BUCKETS})", "median, by buckets", PALE),
            Query(f"histogram_quantile(0.99, {STEP_BUCKETS})", "99 of 100 are below", ORANGE),
            Query(
                'sum(rate(training_step_duration_seconds_sum{@run, mode="train"}[$__rate_interval]))'
                ' / sum(rate(training_step_duration_seconds_count{@run, mode="train"}[$__rate_interval]))',
                "mean",
                BLUE,
            ),
            Query("max(training_step_longest_seconds{@run})", "longest of the last 100", VERMILION),
            Query("max(training_step_ideal_seconds{@run})", "undisturbed", bound=True),
            unit="s",
            logarithmic=True,
            links=(TO_RANKS,),
            about=About(
                "Time of training steps; *undisturbed* is the mean of those without outliers. Quantiles come from a histogram and "
                "are as rough as its buckets; the mean is exact.",
                "a mean well above *undisturbed*, or a widening distance to the upper lines.",
                "a regular pattern is the data loader or a periodic task; a steady rise, memory or heat.",
                "no step ended in that interval.",
            ),
            empty=NO_STEPS,
        ),
        heatmap(
            "How are the steps' times spread?",
            Query(
                'sum by (le) (increase(training_step_duration_seconds_bucket{@run, mode="train"}[$__rate_interval]))',
                "{{le}}",
                heatmap=True,
            ),
            unit="none",
            axis="s",
            about=About(
                "Steps by how long they took; a light field is where most are.",
                "two bands: every n-th step does something more, or one in n waits.",
                "count how often the upper band comes: it is the period of the cause.",
                "no step ended in that interval.",
            ),
            empty=NO_STEPS,
        ),
    )


def _phases() -> tuple[Panel, ...]:
    share = "sum by (phase) (rate(training_phase_seconds_total{@rank}[$__rate_interval]))"
    wait = (
        'sum by (rank) (rate(training_phase_seconds_total{@rank, phase="data_loading"}[$__rate_interval]))'
        " / sum by (rank) (rate(training_phase_seconds_total{@rank}[$__rate_interval]))"
    )
    return (
        lines(
            "What does the time go into?",
            Query(
                f"{share} / ignoring (phase) group_left ()"
                " sum(rate(training_phase_seconds_total{@rank}[$__rate_interval]))",
                "{{phase}}",
            ),
            unit="percentunit",
            most=1,
            stacked=True,
            color=fixed(GREY),
            overrides=named(PHASES),
            legend="right",
            w=16,
            h=10,
            links=(TO_RANKS,),
            about=About(
                "Time of the main threads by phase, as shares of it, over the chosen ranks. Blue and green is work, "
                "orange waiting for data, purple checkpoints, brown starting.",
                "orange above 20 %; purple above 5 %; grey (*other*) above 10 %: time that nobody has named.",
                "orange: more or faster data workers. Purple: asynchronous checkpoints. Grey: put a span around it.",
                "no process of the chosen ranks lived then.",
            ),
            empty="The job tells no phases: spans of exporter.training or a bridge make them.",
        ),
        lines(
            "How long do ranks wait for data?",
            Query(f"quantile(0.5, {wait})", "median rank", BLUE),
            Query(f"max({wait})", "worst rank", VERMILION),
            unit="percentunit",
            most=1,
            thresholds=steps((None, PLAIN), (0.2, WARNING)),
            w=8,
            h=5,
            links=(TO_RANKS,),
            about=About(
                "Share of each rank's time in which it waited for the next batch.",
                "above the dashed line (20 %); only the worst: that rank's data or disk.",
                "all: `num_workers`, prefetch, cheaper decoding. One: *Node and container* of its node.",
                "no rank loaded data then.",
            ),
            empty="The job tells no data_loading phase.",
        ),
        lines(
            "What goes on in the background?",
            Query(
                "sum by (task) (rate(training_background_seconds_total{@run}[$__rate_interval]))", "{{task}}"
            ),
            unit="percentunit",
            color=shades(PURPLE),
            w=8,
            h=5,
            about=About(
                "Share of time in which a task ran beside training: uploads of checkpoints, prefetching.",
                "an upload at 100 %: the next checkpoint has to wait for it.",
                "save less often, or to something faster.",
                "nothing ran beside training.",
            ),
            empty="No task beside training was told.",
        ),
    )


def _learning() -> tuple[Panel, ...]:
    marks: list[Override] = [
        {
            "matcher": {"id": "byFrameRefID", "options": "B"},
            "properties": [
                {"id": "color", "value": fixed(BAD)},
                {"id": "custom.drawStyle", "value": "points"},
                {"id": "custom.showPoints", "value": "always"},
                {"id": "custom.pointSize", "value": 9},
                {"id": "custom.axisPlacement", "value": "hidden"},
                {"id": "unit", "value": "none"},
            ],
        }
    ]
    return (
        lines(
            "How large is the loss?",
            Query("max by (mode) (training_loss{@run})", "{{mode}}"),
            Query(
                events("training_nonfinite_total{@run}", "kind, value", born=True) + " > 0",
                "{{kind}} was {{value}}",
            ),
            unit="none",
            least=None,
            overrides=[*named({"train": BLUE, "validation": ORANGE, "test": GREEN}), *marks],
            w=12,
            h=9,
            about=About(
                "The last finite loss of rank 0; a dot marks an interval with losses or gradients that were no numbers.",
                "a dot; a rise that does not end; a train loss that falls while validation rises.",
                "a dot: find the batch (`training_skipped_steps_total` says whether it was skipped), go back to the "
                "checkpoint before. Rise: the learning rate.",
                "no loss was told in that interval: validation is told when it runs.",
            ),
            empty="The job tells no loss.",
        ),
        lines(
            "How large are the gradients?",
            Query("max(training_grad_norm{@run})", "gradient norm", BLUE),
            unit="none",
            soft=False,
            w=6,
            h=9,
            about=About(
                "Norm of the gradients, before clipping where the job tells it so.",
                "spikes that become more frequent: they come before a loss that is no number.",
                "lower the learning rate, or clip.",
            ),
            empty="The job tells no gradient norm.",
        ),
        lines(
            "Learning rate, loss scale",
            Query("max(training_learning_rate{@run})", "learning rate", BLUE),
            Query("max(training_loss_scale{@run})", "loss scale (right)", ORANGE, right=True),
            unit="none",
            soft=False,
            w=6,
            h=5,
            about=About(
                "The schedule as it is; with mixed precision the loss scale too.",
                "a loss scale that only falls.",
                "gradients overflow at every scale: look for the operation that does.",
            ),
            empty="The job tells neither.",
        ),
        lines(
            "Skipped steps",
            Query(events("training_skipped_steps_total{@run}", "reason", born=True), "{{reason}}"),
            unit="none",
            bars=True,
            overrides=named({"overflow": ORANGE, "nonfinite": VERMILION}),
            w=6,
            h=4,
            about=About(
                "Steps whose update was not applied.",
                "more than one in ten.",
                "an overflow now and then is how the loss scale is found; more is not.",
            ),
            empty="None was told.",
        ),
    )
