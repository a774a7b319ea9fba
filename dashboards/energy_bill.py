"""Rows of the dashboard *Energy, carbon, cost*: waste, carbon and money, and where the numbers come from."""

from __future__ import annotations

from dashboards.palette import (
    BAD,
    BLUE,
    CAUSES,
    GREY,
    ORANGE,
    PLAIN,
    VERMILION,
    WARNING,
    by_first_word,
    fixed,
    named,
    shades,
)
from dashboards.panels import About, Panel, bars, lines, steps, words
from dashboards.queries import Query, now
from dashboards.tables import Column, table

NO_ENERGY = "No energy is attributed: no device of this run's nodes tells it, or another exporter on the node counts it."
NO_TARIFF = "Not configured: see `energy:` in the exporter's configuration. Nothing is guessed."


def waste() -> tuple[Panel, ...]:
    """Give the panels about energy that advanced nothing."""
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


def carbon() -> tuple[Panel, ...]:
    """Give the panels about carbon, water and money."""
    return (
        lines(
            "How much CO2 an hour?",
            Query(
                "sum by (run) (rate(training_carbon_grams_total{@run}[$__rate_interval])) * 3600", "{{run}}"
            ),
            unit="massg",
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
            Column("run", "Run"),
            Column(
                "sum by (run) (training_energy_joules_total{@run}) / 3.6e6",
                "Energy",
                unit="kwatth",
                width=110,
            ),
            Column(
                "sum by (run) (training_carbon_grams_total{@run})", "CO2", unit="massg", decimals=2, width=110
            ),
            Column(
                "sum by (run) (training_embodied_carbon_grams_total{@run})",
                "CO2, making",
                unit="massg",
                decimals=2,
                width=110,
            ),
            Column(
                "sum by (run) (training_water_liters_total{@run})",
                "Water",
                unit="litre",
                decimals=3,
                width=110,
            ),
            Column(
                'sum by (run) (training_cost_total{@run, kind="electricity"})',
                "Electricity",
                decimals=3,
                width=110,
            ),
            Column(
                'sum by (run) (training_cost_total{@run, kind="device_time"})', "Rent", decimals=3, width=110
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
            Column("setting", "Setting"),
            Column(
                'label_replace(max by (source) (training_pue_ratio), "setting", "PUE of the site", "", "")'
                " or label_replace(max by (source, zone) (training_carbon_intensity_grams_per_joule) * 3.6e6,"
                ' "setting", "grams of CO2 per kWh", "", "")'
                " or label_replace(max by (source, currency) (training_electricity_price_per_joule) * 3.6e6,"
                ' "setting", "electricity per kWh", "", "")'
                " or label_replace(max by (device_type, currency) (training_device_price_per_second) * 3600,"
                ' "setting", "rent per hour", "", "")',
                "Value",
                decimals=3,
                width=90,
            ),
            Column("currency", "Currency", width=90),
            Column("device_type", "Device", width=100),
            Column("zone", "Zone", width=70),
            Column("source", "From", width=80),
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


def sources() -> tuple[Panel, ...]:
    """Give the panels about where each number comes from."""
    return (
        table(
            "Where does each number come from?",
            Column("instance", "Node", width=130),
            Column("component", "Component", width=110),
            Column("name", "Device"),
            Column("source", "Read from", width=130),
            Column(
                "measured",
                "Measured?",
                width=110,
                mappings=words({"true": ("measured", PLAIN), "false": ("a model", WARNING)}),
            ),
            Column(
                'max by (instance, device) (exporter_energy_resolution_seconds{instance=~"$node"})',
                "Period",
                unit="s",
                width=90,
            ),
            Column(
                'max by (instance, device) (exporter_energy_crosscheck_ratio{instance=~"$node"})',
                "Counter / power",
                decimals=2,
                width=140,
                thresholds=steps((None, BAD), (0.8, PLAIN), (1.25, BAD)),
            ),
            Column(
                'sum by (instance, device) (exporter_energy_resets_total{instance=~"$node"})',
                "Corrections",
                width=110,
            ),
            Column(
                'sum by (instance, device) (exporter_energy_gap_seconds_total{instance=~"$node"})',
                "Without reading",
                unit="s",
                width=140,
            ),
            Column("device", "Id"),
            of='max by (instance, component, device, source, measured, name) (exporter_energy_source_info{instance=~"$node"})',
            sort="Measured?",
            descending=False,
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
                'min by (instance) (exporter_energy_coverage_ratio{instance=~"$node", component="gpu"})',
                "gpu {{instance}}",
            ),
            Query(
                'min by (instance, component) (exporter_energy_coverage_ratio{instance=~"$node", component!="gpu"})',
                "{{component}} {{instance}}",
                dashed=True,
            ),
            unit="percentunit",
            most=1,
            w=8,
            h=7,
            about=About(
                "Share of the exporter's life in which GPUs and, dashed, other components were measured; a model counts as "
                "none.",
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
