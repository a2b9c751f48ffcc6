"""Every launch of a Triton kernel says whether products and sums may be fused.

Triton's default changes from version 3.9 to 3.10, and with it the bits of results.
"""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src/penstock"
KERNELS = ("kernel", "code")
"""How the names end by which the sources launch kernels."""


def launches() -> dict[str, ast.Call]:
    """Return the launches, `kernel[grid](...)`, by file and line."""
    return {
        f"{path.relative_to(PACKAGE)}:{node.lineno}": node
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and ast.unparse(node.func.value).endswith(KERNELS)
    }


def test_every_launch_says_whether_operations_are_fused() -> None:
    silent = [
        place
        for place, call in launches().items()
        if "enable_fp_fusion" not in [keyword.arg for keyword in call.keywords]
    ]

    assert not silent


def test_launches_are_found() -> None:
    found = {place.split(":")[0] for place in launches()}

    with_kernels = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if "@triton.jit" in path.read_text()
    }
    assert len(found) == 7, found
    assert len(with_kernels) == 6, "another file has kernels: see that their launches are found"
