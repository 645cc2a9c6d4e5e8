"""Numbers and errors as a person reads them."""

from __future__ import annotations


def plural(number: int, noun: str) -> str:
    """1 row, 3 rows, 1,024 rows; of nouns that only get an s."""
    return f"{number:,} {noun if number == 1 else noun + 's'}"


def duration(seconds: float | None) -> str:
    """3.1 s, 4m12s, 2h07m."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def first_line(error: BaseException, kind: bool = False) -> str:
    """The first line of what an error says; its kind where it says nothing. `kind`: that before it, too."""
    name = type(error).__name__
    said = str(error).strip().partition("\n")[0].rstrip()
    if not said:
        return name
    return f"{name}: {said}" if kind else said


def printable(words: str) -> str:
    """Text that cannot steer a terminal: control characters but line ends and tabs are made visible,
    and so is half a surrogate pair, which no file or terminal takes.
    """
    return "".join(
        letter if letter in "\n\t" or letter.isprintable() else f"\\x{ord(letter):02x}" for letter in words
    )
