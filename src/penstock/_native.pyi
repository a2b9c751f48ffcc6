"""The native core, as Python sees it. Written by hand; tests/test_native.py keeps it true."""

from collections.abc import Mapping, Sequence
from enum import Enum

UNIT_NBYTES: int

class ArenaFull(MemoryError): ...
class ArenaBusy(RuntimeError): ...
class CudaError(RuntimeError): ...

class Huge(Enum):
    none = 0
    transparent = 1
    reserved = 2

class Policy(Enum):
    local = 0
    bind = 1
    interleave = 2

class Pin(Enum):
    none = 0
    locked = 1
    registered = 2

class Placement:
    def __init__(self, policy: Policy, nodes: Sequence[int], pattern: Sequence[int]) -> None: ...

class Region:
    def __init__(
        self,
        nbytes: int,
        placement: Placement,
        huge: Huge,
        prefault: bool,
        threads: int,
        cpus: Mapping[int, Sequence[int]],
        fd: int = -1,
    ) -> None: ...
    @staticmethod
    def at(address: int) -> Region | None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def mapped_nbytes(self) -> int: ...
    @property
    def pin(self) -> Pin: ...
    def lock(self) -> None: ...
    def register(self) -> None: ...
    def move(self, offset: int, nbytes: int, to: Placement) -> None: ...

class Block:
    def __init__(self, region: Region) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    @property
    def address(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def region(self) -> Region: ...

class Arena:
    def __init__(self, region: Region) -> None: ...
    def take(self, nbytes: int, align: int) -> Block: ...
    def reset(self) -> None: ...
    @property
    def region(self) -> Region: ...
    @property
    def capacity(self) -> int: ...
    @property
    def used(self) -> int: ...
    @property
    def padding(self) -> int: ...
    @property
    def peak(self) -> int: ...
    @property
    def live(self) -> int: ...

def count_pages(address: int, nbytes: int, threads: int) -> dict[int, int]: ...
def migrate_pages(address: int, nbytes: int, to: Placement, threads: int) -> int: ...
def page_nbytes() -> int: ...
def map_blocks_from(nbytes: int) -> None: ...
def io_uring_errno() -> int: ...
def cuda_devices() -> int: ...
def cuda_why_none() -> str: ...
def isa_name() -> str: ...
def isa_names() -> list[str]: ...

CHASE_STEP_NBYTES: int

class StreamOp(Enum):
    read = 0
    write = 1
    copy = 2

def stream(
    op: StreamOp,
    target: int,
    source: int,
    nbytes: int,
    threads: int,
    cpus: Sequence[int],
    passes: int,
    isa: str = "",
) -> list[float]: ...
def lay_chase(address: int, nbytes: int) -> None: ...
def chase(address: int, stop: int, hops: int, cpus: Sequence[int]) -> tuple[float, int]: ...

# The storage engines (csrc/bind_store.cpp).

END_OF_FILE: int
BAD_CHECKSUM: int
NEVER_WRITTEN: int

class EngineClosed(RuntimeError): ...

class Checksums:
    def __init__(self, nbytes: int, unit: int) -> None: ...
    def note_zeros(self) -> None: ...

class Transfer:
    @property
    def done(self) -> bool: ...
    @property
    def ended(self) -> float: ...
    @property
    def failure(self) -> tuple[int, int, int, int, int] | None: ...

class StoreEngine:
    def __init__(
        self,
        kind: str,
        files: Sequence[int],
        align: int,
        request_nbytes: int,
        depth: int,
        workers: int,
    ) -> None: ...
    def start(
        self,
        write: bool,
        address: int,
        pieces: Sequence[tuple[int, int, int, int, int]],
        checksums: Checksums | None,
    ) -> Transfer: ...
    def wait(self, transfers: Sequence[Transfer], all: bool, seconds: float) -> bool: ...
    def close(self, seconds: float) -> list[tuple[bool, int, int, int]]: ...
    def register_memory(self, address: int, nbytes: int) -> int: ...
    @property
    def counters(self) -> tuple[int, int, int, int]: ...

def buffer_span(buffer: object, writable: bool) -> tuple[int, int]: ...
def crc32c(buffer: object, before: int = 0, variant: str = "") -> int: ...
def crc32c_variants() -> list[str]: ...
def crc32c_is_hardware() -> bool: ...
def allocate_space(fd: int, nbytes: int) -> int: ...

# The sweep.

SWEEP_LEAF: int
SWEEP_LANES: int
SWEEP_MOMENT_BLOCK: int

class Rule(Enum):
    adamw = 0
    sgd = 1
    lion = 2

class GradType(Enum):
    bf16 = 0
    fp16 = 1
    fp32 = 2

class MasterType(Enum):
    split = 0
    single = 1
    half = 2

class MomentType(Enum):
    none = 0
    fp32 = 1
    bf16 = 2
    int8 = 3

class SweepPart(Enum):
    all = 0
    weights = 1
    moments = 2
    checked = 3

class Coefficients:
    def __init__(
        self,
        *,
        scale: float,
        l2: float,
        decay: float,
        rate: float,
        fresh1: float,
        fresh2: float,
        eps: float,
        keep: float,
        look: bool,
    ) -> None: ...

class Segment:
    def __init__(
        self,
        *,
        count: int,
        first_index: int,
        key: int,
        grad: int,
        weight: int,
        rest: int,
        first: int,
        second: int,
        first_bases: int,
        second_bases: int,
        by: Coefficients,
    ) -> None: ...

class SweepJob:
    def wait(self) -> None: ...
    @property
    def done(self) -> bool: ...
    @property
    def began(self) -> float: ...
    @property
    def ended(self) -> float: ...
    @property
    def sum_squares_limbs(self) -> list[int]: ...
    @property
    def max_bits(self) -> int: ...
    @property
    def bad_grad(self) -> tuple[int, int] | None: ...
    @property
    def bad_master(self) -> tuple[int, int] | None: ...

def sweep_overlap(
    segments: Sequence[Segment],
    rule: Rule,
    grad: GradType,
    master: MasterType,
    moments: MomentType,
) -> tuple[int, str, int, str] | None: ...

class SweepPool:
    def __init__(self, threads: int, cpus: Sequence[int], nice: int) -> None: ...
    @property
    def threads(self) -> int: ...
    def sweep(
        self,
        segments: Sequence[Segment],
        rule: Rule,
        grad: GradType,
        master: MasterType,
        moments: MomentType,
        stats: bool,
        isa: str = "",
        beside: bool = False,
        part: SweepPart = ...,
    ) -> SweepJob: ...
    def stats(self, segments: Sequence[Segment], grad: GradType, isa: str = "") -> SweepJob: ...
    def mix(self, segments: Sequence[Segment], grad: GradType, isa: str = "") -> SweepJob: ...

def open_pages(name: str) -> int: ...
def close_pages(fd: int) -> None: ...
def extend_pages(fd: int, nbytes: int) -> None: ...
def commit_pages(fd: int, offset: int, nbytes: int) -> None: ...
def punch_pages(fd: int, offset: int, nbytes: int) -> None: ...
def reserve_range(nbytes: int, align: int) -> int: ...
def release_range(address: int, nbytes: int) -> None: ...
def map_pages(address: int, nbytes: int, fd: int, offset: int, writable: bool) -> None: ...
def unmap_pages(address: int, nbytes: int) -> None: ...
def bytes_at(address: int, nbytes: int, device_type: int, device: int) -> object: ...
