"""Change files of a checkpoint on purpose: its manifest then has to have their checksums."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.checkpoint.checksums import crc32c, to_hex
from penstock.checkpoint.manifest import content_checksum


def with_file(manifest: str, name: str, content: bytes | None) -> str:
    """Return the text of a manifest for other content of a file; None removes the file."""
    document = json.loads(manifest)
    document["files"].pop(name, None)
    if content is not None:
        document["files"][name] = {"nbytes": len(content), "crc32c": to_hex(crc32c(content))}
    document["checksum"] = content_checksum(document)
    return json.dumps(document)


def sign(manifest: str) -> str:
    """Return the text of a manifest with its checksum, unless it is no JSON object."""
    try:
        document = json.loads(manifest)
        document["checksum"] = content_checksum(document)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return manifest
    return json.dumps(document)


def update_manifest(folder: Path, *names: str) -> None:
    """Write the manifest of a directory again after these files were changed or removed."""
    path = folder / "complete.json"
    for name in names:
        content = (folder / name).read_bytes() if (folder / name).exists() else None
        path.write_text(with_file(path.read_text(), name, content))


def make_old_manifest(folder: Path) -> None:
    """Replace the manifest by that of a version without checksums."""
    document = json.loads((folder / "complete.json").read_text())
    names = [*document["files"], *(p.name for p in folder.iterdir() if p.is_file())]
    sizes = {n: (folder / n).stat().st_size for n in names if n != "complete.json"}
    old = {"version": 1, "step": document["step"], "files": sizes}
    (folder / "complete.json").write_text(json.dumps(old))
