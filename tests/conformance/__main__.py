"""`python -m tests.conformance`: run the table of docs/pct.md against the stand-in, and print it.

Over real LXC containers (root and Debian's lxc) and over user namespaces (no root). With
DFLASHCTL_REAL_PVE=root@host:containerid the rows that harm nothing run on a real Proxmox VE node as well.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2])]

from pctkit import lxc, real, table, userns  # noqa: E402
from pctkit.place import Place  # noqa: E402

MAKERS: dict[str, tuple[Callable[[], str], Callable[[], Place]]] = {
    "lxc": (lxc.reason_against, lxc.Lxc),
    "userns": (userns.reason_against, userns.Userns),
    "real": (
        lambda: (
            "" if os.environ.get("DFLASHCTL_REAL_PVE") else "set DFLASHCTL_REAL_PVE=root@host:containerid"
        ),
        lambda: real.Real(os.environ["DFLASHCTL_REAL_PVE"]),
    ),
}


def main() -> int:
    """Exit 0 when every row that ran agrees, 1 when one does not, 2 when nothing could be run."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--place", action="append", choices=list(MAKERS), help="only there (may be repeated)")
    parser.add_argument("--row", action="append", default=[], help="only rows whose id has this in it")
    options = parser.parse_args()
    rows = [row for row in table.load() if not options.row or any(part in row.id for part in options.row)]
    verdicts: dict[str, dict[str, str]] = {}
    notes: list[str] = []
    for name in options.place or list(MAKERS):
        reason = MAKERS[name][0]()
        if reason:
            notes.append(f"{name}: not run: {reason}")
            continue
        verdicts[name] = run(MAKERS[name][1](), rows, notes)
    show(rows, verdicts, notes)
    if not verdicts:
        return 2
    return 1 if any("DIFFERS" in column.values() for column in verdicts.values()) else 0


def run(place: Place, rows: list[table.Row], notes: list[str]) -> dict[str, str]:
    """Run the rows at a place: id -> ok, DIFFERS or -, with the reasons in notes."""
    column = {}
    try:
        for number, row in enumerate(rows, 1):
            if sys.stderr.isatty():
                print(f"\r{place.name}: {number} of {len(rows)}\033[K", end="", file=sys.stderr)
            if reason := place.why_not(row):
                column[row.id] = "-"
                notes.append(f"{place.name}: {row.id}: not run: {reason}")
                continue
            found = place.judge(row)
            column[row.id] = "DIFFERS" if found else "ok"
            notes.extend(f"{place.name}: {row.id}: {text}" for text in found)
    finally:
        place.close()
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)
    return column


def show(rows: list[table.Row], verdicts: dict[str, dict[str, str]], notes: list[str]) -> None:
    """Print the table, then what differs or was left out, then the counts."""
    width = max(len(row.id) for row in rows)
    cited = max(len(row.cites) for row in rows)
    heads = "".join(f"{name:9}" for name in verdicts)
    print(f"{'ROW':{width}}  {'CITES':{cited}}  {heads}SEEN ON THE REAL TOOL")
    for row in rows:
        cells = "".join(f"{column[row.id]:9}" for column in verdicts.values())
        print(f"{row.id:{width}}  {row.cites:{cited}}  {cells}{row.seen or 'NEVER SEEN'}")
    for note in notes:
        print(note)
    seen = sum(bool(row.seen) for row in rows)
    observed = sum(row.observed is not None for row in rows)
    print(f"{len(rows)} rows ({observed} of the recorded battery), {seen} seen on the real tool")
    for name, column in verdicts.items():
        counts = {word: list(column.values()).count(word) for word in ("ok", "DIFFERS", "-")}
        print(f"{name}: {counts['ok']} agree, {counts['DIFFERS']} differ, {counts['-']} not run")


if __name__ == "__main__":
    sys.exit(main())
