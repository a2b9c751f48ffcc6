"""Load a model for generation: resident on the device where it fits, streamed where it does not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.adapter_files import BASE, BaseModel, is_adapter
from penstock.checkpoint.adapter_files import STEM as ADAPTER
from penstock.errors import PenstockError, SurveyError
from penstock.model.config_check import describe
from penstock.model.hub import check_name
from penstock.model.inventory import Inventory
from penstock.model.quantization import Mxfp4, find_quantization
from penstock.records import read_json
from penstock.settings import HUB_MODEL
from penstock.units import GiB, MiB, format_bytes, format_bytes_up, parse_memory

if TYPE_CHECKING:
    import torch

    from penstock.engine.weight_streamer import Progress

ACTIVATIONS = 512 * MiB
"""GPU memory reserved for activations of small chunks, logits and libraries."""

GRAPHS = 256 * MiB
"""GPU memory reserved for CUDA graphs if the weights are resident."""

MIN_CACHE = 64 * MiB
"""Smallest cache: with less, streaming the weights to have more is the better choice."""


class ModelTooLargeError(PenstockError, MemoryError):
    """Not even two blocks of weights and a small cache fit into the memory."""

    def __init__(self, *, wanted: int, had: int) -> None:
        self.wanted, self.had = wanted, had
        super().__init__(
            f"streaming the weights block by block needs {format_bytes(wanted)} for weights and "
            f"cache, but the budget is {format_bytes(had)}; set --hbm {format_bytes_up(wanted)} "
            f"or more"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateSettings:
    """The user's settings for loading a model."""

    model: str
    """Directory, Hugging Face id, or output directory of `penstock train`."""
    hbm: str = "auto"
    """Memory budget for weights and cache."""
    dtype: str = "auto"
    revision: str | None = None
    """Revision on the Hugging Face Hub."""
    trust: bool = False
    """Whether to run code that comes with the model."""
    blocks: str | None = None
    """Module that holds the layers; None to find it."""
    device: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySplit:
    """How the memory is divided between weights and cache."""

    weights: int
    """Bytes of all weights."""
    cache: int
    """Bytes for the cache."""
    page: int
    """Bytes of a page, the minimum that a sequence takes of the cache."""
    streamed: bool
    """Whether the weights are streamed."""
    chunk: int | None = None
    """Number of prompt tokens per step for which there is memory; None means the default."""
    keep: int = 0
    """Bytes of weights that stay on the device if the weights are streamed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model, and what else a generator needs."""

    forward: Any
    """A transformers model, or a `StreamedForward`."""
    tokenizer: Any
    memory: MemorySplit
    notes: tuple[str, ...]
    """Notes for the user."""


def load(
    settings: GenerateSettings,
    progress: Progress,
    *,
    on_tokenizer: Callable[[Any], object] = lambda tokenizer: None,
) -> LoadedModel:
    """Load a model: resident where it fits, streamed where it does not.

    `on_tokenizer` is called with the tokenizer before any weight is read, which may take minutes.
    """
    import torch

    from penstock.checkpoint.manifest import check_small_files
    from penstock.data import load_tokenizer
    from penstock.engine.model_source import model_directory
    from penstock.model.config import load_config
    from penstock.model.survey import survey_config

    source = find_weights(settings.model)
    if Path(source).is_dir():
        check_small_files(source)
    trust, tokens = settings.trust, source
    source, revision, adapter = base_of(source, settings.revision)
    config = load_config(source, trust_remote_code=trust, revision=revision, trained=False)
    inventory = survey_config(
        config, name=settings.model, blocks=settings.blocks, trust_remote_code=trust
    )
    dtype = pick_dtype(settings.dtype, config)
    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    hbm = find_budget(settings.hbm, inventory, dtype, device)
    memory = split_memory(inventory, dtype, hbm, device)
    # An adapter's directory has the tokenizer that it was trained with.
    own = adapter is None or not any(adapter.glob("tokenizer*"))
    tokenizer = load_tokenizer(
        source if own else tokens, revision=revision if own else None, trust_remote_code=trust
    )
    on_tokenizer(tokenizer)
    folder = model_directory(source, revision)
    if not memory.streamed:
        model = load_resident(folder, inventory, dtype, device, trust, adapter)
        return LoadedModel(forward=model, tokenizer=tokenizer, memory=memory, notes=())
    from penstock.generate.streamed_forward import stream_model

    forward = stream_model(
        config, inventory, folder, dtype=dtype, keep=memory.keep, device=device, progress=progress,
        trust_remote_code=trust, adapter=adapter,
    )  # fmt: skip
    note = streaming_note(memory, forward.weights.streamed_nbytes)
    return LoadedModel(forward=forward, tokenizer=tokenizer, memory=memory, notes=(note,))


