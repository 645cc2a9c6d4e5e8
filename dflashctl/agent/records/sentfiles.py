"""Small programs that came with a request, written where they are to run."""

from __future__ import annotations

import os
import re
from typing import Dict

from .. import AgentError

# One folder deep at the most, and nothing that leads out of it.
PATH = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]*/)?[A-Za-z0-9_][A-Za-z0-9._-]*")


def write_files(folder: str, files: Dict[str, str]) -> None:
    """{relative path: text} below `folder`. Raises AgentError("bug") for a path that leads elsewhere,
    OSError."""
    for path, text in sorted(files.items()):
        if not PATH.fullmatch(path):
            raise AgentError("bug", "not the name of a file to send: %r" % path)
        full = os.path.join(folder, path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, "w", encoding="utf-8") as file:
            file.write(text)
