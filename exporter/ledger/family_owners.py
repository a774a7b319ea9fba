"""Ownership of family names by Stats, and counting of the admitted Stats.

All Stats of a family have the same type, unit and buckets; help and labels may differ. A Stat is refused if one of its family or
sample names belongs to a Stat with a different definition. If definitions differ, the current owner of the family has precedence,
then the definition of the process that started first. Stats of exited processes are admitted after those of all running processes. A
Stat with the name of one of the exporter's own families is refused, unless it has the type, unit and labels of the family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import is_

from exporter.ledger.families import IDENTITY_LABELS, bridges, elastic, model, training
from exporter.ledger.families.training_family import TrainingFamily
from exporter.ledger.totals import ProcessTotals, SeriesKey, StatPlan, StatShape, shape_of
from exporter.recording.reserved import RESERVED, RESERVED_PREFIXES
from exporter.recording.values import StatDefinition, families_of

TRAINING_FAMILIES: Mapping[str, TrainingFamily] = {
    spec.name: spec for spec in (*training.SPECS, *model.SPECS, *elastic.SPECS, *bridges.SPECS)
}
"""The exporter's families that Stats fill, by name."""


@dataclass(slots=True, eq=False)
class FamilyOwner:
    """Owner of a main family, its sample names and its window gauges: all Stats with the same main family and shape."""

    main: str
    shape: StatShape
    first_definition: StatDefinition  # of the first admitted Stat, which provides the help
    label_names: tuple[str, ...] = ()  # of all Stats, sorted


def matches(definition: StatDefinition, spec: TrainingFamily) -> bool:
    """Return True if a Stat has the type, unit and labels of a specification."""
    identity = IDENTITY_LABELS if "rank" in spec.labels else IDENTITY_LABELS[:1]
    labels = identity + tuple([name for name, _ in definition.labels])
    return (definition.kind, definition.unit or "", labels) == (spec.type, spec.unit, spec.labels)


@lru_cache(maxsize=8192)
def create_plan(definition: StatDefinition) -> StatPlan | None:
    """Return the plan of a definition, or None if a name or label is reserved."""
    families = families_of(definition)
    names, spec = families.names(), TRAINING_FAMILIES.get(families.main)
    if spec is not None:
        is_refused = not matches(definition, spec)
    else:
        is_refused = any(name in RESERVED or name.startswith(RESERVED_PREFIXES) for name in names)
    if is_refused or any(name in IDENTITY_LABELS for name, _ in definition.labels):
        return None
    key = SeriesKey(families.main, definition.labels)
    return StatPlan(definition, families, names, key, shape_of(definition))


class FamilyOwners:
    """Owners of all families of Stats.

    Attributes:
        version: Incremented with each change of an owner or of an owner's labels.
    """

    def __init__(self) -> None:
        self.version = 0
        self._owners: dict[str, FamilyOwner] = {}  # by main family
        self._names: dict[str, FamilyOwner] = {}  # by family or sample name
        self._plan_lists: list[list[StatPlan | None]] = []  # of the last decision

    def count(self, processes: Sequence[ProcessTotals]) -> None:
        """Decide the ownership again if the processes or their definitions have changed, and count the new snapshots."""
        participants = [process for process in processes if self._update_plans(process)]
        participants.sort(key=lambda process: (process.identity.started, process.identity.id))
        plan_lists = [process.plans for process in participants]
        if not _are_identical(plan_lists, self._plan_lists):
            self._decide(participants)
            self._plan_lists = plan_lists
        for process in processes:
            if process.snapshot is not None and process.snapshot is not process.counted_snapshot:
                process.count(process.snapshot)

    def owner(self, plan: StatPlan) -> FamilyOwner | None:
        """Return the owner of the plan's family, or None if the plan was not admitted."""
        owner = self._owners.get(plan.key.main)
        if owner is None or owner.shape != plan.shape:
            return None
        return owner if all(name in owner.label_names for name, _ in plan.key.labels) else None

    def claim(self, plan: StatPlan) -> bool:
        """Admit a Stat to its family. Return False if a name of the Stat belongs to a different definition."""
        owner = self._owners.get(plan.key.main) or FamilyOwner(plan.key.main, plan.shape, plan.definition)
        if owner.shape != plan.shape or any(self._names.get(name, owner) is not owner for name in plan.names):
            return False
        labels = {*owner.label_names, *[name for name, _ in plan.key.labels]}
        if owner.main not in self._owners or len(labels) > len(owner.label_names):
            owner.label_names = tuple(sorted(labels))
            self.version += 1
        self._owners[owner.main] = owner
        self._names.update(dict.fromkeys(plan.names, owner))
        return True

    def _update_plans(self, process: ProcessTotals) -> bool:
        """Update the plans of a process. Return True if the process takes part in the decision."""
        if process.snapshot is None:
            return False
        definitions = [reading.definition for reading in process.snapshot.recording.stats]
        previous, process.definitions = process.definitions, definitions
        has_changed = previous is None or not _are_identical(definitions, previous)
        if has_changed:
            plans = list(map(create_plan, definitions))
            # Of two definitions of the same series (`a.b` and `a_b`) the second is refused.
            first_plans = {plan.key: plan for plan in reversed(plans) if plan is not None}
            process.plans = [
                plan if plan is not None and first_plans[plan.key] is plan else None for plan in plans
            ]
        if previous is None and not process.is_alive:
            # The process exited before the first read: the Stats are counted, and published if their names are free.
            process.admitted_plans = process.plans
            return False
        return process.is_alive or has_changed

    def _decide(self, participants: Sequence[ProcessTotals]) -> None:
        """Assign all families again, and set the admitted plans of the participants."""
        self._owners, self._names = {}, {}
        self.version += 1
        # Stats that were admitted before have precedence over the Stats of earlier processes.
        for process in participants:
            admitted_keys = {(plan.key, plan.shape) for plan in process.admitted_plans if plan is not None}
            for plan in process.plans:
                if plan is not None and (plan.key, plan.shape) in admitted_keys:
                    self.claim(plan)
        for process in participants:
            admitted_plans = [
                plan if plan is not None and self.claim(plan) else None for plan in process.plans
            ]
            if not _are_identical(admitted_plans, process.admitted_plans):
                process.admitted_plans = admitted_plans


def _are_identical(first: Sequence[object], second: Sequence[object]) -> bool:
    """Return True if two sequences contain the same objects in the same order."""
    return len(first) == len(second) and all(map(is_, first, second))
