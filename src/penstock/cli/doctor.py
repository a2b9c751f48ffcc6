"""`penstock doctor`: check the machine."""

from __future__ import annotations

import typer

from penstock.cli.output import EXIT_ERROR, AsJson, EncodingConsole, print_json


def doctor_command(as_json: AsJson = False) -> None:
    """Check this machine and suggest fixes. Exits with code 1 if a check fails."""
    from penstock.doctor import examine, render, to_json

    findings = examine()
    if as_json:
        print_json(to_json(findings))
    else:
        render(findings, EncodingConsole())
    if any(finding.status == "bad" for finding in findings):
        raise typer.Exit(EXIT_ERROR)
