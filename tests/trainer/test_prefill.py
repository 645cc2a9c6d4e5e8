"""How the target reads packed rows fast: held to the documents one by one, for every kind of layer. What it
does not understand, and compilers that fail, cost speed and one line, never the states.

Run: python -m pytest tests/trainer/test_prefill.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiny_models import SIZES, random_model
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    MistralConfig,
)

from trainer import config as configs
from trainer import failures
from trainer.data.packing import Rows
from trainer.errors import Refused
from trainer.model import gpu_kernels, kernels, prefill
from trainer.model.target import Target
from trainer.run import selfcheck
from trainer.run.setup import choose_reading
from trainer.sections import TrainConfig

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

TAPS = (0, 2, 4)
HALVES = ["sliding_attention"] * 3 + ["full_attention"] * 3
OTHERS: dict[str, Any] = {
    "gemma2": lambda: Gemma2Config(
        **SIZES, head_dim=8, sliding_window=7, final_logit_softcapping=None, attn_logit_softcapping=3.0
    ),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=7, layer_types=HALVES),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=7),  # every layer slides; it names no types
    "gpt-oss": lambda: GptOssConfig(**SIZES, head_dim=8, sliding_window=7, num_local_experts=4),  # sinks
}


def target_of(kind: str, attention: str = "flex") -> tuple[Target, list[str]]:
    """A tiny target, and what it says."""
    if kind in OTHERS:
        torch.manual_seed(0)
        model: nn.Module = AutoModelForCausalLM.from_config(OTHERS[kind](), attn_implementation="eager")
        model.eval()
    else:
        model = random_model(kind)
    target, said = Target(model, TAPS), list[str]()
    target.prefill.attention, target.prefill.say = attention, said.append
    return target, said


def packed(size: int = 256, number: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and documents of a row: short documents, and two long ones at its end."""
    generator = torch.Generator().manual_seed(number)
    new = torch.rand(1, size, generator=generator) < 0.2
    new[:, 0], new[:, size // 3 :], new[:, size // 2] = True, False, True
    index = torch.arange(size)[None]
    tokens = torch.randint(2, 90, (1, size), generator=generator)
    return tokens, index - torch.where(new, index, 0).cummax(1).values, new.long().cumsum(1) - 1


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
    """Layers compiled by a compiler that only counts."""
    torch._dynamo.reset()
    counter = CompileCounter()
    made = torch.compile(prefill.run_layer, backend=counter, dynamic=False, fullgraph=True)
    monkeypatch.setattr(prefill, "compiled_layer", lambda: made)
    yield counter
    torch._dynamo.reset()


def hold(target: Target, rows: tuple[Tensor, Tensor, Tensor], **how: Any) -> None:
    got, wanted = target.states(*rows, full=True, **how), target.one_document_at_a_time(*rows, True)
    assert torch.allclose(got.taps, wanted.taps, atol=1e-4)
    assert got.final is not None and wanted.final is not None
    assert torch.allclose(got.final, wanted.final, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "attention", "graphs"),
    [
        ("qwen3", "sdpa", 1),
        ("qwen3-sliding", "flex", 2),
        ("llama", "flex", 1),
        ("smollm", "sdpa", 2),  # some layers have no RoPE
        ("gemma2", "flex", 2),
        ("gemma3", "sdpa", 2),
        ("mistral", "sdpa", 1),
    ],
)
def test_states_of_packed_rows_are_those_of_the_documents_one_by_one(
    counter: CompileCounter, kind: str, attention: str, graphs: int
) -> None:
    """As they are, and compiled: once for all layers of a kind, and for all batches."""
    target, said = target_of(kind, attention)
    hold(target, packed())
    assert target.prefill.ready and not said
    target.prefill.compile = True
    for number in range(2):
        hold(target, packed(number=number))
    tokens, positions, documents = packed()
    short = target.states(tokens, positions, documents)  # up to the last tap
    whole = target.states(tokens, positions, documents, full=True)
    assert short.final is None and torch.equal(short.taps, whole.taps)
    assert counter.frame_count == graphs and target.prefill.compile
    assert said[0].startswith(f"target: layers compiled for [1, 256], {graphs} graphs")


