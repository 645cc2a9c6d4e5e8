"""The loss's kernel gives the gradient and the losses that float64 arithmetic gives.

Run: python -m pytest tests/trainer/test_errors_kernel.py
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from unproven import did_not_run


def test_the_kernel_by_triton_s_interpreter_equals_float64() -> None:
    if importlib.util.find_spec("triton") is None:
        did_not_run("triton is not installed: pip install -c constraints.txt triton")
    program = Path(__file__).with_name("kernel_by_interpreter.py")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, str(program)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cases = json.loads(done.stdout.splitlines()[-1])
    assert len(cases) == 6
    for each in cases:
        narrow = each["dtype"] == "torch.bfloat16"
        assert each["gradient"] <= (2**-8 if narrow else 2e-6), each
        assert each["loss"] <= 2e-5 and each["right"], each
        assert each["rights"][:4] == [True, True, True, True] and not each["rights"][5], each
