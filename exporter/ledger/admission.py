"""Stats: which of them may share a family name and are counted, and the families that they become; no I/O.

A name has one family, one type, one unit and one set of buckets. Names of the exporter's own families are refused, except
to a Stat that is just that family. The first of the living processes decides, those that hold a family before new ones; a
Stat that differs, or whose other families collide with a held name, is refused. Help and labels may differ. What only the
dead have recorded lingers under the same rule, after all the living.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import is_

from prometheus_client.core import Metric

from exporter.families import Distribution, Family, FamilySpec, FamilyType
from exporter.ledger.families import IDENTITY_LABELS, training
from exporter.ledger.families.training import LAST_VALUES
from exporter.ledger.totals import GapRules, Moment, Plan, Process, Shape, VisibleSlot, shape_of
from exporter.recording.reserved import RESERVED, RESERVED_PREFIXES
from exporter.recording.values import (
    AGGREGATIONS,
    Aggregation,
    StatDefinition,
    StatReading,
    WindowReading,
    families_of,
)

OWN: Mapping[str, FamilySpec] = {spec.name: spec for spec in training.SPECS}
"""Families of the exporter's own that Stats fill: their names are reserved, and theirs alone."""


@dataclass(slots=True, eq=False)
class Claim:
    """A family, its sample names and its window gauges, held by all Stats that feed it."""

    main: str
    shape: Shape
    first: StatDefinition  # of its first holder, for help
    label_names: tuple[str, ...] = ()  # the union over all holders, sorted


def fits(definition: StatDefinition, spec: FamilySpec) -> bool:
    """Tell whether a Stat is a family of the exporter's own."""
    identity = IDENTITY_LABELS if "rank" in spec.labels else IDENTITY_LABELS[:1]
    labels = identity + tuple([name for name, _ in definition.labels])
    return (definition.kind, definition.unit or "", labels) == (spec.type, spec.unit, spec.labels)


@lru_cache(maxsize=8192)
def plan_of(definition: StatDefinition) -> Plan | None:
    """Make the plan of a definition; None where its names are the exporter's."""
    families = families_of(definition)
    names, own = families.names(), OWN.get(families.main)
    if own is not None:
        refused = not fits(definition, own)
    else:
        refused = any(name in RESERVED or name.startswith(RESERVED_PREFIXES) for name in names)
    if refused or any(name in IDENTITY_LABELS for name, _ in definition.labels):
        return None
    return Plan(definition, families, names, (families.main, definition.labels), shape_of(definition))


