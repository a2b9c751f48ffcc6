"""`penstock machines`: list the presets."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table

from penstock import records
from penstock.cli.output import AsJson
from penstock.machine.presets import preset, preset_names
from penstock.units import format_bytes


def machines_command(as_json: AsJson = False) -> None:
    """List the machines that Penstock has presets for, and where their figures come from."""
    if as_json:
        print(json.dumps({name: records.to_json(preset(name)) for name in preset_names()}))
        return
    table = Table("name", "HBM", "DRAM", "CXL", "source", box=None, pad_edge=False)
    for name in preset_names():
        machine = preset(name)
        table.add_row(
            name,
            format_bytes(machine.gpus[0].memory or 0),
            format_bytes(sum(node.capacity for node in machine.dram_nodes)),
            format_bytes(sum(node.capacity for node in machine.cxl_nodes)),
            machine.made.by,
        )
    Console().print(table)
