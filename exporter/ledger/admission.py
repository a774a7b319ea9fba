"""Admission: which Stats of which processes may share a family name, and are counted.

Runs in the sidecar, on the ledger's collecting thread; no I/O. Definitions come in from the feed, where each process
names its Stats as it likes; what goes out is the same for the whole exposition: a name has one family, one type, one unit
and one set of buckets.

The rule, for every name a Stat's families and samples would take:

- Names of the exporter's own families are refused, except to a Stat that is just that family (`OWN`).
- A family belongs to the living processes that have it. The first (by the order given, in which processes that already
  hold the family come before new ones) decides type, unit and buckets; a Stat that differs in one of them, or whose
  other families collide with a held name, is refused while a holder lives.
- Help may differ (the first one's is published), and so may labels: the family then has the union of the label names,
  and those that a Stat lacks are absent from its series.
- What only the dead have recorded lingers under the same rule, after all the living.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import TYPE_CHECKING

from exporter.families import FamilySpec
from exporter.ledger.families import frameworks, training
from exporter.ledger.families.training import IDENTITY_LABELS
from exporter.recording.aggregations import Aggregation
from exporter.recording.naming import StatFamilies, families_of
from exporter.recording.reserved import RESERVED, RESERVED_PREFIXES
from exporter.recording.values import StatDefinition

if TYPE_CHECKING:
    from exporter.ledger.totals import Process, Totals

SeriesKey = tuple[str, tuple[tuple[str, str], ...]]
"""What a Stat is under, over restarts and versions of the code: its main family and its labels."""

Shape = tuple[bool, str | None, tuple[float, ...], str]
"""Histogram or not, unit, bounds of the buckets, kind."""

OWN: Mapping[str, FamilySpec] = {spec.name: spec for spec in (*training.SPECS, *frameworks.SPECS)}
"""Families of the exporter's own that Stats fill: their names are reserved, and theirs alone."""

_MOST_LABELS = 64


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A definition with all that follows from it.

    Attributes:
        definition: As the feed gave it.
        families: The names of its families.
        names: The names of its families and their samples, as they could collide.
        key: What its totals are kept under.
        shape: What must be the same over a family.
    """

    definition: StatDefinition
    families: StatFamilies
    names: frozenset[str]
    key: SeriesKey
    shape: Shape


def identity_labels(spec: FamilySpec) -> tuple[str, ...]:
    """Give those of a family's labels that say whose it is."""
    return IDENTITY_LABELS if "rank" in spec.labels else IDENTITY_LABELS[:1]


def fits(definition: StatDefinition, spec: FamilySpec) -> bool:
    """Tell whether a Stat is a family of the exporter's own."""
    labels = tuple([name for name, _ in definition.labels])
    return (
        definition.kind == spec.type
        and (definition.unit or "") == spec.unit
        and labels == spec.labels[len(identity_labels(spec)) :]
    )


def shape_of(definition: StatDefinition) -> Shape:
    """Tell what must be the same for numbers to be added up."""
    histogram = Aggregation.HISTOGRAM in definition.aggregations
    return histogram, definition.unit, definition.buckets, definition.kind


@dataclass(slots=True, eq=False)
class Claim:
    """A family, its sample names and its window gauges, held by all Stats that feed it.

    Attributes:
        main: Name of the main family.
        shape: Of its first holder.
        first: The definition of its first holder, for help.
        label_names: The union over all holders, sorted.
    """

    main: str
    shape: Shape
    first: StatDefinition
    label_names: tuple[str, ...] = field(default_factory=tuple)


