"""Numbers as a person reads them."""

from __future__ import annotations


def plural(number: int, noun: str) -> str:
    """1 row, 3 rows, 1,024 rows; of nouns that only get an s."""
    return f"{number:,} {noun if number == 1 else noun + 's'}"
