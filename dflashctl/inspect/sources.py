"""Programs of a package here, as files to send: they run there as modules of a package of another name."""

from __future__ import annotations

from importlib import resources


def package_files(package: str, *, sent_as: str) -> dict[str, str]:
    """{"<sent_as>/x.py": text} of the modules of `package`, also from a zipped install."""
    return {
        f"{sent_as}/{entry.name}": entry.read_text(encoding="utf-8")
        for entry in resources.files(package).iterdir()
        if entry.name.endswith(".py")
    }
