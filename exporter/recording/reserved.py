"""Reserved names: the exporter's own families, which the job's Stats must not use.

The construction of a Stat with a reserved name raises DefinitionError. A test compares the list with the specifications.
"""

from __future__ import annotations

RESERVED_PREFIXES = ("cgroup_", "exporter_", "gpu_", "host_", "process_", "scrape_", "training_process_")
"""Prefixes that are reserved, also for families of later versions."""

SUFFIXES: dict[str, tuple[str, ...]] = {
    "counter": ("_total", "_created"),
    "gauge": (),
    "histogram": ("_bucket", "_sum", "_count", "_created"),
    "summary": ("_sum", "_count", "_created"),
    "info": ("_info",),
}
"""Suffixes that an exposition appends to the name of a family, by type."""

_FAMILIES = {
    "counter": """
training_background_seconds training_badput_seconds training_carbon_grams training_checkpoints training_cost
training_elastic_failure_restarts training_elastic_function_calls training_elastic_refused training_elastic_restarts
training_elastic_runs training_elastic_worker_results training_elastic_worker_starts
training_elastic_worker_state_checks training_energy_joules training_epochs training_event_handler_dropped
training_event_handler_events training_events training_events_suppressed training_feed_dropped
training_gpu_alloc_retries training_gpu_idle_between_steps_seconds training_gpu_oom training_gpu_timed_steps
training_hardware_flops training_interruptions training_lost_steps training_microbatches training_misuse
training_model_flops training_nonfinite training_phase_energy_joules training_phase_entries training_phase_gpu_seconds
training_phase_seconds training_productive_energy_joules training_productive_seconds training_restarts
training_samples training_skipped_steps training_slow_step_excess_seconds training_span_exporter_dropped
training_span_exporter_errors training_span_exporter_records training_stat_rejected_samples training_steps
training_tokens training_torch_monitor_overflows training_torch_monitor_refused training_wall_seconds
training_wasted_energy_joules
""",
    "gauge": """
training_attempt training_attempt_start_timestamp_seconds training_attempt_steps
training_carbon_intensity_grams_per_joule training_carbon_intensity_last_update_timestamp_seconds
training_checkpoint_dir_available_bytes training_checkpoint_dir_size_bytes training_checkpoint_interval_seconds
training_checkpoint_last_bytes training_checkpoint_last_step training_checkpoint_last_success_timestamp_seconds
training_collective_sequence training_elastic_remaining_restarts training_electricity_price_per_joule
training_energy_share_ratio training_epoch training_event_last_timestamp_seconds training_feed_alive
training_feed_last_update_timestamp_seconds training_gpu_memory_bytes training_gpu_price_per_second training_grad_norm
training_last_progress_timestamp_seconds training_learning_rate training_loss training_loss_scale
training_nonfinite_since_step training_nonfinite_since_timestamp_seconds training_peak_flops_per_second
training_phase_active training_phase_active_since_timestamp_seconds training_phase_energy_quality_ratio
training_power_usage_effectiveness training_rank_compute_seconds training_rank_conflicts
training_rank_last_exit_timestamp_seconds training_run_silent training_run_state
training_run_state_since_timestamp_seconds training_step training_step_ideal_seconds training_step_longest_seconds
training_step_target training_time_to_first_step_seconds training_uncommitted_seconds training_world_size
""",
    "histogram": """
training_checkpoint_duration_seconds training_elastic_rendezvous_seconds training_phase_duration_seconds
training_step_duration_seconds training_step_gpu_duration_seconds
""",
    "info": """
cgroup gpu training_hang training_rank training_run training_run_outcome
""",
    "summary": """
training_elastic_flakiness training_elastic_function_seconds training_span_duration_seconds
""",
}

RESERVED = frozenset(
    name + suffix
    for family_type, names in _FAMILIES.items()
    for name in names.split()
    for suffix in ("", *SUFFIXES[family_type])
) | {"ALERTS", "ALERTS_FOR_STATE", "up"}
"""Fixed family and sample names of an exposition, and names that Prometheus itself writes."""
