"""Families of torchelastic's metrics, filled by Stats of torchrun's agent.

The agent has no rank and the label `role="agent"`. Other processes may report `training_elastic_refused_total`.
"""

from __future__ import annotations

from exporter.ledger.families import IDENTITY_LABELS
from exporter.ledger.families.training_family import GAUGE_ABSENT, TOTAL_ABSENT, TrainingFamily

FUNCTION_CALLS = TrainingFamily(
    name="training_elastic_function_calls_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "function", "outcome"),
    help=f"Calls of the torchelastic agent's functions by outcome: returned (success) or raised (failure).{TOTAL_ABSENT}",
    source="torchelastic metrics <class>.<function>.{success,failure}",
)
FUNCTION = TrainingFamily(
    name="training_elastic_function_seconds",
    type="summary",
    unit="seconds",
    labels=(*IDENTITY_LABELS, "function"),
    help=(
        "Duration of calls of the agent's functions, with a resolution of 1 ms. Calls are nested: do not add "
        f"the durations of different functions.{TOTAL_ABSENT}"
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
        "Restarts of this agent's workers for any reason: a failure of a worker, or a node that failed, joined "
        f"or left.{TOTAL_ABSENT}"
    ),
    source="torchelastic metric SimpleElasticAgent._restart_workers.success",
)
FAILURE_RESTARTS = TrainingFamily(
    name="training_elastic_failure_restarts_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "worker_role"),
    help=f"Restarts after a failure of this agent's workers, by role of the workers (worker_role).{TOTAL_ABSENT}",
    source="decreases of the torchelastic metric workers.<role>.remaining_restarts",
)
REMAINING_RESTARTS = TrainingFamily(
    name="training_elastic_remaining_restarts",
    type="gauge",
    labels=(*IDENTITY_LABELS, "worker_role"),
    help=f"Remaining restarts after failures, by role of the workers (worker_role).{GAUGE_ABSENT}",
    source="torchelastic metric workers.<role>.remaining_restarts",
)
WORKER_STATE_CHECKS = TrainingFamily(
    name="training_elastic_worker_state_checks_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "state", "worker_role"),
    help=(
        "Checks of the workers by the agent, by role of the workers (worker_role) and state (healthy, succeeded, failed, unhealthy, ...). The time in "
        f"a state is the increase times the agent's monitor interval.{TOTAL_ABSENT}"
    ),
    source="torchelastic metrics workers.<role>.<state>",
)
FLAKINESS = TrainingFamily(
    name="training_elastic_flakiness",
    type="summary",
    labels=(*IDENTITY_LABELS, "worker_role"),
    help=f"Share of the allowed restarts that the workers of a role (worker_role) used; 1 for a failed run. The mean is sum / count.{TOTAL_ABSENT}",
    source="torchelastic metric workers.<role>.flakiness",
)
RUNS = TrainingFamily(
    name="training_elastic_runs_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "outcome", "worker_role"),
    help=(
        "Finished runs of the agent by role of the workers (worker_role) and outcome: success_no_retries, success_with_retries, "
        f"failed_no_retries, failed_with_retries, interrupted (a signal or an error of the agent).{TOTAL_ABSENT}"
    ),
    source="torchelastic metrics workers.<role>.run_*, SimpleElasticAgent.run.failure",
)
WORKER_STARTS = TrainingFamily(
    name="training_elastic_worker_starts_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "worker_role"),
    help=f"Worker processes started by the agent, by role of the workers (worker_role).{TOTAL_ABSENT}",
    source="torchelastic event torchelastic.worker.status.START",
)
WORKER_RESULTS = TrainingFamily(
    name="training_elastic_worker_results_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "exit_code", "result", "worker_role"),
    help=(
        "Final results of workers by result (succeeded, failed, terminated), exit_code and worker_role. A failure before a restart is "
        "not final. After a failure of a worker, the agent terminates the other workers: their exit code is -15 "
        f"or -9.{TOTAL_ABSENT}"
    ),
    source="torchelastic events torchelastic.worker.status.{SUCCEEDED,FAILED,TERMINATED} of workers",
)
REFUSED = TrainingFamily(
    name="training_elastic_refused_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "reason"),
    help=(
        "Refused values of torchelastic metrics by reason: the family belongs to a different metric "
        "(collision), too many names (too_many), invalid name (name), a handler raised "
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
