"""Who acts, for records and events."""

from __future__ import annotations

import getpass
import os
import socket


def person() -> str:
    """user@machine."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no entry for this uid
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
