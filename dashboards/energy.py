"""The dashboard *Energy, carbon, cost*: what runs and machines draw, what it buys, what is measured and what is a model."""

from __future__ import annotations

from dashboards.board import NODE, RESTARTS, RUN, Board, Row, Variable
from dashboards.energy_bill import NO_ENERGY, carbon, sources, waste
from dashboards.palette import COMPONENTS, GREY, PHASES, fixed, named
from dashboards.panels import About, Panel, bars, below, lines, stat
from dashboards.queries import Query, now

UID = "training-energy"
NO_STEPS = "Needs energy and steps: the job does not use exporter.training or a bridge."
JOULES = "sum by (run) (rate(training_energy_joules_total{@run}[$__rate_interval]))"
NODES = Variable(
    NODE.name,
    NODE.label,
    "label_values(exporter_energy_counting, instance)",
    what="Nodes, for the panels about devices.",
)


def board() -> Board:
    """The dashboard."""
    return Board(
        uid=UID,
        title="Training / Energy, carbon, cost",
        what="Watts, joules per step and token, wasted energy, grams of CO2, money; and what of it is measured.",
        variables=(RUN, NODES),
        rows=(
            Row("At a glance", _glance()),
            Row("How much power, and where?", _power()),
            Row("What does it buy?", _worth()),
            Row("What was wasted?", waste()),
            Row("Carbon, water, money", carbon()),
            Row("What is measured, and what is a model?", sources()),
        ),
        marks=(RESTARTS,),
    )


def _glance() -> tuple[Panel, ...]:
    return (
        stat(
            "Power of the runs",
            now("sum(rate(training_energy_joules_total{@run}[$__rate_interval]))"),
            unit="watt",
            about=About(
                "What the chosen runs draw now: their share of GPUs, CPUs and memory, without cooling.",
                "far below the GPUs' limit: they wait. Above zero after the end: something still runs.",
                "see *Training run* for what they wait for.",
                "no energy is attributed to them.",
            ),
        ),
        stat(
            "Energy so far",
            now("sum(training_energy_joules_total{@run}) / 3.6e6"),
            unit="kwatth",
            about=About(
                "Energy of the chosen runs, over their restarts.",
                "more than the work is worth: compare the joules per token with other runs.",
                "*Compare runs*.",
                "no energy is attributed to them.",
            ),
        ),
        stat(
            "Energy per token",
            now(
                "sum(rate(training_energy_joules_total{@run}[5m]))"
                ' / (sum(rate(training_tokens_total{@run, mode="train"}[5m])) > 0)'
            ),
            unit="joule",
            about=About(
                "Joules for each token, over the last five minutes.",
                "it rises: the same work takes longer, while the machine draws nearly as much.",
                "find what the time goes into; energy follows time.",
                "no tokens, or no energy.",
            ),
            empty="no tokens told",
        ),
        stat(
            "Energy goodput",
            now(
                "sum(training_productive_energy_joules_total{@run}) / sum(training_energy_joules_total{@run})"
            ),
            unit="percentunit",
            decimals=1,
            thresholds=below(0.9, 0.7),
            about=About(
                "Share of the energy that went into steps which a checkpoint has made safe.",
                "below 90 % after some hours.",
                "*What was wasted?* has the causes.",
                "the job tells no steps or checkpoints.",
            ),
            empty="no steps told",
        ),
        stat(
            "CO2 so far",
            now("sum(training_carbon_grams_total{@run})"),
            unit="massg",
            decimals=1,
            about=About(
                "Grams of CO2 equivalent of the runs' energy, cooling of the site included where its PUE is configured.",
                "no threshold: it is as bad as your grid.",
                "a cleaner hour, a cleaner region, fewer wasted joules.",
                "no carbon intensity is configured; none is guessed.",
            ),
            empty="no intensity set",
        ),
        stat(
            "Money so far",
            now("sum by (currency) (training_cost_total{@run})", "{{currency}}"),
            unit="none",
            decimals=2,
            text="value_and_name",
            about=About(
                "Electricity and rent of devices, at the configured prices.",
                "more than planned for the steps that were made.",
                "*What was wasted?*.",
                "no price is configured; none is guessed.",
            ),
            empty="no price set",
        ),
    )


