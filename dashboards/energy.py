"""The dashboard *Energy, carbon, cost*: what runs and machines draw, what it buys, what is measured and what is a model."""

from __future__ import annotations

from dashboards.board import NODE, RESTARTS, RUN, Board, Row, Variable
from dashboards.palette import (
    BAD,
    BLUE,
    CAUSES,
    COMPONENTS,
    GREY,
    ORANGE,
    PHASES,
    PLAIN,
    PURPLE,
    VERMILION,
    WARNING,
    bounds,
    by_first_word,
    by_last_character,
    fixed,
    named,
    shades,
)
from dashboards.panels import About, Column, Panel, bars, below, lines, stat, steps, table
from dashboards.queries import Query, now, rows

UID = "training-energy"

NO_ENERGY = "No energy is attributed: no device of this run's nodes tells it, or another exporter on the node counts it."
NO_TARIFF = "Not configured: see `energy:` in the exporter's configuration. Nothing is guessed."
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
            Row("What was wasted?", _waste()),
            Row("Carbon, water, money", _carbon()),
            Row("What is measured, and what is a model?", _sources()),
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
            overrides=by_last_character(),
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
            ),
            unit="watt",
            overrides=[*by_last_character(), bounds("B")],
            legend="hidden",
            about=About(
                "Power by the cards' own energy counters, which miss nothing between two readings; dashed: what one "
                "draws without work.",
                "a card far above or below the others.",
                "above: a lower power limit costs little speed. Below: *GPUs* says what holds it back.",
            ),
            empty="No GPU tells its energy.",
        ),
        lines(
            "What do CPUs and memory draw?",
            Query(
                'sum by (instance, source) (host_cpu_power_watts{instance=~"$node"})',
                "{{instance}} CPUs ({{source}})",
            ),
            Query(
                'sum by (instance, source) (host_dram_power_watts{instance=~"$node"})',
                "{{instance}} memory ({{source}})",
            ),
            unit="watt",
            overrides=[_shades("A", ORANGE), _shades("B", PURPLE)],
            about=About(
                "Mean power between two readings. The source is part of the name: `tdp_model` is a guess from the load.",
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
            overrides=by_last_character(),
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
            overrides=by_last_character(),
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
            overrides=by_last_character(),
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
            decimals=3,
            overrides=named(PHASES | {"unattributed": GREY}),
            color=fixed(GREY),
            w=12,
            about=About(
                "Energy by phase, found by regression of the counters' steps on the phases' times. What could not be "
                "told apart is *unattributed*.",
                "much energy in phases that make no progress.",
                "shorten them; look at the quality beside before you trust short phases.",
                "the job tells no phases, or no device tells its energy.",
            ),
            empty="Needs energy and phases.",
        ),
        table(
            "How well is that known?",
            rows("max by (run, phase) (training_phase_energy_quality_ratio{@run})"),
            rows("sum by (run, phase) (training_phase_energy_joules_total{@run})"),
            columns=(
                Column("run", "Run"),
                Column("phase", "Phase"),
                Column("B", "Energy", unit="joule", width=120),
                Column(
                    "A",
                    "Quality",
                    unit="percentunit",
                    width=150,
                    decimals=0,
                    bar=(0, 1),
                    thresholds=steps((None, WARNING), (0.7, BLUE)),
                ),
            ),
            sort="Energy",
            w=12,
            h=8,
            about=About(
                "Share of each phase's energy that was not measured together with another phase: 100 % is certain.",
                "below 70 %: the phase is shorter than the counter's period.",
                "go by time shares for such a phase.",
            ),
            empty="Needs energy and phases.",
        ),
    )


def _waste() -> tuple[Panel, ...]:
    return (
        lines(
            "How much is wasted, and on what?",
            Query(
                "sum by (cause) (rate(training_wasted_energy_joules_total{@run}[$__rate_interval]))",
                "{{cause}}",
            ),
            unit="watt",
            stacked=True,
            overrides=named(CAUSES),
            about=About(
                "Power that went into no step, by the causes of badput. Work that a crash threw away appears when it is "
                "known to be lost.",
                "anything that lasts.",
                "`data_stall`: the loader. `lost_progress`: save more often. `hang`: end it.",
                "the job tells no phases.",
            ),
            empty="Needs energy and the phases of exporter.training.",
        ),
        bars(
            "How much so far?",
            now("sum by (cause) (training_wasted_energy_joules_total{@run}) / 3.6e6 > 0", "{{cause}}"),
            unit="kwatth",
            decimals=3,
            overrides=named(CAUSES),
            color=fixed(GREY),
            w=6,
            about=About(
                "Energy that made no progress, by cause.",
                "the longest bar is the first to shorten.",
                "as beside.",
                "nothing was wasted, or the job tells no phases.",
            ),
            empty="Nothing, or not known: needs the phases of exporter.training.",
        ),
        lines(
            "How much of the energy was productive?",
            Query(
                "sum by (run) (training_productive_energy_joules_total{@run})"
                " / sum by (run) (training_energy_joules_total{@run})",
                "{{run}}",
            ),
            unit="percentunit",
            most=1,
            overrides=by_last_character(),
            w=6,
            about=About(
                "Share of the energy since the run began that went into steps which a checkpoint has made safe; rises "
                "with each checkpoint.",
                "below 90 % after some hours.",
                "see the causes beside.",
            ),
            empty="Needs energy, steps and checkpoints.",
        ),
    )


