"""Whether kernels can be built for the GPU, and what a run does without them. Needs no GPU.

Run: python -m pytest tests/trainer/test_gpu_kernels.py
"""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer import compile_policy
from trainer import config as configs
from trainer.bench.shapes import SHAPES, drafter_of
from trainer.errors import ConfigError, Refused
from trainer.model import accumulate, gpu_kernels, norm_rope
from trainer.model import attention_spans as spans
from trainer.model.block_attention import stages_of
from trainer.model.compiled import where_it_pays
from trainer.model.gpu_kernels import Facts, driver_problem, run_here, why_none
from trainer.run.preflight import kernels_wanted
from trainer.run.setup import choose_reading
from trainer.sections import Policy
from trainer.training import adamw, loss
from trainer.training.execution import Execution
from trainer.training.step import attention_of

NO_COMPILER = "Failed to find C compiler. Please specify via CC environment variable"
BARE = Facts(problem=NO_COMPILER)
OLD = Facts(capability=(7, 5))


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it with the facts of a GPU."""
    return lambda facts: monkeypatch.setattr(gpu_kernels, "facts_here", lambda: facts)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (Facts(), None),
        (Facts(capability=(9, 0)), None),
        (Facts(capability=(12, 0)), None),
        (BARE, f"Triton cannot build kernels: {NO_COMPILER}"),
        (OLD, "this GPU has compute capability 7.5, kernels need 8.0"),
        (Facts(problem="No module named 'triton'"), "Triton cannot build kernels: No module named 'triton'"),
    ],
)
def test_what_is_in_the_way_of_kernels(facts: Facts, reason: str | None) -> None:
    assert why_none(facts) == reason


@pytest.mark.parametrize("facts", [BARE, OLD])
def test_without_kernels_a_step_is_torchs_own(facts: Facts, box: Any) -> None:
    box(facts)
    shape, on_a_gpu = drafter_of(SHAPES["small"], torch.device("cpu")).config, SimpleNamespace(is_cuda=True)
    for dtype in (torch.bfloat16, torch.float32):
        assert attention_of("auto", "cuda", dtype, shape) == "dense"
    assert attention_of("auto", "cpu", torch.bfloat16, shape) == "dense"
    assert where_it_pays(len, on_a_gpu) is len  # type: ignore[arg-type]
    assert not run_here()


class OnAGpu(Tensor):
    """A CPU's tensor that says otherwise: a kernel of ours would fail on it."""

    is_cuda = True  # type: ignore[assignment]


