"""Fixtures of the unit tests: each tests one part, without lab, bed or a whole command over a connection."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for gpu_kit and its like

from frame_kit import log, verb  # noqa: F401  fixtures
from run_box import box, until, until_seen  # noqa: F401  fixtures
