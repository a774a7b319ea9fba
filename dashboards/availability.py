"""Availability of exporters: panels and PromQL for exporters that are down, and for the start of a problem."""

from __future__ import annotations

from dashboards.palette import BAD, GOOD
from dashboards.panels import Panel, stat, threshold_steps
from dashboards.queries import instant_query


def last_time(condition: str) -> str:
    """Return PromQL for the last time in the time range at which a comparison with `bool` was true, in Unix seconds; 0 if it never was."""
    return f"max_over_time((time() * ({condition}))[$__range:$__interval])"


EXPORTER_DOWN_SINCE = (
    "(max by (instance) (last_over_time(instance:exporter_last_sample:timestamp_seconds{@node_any_job}[$__range]))"
    f" or on (instance) max by (instance) ({last_time('up{@target} == bool 1')})) and on (instance) min by (instance) (up{{@target}}) == 0"
)
"""PromQL for the last sample of an exporter that is down now, as on *Run* and *Fleet*.

Without a recorded sample, the result is the last time in the time range at which the exporter was up; 0 if there is no such time.
"""
NOT_SCRAPED_SINCE = f"max by (instance) ({last_time('up{@target} >= bool 0')}) unless on (instance) max by (instance) (up{{@target}})"
"""PromQL for the last time at which an exporter that is no target of Prometheus any more was a target, by node."""
EXPORTER_UP_SINCE = "max by (instance) (process_start_time_seconds{@node}) and on (instance) min by (instance) (up{@target}) == 1"
"""PromQL for the start of the process of each exporter that is up."""
NO_EXPORTER_UP = "absent(up{@target} == 1)"
"""PromQL with the value 1 if no exporter of the selected nodes is up: the state of the nodes is unknown."""


_STATES = (
    ("down for", EXPORTER_DOWN_SINCE, BAD),
    ("not scraped for", NOT_SCRAPED_SINCE, BAD),
    ("up for", EXPORTER_UP_SINCE, GOOD),
)
"""Text, PromQL of the start in Unix seconds, and color of each state of an exporter. An exporter is in one of the states."""


def exporter_state(w: int = 5) -> Panel:
    """Return the panel with the time for which the exporter of a node has been up, down or not scraped."""
    durations = (
        f'label_replace(time() - ({since}), "state", "{state}", "", "")' for state, since, _ in _STATES
    )
    return stat(
        "Exporter",
        instant_query(" or ".join(durations), "{{state}}"),
        unit="s",
        decimals=0,
        text_mode="value_and_name",
        color_mode="background",
        overrides=[
            {
                "matcher": {"id": "byName", "options": state},
                "properties": [{"id": "thresholds", "value": threshold_steps((None, color))}],
            }
            for state, _, color in _STATES
        ],
        w=w,
    )
