"""Search for the best candidate by hill climbing; the cost model scores every step.

The search is deterministic: it uses no clock and no random numbers, and of equal candidates the
earlier one wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, islice, permutations, product

from penstock.planner.candidate import BlockLocations, Candidate, Location
from penstock.planner.drives import DriveWeights, drive_sets, weights_by_speed, weights_to_hold
from penstock.planner.evaluator import PlanEvaluator
from penstock.planner.feasibility import fitting, round_counts
from penstock.planner.initial_candidates import (
    ORDERS,
    PREFERENCES,
    FillStrategy,
    can_split,
    fill,
    resident_sets,
    split_choices,
    spread,
)
from penstock.planner.kept_layers import keep_layers
from penstock.planner.late_moments import update_moments_late, update_moments_on_nvme_late
from penstock.planner.saved_attention import save_attention
from penstock.planner.sweep_order import interleave_sweeps
from penstock.planner.sweep_sides import share_sweeps
from penstock.tiers import Tier


@dataclass(frozen=True, slots=True)
class SearchEffort:
    """Limits of the search."""

    seeds: int = 60
    """Maximum number of initial candidates."""

    starts: int = 4
    """Maximum number of initial candidates to improve."""

    moves: int = 80
    """Maximum number of changed candidates to time for each of those."""

    work: int = 130_000
    """Number of timed operations after which the search ends. Small models have fewer operations,
    so more of their candidates are timed."""

    sizes: int = 8
    """Number of sizes of groups of blocks to move, from a quarter of all blocks down to one."""

    orders: int = len(ORDERS)
    """Number of fill orders to try."""

    rounds: int = 3
    """How many numbers of rounds to try, of those that fit."""

    gpu_sweeps: bool = True
    """Whether the GPU may sweep blocks in host memory, where that is faster."""

    late_moments: bool = True
    """Whether moments may be updated in backward, where that is faster."""


THOROUGH = SearchEffort()
"""The effort for a plan that will be used."""

QUICK = SearchEffort(seeds=8, starts=1, moves=6, sizes=1, orders=3, rounds=1)
"""The effort for what-if questions, which need many plans."""

PROMISING = 1.25
"""If a quick search over a set of drives finds nothing within this factor of the best plan, a
thorough search does not help."""

COMPARED = 1.04
"""Results of the search within this factor of the best are compared with an exact estimate."""

CLOSE = 0.005
"""Within this fraction of compute time, stop searching: no plan can be faster than compute."""


def search(
    evaluator: PlanEvaluator, effort: SearchEffort = THOROUGH, *, exact: bool = True
) -> Candidate | None:
    """Return the best candidate found, or None if nothing fits.

    Without `exact`, it fits by the quick count of its bytes only.
    """
    if exact:
        found = _find_exact_fit(
            evaluator, lambda: _best_exactly(evaluator, _search(evaluator, effort))
        )
    else:
        found = next(iter(_search(evaluator, effort)), None)
    if found is None:
        return None
    plain = _use_what_is_idle(evaluator, found, effort, exact=exact)
    late = found
    if effort.late_moments:
        late = update_moments_late(evaluator, found, exact=exact)
    if late is found:
        return plain
    late = _use_what_is_idle(evaluator, late, effort, exact=exact)
    # Late moments make the step faster at first. With what is idle otherwise, steps without them
    # may catch up: the GPU can take over sweeps of states whose moments then need no second pass.
    return min(late, plain, key=evaluator.exact_score if exact else evaluator.score)


def _use_what_is_idle(
    evaluator: PlanEvaluator, found: Candidate, effort: SearchEffort, *, exact: bool
) -> Candidate:
    """Use HBM that is left, links and the GPU for less recomputation and shorter sweeps."""
    kept = keep_layers(evaluator, found, exact=exact)
    kept = save_attention(evaluator, kept, exact=exact)
    if effort.gpu_sweeps:
        shared = share_sweeps(evaluator, kept, exact=exact)
        if shared is not kept:
            # Blocks leave HBM to make room for states, which need less than a whole block.
            shared = save_attention(evaluator, shared, exact=exact)
        kept = shared
    kept = interleave_sweeps(evaluator, kept, exact=exact)
    if effort.late_moments:
        kept = update_moments_on_nvme_late(evaluator, kept, exact=exact)
    return kept


MakeEvaluator = Callable[[DriveWeights | None], PlanEvaluator]
"""Makes an evaluator for stripes with these weights of drives."""

Found = tuple[PlanEvaluator, Candidate]
"""A candidate, and the evaluator that found it."""


def search_drives(
    make: MakeEvaluator, effort: SearchEffort = THOROUGH, *, exact: bool = True
) -> Found | None:
    """Return the best candidate over the sets of drives, or None if nothing fits.

    With one drive, or none, this is `search`. With several, a quick search tells which sets are
    worth a thorough one. A drive that is offered can therefore not make a plan slower.
    """
    evaluator = make(None)
    if len(evaluator.budget.nvme) < 2:
        candidate = search(evaluator, effort, exact=exact)
        return None if candidate is None else (evaluator, candidate)
    quick: list[tuple[float, DriveWeights]] = []
    for paths in drive_sets(evaluator.budget, evaluator.rates):
        found = _search_paths(make, paths)
        if found is not None:
            quick.append((found[0].score(found[1]), found[0].drives or {}))
    best: Found | None = None
    for score, drives in sorted(quick, key=lambda pair: pair[0]):
        if best is not None and score > PROMISING * best[0].score(best[1]):
            break
        evaluator = make(drives)
        candidate = search(evaluator, effort, exact=exact)
        if candidate is not None and (
            best is None or evaluator.score(candidate) < best[0].score(best[1])
        ):
            best = evaluator, candidate
    return best


def _search_paths(make: MakeEvaluator, paths: tuple[str, ...]) -> Found | None:
    """Search quickly with stripes over some drives: by speed, or else so that everything fits."""
    any_evaluator = make(None)
    budget, rates = any_evaluator.budget, any_evaluator.rates
    evaluator = make(weights_by_speed(budget, rates, paths))
    candidate = search(evaluator, QUICK)
    if candidate is not None:
        return evaluator, candidate
    # Some drive is too small for its part. Use all that the drives can hold, and then no more than
    # what that needs, so that as little as possible is on slow drives.
    nbytes = sum(path.nbytes for path in budget.nvme if path.path in paths)
    found: Found | None = None
    for _ in range(2):
        evaluator = make(weights_to_hold(budget, rates, paths, nbytes))
        candidate = search(evaluator, QUICK)
        if candidate is None:
            return found
        found = evaluator, candidate
        nbytes = int(1.01 * evaluator.stored_nbytes(candidate)[Tier.NVME])
    return found


def _find_exact_fit(
    evaluator: PlanEvaluator, find: Callable[[], Candidate | None]
) -> Candidate | None:
    """Call `find` until its candidate fits to the byte.

    The search sizes candidates quickly. Each exact check that fails lowers the evaluator's
    capacities, so the next attempt finds a smaller candidate.
    """
    for _ in range(4):
        candidate = find()
        if candidate is None or not evaluator.exact_shortage(candidate):
            return candidate
    return None


def _search(evaluator: PlanEvaluator, effort: SearchEffort) -> list[Candidate]:
    """Improve the best few initial candidates, and return the results, the best first.

    The best initial candidate is often not the one that can be improved most.
    """
    initial = islice(_initial(evaluator, effort), effort.seeds)
    seeds: list[Candidate] = []
    worst = math.inf  # score to beat: that of the last seed once there are enough
    for bound, candidate in _by_lower_bound(evaluator, initial):
        if bound >= worst:
            break
        if evaluator.score(candidate) < worst:
            seeds = sorted([*seeds, candidate], key=evaluator.score)[: effort.starts]
            worst = evaluator.score(seeds[-1]) if len(seeds) == effort.starts else math.inf
    results: list[Candidate] = []
    for seed in seeds:
        if results and (
            evaluator.operations_timed > effort.work or _is_compute_bound(evaluator, results[0])
        ):
            break
        results = sorted([*results, _climb(evaluator, seed, effort)], key=evaluator.score)
    return results


def _best_exactly(evaluator: PlanEvaluator, candidates: list[Candidate]) -> Candidate | None:
    """Return the best of a few good candidates, timed with pieces of the planned size.

    Coarse pieces are wrong by a few percent, so only candidates that are close have to be compared.
    """
    close = [c for c in dict.fromkeys(candidates)
             if evaluator.score(c) < COMPARED * evaluator.score(candidates[0])]  # fmt: skip
    if len(close) < 2:
        return close[0] if close else None
    return min(close, key=evaluator.exact_score)


def _by_lower_bound(
    evaluator: PlanEvaluator, candidates: Iterable[Candidate]
) -> list[tuple[float, Candidate]]:
    """Return candidates with lower bounds of their scores, the lowest first.

    The bound is cheap and close to the score. In this order, few candidates have to be timed until
    the bounds of all others exceed the best score.
    """
    distinct = dict.fromkeys(candidates)
    bounds = [(evaluator.score_lower_bound(candidate), candidate) for candidate in distinct]
    return sorted(bounds, key=lambda pair: pair[0])


def _is_compute_bound(evaluator: PlanEvaluator, candidate: Candidate) -> bool:
    return evaluator.score(candidate) < (1 + CLOSE) * evaluator.compute_seconds(candidate)


def _initial(evaluator: PlanEvaluator, effort: SearchEffort) -> Iterator[Candidate]:
    """Yield initial candidates that fit, the most promising first.

    Those have few rounds, a full HBM and optimizer states in DRAM.
    """
    seen: set[Candidate] = set()
    counts = 0  # numbers of rounds that fit
    for rounds in filter(evaluator.could_fit, round_counts(evaluator)):
        before = len(seen)
        for split in split_choices(evaluator):
            for candidate in _filled(evaluator, effort, rounds, split=split):
                if candidate not in seen:
                    seen.add(candidate)
                    yield candidate
            if len(seen) > before:  # adapters fit in HBM: no other place is better
                break
        counts += len(seen) > before
        if counts >= effort.rounds:
            return
    if not seen:  # little more than the least memory: whatever fits
        yield from islice(fitting(evaluator, {}), 1)


def _filled(
    evaluator: PlanEvaluator, effort: SearchEffort, rounds: int, *, split: bool
) -> Iterator[Candidate]:
    """Yield candidates that fit, from all orders in which tiers are filled."""
    preferences = range(len(PREFERENCES) if evaluator.capacity(Tier.CXL) else 1)
    hbm_activations = (0, len(evaluator.inventory.layers))
    for resident in resident_sets(evaluator, rounds, split=split):
        for order, preference, activations in product(
            ORDERS[: effort.orders], preferences, hbm_activations
        ):
            strategy = FillStrategy(
                order, preference, resident,
                hbm_activations=activations, rounds=rounds, split=split,
            )  # fmt: skip
            candidate = fill(evaluator, strategy)
            if candidate is not None:
                yield candidate


# Hill climbing.


def _climb(evaluator: PlanEvaluator, candidate: Candidate, effort: SearchEffort) -> Candidate:
    """Apply changes that help until none does, or until the effort is spent."""
    timed = 0
    seen = {candidate}
    improved = True
    while improved:
        improved = False
        # An improvement below 0.01 % is not worth another pass over all neighbours.
        enough = evaluator.score(candidate) * (1 - 1e-4)
        neighbours = _neighbours(evaluator, candidate, effort)
        for bound, other in _by_lower_bound(evaluator, neighbours):
            spent = timed >= effort.moves or evaluator.operations_timed > effort.work
            if bound >= enough or spent:
                break
            if other in seen or evaluator.shortage(other):
                continue
            timed += 1
            seen.add(other)
            if evaluator.score(other) < enough:
                candidate, improved = other, True
                break
    return candidate


def _neighbours(
    evaluator: PlanEvaluator, candidate: Candidate, effort: SearchEffort
) -> Iterator[Candidate]:
    """Yield changed candidates, those with many changed blocks first."""
    yield from _change_slots(candidate)
    size = max(1, len(candidate.locations) // 4)
    for _ in range(effort.sizes):
        yield from _move_groups(evaluator, candidate, size)
        yield from _swap_groups(evaluator, candidate, size)
        if size == 1:
            return
        size = max(1, size // 4)


def _change_slots(candidate: Candidate) -> Iterator[Candidate]:
    """Yield candidates with another number of weight slots or prefetched blocks."""
    layers = len(candidate.locations) - 2
    for slots, ahead in ((3, 2), (4, 1), (8, 1), (16, 1), (2, 1)):
        if slots <= layers + 1 and (slots, ahead) != (candidate.slots, candidate.ahead):
            yield replace(candidate, slots=slots, ahead=ahead)


def _move_groups(evaluator: PlanEvaluator, candidate: Candidate, size: int) -> Iterator[Candidate]:
    """Yield candidates with one group of some blocks in another location."""
    for group in BlockLocations._fields:
        for source in Location:
            blocks = _blocks_at(candidate, group, source)
            for target in _targets(evaluator, group):
                if target is not source and blocks:
                    ordered = sorted(blocks)
                    patterns = (spread(blocks)[:size], ordered[:size], ordered[-size:])
                    for some in dict.fromkeys(map(tuple, patterns)):
                        yield _put(candidate, group, some, target)
    yield from _change_residents(evaluator, candidate, size)


def _swap_groups(evaluator: PlanEvaluator, candidate: Candidate, size: int) -> Iterator[Candidate]:
    """Yield candidates in which two groups exchange about as many bytes."""
    locations = (Location.DRAM, Location.CXL, Location.NVME)
    rounds = candidate.rounds
    for group, other_group in permutations(BlockLocations._fields, 2):
        for a, b in combinations(locations, 2):
            blocks = _blocks_at(candidate, group, a)
            other_blocks = _blocks_at(candidate, other_group, b)
            if not blocks or not other_blocks:
                continue
            some = spread(blocks)[:size]
            wanted = sum(evaluator.group_nbytes(i, group, rounds) for i in some)
            each = evaluator.group_nbytes(other_blocks[0], other_group, rounds)
            back = spread(other_blocks)[: max(1, math.ceil(wanted / max(each, 1)))]
            yield _put(_put(candidate, group, some, b), other_group, back, a)


def _change_residents(
    evaluator: PlanEvaluator, candidate: Candidate, size: int
) -> Iterator[Candidate]:
    """Yield candidates with whole blocks moved into HBM, out of it, or exchanged."""
    splits = any(each.is_split for each in candidate.locations)

    def put_out(some: list[int], change: Candidate) -> Candidate:
        if not splits:
            return _put_blocks(change, some, Location.DRAM)
        split = [i for i in some if can_split(evaluator, i)]
        others = [i for i in some if i not in split]
        return _put(_put_blocks(change, others, Location.DRAM), "frozen", split, Location.DRAM)

    inside = [i for i, each in enumerate(candidate.locations) if each.resident]
    outside = [i for i, each in enumerate(candidate.locations) if each.weight and not each.resident]
    enter = [outside[:size], outside[-size:]]
    leave = [inside[:size], inside[-size:]]
    yield from (_put_blocks(candidate, some, Location.HBM) for some in enter)
    yield from (put_out(some, candidate) for some in leave)
    for entering, leaving in product(enter, leave):
        without = put_out(leaving, candidate)
        yield _put_blocks(without, entering, Location.HBM)


def _put_blocks(candidate: Candidate, blocks: list[int], location: Location) -> Candidate:
    """Put all groups of some blocks, except activations, in one location."""

    def moved(locations: BlockLocations) -> BlockLocations:
        trained = location if locations.state else None
        return locations._replace(weight=location, state=trained, gradient=trained, frozen=None)

    return candidate.moved({i: moved(candidate.locations[i]) for i in blocks})


def _put(
    candidate: Candidate, group: str, blocks: list[int] | tuple[int, ...], location: Location
) -> Candidate:
    """Put one group of some blocks in a location."""
    return candidate.moved(
        {i: candidate.locations[i]._replace(**{group: location}) for i in blocks}
    )


def _targets(evaluator: PlanEvaluator, group: str) -> list[Location]:
    """Return the locations that a group may move to."""
    targets = [Location.DRAM]
    if evaluator.capacity(Tier.CXL):
        targets += [Location.CXL, Location.MIX] if group == "state" else [Location.CXL]
    if evaluator.capacity(Tier.NVME):
        targets.append(Location.NVME)
    return [*targets, Location.HBM] if group == "activation" else targets


def _blocks_at(candidate: Candidate, group: str, location: Location) -> list[int]:
    """Return the blocks whose group is in a location and may move on its own."""
    return [
        i
        for i, each in enumerate(candidate.locations)
        if getattr(each, group) is location
        and (group in ("activation", "frozen") or each.weight is not Location.HBM)
    ]