def find_weights(model: str) -> str:
    """Return the newest checkpoint of a run that has not ended, or else `model` itself."""
    folder = Path(model)
    if not folder.is_dir() or _has_weights(folder):
        return model
    if _has_weights(folder / HUB_MODEL):
        return str(folder / HUB_MODEL)
    from penstock.checkpoint.run_directory import latest_checkpoint

    checkpoint = latest_checkpoint(folder)
    return model if checkpoint is None else str(checkpoint.path)


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("model*.safetensors*")) or is_adapter(folder)


def base_of(source: str, revision: str | None) -> tuple[str, str | None, Path | None]:
    """Return the model to load, its revision, and the directory of its adapter, if it has one."""
    folder = Path(source)
    if not is_adapter(folder):
        return source, None if folder.is_dir() else revision, None
    base = BaseModel.load(folder)
    if not base.path:
        raise SurveyError(
            f"{folder / BASE} does not say which model the adapter belongs to; merge it with "
            f"`penstock merge {folder} --base MODEL --into DIRECTORY`"
        )
    with missing_base_explained(folder):
        check_name(base.path)
    return base.path, base.revision or None, folder


@contextlib.contextmanager
def missing_base_explained(adapter: Path) -> Iterator[None]:
    """Say in an error about the base model of an adapter what it is, and how to name another."""
    try:
        yield
    except PenstockError as error:
        error.add_note(
            f"it is the base model of the adapter in {adapter}. Put it back, or merge the adapter "
            f"with it where it is now: penstock merge {adapter} --base MODEL --into DIRECTORY"
        )
        raise


def pick_dtype(name: str, config: Any) -> torch.dtype:
    """Return the type to load weights in: that of the config, unless another one is named."""
    import torch

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    own = getattr(config, "dtype", None)
    if name == "auto":
        return own if isinstance(own, torch.dtype) else torch.bfloat16
    return dtypes[name]


def find_budget(hbm: str, inventory: Inventory, dtype: torch.dtype, device: str) -> int:
    """Return the bytes for weights and cache; on a CPU, `hbm` is host memory, as in training."""
    import torch

    if hbm != "auto":
        return parse_memory(hbm)
    if on_gpu(device):
        free, _ = torch.cuda.mem_get_info(torch.device(device))
        return int(0.9 * free)
    return inventory.parameters() * dtype.itemsize + 2 * GiB


