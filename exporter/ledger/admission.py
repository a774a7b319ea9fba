"""Admission: which Stats of which processes may share a family name, and are counted.

Runs in the sidecar, on the ledger's collecting thread; no I/O. Definitions come in from the feed, where each process
names its Stats as it likes; what goes out is the same for the whole exposition: a name has one family, one type, one unit
and one set of buckets.

- Names of the exporter's own families are refused, except to a Stat that is just that family (`OWN`).
- A family belongs to the living processes that have it. The first (those that already hold it come before new ones)
  decides type, unit and buckets; a Stat that differs in one of them, or whose other families collide with a held name, is
  refused while a holder lives.
- Help may differ (the first one's is published), and so may labels: the family then has the union of the label names,
  and those that a Stat lacks are absent from its series.
- What only the dead have recorded lingers under the same rule, after all the living.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING

from exporter.families import FamilySpec
from exporter.ledger.families import training
from exporter.ledger.families.training import IDENTITY_LABELS
from exporter.recording.reserved import RESERVED, RESERVED_PREFIXES
from exporter.recording.values import Aggregation, StatDefinition, StatFamilies, families_of

if TYPE_CHECKING:
    from exporter.ledger.totals import Process, Totals

SeriesKey = tuple[str, tuple[tuple[str, str], ...]]
"""What a Stat is under, over restarts and versions of the code: its main family and its labels."""

Shape = tuple[bool, str | None, tuple[float, ...], str]
"""Histogram or not, unit, bounds of the buckets, kind: what must be the same for numbers to be added up."""

OWN: Mapping[str, FamilySpec] = {spec.name: spec for spec in training.SPECS}
"""Families of the exporter's own that Stats fill: their names are reserved, and theirs alone."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A definition with all that follows from it; `names` are those of its families and their samples."""

    definition: StatDefinition
    families: StatFamilies
    names: frozenset[str]
    key: SeriesKey
    shape: Shape


@dataclass(slots=True, eq=False)
class Claim:
    """A family, its sample names and its window gauges, held by all Stats that feed it."""

    main: str
    shape: Shape
    first: StatDefinition  # of its first holder, for help
    label_names: tuple[str, ...] = ()  # the union over all holders, sorted


def identity_labels(spec: FamilySpec) -> tuple[str, ...]:
    """Give those of a family's labels that say whose it is."""
    return IDENTITY_LABELS if "rank" in spec.labels else IDENTITY_LABELS[:1]


def fits(definition: StatDefinition, spec: FamilySpec) -> bool:
    """Tell whether a Stat is a family of the exporter's own."""
    labels = identity_labels(spec) + tuple([name for name, _ in definition.labels])
    return (definition.kind, definition.unit or "", labels) == (spec.type, spec.unit, spec.labels)


def shape_of(definition: StatDefinition) -> Shape:
    """Tell what must be the same for numbers to be added up."""
    histogram = Aggregation.HISTOGRAM in definition.aggregations
    return histogram, definition.unit, definition.buckets, definition.kind


