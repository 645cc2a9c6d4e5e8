"""The agent as one zip: what travels with each call, and what a run keeps as `supervisor.pyz`.

Inside the zip the package is called `dflash_agent`, and `__main__.py` makes the file runnable:
`python3 -I supervisor.pyz supervise RUN_DIR`. The bytes depend on the sources alone (sorted names, fixed
dates), so equal bytes mean equal code.
"""

from __future__ import annotations

import io
import zipfile
from typing import TYPE_CHECKING, Iterator, Tuple

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

PACKAGE = "dflash_agent"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest date that a zip can hold
_MAIN = b"from dflash_agent.main import command_line\n\ncommand_line()\n"


def payload_bytes() -> bytes:
    """The zip that this module was loaded from; elsewhere (on the laptop, in tests) a new one from the
    sources.

    Raises OSError where the archive cannot be read any more.
    """
    archive = getattr(globals().get("__loader__"), "archive", None)
    if archive is not None and (__package__ or "") == PACKAGE:
        with open(archive, "rb") as file:
            return file.read()
    return build_payload()


def build_payload() -> bytes:
    """Build the zip from the sources of this package; works from a checkout, a wheel and a zipped install."""
    # Python >= 3.9; only the laptop comes here
    from importlib.resources import files

    sources = dict(_sources(files(__package__), PACKAGE))
    sources["__main__.py"] = _MAIN
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(sources):
            info = zipfile.ZipInfo(name, _EPOCH)
            info.external_attr = 0o644 << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, sources[name])
    return buffer.getvalue()


def _sources(folder: "Traversable", name: str) -> Iterator[Tuple[str, bytes]]:
    """(name in the zip, content) of every .py, also of those in the packages below."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _sources(entry, f"{name}/{entry.name}")
        elif entry.name.endswith(".py"):
            yield f"{name}/{entry.name}", entry.read_bytes()
