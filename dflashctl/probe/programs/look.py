"""What this torch sees: its version, GPUs, a compiler. No GPU is opened."""

from __future__ import annotations

import os
import shutil
import sys

from .common import write


def main() -> None:
    import torch

    write(
        {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": ".".join(str(part) for part in sys.version_info[:3]),
            "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
            "compiler": bool(os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")),
        }
    )


if __name__ == "__main__":
    main()
