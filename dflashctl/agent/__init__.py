"""The code that runs on the other machine: standard library only, Python >= 3.8, relative imports only.

On the laptop this package is `dflashctl.agent`; the very same files travel as a zip and are imported there as
`dflash_agent` (see payload.py), so a module here may import its siblings and nothing else of dflashctl.
"""

from __future__ import annotations


class AgentError(Exception):
    """A failure that an operation foresees. `kind` is an ExitCode name in lower case ("not_found", "locked");
    the laptop raises the matching DflashError with the same what, where and next."""

    def __init__(self, kind: str, what: str, where: str = "", next: str = "") -> None:
        super().__init__(what)
        self.kind = kind
        self.what = what
        self.where = where
        self.next = next
