"""All that a run needs on disk, made in a second: a target's configuration without weights, a tokenizer of
one token, and a prepared store of random tokens in which every document fills one row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from trainer.bench.shapes import Shape, tap_places, target_config
from trainer.data.lines import file_digest
from trainer.data.reader import Documents
from trainer.data.store import Writer, name_of

MASK = 0
"""The mask token's id, which no document holds."""


def make_target_folder(folder: Path, shape: Shape) -> Path:
    """config.json and tokenizer.json of a dense target with an embedding and a head of its own."""
    from tokenizers import Tokenizer, models

    folder.mkdir(parents=True, exist_ok=True)
    target_config(shape, shape.vocabulary, tied=False).save_pretrained(folder)
    Tokenizer(models.WordLevel({"<|mask|>": MASK}, unk_token="<|mask|>")).save(str(folder / "tokenizer.json"))
    return folder


def make_store(folder: Path, target: Path, shape: Shape, rows: int, row_tokens: int, seed: int = 0) -> Path:
    """A finished store of `rows` documents of `row_tokens` random tokens each; all of them are trained on."""
    generator = np.random.Generator(np.random.PCG64(seed))
    tokens = generator.integers(MASK + 1, shape.vocabulary, rows * row_tokens, dtype=np.int32)
    found = Documents(
        tokens=tokens,
        supervised=np.ones(len(tokens), dtype=np.bool_),
        lengths=np.full(rows, row_tokens, dtype=np.int64),
        line_numbers=np.arange(1, rows + 1, dtype=np.int64),
        lines=rows,
        rows=rows,
        bad=[],
        other_mode=0,
    )
    identity = {
        "inputs": f"{rows} documents of {row_tokens} random tokens below {shape.vocabulary}, seed {seed}",
        "tokenizer_sha256": file_digest(target / "tokenizer.json"),
    }
    with Writer(folder / name_of(identity), chunk_bytes=1) as writer:
        writer.add(found, 0, "random")
        return writer.finish(identity, ["random"], str(target))


def train_section(
    shape: Shape,
    target: Path,
    store: Path,
    token_budget: int,
    row_tokens: int,
    anchors: int,
    **changes: Any,
) -> dict[str, Any]:
    """A recipe's `train:` that trains without end on such a place, and measures and saves nothing.

    Args:
        anchors: of a document, which is a row.
        changes: of the section's own keys.
    """
    kinds = ["sliding_attention"] * shape.sliding + ["full_attention"] * (shape.layers - shape.sliding)
    return {
        "target": {"path": str(target), "weights": "random"},
        "token_budget": token_budget,
        "drafter": {
            "layers": shape.layers,
            "block_size": shape.block,
            "taps": list(tap_places(shape)),
            "mask_token_id": MASK,
            "layer_types": kinds,
            "sliding_window": shape.window if shape.sliding else None,
            "intermediate_size": shape.ffn,
            "attention_heads": shape.heads,
            "key_value_heads": shape.key_value_heads,
            "head_dim": shape.head_size,
        },
        "data": {
            "source": "store",
            "store": str(store),
            "row_tokens": row_tokens,
            "continuations": False,
            "states": "online",
        },
        "objective": {"anchors_per_document": anchors, "anchors_per_row": anchors, "gamma": 7.0},
        "schedule": {"warmup_steps": 20},
        "budget": {"steps": 1_000_000_000},
        "evaluate": {"prompts": 0},
        "checkpoint": {"every_steps": None, "every_s": None, "keep": 1},
        "logging": {"trackers": []},
        "report_every_s": 0.0,
        **changes,
    }
