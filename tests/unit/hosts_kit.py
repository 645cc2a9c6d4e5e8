"""A hosts.yaml for tests of it."""

from __future__ import annotations

from pathlib import Path

CT200 = """
version: 1
defaults: {host: ct200}
hosts:
  ct200:
    engine: pct
    container: 200
    ssh: {host: proxmox-gpu}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "hosts.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path