class Admission:
    """Makes plans of definitions, settles who may use which names, and counts what is admitted."""

    def __init__(self) -> None:
        self.version = 0  # of the claims; they are the same as long as this is
        self._claims: dict[str, Claim] = {}
        self._names: dict[str, Claim] = {}
        self._lists: list[list[Plan | None]] = []

    def count(self, processes: Sequence[Process]) -> None:
        """Settle what counts, and count it, of all processes with a record."""
        participants = [each for each in processes if self._look(each)]
        participants.sort(key=lambda each: (each.identity.started, each.identity.id))
        lists = [each.plans for each in participants]
        if not _same(lists, self._lists):
            self._settle(participants)
            self._lists = lists
        for each in processes:
            if each.snapshot is not None and each.snapshot is not each.counted:
                each.take(each.snapshot)

    def claim(self, plan: Plan) -> Claim | None:
        """Find the family that a plan feeds; None when another family has its names."""
        claim = self._claims.get(plan.key[0])
        if claim is None or claim.shape != plan.shape:
            return None
        return claim if all(name in claim.label_names for name, _ in plan.key[1]) else None

    def hold(self, plan: Plan) -> bool:
        """Let a Stat hold its family; False where another family has one of its names."""
        claim = self._claims.get(plan.key[0]) or Claim(plan.key[0], plan.shape, plan.definition)
        if claim.shape != plan.shape or any(self._names.get(name, claim) is not claim for name in plan.names):
            return False
        labels = {*claim.label_names, *[name for name, _ in plan.key[1]]}
        if claim.main not in self._claims or len(labels) > len(claim.label_names):
            claim.label_names = tuple(sorted(labels))
            self.version += 1
        self._claims[claim.main] = claim
        self._names.update(dict.fromkeys(plan.names, claim))
        return True

    def _look(self, process: Process) -> bool:
        """Bring a process's plans up to date; True when it has a say in the settlement."""
        if process.snapshot is None:
            return False
        definitions = [reading.definition for reading in process.snapshot.recording.stats]
        before, process.definitions = process.definitions, definitions
        renewed = before is None or not _same(definitions, before)
        if renewed:
            plans = list(map(plan_of, definitions))
            # Of two definitions that become one series (`a.b` and `a_b`) the second has none.
            first = {plan.key: plan for plan in reversed(plans) if plan is not None}
            process.plans = [plan if plan is not None and first[plan.key] is plan else None for plan in plans]
        if before is None and not process.living:
            # It died before anybody saw it: its totals are counted, and shown if they fit those of the living.
            process.admitted = process.plans
            return False
        return process.living or renewed

    def _settle(self, living: Sequence[Process]) -> None:
        """Decide anew who holds which family."""
        self._claims, self._names = {}, {}
        self.version += 1
        # A family that is held stays with its holders, whatever order the processes come in.
        for process in living:
            held = {(plan.key, plan.shape) for plan in process.admitted if plan is not None}
            for plan in process.plans:
                if plan is not None and (plan.key, plan.shape) in held:
                    self.hold(plan)
        for process in living:
            admitted = [plan if plan is not None and self.hold(plan) else None for plan in process.plans]
            if not _same(admitted, process.admitted):
                process.admitted = admitted


def _same(first: Sequence[object], second: Sequence[object]) -> bool:
    return len(first) == len(second) and all(map(is_, first, second))


# What the families show -----------------------------------------------------------------------------

RANK_0 = ("0", "", "")
"""Rank, worker and role of the process whose word is the run's."""

Samples = dict[tuple[str, ...], float | Distribution]
Place = tuple[Claim, tuple[str, ...]]
"""The family of a Stat, and the labels of its series."""


