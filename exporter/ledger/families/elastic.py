"""Families of torchelastic's metrics, filled by Stats of torchrun's agent.

The agent has no rank and `role="agent"`. Any process may report `training_elastic_refused_total`.
"""

from __future__ import annotations

from exporter.ledger.families import IDENTITY_LABELS
from exporter.ledger.families.training_family import GAUGE_ABSENT, TOTAL_ABSENT, TrainingFamily

FUNCTION_CALLS = TrainingFamily(
    name="training_elastic_function_calls_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "function", "outcome"),
    help=f"Calls of the torchelastic agent's functions that returned (success) or raised (failure).{TOTAL_ABSENT}",
    source="torchelastic metrics <class>.<function>.{success,failure}",
)
FUNCTION = TrainingFamily(
    name="training_elastic_function_seconds",
    type="summary",
    unit="seconds",
    labels=(*IDENTITY_LABELS, "function"),
    help=(
        "Duration of calls of the agent's functions, in whole milliseconds. Functions call each "
        f"other: do not add them.{TOTAL_ABSENT}"
    ),
    source="torchelastic metrics <class>.<function>.duration.ms",
)
RENDEZVOUS = TrainingFamily(
    name="training_elastic_rendezvous_seconds",
    type="histogram",
    unit="seconds",
    labels=IDENTITY_LABELS,
    help=f"Waiting time of the agent at each rendezvous.{TOTAL_ABSENT}",
    source="torchelastic metric SimpleElasticAgent._rendezvous.duration.ms",
)
RESTARTS = TrainingFamily(
    name="training_elastic_restarts_total",
    type="counter",
    labels=IDENTITY_LABELS,
    help=(
        "Restarts of this agent's workers for any reason: a failure here, or nodes that failed, "
        f"joined or left.{TOTAL_ABSENT}"
    ),
    source="torchelastic metric SimpleElasticAgent._restart_workers.success",
)
FAILURE_RESTARTS = TrainingFamily(
    name="training_elastic_failure_restarts_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "worker_role"),
    help=f"Restarts used up by failures of this agent's workers.{TOTAL_ABSENT}",
    source="falls of the torchelastic metric workers.<role>.remaining_restarts",
)
REMAINING_RESTARTS = TrainingFamily(
    name="training_elastic_remaining_restarts",
    type="gauge",
    labels=(*IDENTITY_LABELS, "worker_role"),
    help=f"Restarts left for failures.{GAUGE_ABSENT}",
    source="torchelastic metric workers.<role>.remaining_restarts",
)
WORKER_STATE_CHECKS = TrainingFamily(
    name="training_elastic_worker_state_checks_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "state", "worker_role"),
    help=(
        "Checks of the workers by the agent, by result (healthy, succeeded, failed, unhealthy, "
        f"...); time in a state = increase * monitor interval of the agent.{TOTAL_ABSENT}"
    ),
    source="torchelastic metrics workers.<role>.<state>",
)
FLAKINESS = TrainingFamily(
    name="training_elastic_flakiness",
    type="summary",
    labels=(*IDENTITY_LABELS, "worker_role"),
    help=f"Share of the allowed restarts used by a run, 1 for a failed run: sum / count.{TOTAL_ABSENT}",
    source="torchelastic metric workers.<role>.flakiness",
)
RUNS = TrainingFamily(
    name="training_elastic_runs_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "outcome", "worker_role"),
    help=(
        "Finished runs of the agent by outcome: success_no_retries, success_with_retries, "
        f"failed_no_retries, failed_with_retries, interrupted (a signal or an error of the agent).{TOTAL_ABSENT}"
    ),
    source="torchelastic metrics workers.<role>.run_*, SimpleElasticAgent.run.failure",
)
WORKER_STARTS = TrainingFamily(
    name="training_elastic_worker_starts_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "worker_role"),
    help=f"Worker processes started by the agent.{TOTAL_ABSENT}",
    source="torchelastic event torchelastic.worker.status.START",
)
WORKER_RESULTS = TrainingFamily(
    name="training_elastic_worker_results_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "exit_code", "result", "worker_role"),
    help=(
        "Final results of workers (succeeded, failed, terminated) with exit codes; a failure "
        "followed by a restart is not final. Exit codes -15 and -9 beside another failure mostly "
        f"mean that the agent ended the worker.{TOTAL_ABSENT}"
    ),
    source="torchelastic events torchelastic.worker.status.{SUCCEEDED,FAILED,TERMINATED} of workers",
)
REFUSED = TrainingFamily(
    name="training_elastic_refused_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "reason"),
    help=(
        "Values of torchelastic metrics that were not recorded: the family belongs to another "
        "metric (collision), too many names (too_many), no valid name (name), a handler raised "
        f"(handler).{TOTAL_ABSENT}"
    ),
    source="exporter.elastic",
)

SPECS = (
    FUNCTION_CALLS,
    FUNCTION,
    RENDEZVOUS,
    RESTARTS,
    FAILURE_RESTARTS,
    REMAINING_RESTARTS,
    WORKER_STATE_CHECKS,
    FLAKINESS,
    RUNS,
    WORKER_STARTS,
    WORKER_RESULTS,
    REFUSED,
)
