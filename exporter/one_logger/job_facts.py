"""Facts of a job from the configuration, for metrics and exports: world size, batch size, targets and tags."""

from __future__ import annotations

from exporter.one_logger.config import OneLoggerConfig, TrainingTelemetryConfig
from exporter.one_logger.figures import StepFacts
from exporter.training.checkpoints import SavePolicy
from exporter.training.recorder import TRAINING

MAX_TARGET = 10**300
"""Bound of the targets in metrics. A larger target is exported, but is not published as a metric."""


class JobFacts:
    """Current facts of a job, published after each change.

    The callables of the configuration are called at the start of an application, a loop or a save, and at the end of an iteration.
    """

    def __init__(self, settings: OneLoggerConfig) -> None:
        self._settings = settings
        self._training: TrainingTelemetryConfig | None = None
        self._has_callables = settings.is_callable("world_size_or_fn")
        self.steps = StepFacts()
        self.world_size = 1
        facts: dict[str, object] = {"application": settings.application_name}
        if not settings.is_callable("session_tag_or_fn"):
            facts["session_tag"] = settings.session_tag
        if not settings.is_callable("is_baseline_run_or_fn"):
            facts["is_baseline"] = settings.is_baseline_run
        if not self._has_callables:
            facts["world_size"] = self.world_size = settings.world_size or 1
        TRAINING.describe(facts)

    def set_training(self, training: TrainingTelemetryConfig) -> None:
        """Set the configuration of the training."""
        self._training = training
        TRAINING.set_save_policy(self._save_policy)
        names = (
            "global_batch_size_or_fn",
            "seq_length_or_fn",
            "flops_per_sample_or_fn",
            "is_log_throughput_enabled_or_fn",
        )
        has_training_callables = any(training.is_callable(name) for name in names)
        self._has_callables = self._settings.is_callable("world_size_or_fn") or has_training_callables

    def _save_policy(self) -> SavePolicy:
        """Return the policy for a save that starts now."""
        training = self._training
        if training is None:
            return SavePolicy()
        is_enabled = training.is_save_checkpoint_enabled is not False
        return SavePolicy(training.save_checkpoint_strategy.value, is_enabled)

    def begin_application(self, session_tag: str | None, *, is_baseline: bool) -> None:
        """Discard the facts of an earlier application, and read the world size."""
        self.steps = StepFacts()
        self._update_world_size()
        facts = {"session_tag": session_tag, "is_baseline": is_baseline, "world_size": self.world_size}
        TRAINING.describe(facts)

    def describe_training(self, perf_tag: str | list[str], iterations_target: int | None) -> None:
        """Read the facts of an iteration, and publish the facts, the tag and the target."""
        if self._training is not None:
            self.steps.update(self._training)
        TRAINING.describe({"perf_tag": perf_tag})
        self._describe_target(iterations_target)
        self._publish_step_facts()

    def begin_loop(self, iterations_target: int | None, samples_target: int | None) -> None:
        """Read the facts of an iteration, and set the targets of a loop."""
        if self._training is not None:
            self.steps.update(self._training)
        self.steps.iterations_target, self.steps.samples_target = iterations_target, samples_target
        self._update_world_size()
        self._describe_target(iterations_target)
        self._publish_step_facts()

    def update(self) -> None:
        """Read the facts of an iteration again if the configuration has a callable for the world size or for one of the facts."""
        if self._has_callables and self._training is not None:
            self._update_world_size()
            self.steps.update(self._training)
            self._publish_step_facts()

    def _update_world_size(self) -> None:
        self.world_size = self._settings.world_size or self.world_size

    @staticmethod
    def _describe_target(iterations_target: int | None) -> None:
        """Publish a target above 0."""
        if iterations_target is not None and 0 < iterations_target < MAX_TARGET:
            TRAINING.describe({"step_target": iterations_target})

    def _publish_step_facts(self) -> None:
        """Publish this rank's share of the samples and tokens of an iteration, and the FLOPs of a sample."""
        steps = self.steps
        if steps.samples:
            tokens = None if steps.tokens is None else steps.tokens / self.world_size
            TRAINING.expect(steps.samples / self.world_size, tokens)
        if steps.flops_per_sample:
            TRAINING.describe({"flops_per_sample": float(steps.flops_per_sample)})
