"""How long a step takes, asked of many placements in a row. Room: decide."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from penstock.cost.jobs import Known, Translator
from penstock.cost.rates import Rates
from penstock.cost.simulate import Speeds, seconds
from penstock.inventory import Inventory
from penstock.placement_parts import Placement
from penstock.roles import STATE, TRAINED, Role
from penstock.schedule import COMPUTE, Operation, Schedule, Verb
from penstock.tiers import Tier
from penstock.workload import Workload


@dataclass(slots=True)
class Stopwatch:
    """Times placements of one model and work on one machine: what they have in common is worked
    out once. It must not outlive the homes of those placements, which it knows by identity."""

    inventory: Inventory
    """The model."""

    workload: Workload
    """What is done."""

    rates: Rates
    """On what."""

    issued: int = 0
    """As the translator has it."""

    _known: Known = field(init=False, default_factory=dict)
    _speeds: Speeds = field(init=False, default_factory=dict)
    _blocks: dict[tuple[int, ...], Mapping[str, float]] = field(init=False, default_factory=dict)

    def seconds(self, placement: Placement, schedule: Schedule) -> float:
        """What `estimate` calls the step's seconds."""
        return seconds(self._translator(placement).jobs(schedule), self._speeds)

    def at_least(self, placement: Placement) -> float:
        """What the busiest resource works: no order of the step ends sooner."""
        totals: dict[str, float] = defaultdict(float)
        translator = self._translator(placement)
        for block, at in enumerate(placement.blocks):
            key = (block, placement.rounds, *map(id, at.homes))
            if key not in self._blocks:
                self._blocks[key] = translator.totals(_operations(placement, block, self.inventory))
            for resource, wanted in self._blocks[key].items():
                totals[resource] += wanted
        return max(totals.values())

    def computing(self, placement: Placement) -> float:
        """What the GPU computes and the host launches for it, without sweeps: wherever anything
        rests, no step ends sooner."""
        translator = self._translator(placement)
        blocks = range(len(placement.blocks))
        needed = (o for i in blocks for o in _operations(placement, i, self.inventory))
        return max(translator.totals(o for o in needed if o.verb in COMPUTE).values())

    def _translator(self, placement: Placement) -> Translator:
        parts = (self.inventory, self.workload, placement, self.rates)
        return Translator(*parts, issued=self.issued, known=self._known)


def _operations(placement: Placement, block: int, inventory: Inventory) -> Iterator[Operation]:
    """What a step cannot do without. Weights may stay over the turn: they are fetched once."""
    at = placement.blocks[block]
    kind = inventory.blocks[block].kind
    staged = tuple(role for role in TRAINED if at.touches(role, Tier.NVME))
    if at.sweep != "none":
        yield Operation(Verb.SWEEP, block, TRAINED, "forward", gpu=at.sweep == "gpu")
        yield Operation(Verb.READ, block, staged, "forward")
        back = tuple(role for role in (Role.WEIGHT, *STATE) if role in staged)
        yield Operation(Verb.WRITE, block, back, "forward")
    if at.home(Role.WEIGHT):
        yield Operation(Verb.FETCH, block, (Role.WEIGHT,), "forward")
    for round in range(placement.rounds):
        if kind != "head":
            yield Operation(Verb.FORWARD, block, (), "forward", round)
        verb = Verb.LOSS if kind == "head" else Verb.BACKWARD
        yield Operation(verb, block, (), "backward", round)
        for role in (Role.GRADIENT, Role.INPUT):
            if at.home(role):
                yield Operation(Verb.DRAIN, block, (role,), "backward", round)
        if at.home(Role.INPUT):
            yield Operation(Verb.FETCH, block, (Role.INPUT,), "backward", round)
