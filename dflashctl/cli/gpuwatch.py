"""`dflashctl gpu --watch`: one live table on a terminal; elsewhere a line for each GPU that changed hands."""

from __future__ import annotations

import sys
import time

from rich.console import Group

from dflashctl.config.hosts import Host
from dflashctl.gpus.idle import Box
from dflashctl.gpus.show import COLUMNS, holder_cell, rows
from dflashctl.gpus.watch import watch
from dflashctl.render.table import cell, console, say, table


def watch_gpus(host: Host, every_s: float) -> None:
    """Until interrupted."""
    if sys.stdout.isatty():
        _live(host, every_s)
        return
    said: dict[int, str] = {}
    problem: str | None = None
    for box in watch(host, every_s=every_s):
        stamp = time.strftime("%H:%M:%S")
        if box.problem != problem:
            problem = box.problem
            say(f"{stamp} {host.name} · {problem or 'the GPUs can be read again'}")
        for gpu in box.gpus:
            holder = holder_cell(gpu).replace("\n", "; ")
            if said.get(gpu.index) != holder:
                said[gpu.index] = holder
                used = gpu.reading.memory_used_mib
                memory = "?" if used is None else f"{used:,}"
                say(f"{stamp} GPU {gpu.index}  {memory} MiB  {holder}")


def _live(host: Host, every_s: float) -> None:
    from rich.live import Live

    with Live(console=console(), auto_refresh=False) as live:
        last: Box | None = None
        for box in watch(host, every_s=every_s):
            last = box if box.gpus or last is None else last
            live.update(shown(host.name, last, box.problem), refresh=True)


def shown(host: str, box: Box, problem: str | None) -> Group:
    """A line and the table; without contact, the last table under what is wrong."""
    idle = sum(gpu.idle for gpu in box.gpus)
    words = problem or f"{len(box.gpus)} GPUs · {idle} idle · {time.strftime('%H:%M:%S')} · Ctrl-C ends"
    warnings = [cell(f"warning: {warning}", "yellow") for warning in box.warnings]
    return Group(cell(f"{host} · {words}", "bold"), table(COLUMNS, rows(box)), *warnings)
