"""The child that imports torch for `doctor`: packages, C compiler, CUDA driver, torch; each told once known.

Run as `python -c SOURCE` in the environment of a run. No CUDA context is made: the driver is asked through
its own library (cuInit, cuDeviceCanAccessPeer), and torch only counts. So no memory is taken from a run.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from typing import Any, Dict

NAMES = (
    "torch",
    "triton",
    "transformers",
    "safetensors",
    "flash-linear-attention",
    "causal-conv1d",
)
COMPILER_S = 10.0
# CUdevice_attribute of cuda.h.
COMPUTE_MODE, UNIFIED_ADDRESSING, MAJOR, MINOR, IPC_EVENTS = 20, 41, 75, 76, 125


def main() -> None:
    """Print one `DOCTOR {json}` line a step."""
    steps = (("packages", packages), ("compiler", compiler), ("cuda", cuda), ("torch", look_at_torch))
    for step, look in steps:
        facts = look()
        facts["step"] = step
        print("DOCTOR " + json.dumps(facts), flush=True)


def packages() -> Dict[str, Any]:
    """{"versions": {name: version|null}, "executable"}."""
    from importlib import metadata

    versions: Dict[str, Any] = {}
    for name in NAMES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {"versions": versions, "executable": sys.executable}


def compiler() -> Dict[str, Any]:
    """{"command": as Triton would call it|null, "found", "problem": its first error|"", "python": [3, 12]}.

    Triton takes CC, else clang or gcc, with the headers of this Python. Nothing is written: only
    the syntax of what it includes is looked at.
    """
    named = os.environ.get("CC")
    command = named or shutil.which("gcc") or shutil.which("clang")
    answer = {"command": command, "found": False, "problem": "", "python": list(sys.version_info[:2])}
    if command is None or shutil.which(command) is None:
        return answer
    answer["found"] = True
    scheme = "posix_prefix" if os.name == "posix" else os.name  # as Triton: not Debian's posix_local
    include = sysconfig.get_path("include", scheme)
    try:
        done = subprocess.run(
            [command, "-fsyntax-only", "-x", "c", "-I" + include, "-"],
            input=b"#include <stdlib.h>\n#include <dlfcn.h>\n#include <Python.h>\n",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=COMPILER_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        answer["problem"] = str(error)[:300]
        return answer
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        errors = [line for line in lines if "error" in line] or lines or ["exit code %d" % done.returncode]
        answer["problem"] = errors[0][:300]
    return answer


def cuda() -> Dict[str, Any]:
    """{"problem": text|null, "error": name|null, "version": "13.0", "devices": [{"capability",
    "compute_mode", "ipc_events", "unified"}], "peers": [[bool]]}."""
    import ctypes

    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"problem": str(error), "error": None}
    code = library.cuInit(0)
    if code:
        name = ctypes.c_char_p()
        library.cuGetErrorName(code, ctypes.byref(name))
        return {"problem": None, "error": (name.value or b"error %d" % code).decode("ascii", "replace")}

    def number(function: Any, *arguments: Any) -> Any:
        value = ctypes.c_int()
        return value.value if function(ctypes.byref(value), *arguments) == 0 else None

    def attribute(which: int, device: int) -> Any:
        return number(library.cuDeviceGetAttribute, which, device)

    version = number(library.cuDriverGetVersion) or 0
    count = number(library.cuDeviceGetCount) or 0
    devices = [
        {
            "capability": [attribute(MAJOR, each), attribute(MINOR, each)],
            "compute_mode": attribute(COMPUTE_MODE, each),
            "unified": attribute(UNIFIED_ADDRESSING, each),
            "ipc_events": attribute(IPC_EVENTS, each),
        }
        for each in range(count)
    ]
    peers = [
        [one == other or number(library.cuDeviceCanAccessPeer, one, other) == 1 for other in range(count)]
        for one in range(count)
    ]
    return {
        "problem": None,
        "error": None,
        "version": "%d.%d" % (version // 1000, version % 1000 // 10),
        "devices": devices,
        "peers": peers,
    }


def look_at_torch() -> Dict[str, Any]:
    """{"version", "at": its folder, "cuda": of the build|null, "available", "count", "architectures",
    "warnings", "import_s"} or {"problem"}."""
    import warnings

    began = time.monotonic()
    try:
        # Not an import statement: the agent's own modules need the standard library alone.
        torch: Any = importlib.import_module("torch")
    except Exception as error:
        return {"problem": "%s: %s" % (type(error).__name__, error)}
    took = time.monotonic() - began
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
        count = torch.cuda.device_count()
    return {
        "problem": None,
        "version": torch.__version__,
        "at": os.path.dirname(torch.__file__ or ""),
        "cuda": torch.version.cuda,
        "available": available,
        "count": count,
        "architectures": torch.cuda.get_arch_list() if available else [],
        "warnings": [str(each.message)[:500] for each in caught][:3],
        "import_s": took,
    }


if __name__ == "__main__":
    main()