class StatMetrics:
    """Makes the families of all Stats; one in which nothing has changed is taken as the last pass made it."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._oldest = 0.0
        self._samples: dict[str, Samples] = {}
        self._made: dict[str, tuple[Family, Samples, Metric]] = {}
        # As long as nobody claims another family, everything has the place that it had in the last pass.
        self._version = 0
        self._specs: dict[str, Family] = {}
        self._places: dict[tuple[str, ...], tuple[list[Plan | None], list[Place | None]]] = {}

    def fill(self, slots: Sequence[VisibleSlot], rules: GapRules, now: Moment) -> list[Metric]:
        """Make those of one pass, sorted by name."""
        # What the dead have left is settled after all the living.
        leftovers = [
            (each, plan) for each in slots for plan in _leftovers(each) if self._admission.hold(plan)
        ]
        if self._version != self._admission.version:
            self._version, self._specs, self._places = self._admission.version, {}, {}
        self._samples = {}
        # A time window that ended longer ago than its length and this is no longer the last one.
        self._oldest = now.wall - rules.stale_after_seconds
        for each in slots:
            self._living(each)
        for each, plan in leftovers:
            total, place = each.slot.total(plan.key), self._place(plan, each)
            if total is not None and place is not None:
                self._totals(each, plan, place, total)
        before, self._made = self._made, {}
        for name, samples in sorted(self._samples.items()):
            spec, old = self._specs[name], before.get(name)
            same = old is not None and old[:2] == (spec, samples)
            self._made[name] = old if old and same else (spec, samples, spec.later(samples))
        return [metric for _, _, metric in self._made.values()]

    def _living(self, visible: VisibleSlot) -> None:
        process, slot = visible.process, visible.slot
        if process.snapshot is None or not process.living:
            return
        admitted, places = self._places.get(visible.labels, ([], []))
        if admitted is not process.admitted:
            admitted = process.admitted
            places = [None if plan is None else self._place(plan, visible) for plan in admitted]
            self._places[visible.labels] = admitted, places
        others = [part for part in slot.parts() if part is not process and part.series]
        readings = process.snapshot.recording.stats
        for plan, place, reading in zip(admitted, places, readings, strict=True):
            if plan is None or place is None or plan.key not in process.series:
                continue
            total = process.series[plan.key]
            if others and any(plan.key in part.series for part in others):
                total = slot.total(plan.key) or total
            self._totals(visible, plan, place, total)
            if visible.fresh and plan.families.samples:
                self._windows(plan, place, reading.window)

    def _place(self, plan: Plan, visible: VisibleSlot) -> Place | None:
        claim = self._admission.claim(plan)
        if claim is None:
            return None
        identity: tuple[str, ...] = visible.labels
        if claim.main in OWN and "rank" not in OWN[claim.main].labels:
            if visible.labels[1:] != RANK_0:
                return None
            identity = identity[:1]
        mine = dict(plan.key[1])
        return claim, (*identity, *[mine.get(name, "") for name in claim.label_names])

    def _totals(self, visible: VisibleSlot, plan: Plan, place: Place, total: StatReading) -> None:
        names, kind = plan.families, plan.definition.kind
        value: float | Distribution | None = None
        if kind == "gauge":
            # A gauge tells of now, and is no total that a restart could take back.
            if visible.advancing if names.main in LAST_VALUES else visible.fresh:
                value = total.value
        elif visible.counted and kind == "counter":
            value = total.sum
        elif visible.counted:
            buckets = tuple(zip(total.definition.buckets, total.bucket_counts, strict=True))
            value = Distribution(total.count, total.sum, buckets, total.exponential)
        if value is not None:
            self._add(names.main, None, place, value)
        if names.last_sample and total.last_sample is not None:
            self._add(names.last_sample, None, place, total.last_sample)

    def _windows(self, plan: Plan, place: Place, window: WindowReading | None) -> None:
        """Add the gauges of the last window, unless another should long have closed."""
        length = plan.definition.window_seconds
        if window is not None and length is not None and window.ended + length < self._oldest:
            return
        self._add(plan.families.samples, None, place, 0 if window is None else window.samples)
        if window is not None and window.samples:
            for aggregation, name in plan.families.windows:
                value = window.values.get(aggregation)
                if value is not None:  # the first window after an override still has the old ones
                    self._add(name, aggregation, place, value)

    def _add(
        self, name: str, aggregation: Aggregation | None, place: Place, value: float | Distribution
    ) -> None:
        samples = self._samples.setdefault(name, {})
        if name not in self._specs:
            self._specs[name] = _spec(name, aggregation, place[0])
        samples[place[1]] = value


def _leftovers(visible: VisibleSlot) -> Iterable[Plan]:
    """What lingers of a slot, without the Stats that the living process has itself."""
    own = visible.process.series if visible.process.living else {}
    found = {key: each.definition for part in visible.lingering for key, each in part.series.items()}
    return filter(None, [plan_of(definition) for key, definition in found.items() if key not in own])


def _spec(name: str, aggregation: Aggregation | None, claim: Claim) -> Family:
    if name in OWN:
        return OWN[name]
    first, unit = claim.first, claim.first.unit or ""
    kind: FamilyType = "gauge"
    gone = "the process is gone or its feed is not refreshed."
    if name == claim.main:
        text = first.help or f"Stat {first.name}."
        if first.kind != "gauge":
            kind = "counter" if first.kind == "counter" else "histogram" if claim.shape[0] else "summary"
    elif aggregation is not None:
        what = AGGREGATIONS[aggregation].help
        text = f"{what} of the last closed window of {first.name}; absent when the window was empty, {gone}"
    elif name.endswith("_seconds"):
        text, unit = f"Unix time of the latest sample of {first.name}; absent before the first.", "seconds"
    else:
        text = (
            f"Samples of the last closed window of {first.name}; 0 when there were none, absent when {gone}"
        )
        unit = ""
    return Family(name=name, type=kind, help=text, labels=IDENTITY_LABELS + claim.label_names, unit=unit)