class Waits(TorchDispatchMode):
    """Counts what would wait for a device: values that become Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero"):
            self.found.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-sliding", "llama", "gemma3"])
def test_rows_are_read_without_a_wait_for_the_device(kind: str) -> None:
    target, _ = target_of(kind, "sdpa")
    tokens, positions, documents = packed()
    assert target.prefill.ready  # looks once, before
    with Waits() as waits:
        target.states(tokens, positions, documents, single=False)
        target.states(tokens, torch.arange(256)[None], torch.zeros_like(documents), single=True)
        target.prefill.attention = "flex"
        target.prefill.masks(documents, False)
    assert waits.found == []
    with Waits() as waits:
        target.run(tokens, positions)  # transformers looks itself for documents in positions
    assert "aten::_local_scalar_dense" in waits.found


def test_rows_of_one_document_go_without_a_mask_where_no_layer_needs_one() -> None:
    documents = torch.zeros(1, 256, dtype=torch.int64)
    assert target_of("qwen3")[0].prefill.masks(documents, True) == {None: None}
    sliding = target_of("qwen3-sliding")[0].prefill
    assert sliding.masks(documents, True)[None] is None and sliding.masks(documents, True)[7] is not None
    assert sliding.masks(documents[:, :7], True) == {None: None, 7: None}  # no longer than the window
    both = sliding.masks(documents[:, :7], False)
    assert both[None] is both[7] is not None
    assert target_of("gemma2")[0].prefill.masks(documents, True)[None] is not None  # SDPA cannot cap
    for kind in ("qwen3-sliding", "gemma2"):
        hold(target_of(kind)[0], (packed()[0], torch.arange(256)[None], documents), single=True)


@pytest.mark.parametrize(
    ("kind", "attention", "reason"),
    [
        ("gpt-oss", "flex", "its attention takes s_aux"),
        ("gemma2", "sdpa", "its attention caps scores, which only flex attention does"),
        ("qwen3.5", "flex", "it has layers of full_attention, linear_attention"),
    ],
)
def test_what_is_not_understood_is_read_the_plain_way_and_said_once(
    kind: str, attention: str, reason: str
) -> None:
    target, said = target_of(kind, attention)
    rows = packed(60)
    hold(target, rows)
    hold(target, rows)
    assert len(said) == 1 and said[0].startswith("WARNING: the target reads packed rows the plain way")
    assert reason in said[0]


def test_layers_that_do_not_do_as_their_configuration_says_are_found_out() -> None:
    """Silently wrong without: a window that is not asked for, or is another; attention of a layer's own;
    a mask that lets documents see each other.
    """
    target, said = target_of("qwen3-sliding", "sdpa")
    target.decoder.layers[3].self_attn.sliding_window = None
    assert not target.prefill.ready and "do not ask for the windows" in said[0]

    target, said = target_of("qwen3-sliding", "sdpa")
    target.decoder.layers[3].self_attn.sliding_window = 9
    assert not target.prefill.ready and "a window of 9" in said[0]

    target, said = target_of("qwen3", "sdpa")
    layer = target.decoder.layers[1].self_attn
    layer.config = type(layer.config)(**SIZES, head_dim=8, attn_implementation="sdpa")
    assert not target.prefill.ready and "do not ask for the windows" in said[0]

    target, said = target_of("qwen3", "sdpa")
    real = target.prefill.masks
    target.prefill.masks = lambda documents, single: real(torch.zeros_like(documents), single)  # type: ignore[method-assign]
    assert not target.prefill.ready and "off what they give one by one" in said[0]


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def test_a_compiler_that_fails_costs_one_line_and_no_states(monkeypatch: pytest.MonkeyPatch) -> None:
    target, said = target_of("qwen3", "sdpa")
    target.prefill.compile = True
    monkeypatch.setattr(prefill, "compiled_layer", lambda: failing(RuntimeError("no such\ninstruction")))
    hold(target, packed())
    assert said == [
        "WARNING: the target reads rows slower: its layers cannot be compiled, and run as they are: "
        "RuntimeError: no such"
    ]
    target, said = target_of("qwen3-sliding")
    monkeypatch.setattr(prefill, "flex_capped", failing(RuntimeError("no kernel")))
    hold(target, packed())
    assert target.prefill.attention == "sdpa" and len(said) == 1
    assert "flex attention fails here, dense masks take its place: RuntimeError: no kernel" in said[0]


def test_neither_want_of_memory_nor_a_later_error_is_a_failing_compiler(
    monkeypatch: pytest.MonkeyPatch, counter: CompileCounter
) -> None:
    target, _ = target_of("qwen3", "sdpa")
    target.prefill.compile = True
    assert target.prefill.ready
    working = prefill.compiled_layer
    monkeypatch.setattr(prefill, "compiled_layer", lambda: failing(torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError):
        target.states(*packed())
    monkeypatch.setattr(prefill, "compiled_layer", working)
    target.states(*packed())
    monkeypatch.setattr(prefill, "compiled_layer", lambda: failing(RuntimeError("a device's error")))
    with pytest.raises(RuntimeError, match="a device's error"):
        target.states(*packed())
    assert target.prefill.compile


def test_a_shape_that_comes_once_is_not_compiled_for(counter: CompileCounter) -> None:
    target, said = target_of("qwen3", "sdpa")
    target.prefill.compile = True
    hold(target, packed(), again=False)
    assert counter.frame_count == 0 and not said


def test_the_self_check_compiles_nothing_and_leaves_layers_that_can_be_compiled(
    counter: CompileCounter,
) -> None:
    """transformers leaves hooks where it recorded; another shape could not be compiled through them."""
    target, _ = target_of("qwen3", "sdpa")
    target.prefill.compile = True
    tokens, positions, documents = packed()
    rows = Rows(tokens, documents, positions, torch.ones_like(tokens, dtype=torch.bool))
    states = target.states(tokens, positions, documents)
    assert counter.frame_count == 1
    assert selfcheck.check_taps(target, rows, states) < 1e-4
    assert counter.frame_count == 1 and target.config._attn_implementation == "sdpa"
    hold(target, packed(100))
    assert counter.frame_count == 2 and target.prefill.compile


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-sliding"])
def test_the_self_check_refuses_documents_that_see_each_other(kind: str) -> None:
    target, _ = target_of(kind, "sdpa")
    tokens, positions, documents = packed()
    rows = Rows(tokens, documents, positions, torch.ones_like(tokens, dtype=torch.bool))
    leaky = target.states(tokens, positions, torch.zeros_like(documents))
    with pytest.raises(Refused, match=r"tap \d is \d\.\d+ off"):
        selfcheck.check_taps(target, rows, leaky)
    supervised = rows.supervised & (documents == 0)
    first = dataclasses.replace(rows, supervised=supervised)  # a document that is alone to see
    assert selfcheck.check_taps(target, first, leaky) < 1e-4


def test_a_copy_reads_as_the_first_does(counter: CompileCounter) -> None:
    target, said = target_of("qwen3-sliding", "sdpa")
    target.prefill.compile = True
    hold(target, packed())
    other = target.copied_to(torch.device("cpu"))
    assert (other.prefill.attention, other.prefill.compile, other.prefill.ready) == ("sdpa", True, True)
    hold(other, packed())
    assert len(said) == 2


# --- by the recipe ---


def config_of(**changes: Any) -> TrainConfig:
    target = {"path": "x", **changes.pop("target", {})}
    return configs.load({"target": target, "drafter": {"mask_token_id": 1}, **changes})


def test_the_recipe_chooses_and_threads_compile_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = target_of("qwen3", "sdpa")
    made = target.prefill

    def chosen(**changes: Any) -> tuple[str, bool]:
        made.attention, made.compile = "as it was", False
        choose_reading(config_of(**changes), target, print)
        return made.attention, made.compile

    assert chosen() == ("as it was", False) and made.say is print
    assert chosen(target={"attention": "flex"}) == ("flex", False)
    monkeypatch.setattr(Target, "device", torch.device("cuda"))
    monkeypatch.setattr(gpu_kernels, "facts_here", gpu_kernels.Facts)
    assert chosen() == ("as it was", True)
    assert chosen(target={"compile": "off", "attention": "sdpa"}) == ("sdpa", False)
    assert chosen(topology="threads") == ("sdpa", False)
    problems = configs.check(
        {**_section(), "topology": "threads", "target": {"path": "x", "attention": "flex"}}
    )
    assert problems == ["train.target.attention: flex compiles, and not among threads; use sdpa"]
    wrong = configs.check({**_section(), "target": {"path": "x", "compile": "on"}})
    assert wrong == ["train.target.compile: 'on' is not one of auto, off"]


def _section() -> dict[str, Any]:
    return {"drafter": {"mask_token_id": 1}}


def test_kernels_that_a_linear_target_lacks_are_said_as_the_run_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "PACKAGES", {"no_such_fla": "flash-linear-attention", "torch": "torch"})
    monkeypatch.setattr(Target, "device", torch.device("cuda"))
    monkeypatch.setattr(gpu_kernels, "facts_here", gpu_kernels.Facts)
    said: list[str] = []
    choose_reading(config_of(), target_of("qwen3.5", "sdpa")[0], said.append)
    assert len(said) == 1 and "flash-linear-attention kernels are not installed" in said[0]
    assert [row.name for row in failures.table() if row.finds(said[0])] == ["fla-missing"]
    said.clear()
    choose_reading(config_of(), target_of("qwen3", "sdpa")[0], said.append)
    assert said == []
