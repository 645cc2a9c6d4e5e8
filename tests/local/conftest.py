"""Fixtures of the tests of whole commands and real runs on this machine: engine `local`, no lab, no root."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for deploy_place

from run_box import box, until, until_seen  # noqa: F401  fixtures
