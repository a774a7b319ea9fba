"""Families of torchelastic: what its agent does, and what becomes of its workers.

Filled by Stats of the same name that `exporter.elastic` makes in the agent, as any Stat through the feed; here is what
they are. All but `training_elastic_refused_total` are the agent's: `role="agent"`, no rank.
"""

from __future__ import annotations

from exporter.collectors.family import FamilySpec
from exporter.ledger.identity_labels import IDENTITY_LABELS

_LINGERS = (
    "; absent where no agent of the run is watched, when its totals no longer linger, and while the ledger's state cannot be"
    " written."
)

FUNCTION_CALLS = FamilySpec(
    "training_elastic_function_calls_total",
    "counter",
    "Calls of the agent's own functions that have returned (success) or raised (failure)" + _LINGERS,
    (*IDENTITY_LABELS, "function", "outcome"),
    source="torchelastic metrics <class>.<function>.{success,failure}",
)
FUNCTION_SECONDS = FamilySpec(
    "training_elastic_function_seconds",
    "summary",
    "How long calls of the agent's own functions took, in whole milliseconds" + _LINGERS,
    (*IDENTITY_LABELS, "function"),
    "seconds",
    "torchelastic metrics <class>.<function>.duration.ms",
)
RENDEZVOUS_SECONDS = FamilySpec(
    "training_elastic_rendezvous_seconds",
    "histogram",
    "How long the agent waited for the others at each rendezvous" + _LINGERS,
    IDENTITY_LABELS,
    "seconds",
    "torchelastic metric SimpleElasticAgent._rendezvous.duration.ms",
)
RESTARTS = FamilySpec(
    "training_elastic_restarts_total",
    "counter",
    "Restarts of this agent's workers, whoever caused them: a failure here, or nodes that failed, came or went"
    + _LINGERS,
    IDENTITY_LABELS,
    source="torchelastic metric SimpleElasticAgent._restart_workers.success",
)
FAILURE_RESTARTS = FamilySpec(
    "training_elastic_failure_restarts_total",
    "counter",
    "Restarts that a failure of this agent's own workers has used up" + _LINGERS,
    (*IDENTITY_LABELS, "worker_role"),
    source="falls of the torchelastic metric workers.<role>.remaining_restarts",
)
REMAINING_RESTARTS = FamilySpec(
    "training_elastic_remaining_restarts",
    "gauge",
    "Restarts that failures may still use up; absent before the workers have started and after the agent's end.",
    (*IDENTITY_LABELS, "worker_role"),
    source="torchelastic metric workers.<role>.remaining_restarts",
)
WORKER_STATES = FamilySpec(
    "training_elastic_worker_state_checks_total",
    "counter",
    "Looks of the agent at its workers, by what it found (healthy, succeeded, failed, unhealthy, ...); the time in a"
    " state is the increase times the agent's monitor interval" + _LINGERS,
    (*IDENTITY_LABELS, "state", "worker_role"),
    source="torchelastic metrics workers.<role>.<state>",
)
FLAKINESS = FamilySpec(
    "training_elastic_flakiness_ratio",
    "summary",
    "Share of the allowed restarts that a run has used up, or 1 when it failed: sum / count" + _LINGERS,
    (*IDENTITY_LABELS, "worker_role"),
    "ratio",
    "torchelastic metric workers.<role>.flakiness",
)
RUNS = FamilySpec(
    "training_elastic_runs_total",
    "counter",
    "Runs of the agent that have ended, by what became of the workers: success_no_retries, success_with_retries,"
    " failed_no_retries, failed_with_retries, or interrupted (a signal or an error of the agent); what the agent calls"
    " its own success says only that it returned" + _LINGERS,
    (*IDENTITY_LABELS, "outcome", "worker_role"),
    source="torchelastic metrics workers.<role>.run_*, SimpleElasticAgent.run.failure",
)
WORKER_STARTS = FamilySpec(
    "training_elastic_worker_starts_total",
    "counter",
    "Worker processes that the agent has started" + _LINGERS,
    (*IDENTITY_LABELS, "worker_role"),
    source="torchelastic event torchelastic.worker.status.START",
)
WORKER_RESULTS = FamilySpec(
    "training_elastic_worker_results_total",
    "counter",
    "Final results of workers (succeeded, failed, terminated) with their exit codes; a failure that leads to a restart"
    " is none. Of several that failed, those with exit code -15 or -9 were mostly ended by the agent"
    + _LINGERS,
    (*IDENTITY_LABELS, "exit_code", "result", "worker_role"),
    source="torchelastic events torchelastic.worker.status.{SUCCEEDED,FAILED,TERMINATED} of workers",
)
REFUSED = FamilySpec(
    "training_elastic_refused_total",
    "counter",
    "Values of torchelastic metrics that were not recorded: another pair of group and name has the same family"
    " (collision), too many names (too_many), no usable name (name), a family that is somebody else's (definition),"
    " and metrics that a handler missed since it raised (handler); absent where there were none.",
    (*IDENTITY_LABELS, "reason"),
    source="exporter.elastic",
)

SPECS = (
    FUNCTION_CALLS,
    FUNCTION_SECONDS,
    RENDEZVOUS_SECONDS,
    RESTARTS,
    FAILURE_RESTARTS,
    REMAINING_RESTARTS,
    WORKER_STATES,
    FLAKINESS,
    RUNS,
    WORKER_STARTS,
    WORKER_RESULTS,
    REFUSED,
)
