"""The log file of errors: the full traceback of each, secrets masked, readable by its owner only."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from dflashctl.render.secrets import MASK, SECRET_NAME, SHORTEST_SOUNDING, masked

MAX_BYTES = 2_000_000
"""Then the log becomes dflashctl.log.1 and a new one begins."""

_WELL_KNOWN = re.compile(r"\b(hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[abp]-)[A-Za-z0-9_\-]{8,}")
_ASSIGNED = re.compile(
    r"""(?P<name>\b[A-Za-z0-9_\-]*(?:token|secret|passw(?:or)?d|passphrase|api[_-]?key)["']?\s*[=:]\s*["']?)"""
    r"""(?P<value>[^\s"',;]{4,})""",
    re.IGNORECASE,
)


_COMMAND = re.compile(r'ProxyCommand\(".*?"\)(?= returned)', re.DOTALL)
"""paramiko's words for one that failed: people give passwords to sshpass there."""
_LOGIN = re.compile(r"(://[^/\s:@]*:)[^/\s@]+(?=@)")


def mask(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Replace what looks secret: the values of the environment's secret-sounding variables, tokens with a
    well-known beginning, what is assigned to a secret-sounding name, passwords in addresses, and the text of
    a ProxyCommand."""
    values = (os.environ if environment is None else environment).items()
    sounding = {value for name, value in values if SECRET_NAME.search(name)}
    secrets = {value for value in sounding if len(value) >= SHORTEST_SOUNDING}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    text = _LOGIN.sub(lambda found: found[1] + MASK, _COMMAND.sub(f"ProxyCommand({MASK})", text))
    text = _WELL_KNOWN.sub(lambda found: found[1] + MASK, text)
    return masked(_ASSIGNED.sub(lambda found: found["name"] + MASK, text))


def log_path() -> Path:
    """Where the log is: DFLASHCTL_LOG, or the platform's folder for a user's logs."""
    if chosen := os.environ.get("DFLASHCTL_LOG"):
        return Path(chosen)
    import platformdirs

    return platformdirs.user_log_path("dflashctl") / "dflashctl.log"


def record(error: BaseException, words: Sequence[str]) -> str:
    """Append the traceback. Returns a phrase that says where it is, or why it is nowhere; never raises:
    the error itself is the news."""
    from dflashctl import __version__

    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    version = ".".join(map(str, sys.version_info[:3]))
    head = f"{stamp} dflashctl {__version__}, Python {version}: {shlex.join(['dflashctl', *words])}"
    text = mask(head + "\n" + "".join(traceback.format_exception(error)) + "\n")
    path = None
    try:
        path = log_path()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > MAX_BYTES:
            path.replace(path.with_name(path.name + ".1"))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except (OSError, RuntimeError) as failure:  # RuntimeError: no home folder
        return f"no traceback kept: {path or 'log folder'}: {failure}"
    return f"full traceback in {path}"