def split_memory(inventory: Inventory, dtype: torch.dtype, hbm: int, device: str) -> MemorySplit:
    """Divide the memory between weights and cache.

    The weights are resident if a cache fits in addition, with smaller chunks of prompts if
    necessary. Otherwise they are streamed, and as many of them stay on the device as leave room for
    two blocks in transit and a cache of a quarter of the memory.
    """
    from penstock.engine.weight_streamer import block_nbytes
    from penstock.generate.forward import ALONE, LARGE_CHUNK, SMALL_CHUNK

    sizes = [block_nbytes(inventory, block, dtype) for block in inventory.blocks]
    weights = inventory.parameters() * dtype.itemsize
    spare = ACTIVATIONS if on_gpu(device) else 0
    page = page_nbytes(device)
    least = max(min(MIN_CACHE, hbm // 8), page)
    for chunk, tokens in ((None, ALONE * LARGE_CHUNK), (SMALL_CHUNK, SMALL_CHUNK)):
        left = hbm - weights
        left -= resident_activations(inventory, dtype, tokens) if on_gpu(device) else 0
        if left >= least:
            return MemorySplit(weights=weights, cache=left, page=page, streamed=False, chunk=chunk)
    slots = 2 * max(sizes)
    if hbm < slots + spare + least:
        raise ModelTooLargeError(wanted=_min_budget(slots + spare, page), had=hbm)
    cache = max(least, min(hbm // 4, hbm - slots - spare))
    keep = max(0, hbm - slots - spare - cache)
    chunk = streamed_chunk(inventory, dtype) if on_gpu(device) else None
    return MemorySplit(
        weights=weights, cache=cache, page=page, streamed=True, keep=keep, chunk=chunk
    )


def resident_activations(inventory: Inventory, dtype: torch.dtype, tokens: int) -> int:
    """Return the bytes needed in addition to resident weights to read `tokens` prompt tokens."""
    return ACTIVATIONS + GRAPHS + layer_activations(inventory, dtype, tokens)


def layer_activations(inventory: Inventory, dtype: torch.dtype, tokens: int) -> int:
    """Return the bytes of activations in a layer.

    These are three tensors inside the MLP and, in addition, its input, the residual and its output,
    or as much around attention.
    """
    widest = max(3 * b.mlp_width + 3 * inventory.hidden for b in inventory.layers)
    return tokens * widest * dtype.itemsize


def streamed_chunk(inventory: Inventory, dtype: torch.dtype) -> int:
    """Return the number of prompt tokens per step if the weights are streamed.

    All weights cross for each chunk, so long chunks are better, as long as they take no more than
    half of the memory that is reserved for activations.
    """
    from penstock.generate.forward import MEDIUM_CHUNK, SMALL_CHUNK

    chunk = MEDIUM_CHUNK
    while chunk > SMALL_CHUNK and layer_activations(inventory, dtype, chunk) > ACTIVATIONS // 2:
        chunk //= 2
    return chunk


def on_gpu(device: str) -> bool:
    """Return whether a device name is that of a GPU."""
    return device.startswith("cuda")


def page_nbytes(device: str) -> int:
    """Return the page size of the cache, the minimum that a sequence takes."""
    from penstock.kv.address_space import HOST_PAGE_NBYTES

    return 2 * MiB if on_gpu(device) else HOST_PAGE_NBYTES


def _min_budget(fixed: int, page: int) -> int:
    """Return the smallest budget that leaves room for a cache in addition to `fixed` bytes."""
    return min(fixed + max(MIN_CACHE, page), max(fixed * 8 // 7 + 8, fixed + page))


def load_resident(
    folder: Path,
    inventory: Inventory,
    dtype: torch.dtype,
    device: str,
    trust: bool,
    adapter: Path | None = None,
) -> Any:
    """Load a transformers model onto the device, with an adapter merged into its weights."""
    import torch
    import transformers

    from penstock.checkpoint.verify import check_weights
    from penstock.engine.model_source import check_weights as check_tensors

    check_weights(folder)
    make: Any = transformers.AutoModelForCausalLM
    _check_generation_config(folder)
    try:
        dequantize = _dequantize_mxfp4(folder)
        model = make.from_pretrained(
            str(folder), dtype=dtype, use_safetensors=True, trust_remote_code=trust, **dequantize
        )
        if dequantize:
            _set_dtype(model, dtype)
    except (torch.OutOfMemoryError, OSError):
        raise
    except Exception as problem:  # the model's own code may raise any exception
        check_tensors(folder, inventory)  # names the tensor, if the files are wrong
        raise SurveyError(
            f"{folder}/config.json: transformers cannot load the model: {describe(problem)}"
        ) from problem
    if adapter is not None:
        from penstock.checkpoint.merged_weights import merge_in_memory

        check_weights(adapter, stem=ADAPTER)
        model = merge_in_memory(model, adapter, folder)
    return model.to(torch.device(device)).eval()


def _dequantize_mxfp4(folder: Path) -> dict[str, Any]:
    """Return options with which MXFP4 weights are loaded as in training, on any machine.

    Otherwise transformers keeps them as they are where it has kernels for them.
    """
    fields = read_json(folder / "config.json")
    if not isinstance(find_quantization(fields, str(folder)), Mxfp4):
        return {}
    from transformers.utils.quantization_config import Mxfp4Config

    return {"quantization_config": Mxfp4Config(dequantize=True)}


def _set_dtype(model: Any, dtype: torch.dtype) -> None:
    """Convert weights that transformers has dequantized to bfloat16, whatever the wanted type."""
    for parameter in model.parameters():
        if parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Fields of generation_config.json whose type transformers does not check."""


def _check_generation_config(folder: Path) -> None:
    """Raise SurveyError, which names the file, if transformers cannot read it."""
    import transformers

    path = folder / "generation_config.json"
    if path.exists():
        try:
            fields = read_json(path)
            if not isinstance(fields, dict):
                raise ValueError("must contain an object {...}")
            for name in TOKEN_FIELDS:
                tokens = fields.get(name)
                listed = tokens if isinstance(tokens, list) else [tokens]
                if tokens is not None and not all(type(token) is int for token in listed):
                    raise ValueError(f"{name} must be a token number, got {tokens!r:.60}")
            transformers.GenerationConfig.from_pretrained(str(folder))
        except Exception as problem:  # transformers checks few of the types
            raise SurveyError(f"{path}: {describe(problem)}") from None


def streaming_note(memory: MemorySplit, passing: int) -> str:
    """Return the note that warns about streaming; `passing` bytes of weights cross per step."""
    return (
        f"the weights ({format_bytes(memory.weights)}) do not fit next to a cache: "
        f"{format_bytes(passing)} of them stay in host memory and cross to the device in every "
        f"step. This is slow, and a step takes as long for one prompt as for many: pass many "
        f"prompts, or raise --hbm"
    )
