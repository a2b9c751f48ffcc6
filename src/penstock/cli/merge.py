"""`penstock merge`: write a model with a trained adapter merged into its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.output import AsJson, print_json, progress_bar
from penstock.units import format_bytes


def merge_command(
    directory: Annotated[
        Path,
        typer.Argument(help="Output directory of `penstock train --lora`, or an adapter of PEFT."),
    ],
    into: Annotated[Path, typer.Option(help="New directory for the whole model.")],
    base: Annotated[
        str | None,
        typer.Option(help="Base model, if it is not where it was when the adapter was trained."),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Allow code from the model repository to run."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Merge an adapter into the weights of its base model, tensor by tensor."""
    from penstock.train.merge import merge

    with progress_bar("merging", quiet=as_json) as progress:
        nbytes = merge(
            directory, into, base=base, trust_remote_code=trust_remote_code, progress=progress
        )
    if as_json:
        print_json({"into": str(into), "bytes": nbytes})
    else:
        print(f"{into}: {format_bytes(nbytes)} of weights, which transformers loads as they are")
