"""Find out whether the files of a model have a head of their own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from penstock.errors import RecordError
from penstock.records import read_json

HEAD = "lm_head.weight"


def files_lack_head(model: str | Path) -> bool:
    """Return whether a directory has weights, and none of them is a head.

    False if there are no weights to look at, as for a `config.json` alone.
    """
    path = Path(model)
    names = list(_tensor_names(path.parent if path.name == "config.json" else path))
    return bool(names) and not any(name.endswith(HEAD) for name in names)


def _tensor_names(folder: Path) -> Iterable[str]:
    from safetensors import SafetensorError, safe_open

    index, file = folder / "model.safetensors.index.json", folder / "model.safetensors"
    try:
        if file.is_file():
            with safe_open(file, "numpy") as opened:
                return list(opened.keys())
        fields = read_json(index) if index.is_file() else {}
        names = fields.get("weight_map") if isinstance(fields, dict) else None
        return list(names) if isinstance(names, dict) else []
    except (OSError, RecordError, SafetensorError):
        return []  # reading the weights fails in the same way, and says so
