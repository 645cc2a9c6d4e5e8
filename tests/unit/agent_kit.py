"""An agent's frames, a host of engine `local`, and an agent with another operation."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from dflashctl.agent import main as agent_main
from dflashctl.config.hosts import Host

NONCE = "0123456789abcdef"


def local_host(root: Path, **changes: Any) -> Host:
    values: dict[str, Any] = {
        "name": "here",
        "engine": "local",
        "python": sys.executable,
        "home": str(root),
        "code_root": str(root / "code"),
        "workdir": str(root),
        "log_dir": str(root),
        "state_dir": str(root / "state"),
    }
    return Host(**{**values, **changes})


def frames(body: dict[str, Any], events: Sequence[dict[str, Any]] = (), nonce: str = NONCE) -> bytes:
    """What an agent writes."""
    out = BytesIO()
    emit = agent_main.Emit(out, nonce)
    for event in events:
        emit(event)
    emit.answer(body)
    return out.getvalue()


def zip_with(op: bytes, modules: dict[str, str]) -> bytes:
    """An agent whose "ping" is another operation, `op`, of one of `modules`."""
    folder = Path(agent_main.__file__).parent
    sources = {
        "__init__": (folder / "__init__.py").read_bytes(),
        "main": (folder / "main.py").read_bytes().replace(b"main:ping", op),
        **{name: text.encode() for name, text in modules.items()},
    }
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in sources.items():
            archive.writestr(f"dflash_agent/{name}.py", data)
    return buffer.getvalue()