def _power() -> tuple[Panel, ...]:
    return (
        lines(
            "What do the runs draw?",
            Query(
                "sum by (component) (rate(training_energy_joules_total{@run}[$__rate_interval]))",
                "{{component}}",
            ),
            unit="watt",
            stacked=True,
            overrides=named(COMPONENTS),
            about=About(
                "Power of the chosen runs by component, from the devices' energy counters.",
                "a floor that does not fall when the run pauses: power for nothing.",
                "end or pack jobs; idle GPUs draw 70 to 100 W each.",
            ),
            empty=NO_ENERGY,
        ),
        lines(
            "What do the machines draw?",
            Query(
                'sum by (instance) (rate(gpu_energy_joules_total{instance=~"$node"}[$__rate_interval]))'
                ' + on (instance) (sum by (instance) (rate(host_cpu_energy_joules_total{instance=~"$node"}'
                "[$__rate_interval])) or 0 * sum by (instance) (rate(gpu_energy_joules_total"
                '{instance=~"$node"}[$__rate_interval])))',
                "{{instance}}",
            ),
            Query(
                'sum by (instance) (rate(host_dram_energy_joules_total{instance=~"$node"}[$__rate_interval]))',
                "memory of {{instance}}",
            ),
            unit="watt",
            about=About(
                "Power of all devices that can be read, whoever uses them.",
                "far more than the runs beside: others use the machine, or it idles dearly.",
                "see *GPUs* for processes that hold a GPU.",
            ),
            empty="No device of these nodes tells its energy.",
        ),
        lines(
            "What does each GPU draw, and of that at rest?",
            Query(
                'sum by (instance, gpu) (rate(gpu_energy_joules_total{instance=~"$node"}[$__rate_interval]))',
                "{{instance}} GPU {{gpu}}",
            ),
            Query(
                'max by (instance) (gpu_power_idle_watts{instance=~"$node", method="before_start"})'
                ' or max by (instance) (gpu_power_idle_watts{instance=~"$node", method="min_seen"})',
                "{{instance}} at rest, the most",
                bound=True,
            ),
            unit="watt",
            legend="hidden",
            about=About(
                "Power by the cards' own energy counters, which miss nothing between two readings; dashed: what one "
                "draws without work, or the least that was seen of it.",
                "a card far above or below the others.",
                "above: a lower power limit costs little speed. Below: *GPUs* says what holds it back.",
            ),
            empty="No GPU tells its energy.",
        ),
        lines(
            "What do CPUs and memory draw?",
            Query(
                'sum by (instance, source) (host_cpu_power_watts{instance=~"$node"})',
                "CPUs ({{source}}) of {{instance}}",
            ),
            Query(
                'sum by (instance, source) (host_dram_power_watts{instance=~"$node"})',
                "memory ({{source}}) of {{instance}}",
                dashed=True,
            ),
            unit="watt",
            about=About(
                "Mean power between two readings, of memory dashed. The source is part of the name: `tdp_model` is a guess from the load.",
                "a model where registers could be read.",
                "read access to /sys/class/powercap (root since Linux 5.10).",
            ),
            empty="No energy registers can be read here, and no model is configured (`energy.cpu_tdp_watts`).",
        ),
    )


def _worth() -> tuple[Panel, ...]:
    def per(title: str, family: str, unit: str, what: str) -> Panel:
        return lines(
            title,
            Query(
                f'{JOULES} / (sum by (run) (rate({family}{{@run, mode="train"}}[$__rate_interval])) > 0)',
                "{{run}}",
            ),
            unit=unit,
            w=6,
            about=About(
                what,
                "a rise at equal work.",
                "what slowed the run down at that time also cost this energy.",
                "no step ended in that interval.",
            ),
            empty=NO_STEPS,
        )

    return (
        lines(
            "Joules per step",
            Query(
                f'{JOULES} / (max by (run) (rate(training_steps_total{{@run, mode="train"}}[$__rate_interval])) > 0)',
                "{{run}}",
            ),
            unit="joule",
            w=6,
            about=About(
                "Energy of the whole run for each step: a ratio of counters, so it is right for short steps too.",
                "a rise at equal work.",
                "what slowed the run down at that time also cost this energy.",
                "no step ended in that interval.",
            ),
            empty=NO_STEPS,
        ),
        per("Joules per sample", "training_samples_total", "joule", "Energy for each sample."),
        per("Joules per token", "training_tokens_total", "joule", "Energy for each token."),
        lines(
            "FLOPs per joule",
            Query(
                f"sum by (run) (rate(training_model_flops_total{{@run}}[$__rate_interval])) / {JOULES}",
                "{{run}}",
            ),
            unit="sishort",
            w=6,
            about=About(
                "Floating point operations of the model for each joule: MFU's sister.",
                "a fall at equal work; an H100 at its limit can do about 1.4 T a joule.",
                "as for MFU on *Training run*.",
            ),
            empty="The job tells no FLOPs, or no energy is attributed.",
        ),
        bars(
            "Which phases take the energy?",
            now("sum by (phase) (training_phase_energy_joules_total{@run}) / 3.6e6", "{{phase}}"),
            unit="kwatth",
            overrides=named(PHASES | {"unattributed": GREY}),
            color=fixed(GREY),
            w=12,
            about=About(
                "Energy of each interval, divided by the time in each phase. What no phase explains is *unattributed*.",
                "much energy in phases that make no progress.",
                "shorten them; phases of different power that alternate fast are not told apart.",
                "the job tells no phases, or no device tells its energy.",
            ),
            empty="Needs energy and phases.",
        ),
    )
