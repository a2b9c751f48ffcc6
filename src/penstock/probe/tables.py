"""Print the result of a probe as tables."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.machine.machine import Figure, Machine, MemoryNode, StoragePath
from penstock.probe.session import ProbeResult
from penstock.units import format_bytes, format_rate, format_seconds

_MEMORY_OPERATIONS = ("read", "write", "copy")
_MOMENTS = ("fp32", "bf16", "int8")
_DIRECTIONS = ("h2d", "d2h", "both")


def tables(result: ProbeResult) -> RenderableType:
    """Return tables of all measured figures, then the notes."""
    machine = result.machine
    parts: list[RenderableType] = [_memory_table(machine)]
    if any(rate.operation == "sweep" for node in machine.nodes for rate in node.rates):
        parts.append(_sweep_table(machine))
    if machine.node_copies:
        parts.append(_copies_table(machine))
    if machine.transfers:
        parts.append(_transfers_table(machine))
    if machine.gpu_links:
        parts.append(_links_table(machine))
    if machine.nics:
        parts.append(_nics_table(machine))
    parts += [_storage_table(path) for path in machine.storage if path.rates]
    parts = [part for table in parts for part in (table, Text())]
    if machine.process_memory is not None:
        size, loaded = format_bytes(machine.process_memory), "Python, PyTorch"
        loaded += ", CUDA, compiler" if machine.gpus else ""
        parts += [Text(f"Host memory of a process ({loaded}): {size}"), Text()]
    parts += [Text(f"note: {note}", style="yellow") for note in result.notes]
    parts.append(
        Text(
            "Each figure is the median of several runs; ± is half the range from lowest to highest."
        )
    )
    return Group(*parts)


def _memory_table(machine: Machine) -> Table:
    table = _table("Memory", "node", "latency", "threads", *_MEMORY_OPERATIONS)
    for node in machine.nodes:
        threads = sorted({rate.threads for rate in node.rates if rate.operation != "sweep"})
        first = [f"{node.id} {node.kind}", _time(node.latency)]
        if not threads:
            table.add_row(*first, "-", "-", "-", "-")
        for count in threads:
            rates = [_rate(_find(node, operation, count)) for operation in _MEMORY_OPERATIONS]
            table.add_row(*first, str(count), *rates)
            first = [""] * len(first)
        table.add_section()
    return table


def _sweep_table(machine: Machine) -> Table:
    """Return a table of sweep rates: one column per moment format, in bytes read and written."""
    table = _table("Optimizer sweep", "node", "parameters", "threads", *_MOMENTS)
    for node in machine.nodes:
        rows: dict[tuple[int, int], dict[str | None, Figure]] = {}
        for rate in node.rates:
            if rate.operation == "sweep":
                row = rows.setdefault((rate.parameters or 0, rate.threads), {})
                row[rate.moments] = rate.bytes_per_second
        first = f"{node.id} {node.kind}"
        for (parameters, threads), rates in sorted(rows.items()):
            cells = [_rate(rates.get(of, rates.get(None))) for of in _MOMENTS]
            size = f"{parameters / 1e6:g} M" if parameters else "many"
            table.add_row(first, size, str(threads), *cells)
            first = ""
        table.add_section()
    return table


def _copies_table(machine: Machine) -> Table:
    table = _table("Copies between nodes", "from", "to", "threads", "rate")
    for copy in machine.node_copies:
        rate = _rate(copy.bytes_per_second)
        table.add_row(str(copy.source), str(copy.target), str(copy.threads), rate)
    return table


def _transfers_table(machine: Machine) -> Table:
    table = _table("Copies to and from GPUs", "node", "GPU", "size", "streams", *_DIRECTIONS)
    rows: dict[tuple[int, tuple[int, ...], int, int], dict[str, Figure]] = {}
    for t in machine.transfers:
        row = rows.setdefault((t.node, t.gpus, t.nbytes, t.streams), {})
        row[t.direction] = t.bytes_per_second
    for (node, gpus, nbytes, streams), rates in sorted(rows.items()):
        cells = [_rate(rates.get(direction)) for direction in _DIRECTIONS]
        names = ", ".join(map(str, gpus))
        table.add_row(str(node), names, format_bytes(nbytes), str(streams), *cells)
    return table


def _links_table(machine: Machine) -> Table:
    table = _table("Links between GPUs", "GPU", "kind", "each way, all together")
    for link in machine.gpu_links:
        table.add_row(", ".join(map(str, link.gpus)), link.kind, _rate(link.bytes_per_second))
    return table


def _nics_table(machine: Machine) -> Table:
    table = _table("Network cards, as the kernel reports them", "name", "node", "rate")
    for nic in machine.nics:
        node = "-" if nic.node is None else str(nic.node)
        table.add_row(nic.name, node, _rate(nic.bytes_per_second))
    return table


def _storage_table(path: StoragePath) -> Table:
    about = [path.device or path.file_system, "" if path.direct else "no direct I/O"]
    title = f"Storage: {path.path} ({', '.join(filter(None, about)) or 'unknown device'})"
    table = _table(title, "request", "in flight", "read", "write")
    rows: dict[tuple[int, int], dict[str, Figure]] = {}
    for rate in path.rates:
        rows.setdefault((rate.block, rate.depth), {})[rate.operation] = rate.bytes_per_second
    for (block, depth), rates in sorted(rows.items()):
        cells = [_rate(rates.get(operation)) for operation in ("read", "write")]
        table.add_row(format_bytes(block), str(depth), *cells)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    # The widest table must fit in a terminal with 80 columns.
    table.pad_edge, table.show_edge, table.collapse_padding = False, False, True
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _find(node: MemoryNode, operation: str, threads: int) -> Figure | None:
    for rate in node.rates:
        if (rate.operation, rate.threads) == (operation, threads):
            return rate.bytes_per_second
    return None


def _rate(figure: Figure | None) -> str:
    return "-" if figure is None else f"{format_rate(figure.median)} {_spread(figure)}"


def _time(figure: Figure | None) -> str:
    return "-" if figure is None else f"{format_seconds(figure.median)} {_spread(figure)}"


def _spread(figure: Figure) -> str:
    return f"±{(figure.high - figure.low) / 2 / figure.median:.0%}"
