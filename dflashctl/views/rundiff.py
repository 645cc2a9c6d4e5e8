"""Two runs side by side, as a table a section and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflashctl.history.listing import Shown
from dflashctl.history.rundiff import Section
from dflashctl.render import table
from dflashctl.render.text import clip, line, plural

if TYPE_CHECKING:
    from rich.console import RenderableType

ROWS = 60
CELL = 60


def side_by_side(left: Shown, right: Shown, sections: tuple[Section, ...]) -> RenderableType:
    from rich.console import Group

    names = [_name(left), _name(right)]
    parts: list[RenderableType] = [table.cell(line(f"{names[0]} and {names[1]}"), "bold")]
    for section in sections:
        found = section.differences
        if not found:
            parts.append(table.cell(f"{section.title}: no difference in {plural(section.same, 'thing')}"))
            continue
        parts.append(table.cell(f"{section.title}: {plural(len(found), 'difference')}, {section.same} alike"))
        rows = [[line(each.name), clip(each.left, CELL), clip(each.right, CELL)] for each in found[:ROWS]]
        parts.append(table.table(("", names[0], names[1]), rows))
        if len(found) > ROWS:
            parts.append(table.cell(f"and {len(found) - ROWS} more: --json has them all", "dim"))
    return Group(*parts)


def _name(shown: Shown) -> str:
    """Tag and the end of the id: two runs may have one tag."""
    return line(f"{shown.entry.facts.name} {shown.entry.facts.id.rpartition('-')[2]}")


def document(left: Shown, right: Shown, sections: tuple[Section, ...]) -> dict[str, Any]:
    """Schema dflashctl.rundiff/1."""
    return {
        "host": left.host,
        "left": left.entry.facts.id,
        "right": right.entry.facts.id,
        "sections": [
            {
                "title": section.title,
                "same": section.same,
                "differences": [vars(each) for each in section.differences],
            }
            for section in sections
        ],
    }
