"""Allocate, pin and migrate ranges of host memory.

If memory that is bound to a node does not fit there, the OS does not return an error: its OOM
killer ends the process. Free memory is therefore checked before every allocation. The native code
reports errno values; this module turns them into errors with numbers and advice.
"""

from __future__ import annotations

import errno
import fcntl
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
from penstock.machine.limits import memory_limit
from penstock.machine.sysfs import System
from penstock.memory.placement import Interleave, Place, Stripe, check_place, current_place
from penstock.memory.residency import residency
from penstock.units import MiB, format_bytes, round_up

Huge = Literal["auto", "thp", "2M"] | None

KEEP_FREE = 64 * MiB
"""Left free on every node for the OS: below its watermarks an allocation first reclaims memory
and then invokes the OOM killer."""

MAX_NBYTES = 2**63 - 1

MAX_TOUCHERS = 32
"""Maximum number of threads per node for the first touch. Fewer already saturate its memory."""

_NATIVE_HUGE = {
    None: _native.Huge.none,
    "thp": _native.Huge.transparent,
    "2M": _native.Huge.reserved,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionOptions:
    """How a range is allocated. Where it is allocated is the place."""

    pinned: bool = False
    """Register the range with CUDA if there is a GPU; otherwise lock it in memory."""

    huge: Huge = "auto"
    """Page size. `"thp"`: transparent huge pages of 2 MiB where the OS finds them. `"2M"`: huge
    pages from the reserved pool, or an error. None: 4 KiB pages. `"auto"`: `"thp"`, except with
    Interleave, which distributes single pages (None)."""

    prefault: bool = True
    """Allocate every page now, so that a shortage is found here and not during a step."""

    def __post_init__(self) -> None:
        if self.huge not in ("auto", "thp", "2M", None):
            raise SizeError(f'huge must be "auto", "thp", "2M" or None, got {self.huge!r}')

    def resolve(self, place: Place | None) -> RegionOptions:
        """Replace `"auto"` by the kind of pages that suits the place."""
        if self.huge != "auto":
            return self
        return replace(self, huge=None if isinstance(place, Interleave) else "thp")


def allocate_region(
    nbytes: int,
    place: Place | None,
    options: RegionOptions,
    system: System | None = None,
    *,
    fd: int = -1,
) -> _native.Region:
    """Allocate a range of at least `nbytes`, in whole pages.

    Without a `place`, use the one set by `placing`, or else the OS's choice. With `fd`, the range
    is the memory of that file (`create_memory_file`), shared with every process that maps it. If
    this raises, nothing stays mapped.
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
            fd=fd,
        )
    except OSError as error:
        raise _explain(error, wanted, options.huge, system) from None
    if options.pinned:
        pin_region(region)
    return region


def create_memory_file(nbytes: int, huge: Huge = "thp") -> int:
    """Create a file in memory, of whole pages, and return its file descriptor.

    It has no name, and disappears with the last process that has it open or mapped. Nobody can
    change its size: a process that maps it would crash.
    """
    page = _page_bytes(huge)
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if huge == "2M":
        flags |= os.MFD_HUGETLB | os.MFD_HUGE_2MB
    fd = os.memfd_create("penstock", flags)
    try:
        os.ftruncate(fd, round_up(nbytes, page))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


def move_region(
    region: _native.Region, offset: int, nbytes: int, place: Place, system: System | None = None
) -> None:
    """Migrate part of a range, widened to whole pages.

    No copy to or from the range may be in flight: a pinned range is unregistered meanwhile.
    """
    check_move(region.address + offset, nbytes, place, system or System())
    try:
        region.move(offset, nbytes, place.native())
    except OSError as error:
        raise explain_move(error, nbytes) from None
    except _native.CudaError as error:  # the pages were moved, but are no longer pinned
        raise _explain_pin(error, region) from None


def check_move(address: int, nbytes: int, place: Place, system: System) -> None:
    """Raise unless the nodes of `place` have room for the pages that are not on them yet.

    Moving does not increase the total memory usage, so the control group's limit does not matter.
    """
    _check_nodes(place.nodes, system)
    pages = residency(address, nbytes)
    already_there, in_memory = pages.nbytes, nbytes - pages.unmapped * pages.page_nbytes
    shares = place.shares(max(0, in_memory))  # pages that are not in memory do not move
    _check_free({n: max(0, share - already_there.get(n, 0)) for n, share in shares.items()}, system)


def explain_move(error: OSError, nbytes: int) -> Exception:
    """Turn an OS error of a migration into a Penstock error."""
    if error.errno in (errno.EPERM, errno.EACCES):
        return PlacementPermissionError(_call(error), error.errno)
    reason = {
        errno.EIO: "some pages cannot move (pinned by a driver or by I/O in flight)",
        errno.ENOMEM: "the target node ran out of memory, or the process reached vm.max_map_count",
    }.get(error.errno or 0, str(error.strerror))
    return MoveError(wanted=nbytes, reason=reason)


def check_nbytes(name: str, nbytes: int) -> None:
    """Raise SizeError unless `nbytes` is a possible size. `name` is used in the message."""
    if not 1 <= nbytes <= MAX_NBYTES:
        raise SizeError(f"{name} must have 1 to {MAX_NBYTES} bytes, got {nbytes}")


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
    limit = memory_limit(system)
    if limit is not None and wanted > limit.left:
        raise MemoryLimitError(wanted=wanted, free=limit.left, limit=limit.nbytes, name=limit.name)
    return None


def _check_free(shares: Mapping[int, int], system: System) -> None:
    available = {n: system.node_bytes(n).available for n in system.allowed_nodes()}
    room = {n: max(0, nbytes - KEEP_FREE) for n, nbytes in available.items()}
    for node, share in shares.items():
        if share > room[node]:
            others = {n: r for n, r in room.items() if n not in shares}
            raise NodeFullError(node, wanted=share, free=room[node], others=others)


def _check_pool(place: Place | None, wanted: int, system: System) -> None:
    """Check the pool of reserved huge pages, which is separate from ordinary memory."""
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
    """Raise if a stripe would need too many mappings.

    Until it is touched, a stripe is one mapping per run of units on a node.
    """
    if not isinstance(place, Stripe):
        return
    runs = wanted // _native.UNIT_NBYTES
    limit = system.number("proc/sys/vm/max_map_count") or 65530
    if runs > limit // 2:
        raise MapError(
            wanted=wanted,
            errno=errno.ENOMEM,
            reason=f"a stripe of that length that is not prefaulted needs up to {runs} mappings of "
            f"the {limit} that a process may have",
            advice="use prefault=True, or raise vm.max_map_count",
        )


def _cpus_for(place: Place | None, system: System) -> dict[int, list[int]]:
    """Return the CPUs that touch the pages of each node first."""
    nodes = place.nodes if place else ()
    cpus = {node: list(system.nearest_cpus(node)) for node in nodes}
    # -1 stands for memory that is bound to no node: every CPU that the process may use.
    cpus[-1] = sorted(os.sched_getaffinity(0))
    return cpus


def _native_placement(place: Place | None) -> _native.Placement:
    return place.native() if place else _native.Placement(_native.Policy.local, [], [])


def _page_bytes(huge: Huge) -> int:
    return _native.UNIT_NBYTES if huge == "2M" else _native.page_nbytes()


def _explain(error: OSError, wanted: int, huge: Huge, system: System) -> Exception:
    call = _call(error)
    if error.errno in (errno.EPERM, errno.EACCES):
        return PlacementPermissionError(call, error.errno)
    if huge == "2M" and error.errno in (errno.ENOMEM, errno.EFAULT):
        unit = _native.UNIT_NBYTES
        free = system.free_huge_pages(None)
        return HugePagesError(wanted=wanted // unit, free=free, unit=unit, node=None)
    advice = "free some memory or request less; `ulimit -v` and vm.overcommit_memory also limit it"
    if error.errno == errno.ENOSYS:
        advice = "this kernel has no NUMA support; omit `place`"
    return MapError(
        wanted=wanted,
        errno=error.errno or 0,
        reason=f"{call}: {os.strerror(error.errno or 0)}",
        advice=advice,
    )


def _call(error: OSError) -> str:
    """Return the system call in a native error: `mbind: Operation not permitted` gives `mbind`."""
    return str(error.strerror).split(":")[0]


def pin_region(region: _native.Region) -> None:
    """Register the range with CUDA, or lock it in memory if there is no GPU.

    If locking fails, warn only: the memory stays pageable, and results are the same.
    """
    if _native.cuda_devices() > 0:
        try:
            region.register()
        except _native.CudaError as error:
            raise _explain_pin(error, region) from None
        return
    try:
        region.lock()
    except OSError:
        _warn_unpinned()


def _explain_pin(error: _native.CudaError, region: _native.Region) -> PinError:
    code, name = error.args
    return PinError(wanted=region.mapped_nbytes, code=code, name=name)


@functools.cache  # warn once per process: a training run allocates thousands of tensors
def _warn_unpinned() -> None:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    allowed = "no more" if limit == resource.RLIM_INFINITY else f"only {format_bytes(limit)} of"
    warnings.warn(
        f"pinned=True: there is no GPU, and this process may lock {allowed} memory, so memory "
        f"stays pageable. Results are the same. `ulimit -l unlimited` removes the limit",
        stacklevel=_stacklevel_of_caller(),
    )


def _stacklevel_of_caller() -> int:
    """Return the `stacklevel` of the first caller outside Penstock."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("penstock"):
        depth, frame = depth + 1, frame.f_back
    return depth
