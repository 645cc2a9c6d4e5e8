"""One figure against another, as text: it stands in a log, and needs no library."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH, HEIGHT = 48, 16
MARKS = "0123456789abcdefghijklmnopqrstuvwxyz"


def scatter(points: Sequence[tuple[float, float]], across: str, up: str) -> str:
    """Points as marks in their order (0 to 9, a to z, then z), in a square of equal scales with its diagonal.

    A later point covers an earlier one in the same place; the last is always "*".
    """
    values = [value for point in points for value in point]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    cells = [[" "] * WIDTH for _ in range(HEIGHT)]

    def at(value: float, size: int) -> int:
        return round((value - low) / span * (size - 1))

    for column in range(WIDTH):
        cells[round(column / (WIDTH - 1) * (HEIGHT - 1))][column] = "."
    for number, (x, y) in enumerate(points):
        mark = "*" if number == len(points) - 1 else MARKS[min(number, len(MARKS) - 1)]
        cells[at(y, HEIGHT)][at(x, WIDTH)] = mark
    lines = [f"{up} (up) against {across} (across); dots: equal"]
    for row in reversed(range(HEIGHT)):
        label = f"{low + row / (HEIGHT - 1) * span:6.2f}" if row % 5 == 0 else " " * 6
        lines.append(f"{label} |{''.join(cells[row]).rstrip()}")
    lines.append(" " * 7 + "+" + "-" * WIDTH)
    lines.append(" " * 7 + f"{low:<{WIDTH // 2}.2f}{high:>{WIDTH // 2}.2f}")
    return "\n".join(lines)
