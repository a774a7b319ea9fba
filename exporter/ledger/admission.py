"""Admission: which Stats of which processes may share a family name.

Runs in the sidecar, on the ledger's collecting thread. Definitions come in from the feed, where each process
names its Stats as it likes; what goes out is the same for the whole exposition: a name has one family, one
type, one unit and one set of buckets.

The rule, for every name a Stat's families and samples would take:

- Names of the exporter's own families are refused, except to a Stat that is just that family (`own_families`).
- A family belongs to the living processes that have it. The first (by the order given, in which processes
  that already hold the family come before new ones) decides type, unit and buckets; a Stat that differs in
  one of them, or whose other families collide with a held name, is refused while a holder lives.
- Help may differ (the first one's is published), and so may labels: the family then has the union of the
  label names, and those that a Stat lacks are absent from its series.
- What only the dead have recorded lingers under the same rule, after all the living.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from exporter.ledger.identity_labels import IDENTITY_LABELS
from exporter.ledger.own_families import OWN, fits
from exporter.recording.naming import StatFamilies, families_of
from exporter.recording.reserved import RESERVED, RESERVED_PREFIXES
from exporter.recording.values import Aggregation, StatDefinition

SeriesKey = tuple[str, tuple[tuple[str, str], ...]]
"""What a Stat is under, over restarts and versions of the code: its main family and its labels."""

Shape = tuple[bool, str | None, tuple[float, ...], str]
"""Histogram or not, unit, bounds of the buckets, kind."""

_MOST_PLANS = 100_000
_MOST_LABELS = 64


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A definition with all that follows from it; made once for each.

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
        families: Every family name in it with the aggregation it shows; None for what is no window gauge.
    """

    main: str
    shape: Shape
    first: StatDefinition
    label_names: tuple[str, ...] = ()
    families: dict[str, Aggregation | None] = field(default_factory=dict)


class Claimant:
    """One process in front of the door, or what lingers of the dead.

    Attributes:
        plans: Its Stats in order; None for one that cannot be published by anybody.
        admitted: Those that were admitted by the settlement before; they come first in this one.
    """

    __slots__ = ("admitted", "plans")

    def __init__(self, plans: Sequence[Plan | None], admitted: Sequence[Plan | None] = ()) -> None:
        self.plans = plans
        self.admitted = admitted


class Admission:
    """Makes plans of definitions and settles who may use which names.

    Attributes:
        version: Grows with every settlement, so that what was derived from claims can be kept until then.
    """

    def __init__(self, *, reserved: Iterable[str] = ()) -> None:
        """Start without claims.

        Args:
            reserved: Names of fixed families that no Stat may take, beside the generated list.
        """
        self.version = 0
        self._reserved = RESERVED | frozenset(reserved)
        self._plans: dict[StatDefinition, Plan | None] = {}
        self._claims: dict[str, Claim] = {}
        self._names: dict[str, Claim] = {}

    def plans(self, definitions: Iterable[StatDefinition]) -> list[Plan | None]:
        """Make or find the plans of one process's definitions; None for what may never be published.

        The second of two that become the same series (`a.b` and `a_b`) is such a one.
        """
        plans: list[Plan | None] = []
        seen: set[SeriesKey] = set()
        for definition in definitions:
            plan = self._plan(definition)
            if plan is not None and plan.key in seen:
                plan = None
            if plan is not None:
                seen.add(plan.key)
            plans.append(plan)
        return plans

    def _plan(self, definition: StatDefinition) -> Plan | None:
        try:
            return self._plans[definition]
        except KeyError:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            plan = self._plans[definition] = self._made(definition)
            return plan

    def settle(self, living: Sequence[Claimant], dead: Sequence[Claimant]) -> list[list[Plan | None]]:
        """Decide anew who holds which family.

        Returns:
            For each living claimant its plans in order, None where it was refused.
        """
        self.version += 1
        self._claims, self._names = {}, {}
        # A family that is held stays with its holders, whatever order the processes come in.
        for claimant in living:
            held = {(plan.key, plan.shape) for plan in claimant.admitted if plan is not None}
            for plan in claimant.plans:
                if plan is not None and (plan.key, plan.shape) in held:
                    self._hold(plan)
        settled = [
            [plan if plan is not None and self._hold(plan) else None for plan in claimant.plans]
            for claimant in living
        ]
        for claimant in dead:
            for plan in claimant.plans:
                if plan is not None:
                    self._hold(plan)
        return settled

    def claim(self, plan: Plan) -> Claim | None:
        """Find the family that a plan feeds; None when another family has its names."""
        claim = self._claims.get(plan.key[0])
        if claim is None or claim.shape != plan.shape:
            return None
        return claim if all(name in claim.label_names for name, _ in plan.key[1]) else None

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
        families = plan.families
        claim.families[families.main] = None
        if families.samples:
            claim.families.update({families.last_sample: None, families.samples: None})
        claim.families.update({name: aggregation for aggregation, name in families.windows})
        return True