def _carbon() -> tuple[Panel, ...]:
    return (
        lines(
            "How much CO2 an hour?",
            Query(
                "sum by (run) (rate(training_carbon_grams_total{@run}[$__rate_interval])) * 3600", "{{run}}"
            ),
            unit="massg",
            overrides=by_last_character(),
            w=8,
            about=About(
                "Grams of CO2 equivalent in an hour at this rate: energy times PUE times intensity of the moment.",
                "the same power at a dirtier hour.",
                "move what can wait to a cleaner one.",
            ),
            empty=NO_TARIFF,
        ),
        lines(
            "How clean is the electricity?",
            Query(
                "max by (zone, source, factor, kind) (training_carbon_intensity_grams_per_joule) * 3.6e6",
                "{{zone}}: {{kind}}, {{factor}} ({{source}})",
            ),
            unit="massg",
            color=shades(BLUE),
            steps_drawn=True,
            w=8,
            about=About(
                "Grams of CO2 equivalent per kWh, as configured or read from a file.",
                "a flat line where a file should change it: the file is stale.",
                "see *Settings in force*: since when.",
            ),
            empty=NO_TARIFF,
        ),
        lines(
            "How much money an hour?",
            Query(
                "sum by (kind, currency) (rate(training_cost_total{@run}[$__rate_interval])) * 3600",
                "{{kind}}, {{currency}}",
            ),
            unit="none",
            decimals=2,
            stacked=True,
            overrides=by_first_word({"electricity": ORANGE, "device_time": BLUE}),
            w=8,
            about=About(
                "Electricity and rent in an hour at this rate.",
                "rent goes on while a run stands still.",
                "give devices back between attempts.",
            ),
            empty=NO_TARIFF,
        ),
        table(
            "What did each run take?",
            rows("sum by (run) (training_energy_joules_total{@run}) / 3.6e6"),
            rows("sum by (run) (training_carbon_grams_total{@run})"),
            rows("sum by (run) (training_embodied_carbon_grams_total{@run})"),
            rows("sum by (run) (training_water_liters_total{@run})"),
            rows('sum by (run) (training_cost_total{@run, kind="electricity"})'),
            rows('sum by (run) (training_cost_total{@run, kind="device_time"})'),
            columns=(
                Column("run", "Run"),
                Column("A", "Energy", unit="kwatth", decimals=3, width=110),
                Column("B", "CO2", unit="massg", decimals=2, width=110),
                Column("C", "CO2, making", unit="massg", decimals=2, width=110),
                Column("D", "Water", unit="litre", decimals=3, width=110),
                Column("E", "Electricity", unit="none", decimals=3, width=110),
                Column("F", "Rent", unit="none", decimals=3, width=110),
            ),
            sort="Energy",
            w=14,
            h=8,
            about=About(
                "Totals of each run over its restarts, on the nodes that are scraped; *CO2, making* is the devices' own, *Electricity* and "
                "*Rent* are money.",
                "a run that costs more than others of the same work.",
                "*Compare runs*.",
                "what is not configured is absent, not zero.",
            ),
            empty=NO_ENERGY,
        ),
        table(
            "Settings in force",
            rows(
                'label_replace(max by (source) (training_pue_ratio), "setting", "PUE of the site", "", "")'
                " or label_replace(max by (source, zone) (training_carbon_intensity_grams_per_joule) * 3.6e6,"
                ' "setting", "grams of CO2 per kWh", "", "")'
                " or label_replace(max by (source, currency) (training_electricity_price_per_joule) * 3.6e6,"
                ' "setting", "electricity per kWh", "", "")'
                " or label_replace(max by (device_type, currency) (training_device_price_per_second) * 3600,"
                ' "setting", "rent per hour", "", "")'
            ),
            columns=(
                Column("setting", "Setting"),
                Column("A", "Value", unit="none", decimals=3, width=90),
                Column("currency", "Currency", width=90),
                Column("device_type", "Device", width=100),
                Column("zone", "Zone", width=70),
                Column("source", "From", width=80),
            ),
            w=10,
            h=8,
            about=About(
                "Numbers that were configured; nothing is guessed from an address or a table of countries.",
                "a number that is not yours.",
                "`energy:` in the exporter's configuration.",
                "nothing is configured.",
            ),
            empty=NO_TARIFF,
        ),
    )


