"""Ranges of host memory, checked before they are taken. Room: hold.

The kernel answers a bound range that does not fit with its OOM killer, not with an error, so room
is checked first. Native code knows numbers, this file knows names; the message joins both.
"""

from __future__ import annotations

import errno
import functools
import os
import resource
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from penstock import _native
from penstock.errors import (
    ForbiddenNodeError,
    HugePagesError,
    MapError,
    MemoryLimitError,
    MoveError,
    NodeFullError,
    OfflineNodeError,
    PinError,
    PlacementPermissionError,
    SizeError,
    UnknownNodeError,
)
from penstock.machine.sysfs import System
from penstock.memory.placement import Interleave, Place, Stripe, check_place, current_place
from penstock.memory.residency import residency
from penstock.units import MiB, format_bytes, round_up

Huge = Literal["auto", "thp", "2M"] | None

KEEP_FREE = 64 * MiB
"""Left on every node for the kernel's own needs: below its watermarks an allocation reclaims and
then kills."""

MAX_NBYTES = 2**63 - 1

MAX_TOUCHERS = 32
"""Threads per node for the first touch. Zeroing saturates a node's memory well before this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionOptions:
    """How a range is taken. Where it is taken is the place."""

    pinned: bool = False
    """Registered with CUDA where there is a GPU, locked in memory where there is none."""

    huge: Huge = "auto"
    """`"thp"`: 2 MiB pages where the kernel finds them. `"2M"`: from the reserved pool, or an
    error. None: 4 KiB pages. `"auto"`: `"thp"`, except under Interleave, which deals pages."""

    prefault: bool = True
    """Take every page now, so that a shortage shows here and not in the middle of a step."""

    def __post_init__(self) -> None:
        if self.huge not in ("auto", "thp", "2M", None):
            raise SizeError(f'huge is "auto", "thp", "2M" or None, got {self.huge!r}')

    def resolve(self, place: Place | None) -> RegionOptions:
        if self.huge != "auto":
            return self
        return replace(self, huge=None if isinstance(place, Interleave) else "thp")


def allocate_region(
    nbytes: int,
    place: Place | None,
    options: RegionOptions,
    system: System | None = None,
) -> _native.Region:
    """A new range of at least `nbytes`, in whole pages.

    Without a `place` it is the one set by `placing`, or else the kernel's own choice. Nothing is
    left mapped when this raises.
    """
    system = system or System()
    check_place(place)
    place = place or current_place()
    check_nbytes("a range", nbytes)
    options = options.resolve(place)
    wanted = round_up(nbytes, _page_bytes(options.huge))
    _check_room(place, wanted, options, system)
    try:
        region = _native.Region(
            nbytes=nbytes,
            placement=_native_placement(place),
            huge=_NATIVE_HUGE[options.huge],
            prefault=options.prefault,
            threads=MAX_TOUCHERS,
            cpus=_cpus_for(place, system),
        )
    except OSError as failed:
        raise _explain(failed, wanted, options.huge, system) from None
    if options.pinned:
        _pin(region)
    return region


def move_region(
    region: _native.Region, offset: int, nbytes: int, place: Place, system: System | None = None
) -> None:
    """Migrate part of a range, widened to whole pages. No copy may be in flight."""
    check_move(region.address + offset, nbytes, place, system or System())
    try:
        region.move(offset, nbytes, place.native())
    except OSError as failed:
        raise explain_move(failed, nbytes) from None
    except _native.CudaError as failed:  # moved, but no longer pinned
        raise _explain_pin(failed, region) from None


def check_move(address: int, nbytes: int, place: Place, system: System) -> None:
    """Raise unless the nodes of `place` have room for what is not there yet.

    Moving takes no more memory in all, so a control group has no say in it.
    """
    _check_nodes(place.nodes, system)
    found = residency(address, nbytes)
    here, in_memory = found.nbytes, nbytes - found.unmapped * found.page_nbytes
    shares = place.shares(max(0, in_memory))  # what is not in memory does not move
    _check_free({n: max(0, share - here.get(n, 0)) for n, share in shares.items()}, system)


def explain_move(failed: OSError, nbytes: int) -> Exception:
    if failed.errno in (errno.EPERM, errno.EACCES):
        return PlacementPermissionError(_call(failed), failed.errno)
    reason = {
        errno.EIO: "the kernel holds some pages in place (pinned by a driver or by I/O in flight)",
        errno.ENOMEM: "the target ran out of memory, or the process out of vm.max_map_count",
    }.get(failed.errno or 0, str(failed.strerror))
    return MoveError(wanted=nbytes, reason=reason)


def check_nbytes(what: str, nbytes: int) -> None:
    if not 1 <= nbytes <= MAX_NBYTES:
        raise SizeError(f"{what} holds from 1 to {MAX_NBYTES} bytes, got {nbytes}")


def _check_room(place: Place | None, wanted: int, options: RegionOptions, system: System) -> None:
    """Raise unless every node of `place` exists, is allowed, and has room for its share."""
    if place is not None:
        _check_nodes(place.nodes, system)
    if options.huge == "2M":
        return _check_pool(place, wanted, system)
    if not options.prefault:
        return _check_maps(place, wanted, system)
    if place is not None:
        _check_free(place.shares(wanted), system)
    limited = system.memory_limit()
    if limited is not None and wanted > limited[1]:
        raise MemoryLimitError(wanted=wanted, free=limited[1], limit=limited[0])
    return None


def _check_free(shares: Mapping[int, int], system: System) -> None:
    available = {n: system.node_bytes(n).available for n in system.allowed_nodes()}
    room = {n: max(0, nbytes - KEEP_FREE) for n, nbytes in available.items()}
    for node, share in shares.items():
        if share > room[node]:
            others = {n: r for n, r in room.items() if n not in shares}
            raise NodeFullError(node, wanted=share, free=room[node], others=others)


def _check_pool(place: Place | None, wanted: int, system: System) -> None:
    """Reserved pages are apart from ordinary memory: their pool alone counts."""
    unit = _native.UNIT_NBYTES
    shares: Iterable[tuple[int | None, int]] = [(None, wanted)]
    if place is not None:
        shares = place.shares(wanted).items()
    for node, share in shares:
        pages, free = -(-share // unit), system.free_huge_pages(node)
        if pages > free:
            raise HugePagesError(wanted=pages, free=free, unit=unit, node=node)


def _check_nodes(nodes: tuple[int, ...], system: System) -> None:
    possible, online, allowed = (
        system.possible_nodes(),
        system.memory_nodes(),
        system.allowed_nodes(),
    )
    for node in nodes:
        if node in allowed:
            continue
        if node in online:
            raise ForbiddenNodeError(node, allowed)
        if node in possible:
            raise OfflineNodeError(node, online)
        raise UnknownNodeError(node, online)


def _check_maps(place: Place | None, wanted: int, system: System) -> None:
    """A stripe that is not touched now stays one kernel mapping per run of units."""
    if not isinstance(place, Stripe):
        return
    runs = wanted // _native.UNIT_NBYTES
    limit = system.number("proc/sys/vm/max_map_count") or 65530
    if runs > limit // 2:
        raise MapError(
            wanted=wanted,
            errno=errno.ENOMEM,
            reason=f"an untouched stripe of that length takes up to {runs} mappings of the "
            f"{limit} a process may have",
            advice="use prefault=True or raise vm.max_map_count",
        )


def _cpus_for(place: Place | None, system: System) -> dict[int, list[int]]:
    nodes = place.nodes if place else ()
    cpus = {node: list(system.nearest_cpus(node)) for node in nodes}
    # For memory of no one node: every CPU we may use.
    cpus[-1] = sorted(os.sched_getaffinity(0))
    return cpus


def _native_placement(place: Place | None) -> _native.Placement:
    return place.native() if place else _native.Placement(_native.Policy.local, [], [])


_NATIVE_HUGE = {
    None: _native.Huge.none,
    "thp": _native.Huge.transparent,
    "2M": _native.Huge.reserved,
}


def _page_bytes(huge: Huge) -> int:
    return _native.UNIT_NBYTES if huge == "2M" else _native.page_nbytes()


def _explain(failed: OSError, wanted: int, huge: Huge, system: System) -> Exception:
    call = _call(failed)
    if failed.errno in (errno.EPERM, errno.EACCES):
        return PlacementPermissionError(call, failed.errno)
    if huge == "2M" and failed.errno in (errno.ENOMEM, errno.EFAULT):
        unit = _native.UNIT_NBYTES
        free = system.free_huge_pages(None)
        return HugePagesError(wanted=wanted // unit, free=free, unit=unit, node=None)
    advice = "free memory or ask for less; `ulimit -v` and vm.overcommit_memory also limit it"
    if failed.errno == errno.ENOSYS:
        advice = "this kernel has no NUMA support; leave out `place`"
    return MapError(
        wanted=wanted,
        errno=failed.errno or 0,
        reason=f"{call}: {os.strerror(failed.errno or 0)}",
        advice=advice,
    )


def _call(failed: OSError) -> str:
    """`mbind: Operation not permitted` -> `mbind`."""
    return str(failed.strerror).split(":")[0]


def _pin(region: _native.Region) -> None:
    if _native.cuda_devices() > 0:
        try:
            region.register()
        except _native.CudaError as failed:
            raise _explain_pin(failed, region) from None
        return
    try:
        region.lock()
    except OSError:
        _warn_unpinned()


def _explain_pin(failed: _native.CudaError, region: _native.Region) -> PinError:
    code, name = failed.args
    return PinError(wanted=region.mapped_nbytes, code=code, name=name)


@functools.cache  # once a process: a training run makes thousands of tensors
def _warn_unpinned() -> None:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    allowed = "no more" if limit == resource.RLIM_INFINITY else f"only {format_bytes(limit)}"
    warnings.warn(
        f"pinned=True: there is no GPU, and this process may lock {allowed}, so memory stays "
        f"pageable; results are the same. `ulimit -l unlimited` lifts the limit",
        stacklevel=_frames_of_ours(),
    )


def _frames_of_ours() -> int:
    """How far up the stack the user's own code is, as `warnings.warn` counts."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("penstock"):
        depth, frame = depth + 1, frame.f_back
    return depth
