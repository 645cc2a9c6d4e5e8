"""What a process may use, and what it does while it imports.

Run: python -m pytest tests/trainer/test_machine.py
"""

from __future__ import annotations

import gc

import pytest

from trainer.machine import importing


def test_nothing_is_collected_during_an_import_and_all_as_before_afterwards() -> None:
    assert gc.isenabled()
    with pytest.raises(ImportError), importing():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled(), "whoever switched it off wants it off"
    finally:
        gc.enable()