def _sources() -> tuple[Panel, ...]:
    return (
        table(
            "Where does each number come from?",
            rows(
                'max by (instance, component, device, source, measured, name) (exporter_energy_source_info{instance=~"$node"})'
            ),
            rows('max by (instance, device) (exporter_energy_resolution_seconds{instance=~"$node"})'),
            rows('max by (instance, device) (exporter_energy_crosscheck_ratio{instance=~"$node"})'),
            rows('sum by (instance, device) (exporter_energy_resets_total{instance=~"$node"})'),
            rows('sum by (instance, device) (exporter_energy_gap_seconds_total{instance=~"$node"})'),
            columns=(
                Column("instance", "Node", width=130),
                Column("component", "Component", width=110),
                Column("name", "Device"),
                Column("source", "Read from", width=130),
                Column(
                    "measured",
                    "Measured?",
                    width=110,
                    mappings=[
                        {
                            "type": "value",
                            "options": {
                                "true": {"text": "measured", "color": PLAIN, "index": 0},
                                "false": {"text": "a model", "color": WARNING, "index": 1},
                            },
                        }
                    ],
                ),
                Column("B", "Period", unit="s", width=90),
                Column(
                    "C",
                    "Counter / power",
                    unit="none",
                    decimals=2,
                    width=140,
                    thresholds=steps((None, BAD), (0.8, PLAIN), (1.25, BAD)),
                ),
                Column("D", "Corrections", unit="none", width=110),
                Column("E", "Without reading", unit="s", width=140),
                Column("device", "Id"),
            ),
            sort="Component",
            about=About(
                "Each device: what its energy is read from, how often its counter moves, whether it agrees with its own "
                "power (1 is agreement), and what had to be corrected or bridged.",
                "*a model*; a ratio outside 0.8 to 1.25: counter and power disagree, and nobody knows which is right.",
                "a model: give the exporter the right to read. A bad ratio: treat that card's joules with care.",
            ),
            empty="No device of these nodes tells its energy.",
            h=10,
        ),
        lines(
            "How much of the time is covered by measurement?",
            Query(
                'min by (instance, component) (exporter_energy_coverage_ratio{instance=~"$node"})',
                "{{instance}} {{component}}",
            ),
            unit="percentunit",
            most=1,
            color=shades(BLUE),
            w=8,
            h=7,
            about=About(
                "Share of the exporter's life in which a component was measured; a model counts as none.",
                "GPUs below 99 %; CPUs at zero mean a model, or nothing.",
                "see the reasons beside.",
            ),
            empty="No device of these nodes tells its energy.",
        ),
        lines(
            "Why was nothing read?",
            Query(
                'sum by (component, reason) (rate(exporter_energy_gap_seconds_total{instance=~"$node"}[$__rate_interval]))',
                "{{component}}: {{reason}}",
            ),
            unit="none",
            color=shades(VERMILION),
            w=8,
            h=7,
            about=About(
                "Devices without a reading, by reason.",
                "`permission`, `lost`.",
                "`permission`: /sys/class/powercap for root only. `lost`: the GPU fell off the bus.",
                "no device has ever been without one.",
            ),
            empty="No device was ever without a reading.",
        ),
        bars(
            "How was the runs' share found?",
            now(
                "sum by (component, method) (training_energy_joules_total{@run}) / 3.6e6",
                "{{component}}: {{method}}",
            ),
            unit="kwatth",
            decimals=3,
            color={"mode": "fixed", "fixedColor": BLUE},
            w=8,
            h=7,
            about=About(
                "Energy by the way of attribution: `exclusive` (nobody else held the device) and `whole` (as configured) "
                "are certain; `sm_share`, `cpu_share`, `memory_share` divide by use.",
                "`memory_share`: the driver tells nothing better.",
                "one job for each GPU makes it exclusive.",
                "no energy is attributed.",
            ),
            empty=NO_ENERGY,
        ),
    )


def _shades(query: str, color: str) -> dict[str, object]:
    return {
        "matcher": {"id": "byFrameRefID", "options": query},
        "properties": [{"id": "color", "value": shades(color)}],
    }
