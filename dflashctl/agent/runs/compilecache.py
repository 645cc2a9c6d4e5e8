"""Where the run's compiled kernels are kept, and whether they are warm: it decides what a first step costs.

Names and defaults are PyTorch's and Triton's: TORCHINDUCTOR_CACHE_DIR, else <temporary folder>/
torchinductor_<user>; TRITON_CACHE_DIR, else ~/.triton/cache (inductor sets its own below its folder).
"""

from __future__ import annotations

import os
from typing import Any, Dict


def compile_cache(environment: Dict[str, str]) -> Dict[str, Any]:
    """{"path", "state": "cold" | "warm"} of a program with this environment, looked at before it starts."""
    path = environment.get("TORCHINDUCTOR_CACHE_DIR") or os.path.join(
        environment.get("TMPDIR") or "/tmp", "torchinductor_" + _user()
    )
    return {"path": path, "state": "warm" if _has_files(path) else "cold"}


def _has_files(path: str) -> bool:
    return any(files for _, _, files in os.walk(path))


def _user() -> str:
    try:
        import pwd

        return pwd.getpwuid(os.getuid()).pw_name
    except (ImportError, KeyError):
        return str(os.getuid())
