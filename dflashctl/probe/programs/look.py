"""What this torch sees: its version, GPUs, a compiler. No GPU is opened.

For GPUs Inductor has Triton build its launchers with a C compiler; for the CPU it builds kernels in C++.
"""

from __future__ import annotations

import os
import shutil
import sys

from .common import write


def main() -> None:
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    variable, names = ("CC", ("gcc", "clang")) if gpus else ("CXX", ("g++",))
    write(
        {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": ".".join(str(part) for part in sys.version_info[:3]),
            "gpus": gpus,
            "compiler": bool(os.environ.get(variable) or any(map(shutil.which, names))),
        }
    )


if __name__ == "__main__":
    main()
