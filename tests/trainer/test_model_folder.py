"""What is read from weights without torch is what torch reads.

Run: python -m pytest tests/trainer/test_model_folder.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from trainer.errors import ConfigError
from trainer.model.folder import header, read_floats


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_floats_are_torchs_own(tmp_path: Path, dtype: torch.dtype) -> None:
    wanted = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted[0, :3] = torch.tensor([0.0, -0.0, 1e-6]).to(dtype)
    path = tmp_path / "model.safetensors"
    save_file({"before": torch.ones(3), "x": wanted, "y": torch.ones(2, dtype=torch.bool)}, path)
    found = read_floats(path, "x")
    assert found.dtype == np.float32 and found.tobytes() == wanted.float().numpy().tobytes()
    for name in ("y", "nobody"):
        with pytest.raises(ConfigError, match=f"cannot read weight {name}"):
            read_floats(path, name)


@pytest.mark.parametrize("content", [b"", b"\xff" * 9, b"\x02\0\0\0\0\0\0\0[]", b"\x01\0\0\0\0\0\0\0{"])
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot read the weights"):
        header(path)
