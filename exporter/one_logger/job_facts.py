"""Facts of the configuration that the families and the figures need: world size, batch size, targets, tags."""

from __future__ import annotations

from exporter.one_logger.config import OneLoggerConfig, TrainingTelemetryConfig
from exporter.one_logger.figures import StepFacts
from exporter.training.checkpoints import SavePolicy
from exporter.training.recorder import TRAINING

MAX_TARGET = 10**300
"""Targets above are exported, but are no values of a gauge."""


class JobFacts:
    """Present facts of a job, passed to the families when they change.

    Callables of the job are called when the application, a loop or an iteration needs their values.
    """

    def __init__(self, settings: OneLoggerConfig) -> None:
        self._settings = settings
        self._training: TrainingTelemetryConfig | None = None
        self._varying = settings.varies("world_size_or_fn")
        self.steps = StepFacts()
        self.world_size = 1
        facts: dict[str, object] = {"application": settings.application_name}
        if not settings.varies("session_tag_or_fn"):
            facts["session_tag"] = settings.session_tag
        if not settings.varies("is_baseline_run_or_fn"):
            facts["is_baseline"] = settings.is_baseline_run
        if not self._varying:
            facts["world_size"] = self.world_size = settings.world_size or 1
        TRAINING.describe(facts)

    def set_training(self, training: TrainingTelemetryConfig) -> None:
        """Set the configuration of the training."""
        self._training = training
        TRAINING.set_save_policy(self._save_policy)
        self._varying = self._settings.varies("world_size_or_fn") or any(
            training.varies(name)
            for name in (
                "global_batch_size_or_fn",
                "seq_length_or_fn",
                "flops_per_sample_or_fn",
                "is_log_throughput_enabled_or_fn",
            )
        )

    def _save_policy(self) -> SavePolicy:
        """Return how a save that begins now is made."""
        training = self._training
        if training is None:
            return SavePolicy()
        enabled = training.is_save_checkpoint_enabled is not False
        return SavePolicy(training.save_checkpoint_strategy.value, enabled)

    def begin_application(self, session_tag: str | None, *, baseline: bool) -> None:
        """Forget the steps of an earlier application, and read the world size."""
        self.steps = StepFacts()
        self._update_world_size()
        facts = {"session_tag": session_tag, "is_baseline": baseline, "world_size": self.world_size}
        TRAINING.describe(facts)

    def describe_training(self, perf_tag: str | list[str], iterations_target: int | None) -> None:
        """Read the facts of an iteration, and pass them with the tag and the target."""
        if self._training is not None:
            self.steps.update(self._training)
        TRAINING.describe({"perf_tag": perf_tag})
        self._describe_target(iterations_target)
        self._expect()

    def begin_loop(self, iterations_target: int | None, samples_target: int | None) -> None:
        """Read the facts of an iteration, and set the targets of a loop."""
        if self._training is not None:
            self.steps.update(self._training)
        self.steps.iterations_target, self.steps.samples_target = iterations_target, samples_target
        self._update_world_size()
        self._describe_target(iterations_target)
        self._expect()

    def update(self) -> None:
        """Read the facts of an iteration that are callables."""
        if self._varying and self._training is not None:
            self._update_world_size()
            self.steps.update(self._training)
            self._expect()

    def _update_world_size(self) -> None:
        self.world_size = self._settings.world_size or self.world_size

    @staticmethod
    def _describe_target(iterations_target: int | None) -> None:
        """Pass a target; 0 and less mean no target."""
        if iterations_target is not None and 0 < iterations_target < MAX_TARGET:
            TRAINING.describe({"step_target": iterations_target})

    def _expect(self) -> None:
        """Pass the samples and tokens of this rank's share of an iteration."""
        steps = self.steps
        if steps.samples:
            tokens = None if steps.tokens is None else steps.tokens / self.world_size
            TRAINING.expect(steps.samples / self.world_size, tokens)
        if steps.flops_per_sample:
            TRAINING.describe({"flops_per_sample": float(steps.flops_per_sample)})
