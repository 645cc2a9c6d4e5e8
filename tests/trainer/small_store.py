"""A prepared store of a few short conversations."""

from __future__ import annotations

import json
from pathlib import Path

from trainer.data.chat_template import Mode
from trainer.data.prepare import Tolerance, prepare
from trainer.data.reader import Settings
from trainer.data.store import Store

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def make_store(folder: Path, target: Path) -> Store:
    """Below `folder`, for a target that gets a chat template."""
    (target / "chat_template.jinja").write_text(TEMPLATE)
    rows = []
    for number in range(24):
        asked = {"role": "user", "content": f"count from {number}"}
        said = {"role": "assistant", "content": " ".join(str(number + n) for n in range(2 + number % 7))}
        rows.append({"messages": [asked, said]})
    source = folder / "a.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = Settings(str(target), mode=Mode(True))
    return prepare([source], settings, folder / "data", Tolerance(rows=0), say=lambda text: None)