class Admission:
    """Makes plans of definitions, settles who may use which names, and counts what is admitted.

    Attributes:
        settled: How often it was settled who holds what; the claims of plans are the same in between.
    """

    def __init__(self) -> None:
        self.settled = 0
        self._claims: dict[str, Claim] = {}
        self._names: dict[str, Claim] = {}
        self._lists: tuple[list[object], list[object]] = ([], [])

    def count(self, processes: Sequence[Process], lingering: Sequence[Totals]) -> None:
        """Settle what counts, and count it, of all processes with a record and of what the dead have left."""
        participants = [each for each in processes if self._look(each)]
        participants.sort(key=lambda each: (each.identity.started, each.identity.id))
        lists: list[object] = [each.plans for each in participants]
        before, leftovers_before = self._lists
        changed = not _same(lists, before)
        if changed:
            self._settle(participants, ())
        for each in processes:
            if each.snapshot is not None and each.snapshot is not each.counted:
                each.take(each.snapshot)
        # What the dead have left is known only now; it stands behind the living, and changes nothing for them.
        leftovers = [plans for each in lingering if (plans := self._leftover(each))]
        if changed or not _same(leftovers, leftovers_before):
            self._settle(participants, leftovers)
        self._lists = lists, list(leftovers)

    def claim(self, plan: Plan) -> Claim | None:
        """Find the family that a plan feeds; None when another family has its names."""
        claim = self._claims.get(plan.key[0])
        if claim is None or claim.shape != plan.shape:
            return None
        return claim if all(name in claim.label_names for name, _ in plan.key[1]) else None

    def _look(self, process: Process) -> bool:
        """Bring a process's plans up to date; True when it has a say in the settlement."""
        if process.snapshot is None:
            return False
        definitions = [reading.definition for reading in process.snapshot.recording.stats]
        first = process.definitions is None
        renewed = process.definitions is None or not _same(definitions, process.definitions)
        if renewed:
            process.definitions = definitions
            known = {plan.definition: plan for plan in process.plans if plan is not None}
            process.plans = self._plans(definitions, known)
        if process.living or not first:
            return process.living or renewed
        # It died before anybody saw it: its totals are counted, and shown if they fit those of the living.
        process.admitted = process.plans
        return False

    def _leftover(self, totals: Totals) -> list[Plan | None]:
        if totals.lingering is None:
            totals.lingering = self._plans([reading.definition for reading in totals.series.values()], {})
        return totals.lingering

    def _plans(
        self, definitions: Iterable[StatDefinition], known: Mapping[StatDefinition, Plan]
    ) -> list[Plan | None]:
        """Make the plans of one process; of two definitions that become one series (`a.b` and `a_b`) the second has none."""
        plans: list[Plan | None] = []
        seen: set[SeriesKey] = set()
        for definition in definitions:
            plan = known.get(definition) or self._plan(definition)
            plans.append(plan if plan is not None and plan.key not in seen else None)
            if plan is not None:
                seen.add(plan.key)
        return plans

    def _plan(self, definition: StatDefinition) -> Plan | None:
        families = families_of(definition)
        names, own = families.names(), OWN.get(families.main)
        if own is not None:
            refused = not fits(definition, own)
        else:
            refused = any(name in RESERVED or name.startswith(RESERVED_PREFIXES) for name in names)
        if refused or any(name in IDENTITY_LABELS for name, _ in definition.labels):
            return None
        return Plan(definition, families, names, (families.main, definition.labels), shape_of(definition))

    def _settle(self, living: Sequence[Process], dead: Iterable[Sequence[Plan | None]]) -> None:
        """Decide anew who holds which family."""
        self._claims, self._names = {}, {}
        self.settled += 1
        # A family that is held stays with its holders, whatever order the processes come in.
        for process in living:
            held = {(plan.key, plan.shape) for plan in process.admitted if plan is not None}
            for plan in process.plans:
                if plan is not None and (plan.key, plan.shape) in held:
                    self._hold(plan)
        for process in living:
            admitted = [plan if plan is not None and self._hold(plan) else None for plan in process.plans]
            if not _same(admitted, process.admitted):
                process.admitted = admitted
        for plans in dead:
            for plan in plans:
                if plan is not None:
                    self._hold(plan)

    def _hold(self, plan: Plan) -> bool:
        claim = self._claims.get(plan.key[0]) or Claim(plan.key[0], plan.shape, plan.definition)
        if claim.shape != plan.shape or any(self._names.get(name, claim) is not claim for name in plan.names):
            return False
        labels = {*claim.label_names, *[name for name, _ in plan.key[1]]}
        if len(labels) > len(claim.label_names):
            claim.label_names = tuple(sorted(labels))
        self._claims[claim.main] = claim
        self._names.update(dict.fromkeys(plan.names, claim))
        return True


def _same(first: Sequence[object], second: Sequence[object]) -> bool:
    return len(first) == len(second) and all(map(is_, first, second))