class Admission:
    """Makes plans of definitions, settles who may use which names, and counts what is admitted.

    Args:
        reserved: Names of fixed families that no Stat may take, beside the generated list.
    """

    def __init__(self, *, reserved: Iterable[str] = ()) -> None:
        self._reserved = RESERVED | frozenset(reserved)
        self._claims: dict[str, Claim] = {}
        self._names: dict[str, Claim] = {}
        self._settled: tuple[list[object], list[object]] = ([], [])

    def count(self, processes: Sequence[Process], lingering: Sequence[Totals]) -> None:
        """Settle what counts, and count it.

        Args:
            processes: All that have a record.
            lingering: What the dead have left that is still shown.
        """
        participants = [each for each in processes if self._look(each)]
        participants.sort(key=lambda each: (each.identity.started, each.identity.id))
        lists: list[object] = [each.plans for each in participants]
        before, leftovers_before = self._settled
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
        self._settled = lists, list(leftovers)

    def plans(
        self, definitions: Iterable[StatDefinition], known: Mapping[StatDefinition, Plan | None]
    ) -> list[Plan | None]:
        """Make the plans of one process's definitions; None for what may never be published.

        The second of two that become the same series (`a.b` and `a_b`) is such a one.

        Args:
            definitions: All of them.
            known: Plans that were made before.
        """
        plans: list[Plan | None] = []
        seen: set[SeriesKey] = set()
        for definition in definitions:
            plan = known.get(definition) or self._made(definition)
            if plan is not None and plan.key in seen:
                plan = None
            if plan is not None:
                seen.add(plan.key)
            plans.append(plan)
        return plans

    def claim(self, plan: Plan) -> Claim | None:
        """Find the family that a plan feeds; None when another family has its names."""
        claim = self._claims.get(plan.key[0])
        if claim is None or claim.shape != plan.shape:
            return None
        return claim if all(name in claim.label_names for name, _ in plan.key[1]) else None

    def _look(self, process: Process) -> bool:
        """Bring a process's plans up to date; True when it has a say in the settlement."""
        snapshot = process.snapshot
        if snapshot is None:
            return False
        definitions = [reading.definition for reading in snapshot.recording.stats]
        first = process.definitions is None
        renewed = process.definitions is None or not _same(definitions, process.definitions)
        if renewed:
            process.definitions = definitions
            known = {plan.definition: plan for plan in process.plans if plan is not None}
            process.plans = self.plans(definitions, known)
        if process.living:
            return True
        if first:
            # It died before anybody saw it: its totals are counted, and shown if they fit those of the living.
            process.admitted = process.plans
            return False
        return renewed

    def _leftover(self, totals: Totals) -> list[Plan | None]:
        if totals.lingering is None:
            totals.lingering = self.plans([reading.definition for reading in totals.series.values()], {})
        return totals.lingering

    def _settle(self, living: Sequence[Process], dead: Iterable[Sequence[Plan | None]]) -> None:
        """Decide anew who holds which family."""
        self._claims, self._names = {}, {}
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

    def _made(self, definition: StatDefinition) -> Plan | None:
        families = families_of(definition)
        names = families.names()
        own = OWN.get(families.main)
        if own is not None:
            refused = not fits(definition, own)
        else:
            refused = any(name in self._reserved or name.startswith(RESERVED_PREFIXES) for name in names)
        if refused or any(name in IDENTITY_LABELS for name, _ in definition.labels):
            return None
        return Plan(definition, families, names, (families.main, definition.labels), shape_of(definition))

    def _hold(self, plan: Plan) -> bool:
        main = plan.key[0]
        claim = self._claims.get(main)
        if claim is not None and claim.shape != plan.shape:
            return False
        if any(self._names.get(name, claim) is not claim for name in plan.names):
            return False
        labels = {name for name, _ in plan.key[1]}
        if claim is None:
            claim = self._claims[main] = Claim(main, plan.shape, plan.definition)
        elif len(labels.union(claim.label_names)) > _MOST_LABELS:
            return False
        if not labels.issubset(claim.label_names):
            claim.label_names = tuple(sorted(labels.union(claim.label_names)))
        for name in plan.names:
            self._names[name] = claim
        return True


def _same(first: Sequence[object], second: Sequence[object]) -> bool:
    return len(first) == len(second) and all(map(is_, first, second))
