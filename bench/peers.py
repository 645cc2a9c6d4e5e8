"""Other trainers of DFlash drafters beside ours on the same device: context tok/s and peak memory.

    python bench/peers.py [--shape 27b] [--context-tokens 24576] [--anchors 3072] ...    (docs/performance.md)

`speculators` must be there (`pip install --no-deps speculators==0.9.0`). SpecForge is only looked for, and
that it does not run is said. All get the same sizes, random states, float32 weights with bfloat16 products on
a GPU, and one optimizer: clipping to 1 and torch's fused AdamW. Each is built, timed and dropped before the
next.
Prints a table of figures and ratios (ours over theirs) and, last, one line of JSON.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
TESTS = REPOSITORY / "tests"
sys.path[:0] = [str(REPOSITORY), str(TESTS / "trainer" / "oracles"), str(TESTS / "kit")]

from trainer.machine import prepare_environment  # noqa: E402

prepare_environment()

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from trainer.bench import timing  # noqa: E402
from trainer.bench.measure import Settings, make_step, problems  # noqa: E402
from trainer.bench.shapes import SHAPES, batch_of, tap_places  # noqa: E402
from trainer.training.objective import draw  # noqa: E402

Step = Callable[[], object]
"""Forward and backward; gradients are left in the parameters."""


def updated(model: nn.Module, backward: Step) -> Step:
    """A whole step with the optimizer that all get."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def whole() -> None:
        backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return whole


def ours(settings: Settings) -> Step:
    step, device = make_step(settings), settings.where
    batch = batch_of(SHAPES[settings.shape], settings.rows, settings.row_tokens, device)
    uniform = draw((settings.rows, settings.row_tokens), 0, 0, 0).to(device)
    return updated(step.drafter, lambda: step.gradients(batch, [uniform]))


def mended_autotuners() -> None:
    """Its fused losses share one list of configurations, which torch 2.11 cannot have (pytorch#177600)."""
    fused = sys.modules.get("speculators.losses.fused")
    for kernel in vars(fused).values() if fused else ():
        if hasattr(kernel, "configs") and hasattr(kernel, "fn"):
            kernel.configs = copy.deepcopy(kernel.configs)


def speculators(settings: Settings) -> Step:
    """Its DFlash model. It reads one packed row, so our rows are that row's documents. It also projects the
    target's logits, for labels.
    """
    import speculators_package
    from transformers import Qwen3Config

    parts = ("losses.fused",) if settings.where.type == "cuda" else ()  # kernels
    package = speculators_package.load("losses.utils", "models.dflash.core", *parts)
    mended_autotuners()
    core, losses = sys.modules["speculators.models.dflash.core"], sys.modules["speculators.losses.utils"]
    shape, device = SHAPES[settings.shape], settings.where
    gpu = device.type == "cuda"
    kinds = ["sliding_attention"] * shape.sliding + ["full_attention"] * (shape.layers - shape.sliding)
    inner = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        head_dim=shape.head_size,
        layer_types=kinds,
        use_sliding_window=shape.sliding > 0,
        sliding_window=shape.window if shape.sliding else None,
        tie_word_embeddings=False,
    )
    inner._attn_implementation = "simple_flex_attention" if gpu else "eager"
    config = package.DFlashSpeculatorConfig(
        transformer_layer_config=inner,
        draft_vocab_size=shape.vocabulary,
        block_size=shape.block,
        aux_hidden_state_layer_ids=[tap + 1 for tap in tap_places(shape)],
        mask_token_id=0,
    )
    with device:
        model = package.DFlashDraftModel(config).train()
    for name, parameter in model.named_parameters():
        owned = ("embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm")
        parameter.requires_grad = not name.startswith(owned)
        nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else nn.init.ones_(parameter)
    if not gpu:
        model._create_mask_fn = lambda *args, **kwargs: core.create_float_mask(
            *args, **kwargs, dtype=torch.float32
        )
    batch = batch_of(shape, settings.rows, settings.row_tokens, device)
    documents = torch.arange(settings.rows, device=device).repeat_interleave(settings.row_tokens)[None]

    def flat(tensor: Tensor) -> Tensor:
        return tensor.flatten(0, 1)[None]

    taps, width = flat(batch.states.taps), settings.width * settings.rows
    final = taps[..., : shape.hidden].contiguous()
    loss_config = losses.resolve_loss_config("ce", "fused" if gpu else "eager")

    def backward() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=gpu):
            _, loss, _ = model(
                taps,
                flat(batch.rows.tokens),
                flat(batch.rows.supervised).long(),
                final,
                documents,
                flat(batch.rows.positions),
                loss_config=loss_config,
                gamma=7.0,
                max_anchors=width,
            )
        loss.backward()

    return updated(model, backward)


PEERS = {"ours": ours, "speculators": speculators}


def measured(make: Callable[[Settings], Step], settings: Settings) -> dict[str, float | None] | str:
    """The figures of one, or why there are none."""
    device = settings.where
    gc.collect()
    timing.reset_peak(device)
    try:
        whole = make(settings)
        stance = "default" if device.type == "cuda" else "force_eager"  # a CPU's toy sizes are not worth it
        with torch.compiler.set_stance(stance):
            seconds = timing.timed(whole, device, settings.repeats, warmup=3 if device.type == "cuda" else 1)
    except torch.OutOfMemoryError:
        return "out of memory"
    return {
        "ms": 1e3 * seconds,
        "context_tok_s": settings.context_tokens / seconds,
        "peak_gib": timing.peak_gib(device),
    }


def ratios(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Ours over each other one that ran: tok/s (more is better), and peak memory (less is better)."""
    mine, made = found["ours"], {}
    for name, theirs in found.items():
        if name == "ours" or isinstance(theirs, str) or isinstance(mine, str):
            continue
        made[name] = {"context_tok_s": mine["context_tok_s"] / theirs["context_tok_s"]}
        if mine["peak_gib"] and theirs["peak_gib"]:
            made[name]["peak_gib"] = mine["peak_gib"] / theirs["peak_gib"]
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="27b")
    parser.add_argument("--context-tokens", type=int, default=24_576)
    parser.add_argument("--row-tokens", type=int, default=4_096)
    parser.add_argument("--anchors", type=int, default=3_072)
    parser.add_argument("--anchors-per-pass", type=int)
    parser.add_argument("--execution", choices=["eager", "compiled", "captured"], default="eager")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    given = vars(parser.parse_args())
    settings = Settings(**given)
    settings = replace(settings, precision="bfloat16" if settings.where.type == "cuda" else "float32")
    if wrong := problems(settings):
        sys.exit("error: " + "; ".join(wrong))
    found = {name: measured(make, settings) for name, make in PEERS.items()}
    found["specforge"] = (
        "not importable here" if importlib.util.find_spec("specforge") is None else "no adapter"
    )
    print(f"{'who':<12} {'ms':>10} {'context tok/s':>14} {'peak GiB':>9}")
    for name, figures in found.items():
        if isinstance(figures, str):
            print(f"{name:<12} DID NOT RUN: {figures}")
            continue
        peak = "-" if figures["peak_gib"] is None else f"{figures['peak_gib']:.1f}"
        print(f"{name:<12} {figures['ms']:>10,.1f} {figures['context_tok_s']:>14,.0f} {peak:>9}")
    compared = ratios(found)
    for name, each in compared.items():
        print(f"ours over {name}: " + ", ".join(f"{what} {value:.2f}" for what, value in each.items()))
    print(json.dumps({**given, "torch": torch.__version__, "found": found, "ours_over": compared}))


if __name__ == "__main__":
    main()
