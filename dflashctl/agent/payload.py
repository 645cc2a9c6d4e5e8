"""The agent as one zip: what travels with each call, and what a run keeps as `supervisor.pyz`.

Inside the zip the package is called `dflash_agent`, and `__main__.py` makes the file runnable:
`python3 -I supervisor.pyz supervise RUN_DIR`. The bytes depend on the sources alone (sorted names, fixed
dates), so equal bytes mean equal code.
"""

from __future__ import annotations

import io
import zipfile

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

    sources = {
        f"{PACKAGE}/{entry.name}": entry.read_bytes()
        for entry in files(__package__).iterdir()
        if entry.name.endswith(".py") and entry.is_file()
    }
    sources["__main__.py"] = _MAIN
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(sources):
            info = zipfile.ZipInfo(name, _EPOCH)
            info.external_attr = 0o644 << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, sources[name])
    return buffer.getvalue()
