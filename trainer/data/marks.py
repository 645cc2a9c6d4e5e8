"""Marks in the text of a template: characters that Unicode keeps out of text, and where they were.

Around what each message says, with the message's number; or of the template's own `{% generation %}` blocks.
"""

from __future__ import annotations

import re
from typing import Any

from trainer.data.chat_template import CLOSE, OPEN, Span

FIRST_NUMBER, MOST_MESSAGES = 0xE000, 6400  # the private-use characters number the messages
_BLOCK = re.compile(f"[{OPEN}{CLOSE}]")


def mark(message: dict[str, Any], number: int) -> dict[str, Any]:
    """The message with marks around what it says: inside its outer white space, which templates may strip."""
    sign = OPEN + chr(FIRST_NUMBER + number)

    def around(text: str) -> str:
        core = text.strip()
        if not core:
            return text
        start = text.index(core)
        return f"{text[:start]}{sign}{core}{sign}{text[start + len(core) :]}"

    marked = {**message, "content": around(message["content"])}
    for name in ("reasoning_content", "thinking"):
        if name in message:
            marked[name] = around(message[name])
    if "tool_calls" in message:
        marked["tool_calls"] = [
            {**call, "function": {**call["function"], "name": around(call["function"]["name"])}}
            for call in message["tool_calls"]
        ]
    return marked


def without_marks(marked: str) -> tuple[str, dict[int, Span]]:
    """The text, and for each message the places in it of its first and its last mark; neither where the
    template has cut a mark in two.
    """
    head, *rest = marked.split(OPEN)
    pieces, size = [head], len(head)
    places: dict[int, Span] = {}
    for part in rest:
        number = ord(part[0]) - FIRST_NUMBER if part else -1
        if not 0 <= number < MOST_MESSAGES:
            return "", {}
        places[number] = (places[number][0] if number in places else size, size)
        pieces.append(part[1:])
        size += len(part) - 1
    return "".join(pieces), places


def blocks(marked: str) -> tuple[str, tuple[Span, ...]]:
    """The text of a template with `{% generation %}` blocks, and where they were."""
    pieces, spans, length, depth, start = [], [], 0, 0, 0
    at = 0
    for mark in _BLOCK.finditer(marked):
        pieces.append(marked[at : mark.start()])
        length += mark.start() - at
        at = mark.end()
        if mark[0] == OPEN:
            start = length if depth == 0 else start
            depth += 1
        else:
            depth -= 1
            if depth == 0 and length > start:
                spans.append((start, length))
    pieces.append(marked[at:])
    return "".join(pieces), tuple(spans)
