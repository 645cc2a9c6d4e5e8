"""`regenerate`: answers that the target writes itself, since a drafter has to foretell the target.

The questions stay, each answer is written anew with the new answers before it. Two ways: by the target here
(`trainer.data.local`), or by any server that speaks OpenAI's chat completions (`trainer.data.server`). Either
way rows come out in the input's order, and an interrupted run goes on to the same file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.data import lines, records
from trainer.data.journal import Counts, Journal, Result, Status
from trainer.data.lines import BadRow
from trainer.data.meter import Meter
from trainer.data.records import Conversation
from trainer.errors import ConfigError

Say = Callable[[str], None]
MAX_LINE_BYTES = 16_000_000


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn."""

    temperature: float = 0.0  # 0: always the most likely token
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    max_new_tokens: int = 4096
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """What the target wrote in one turn."""

    content: str
    tokens: int
    reasoning: str | None = None

    def message(self) -> dict[str, Any]:
        thought = {} if self.reasoning is None else {"reasoning_content": self.reasoning}
        return {"role": "assistant", "content": self.content, **thought}


class Refused(Exception):
    """There is no answer to use; the text says why."""

    def __init__(self, reason: str, status: Status = "failed") -> None:
        super().__init__(reason)
        self.status: Status = status


@dataclass
class Job:
    """One row on its way: what is said so far, and what is still to be asked."""

    line: int
    row: dict[str, Any]
    tools: list[Any] | None
    ahead: list[list[dict[str, Any]]]  # messages up to each question, one list for each answer to be written
    said: list[dict[str, Any]] = field(default_factory=list)
    tokens: int = 0
    refused: Refused | None = None

    def next_prompt(self) -> list[dict[str, Any]] | None:
        """What the next answer is to; None when all are written or one was refused."""
        if self.refused is not None or not self.ahead:
            return None
        return [*self.said, *self.ahead[0]]

    def answered(self, answer: Answer) -> None:
        self.said += [*self.ahead.pop(0), answer.message()]
        self.tokens += answer.tokens

    def result(self) -> Result:
        if self.refused is not None:
            status, reason = self.refused.status, str(self.refused)
            return Result(self.line, status, self.row, reason, self.tokens)
        kept: dict[str, Any] = {key: self.row[key] for key in ("id", "tools") if key in self.row}
        return Result(self.line, "success", {**kept, "messages": self.said}, "", self.tokens)


def job(line: int, row: dict[str, Any]) -> Job:
    """The job of one row.

    Raises:
        Refused: as skipped, when there is nothing that could be asked.
    """
    try:
        record = records.read(row, need_answer=False)
    except BadRow as error:
        raise Refused(str(error), "skipped") from None
    if not isinstance(record, Conversation):
        raise Refused("no conversation", "skipped")
    if any(message.get("tool_calls") or message["role"] == "tool" for message in record.messages):
        raise Refused("calls tools, whose results belong to the old answers", "skipped")
    ahead: list[list[dict[str, Any]]] = []
    waiting: list[dict[str, Any]] = []
    for message, following in zip(record.messages, [*record.messages[1:], None], strict=True):
        if message["role"] == "assistant":
            continue
        waiting.append(message)
        if message["role"] == "user" and (following is None or following["role"] == "assistant"):
            ahead.append(waiting)
            waiting = []
    if not ahead:
        raise Refused("asks nothing", "skipped")
    return Job(line, row, record.tools, ahead)


def jobs(path: Path) -> Iterator[Job | Result]:
    """The rows of the input in order; a Result for those that are skipped."""
    for number, line in enumerate(lines.lines_in(path, 0, path.stat().st_size, MAX_LINE_BYTES), 1):
        row: dict[str, Any] | None = None
        try:
            row = lines.record(line, MAX_LINE_BYTES)
            if row is not None:
                yield job(number, row)
        except BadRow as error:
            yield Result(number, "skipped", None, str(error))
        except Refused as error:
            yield Result(number, error.status, row, str(error))


# Answers every job of a stream, in its order; a Result passes through. The second argument hears how many
# tokens have been written for rows that are not out yet.
Answering = Callable[[Iterator[Job | Result], Callable[[int], None]], Iterator[Result]]


def regenerate(
    source: Path, out: Path, settings: dict[str, Any], window: int, answering: Answering, say: Say = print
) -> Counts:
    """Write `out`, and OUT.failed with what has no new answers; goes on where an earlier run stopped.

    Args:
        settings: what decides the answers; work goes on only under the same.
        window: rows that `answering` takes at once.
    Raises:
        ConfigError: no such input; the output is there or was begun with other settings.
    """
    refuse_files(source, out)
    known = {"input": lines.file_digest(source), **settings}
    total = sum(1 for _ in jobs(source))
    with Journal(out, known, window) as journal:
        if journal.counts.rows:
            say(f"going on after {journal.counts.rows:,} of {total:,} rows ({journal.counts})")
        left = jobs(source)
        for _ in range(journal.counts.rows):
            next(left)
        with Meter("regenerate", total, journal.counts.rows, 1, "rows", journal.counts.tokens) as meter:

            def told(written: int) -> None:
                meter.update(journal.counts.rows, journal.counts.tokens + written, str(journal.counts))

            for result in answering(left, told):
                journal.add(result)
                told(0)
        counts = journal.counts
        journal.finish(str(source))
    return counts


def refuse_files(source: Path, out: Path) -> None:
    """Raises ConfigError: no such input, or the output is there."""
    if not source.is_file():
        raise ConfigError("no such file", where=str(source))
    if out.exists():
        raise ConfigError("is there already", where=str(out), next="remove it, or name another --out")


def report(counts: Counts, out: Path) -> list[str]:
    """Lines for a person."""
    said = [f"{counts.rows:,} rows: {counts}; {counts.tokens:,} tokens written"]
    worst = sorted(counts.reasons.items(), key=lambda pair: (-pair[1], pair[0]))[:5]
    said += [f"  {count:,} times: {reason}" for reason, count in worst]
    if counts.failed or counts.skipped:
        said.append(f"those rows are in {out}.failed; regenerate reads it to try them again")
    said.append(str(out))
    return said


def row_seed(seed: int, job: Job) -> int:
    """The seed of a row's next answer: of no other row's doing."""
    key = hashlib.blake2b(f"{seed}/{job.line}/{len(job.ahead)}".encode(), digest_size=4).digest()
    return int.from_bytes(key, "little") >> 1
