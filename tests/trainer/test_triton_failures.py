"""What the installed Triton and Inductor really say is what the table of known failures knows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trainer import failures


def no_compiler() -> None:
    from triton.runtime import build

    build._find_compiler.cache_clear()
    try:
        build._find_compiler("c")
    finally:
        build._find_compiler.cache_clear()


def no_cxx_compiler() -> None:
    from torch._inductor.exc import InvalidCxxCompiler

    raise InvalidCxxCompiler


def out_of_resources() -> None:
    from triton.runtime.errors import OutOfResources

    raise OutOfResources(262144, 101376, "shared memory")


def assembler() -> None:
    from triton.runtime.errors import PTXASError

    raise PTXASError("Internal Triton PTX codegen error\n`ptxas` stderr:\nptxas fatal   : ...")


def triton_missing() -> None:
    from torch._inductor.exc import TritonMissing

    raise TritonMissing(None)


def recompiled_too_often() -> None:
    from torch._dynamo.exc import FailOnRecompileLimitHit

    raise FailOnRecompileLimitHit("Hard failure due to fullgraph=True")


@pytest.mark.parametrize(
    ("fails", "name"),
    [
        (no_compiler, "no-c-compiler"),
        (no_cxx_compiler, "no-c-compiler"),
        (out_of_resources, "triton-resources"),
        (assembler, "triton-ptxas"),
        (triton_missing, "triton-missing"),
        (recompiled_too_often, "recompile-limit-fullgraph"),
    ],
)
def test_their_errors_are_known(
    fails: Callable[[], None], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(Exception) as caught:
        fails()
    assert [row.name for row in failures.of_error(caught.value)] == [name]
