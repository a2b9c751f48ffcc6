"""A model ready to generate, on the device or streamed to it. Room: show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError
from penstock.model.inventory import Inventory
from penstock.units import GiB, MiB, format_bytes, format_bytes_up, parse_bytes

if TYPE_CHECKING:
    import torch

Tell = Callable[[int, int, str], None]

ACTIVATIONS = 512 * MiB
"""Of a GPU, left for what passes through the layers, the logits and libraries."""

GRAPHS = 256 * MiB
"""Beside weights that stay, for CUDA graphs; prompts are read in larger chunks then, too."""

LEAST_CACHE = 64 * MiB
"""With less, streaming weights to have more is the better choice."""


class ModelRoomError(PenstockError, MemoryError):
    """Not even two blocks and a small cache fit."""

    def __init__(self, *, wanted: int, had: int) -> None:
        self.wanted, self.had = wanted, had
        super().__init__(
            f"{format_bytes(had)} were given for weights and cache, and {format_bytes(wanted)} are "
            f"needed to stream the weights block by block; give --hbm {format_bytes_up(wanted)} "
            f"or more"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateSettings:
    """What the user asks for."""

    model: str
    hbm: str = "auto"
    dtype: str = "auto"
    revision: str | None = None
    trust: bool = False
    device: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """How the memory is shared out."""

    weights: int
    """Bytes of all weights."""
    cache: int
    """What the cache gets."""
    page: int
    """Of which a sequence takes at least this."""
    streamed: bool
    chunk: int | None = None
    """Prompt tokens of a step that there is room for; None: as many as usual."""
    keep: int = 0
    """If streamed: bytes of weights that stay on the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A model, and what the generator needs to know beside it."""

    forward: Any
    tokenizer: Any
    room: Room
    notes: tuple[str, ...]


def load(wanted: GenerateSettings, tell: Tell) -> Loaded:
    """Resident where it fits, streamed where it does not."""
    import torch

    from penstock.data import load_tokenizer
    from penstock.engine.prepare import model_directory
    from penstock.model.config import load_config
    from penstock.model.survey import survey_config

    source = newest(wanted.model)
    trust = wanted.trust
    revision = None if Path(source).is_dir() else wanted.revision
    config = load_config(source, trust_remote_code=trust, revision=revision)
    inventory = survey_config(config, name=wanted.model, trust_remote_code=trust)
    dtype = pick_dtype(wanted.dtype, config)
    where = wanted.device or ("cuda" if torch.cuda.is_available() else "cpu")
    room = share_out(inventory, dtype, hbm_nbytes(wanted.hbm, inventory, dtype, where), where)
    tokenizer = load_tokenizer(source, revision=revision, trust_remote_code=trust)
    folder = model_directory(source, revision)
    if not room.streamed:
        model = resident(folder, dtype, where, trust)
        return Loaded(forward=model, tokenizer=tokenizer, room=room, notes=())
    from penstock.generate.streamed_forward import streamed

    forward = streamed(
        config, inventory, folder, dtype=dtype, keep=room.keep, device=where, tell=tell,
        trust_remote_code=trust,
    )  # fmt: skip
    note = slow_note(room, forward.weights.passing_nbytes)
    return Loaded(forward=forward, tokenizer=tokenizer, room=room, notes=(note,))


def newest(model: str) -> str:
    """A run that has not ended has no weights of its own yet: its newest checkpoint then."""
    folder = Path(model)
    if not folder.is_dir() or any(folder.glob("model*.safetensors*")):
        return model
    from penstock.checkpoint.run_directory import latest_checkpoint

    found = latest_checkpoint(folder)
    return model if found is None else str(found.path)


def pick_dtype(name: str, config: Any) -> torch.dtype:
    import torch

    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    told = getattr(config, "dtype", None)
    if name == "auto":
        return told if isinstance(told, torch.dtype) else torch.bfloat16
    return kinds[name]


def hbm_nbytes(hbm: str, inventory: Inventory, dtype: torch.dtype, where: str) -> int:
    """What may be used in all; on a CPU `hbm` is host memory, as it is in training."""
    import torch

    if hbm != "auto":
        return parse_bytes(hbm)
    if on_gpu(where):
        free, _ = torch.cuda.mem_get_info(torch.device(where))
        return int(0.9 * free)
    return inventory.parameters() * dtype.itemsize + 2 * GiB


def share_out(inventory: Inventory, dtype: torch.dtype, hbm: int, where: str) -> Room:
    """Weights on the device if a cache fits beside them, prompts being read in smaller chunks if
    need be; else as many of them as leave room for two slots and a cache of a quarter."""
    from penstock.engine.weight_streamer import block_nbytes
    from penstock.generate.forward import ALONE, LARGE_CHUNK, SMALL_CHUNK

    sizes = [block_nbytes(inventory, block, dtype) for block in inventory.blocks]
    weights = inventory.parameters() * dtype.itemsize
    spare = ACTIVATIONS if on_gpu(where) else 0
    page = page_nbytes(where)
    least = max(min(LEAST_CACHE, hbm // 8), page)
    for chunk, tokens in ((None, ALONE * LARGE_CHUNK), (SMALL_CHUNK, SMALL_CHUNK)):
        left = hbm - weights - (activations(inventory, dtype, tokens) if on_gpu(where) else 0)
        if left >= least:
            return Room(weights=weights, cache=left, page=page, streamed=False, chunk=chunk)
    slots = 2 * max(sizes)
    if hbm < slots + spare + least:
        raise ModelRoomError(wanted=_enough(slots + spare, page), had=hbm)
    cache = max(least, min(hbm // 4, hbm - slots - spare))
    keep = max(0, hbm - slots - spare - cache)
    chunk = streamed_chunk(inventory, dtype) if on_gpu(where) else None
    return Room(weights=weights, cache=cache, page=page, streamed=True, keep=keep, chunk=chunk)


def activations(inventory: Inventory, dtype: torch.dtype, tokens: int) -> int:
    """What there must be beside weights that stay, while so many tokens of prompts are read."""
    return ACTIVATIONS + GRAPHS + layer_activations(inventory, dtype, tokens)


def layer_activations(inventory: Inventory, dtype: torch.dtype, tokens: int) -> int:
    """Through a layer: three tensors inside the MLP, and beside them what goes in, is kept, and
    comes out, or as much around attention."""
    widest = max(3 * b.mlp_width + 3 * inventory.hidden for b in inventory.layers)
    return tokens * widest * dtype.itemsize


def streamed_chunk(inventory: Inventory, dtype: torch.dtype) -> int:
    """Prompt tokens of a step whose weights cross: all of them for each step, so that many tokens
    at a time are better, as long as they take no more than half of what is left for them."""
    from penstock.generate.forward import MEDIUM_CHUNK, SMALL_CHUNK

    chunk = MEDIUM_CHUNK
    while chunk > SMALL_CHUNK and layer_activations(inventory, dtype, chunk) > ACTIVATIONS // 2:
        chunk //= 2
    return chunk


def on_gpu(where: str) -> bool:
    return where.startswith("cuda")


def page_nbytes(where: str) -> int:
    """The least that a sequence takes of the cache."""
    from penstock.kv.address_space import PAGE_NBYTES

    return 2 * MiB if on_gpu(where) else PAGE_NBYTES


def _enough(fixed: int, page: int) -> int:
    """The least budget that leaves room for a cache beside what is fixed."""
    return min(fixed + max(LEAST_CACHE, page), max(fixed * 8 // 7 + 8, fixed + page))


def resident(folder: Path, dtype: torch.dtype, where: str, trust: bool) -> Any:
    import torch
    import transformers

    from penstock.checkpoint.reader import ShardReader

    with ShardReader(folder):  # says what is wrong with the files, in our words
        pass
    make: Any = transformers.AutoModelForCausalLM
    model = make.from_pretrained(
        str(folder), dtype=dtype, use_safetensors=True, trust_remote_code=trust
    )
    return model.to(torch.device(where)).eval()


def slow_note(room: Room, passing: int) -> str:
    return (
        f"the weights ({format_bytes(room.weights)}) do not fit beside a cache: "
        f"{format_bytes(passing)} of them rest in host memory and cross to the device for every "
        f"step. This is slow, and as slow for many prompts as for one: give many, or more --hbm"
    )
