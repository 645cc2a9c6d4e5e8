"""Our Triton kernels by Triton's interpreter beside float64 arithmetic, gradients included; and that they
compile for the GPUs in use. Neither needs a GPU.

Run: python -m pytest tests/trainer/test_triton_kernels.py
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from unproven import did_not_run


def output_of(program: str, **env: str) -> Any:
    """The last line that a program beside this file prints, from JSON."""
    if importlib.util.find_spec("triton") is None:
        did_not_run("triton is not installed: pip install -c constraints.txt triton")
    path = Path(__file__).with_name(program)
    there = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **env}
    done = subprocess.run([sys.executable, str(path)], env=there, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """What each kernel gave by Triton's interpreter."""
    found: dict[str, Any] = output_of("kernels_by_interpreter.py", TRITON_INTERPRET="1")
    return found


@pytest.mark.parametrize(("kernels", "cases"), [("attention", 15), ("norm and RoPE", 4)])
def test_output_and_gradients_equal_float64(kernels: str, cases: int, interpreted: dict[str, Any]) -> None:
    found = interpreted[kernels]
    assert len(found) == cases
    for case in found:
        most = 3e-3 if case["dtype"] == "torch.float16" else 2e-6
        assert all(error <= most for error in case["errors"].values()), case


def test_the_losss_gradient_and_losses_equal_float64(interpreted: dict[str, Any]) -> None:
    cases = interpreted["errors"]
    assert len(cases) == 6
    for each in cases:
        narrow = each["dtype"] == "torch.bfloat16"
        assert each["gradient"] <= (2**-8 if narrow else 2e-6), each
        assert each["loss"] <= 2e-5 and each["right"], each
        assert each["rights"][:4] == [True, True, True, True] and not each["rights"][5], each


def test_adamw_equals_torchs_and_keeps_the_twins(interpreted: dict[str, Any]) -> None:
    found = interpreted["adamw"]
    assert found["error"] < 5e-7 and found["stale"] == 0 and found["followed"]
    assert found["counts"] == [4.0] * 4  # one of five steps was bad
    assert found["sums"] == 0.0


def test_they_compile_for_a_gpu() -> None:
    """With the sizes, warps and stages of real runs: what the interpreter lets pass, a compiler may not."""
    found = output_of("kernels_compiled.py")
    assert set(found) == {
        "forward",
        "query_gradients",
        "key_gradients",
        "forward, Ada",
        "query_gradients, Ada",
        "key_gradients, Ada",
        "norm and RoPE",
        "norm and RoPE back",
        "errors",
        "update",
        "add",
    }
    for name, shared in found.items():
        most = 99 if "Ada" in name else 227  # KiB of a program that an L40S, or an H100 or H200, gives out
        assert shared <= most * 1024, name