def told(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(OnAGpu)  # type: ignore[no-any-return]


@pytest.mark.parametrize("facts", [BARE, OLD])
def test_each_operation_with_a_kernel_does_without_it(facts: Facts, box: Any) -> None:
    x = torch.randn(2, 8, 4, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    hidden, head, labels = x.flatten(0, 2), torch.eye(16).bfloat16(), torch.arange(64) % 16
    part = torch.ones(accumulate.LEAST, dtype=torch.bfloat16)
    box(Facts())
    assert norm_rope.runs_here(told(x)) and adamw._fits(told(x.float()))
    assert not norm_rope.runs_here(x) and not adamw._fits(x.float())
    box(facts)
    assert not norm_rope.runs_here(told(x)) and not adamw._fits(told(x.float()))
    assert torch.equal(accumulate.accumulate(None, told(part)).as_subclass(Tensor), part.float())
    found = loss._chunk(told(hidden), head, labels, None, kl=False)
    for one, other in zip(found, loss._chunk(hidden, head, labels, None, kl=False), strict=True):
        assert torch.equal(one.as_subclass(Tensor), other)


@pytest.mark.parametrize(
    ("shared_kib", "stages"), [(None, [3, 3, 2]), (227, [3, 3, 2]), (163, [3, 3, 2]), (99, [2, 2, 2])]
)
def test_cards_with_little_shared_memory_have_fewer_loads_under_way(
    shared_kib: int | None, stages: list[int]
) -> None:
    """test_triton_kernels.py compiles for them, and measures what a program takes."""
    given = None if shared_kib is None else 1024 * shared_kib
    assert [stages_of(each, given) for each in (spans.FORWARD, spans.QUERIES, spans.KEYS)] == stages


@pytest.mark.parametrize("wish", ["flex", "triton"])
def test_attention_that_is_wished_for_and_cannot_be_had_is_refused(wish: str, box: Any) -> None:
    box(BARE)
    shape = drafter_of(SHAPES["small"], torch.device("cpu")).config
    with pytest.raises(
        ConfigError, match="cannot run: Triton cannot build kernels: Failed to find C"
    ) as caught:
        attention_of(wish, "cuda", torch.bfloat16, shape)
    assert caught.value.where == f"train.attention: {wish}" and caught.value.next == "use attention: auto"
    assert attention_of("flex", "cpu", torch.bfloat16, shape) == "flex"  # uncompiled: needs none


def test_compiling_that_is_wished_for_and_cannot_be_had_is_refused(box: Any) -> None:
    drafter = drafter_of(SHAPES["toy"], torch.device("cpu"))
    box(BARE)
    for mode in ("compiled", "captured"):
        with pytest.raises(ConfigError, match=f"{mode} cannot run: Triton cannot build kernels"):
            Execution(mode, drafter, "cuda")
    with pytest.raises(ConfigError, match="mode inductor cannot run: Triton cannot build kernels"):
        compile_policy.needs_compiler(Policy(mode="inductor"), cuda=True)
    compile_policy.needs_compiler(Policy(), cuda=True)
    Execution("eager", drafter, "cuda")
    box(Facts())
    compile_policy.needs_compiler(Policy(mode="inductor"), cuda=True)
    Execution("captured", drafter, "cuda")


def reading(attention: str = "auto") -> tuple[Any, list[str]]:
    """How a target on a GPU would be read, and what is said of it."""
    prefill = SimpleNamespace(attention="flex", compile=False, say=None)
    target: Any = SimpleNamespace(
        device=torch.device("cuda"), prefill=prefill, layer_types=["full_attention"]
    )
    section = {"target": {"path": "x", "attention": attention}, "drafter": {"mask_token_id": 0}}
    said: list[str] = []
    choose_reading(configs.load(section), target, said.append)
    return prefill, said


def test_a_run_says_once_that_it_goes_without_kernels(box: Any) -> None:
    box(BARE)
    prefill, (line,) = reading()
    assert line.startswith(f"WARNING: no GPU kernels: Triton cannot build kernels: {NO_COMPILER}. ")
    assert "install gcc and python3-dev" in line
    assert (prefill.attention, prefill.compile) == ("sdpa", False)
    assert reading("flex")[0].attention == "flex"  # which steps down by itself, loudly
    box(Facts())
    prefill, said = reading()
    assert said == [] and (prefill.attention, prefill.compile) == ("flex", True)


def test_a_compiled_region_does_not_look_at_the_box(box: Any) -> None:
    """Where torch traces, the answer is a constant: looking would break the graph."""
    box(Facts())

    @torch.compile(backend="eager", fullgraph=True)
    def traced(x: Tensor) -> Tensor:
        return x + 1 if run_here() else x

    assert traced(torch.zeros(1)).tolist() == [1.0]


def test_triton_itself_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says first where it cannot run: here there is no GPU, or it can."""
    problem = driver_problem()
    assert (problem is None) == torch.cuda.is_available()

    def fails(error: Exception) -> Any:
        class Active:
            @property
            def active(self) -> Any:
                raise error

        return Active()

    for error, answer in (
        (RuntimeError(f"{NO_COMPILER}\nand more"), NO_COMPILER),
        (
            subprocess.CalledProcessError(1, ["gcc", "main.c"]),
            "gcc fails; it needs Python's headers (python3-dev) and libcuda",
        ),
        (AssertionError(), "AssertionError"),
    ):
        monkeypatch.setitem(sys.modules, "triton.runtime", SimpleNamespace(driver=fails(error)))
        assert driver_problem() == answer
    monkeypatch.setitem(sys.modules, "triton.runtime", None)
    assert "triton" in str(driver_problem())


class _OutOfResources(Exception):
    __module__ = "triton.runtime.errors"


def test_a_kernel_that_fails_before_the_first_step_is_refused_in_one_message() -> None:
    for error in (
        RuntimeError(f"{NO_COMPILER} or set triton.knobs"),
        subprocess.CalledProcessError(1, ["gcc"]),
        _OutOfResources("out of resource: shared memory, Required: 131072, Hardware limit: 101376"),
    ):
        with (
            pytest.raises(Refused, match="a GPU kernel cannot be built or started: ") as caught,
            kernels_wanted(),
        ):
            raise error
        assert str(error).split("\n")[0] in caught.value.what and caught.value.__cause__ is error
    for other in (RuntimeError("shapes do not match"), ConfigError("no"), KeyError("x")):
        with pytest.raises(type(other)) as kept, kernels_wanted():
            raise other
        assert kept.value is other
