"""Rows whose hidden states are not finite: named, each counted once, skipped within a bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from trainer.culprits import Who, named, rank_of
from trainer.errors import DataError


def newly_bad(
    found: Iterable[int],
    known: Sequence[int],
    allowed: int,
    total: int,
    makers: Mapping[int, Who] | None = None,
) -> list[int]:
    """The rows of `found` that are not known yet, rising: a row that is read in every epoch counts once.

    Rows that are packed anew for every epoch are numbered through all epochs (`trainer.data.stored`): no row
    comes twice, but its documents do. So of those only the rows of the latest epoch count.

    Args:
        allowed: bad rows that are skipped.
        makers: of bad rows' states, as far as they are known: one of several processes or threads.
        total: rows of an epoch; when all are bad the target is broken, whatever is allowed.
    Raises:
        DataError: there are too many.
    """
    new = sorted({*found} - {*known})
    if not new:
        return []
    bad = [row for row in (*known, *new) if row // total == new[-1] // total]
    if len(bad) > allowed or len(bad) == total:
        shown = ", ".join(str(row) for row in bad[:5]) + (", ..." if len(bad) > 5 else "")
        counts = Counter(makers[row] for row in bad if row in makers) if makers else Counter()
        whose = f"; made by {named(counts)}" if counts else ""
        raise DataError(
            f"{len(bad):,} of {total:,} rows have non-finite hidden states (rows {shown}){whose}",
            where="train.data.max_bad_rows",
            next="check the target's weights and dtype; the limit is for accidents, not for a broken target",
            rank=rank_of(counts) if counts else None,
        )
    return new
