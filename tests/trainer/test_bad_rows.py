"""Rows with hidden states that are not finite.

Run: python -m pytest tests/trainer/test_bad_rows.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_target
from tokenizers import Tokenizer

from trainer import config as configs
from trainer.culprits import Who
from trainer.data.bad_rows import newly_bad
from trainer.data.dataset import Dataset
from trainer.data.packing import from_tokens
from trainer.data.prompts import packed_text
from trainer.errors import DataError
from trainer.model.drafter import Drafter
from trainer.model.target import Target
from trainer.process.runfiles import RunFiles
from trainer.run.progress import Tally
from trainer.run.train import run
from trainer.topology.work import Bad
from trainer.training.objective import draw
from trainer.training.step import DrafterStep


def test_a_row_counts_once_however_often_it_is_read() -> None:
    known: list[int] = []
    for epoch in range(50):
        new = newly_bad([7, 3, 7], known, allowed=2, total=100)
        assert new == ([] if epoch else [3, 7])
        known += new
    assert newly_bad([], known, allowed=2, total=100) == []


def test_more_distinct_rows_than_allowed_end_the_run_and_are_named() -> None:
    assert newly_bad([1, 2], [9], allowed=3, total=100) == [1, 2]
    with pytest.raises(DataError) as caught:
        newly_bad([1, 2, 9, 4, 5, 6], [9], allowed=5, total=1000)
    text = str(caught.value)
    assert "6 of 1,000 rows have non-finite hidden states (rows 9, 1, 2, 4, 5, ...)" in text
    assert "train.data.max_bad_rows" in text and "weights and dtype" in text


def test_when_every_row_is_bad_no_bound_helps() -> None:
    with pytest.raises(DataError, match="3 of 3 rows have non-finite hidden states"):
        newly_bad([2], [0, 1], allowed=8, total=3)


def test_rows_packed_anew_for_every_epoch_count_within_their_epoch() -> None:
    """10 rows an epoch, numbered on: one bad document makes another row bad in each."""
    known: list[int] = []
    for row in (4, 17, 20, 39, 41):
        assert newly_bad([row], known, allowed=1, total=10) == [row]
        known.append(row)
    with pytest.raises(DataError, match=r"2 of 10 rows have non-finite hidden states \(rows 41, 43\)"):
        newly_bad([43], known, allowed=1, total=10)


def test_rows_that_are_read_anew_every_epoch(
    make_target: Callable[..., Target], make_drafter: Callable[..., Drafter]
) -> None:
    """Two of five rows hold a token whose embedding is broken; the target reads all rows in all 4 epochs."""
    target, drafter = make_target("llama"), make_drafter()
    target.embedding.weight.data[70] = float("nan")
    tokens = torch.randint(2, 60, (5, 24), generator=torch.Generator().manual_seed(0))
    tokens[1, 9], tokens[4, 20] = 70, 70
    data = Dataset(from_tokens(tokens, supervised_from=3), None, {}, 0.0, [])
    section = {
        "target": {"path": "x"},
        "drafter": {"mask_token_id": 1, "block_size": 4},
        "precision": "float32",
    }
    config = configs.load({**section, "objective": {"gamma": 3.0}})
    step = DrafterStep(drafter, target, config, 8)
    known: list[int] = []
    for epoch in range(4):
        since = Tally()
        for index in (torch.tensor([3, 1]), torch.tensor([0, 4, 2])):
            batch, bad = data.batch(index, target)
            assert bad is not None and bad.tolist() == [row in (1, 4) for row in index.tolist()]
            sums = step.sums(batch, draw((len(index), 24), 0, epoch, 0))
            sums.loss.backward()
            since.add(sums, 48, Bad(index, bad))
            assert sums.loss.item() > 0 and bool(sums.loss.isfinite())
        known += newly_bad(since.bad_rows, known, allowed=2, total=5)
        assert known == [1, 4]
    for parameter in drafter.parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all())


def test_a_run_names_a_bad_row_once_and_goes_on(tmp_path: Path) -> None:
    """Six rows read anew in each of three epochs; one of them holds a token that the target knows as NaN."""
    folder = save_target(tmp_path / "target", "llama")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows = packed_text(tokenizer, 6, 32, 0, seed=0)
    found = Counter(token for row in rows.tokens.tolist() for token in set(row))
    token = next(token for token, count in found.items() if count == 1)
    (bad,) = [row for row in range(6) if token in rows.tokens[row].tolist()]
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][token] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    section: dict[str, Any] = {
        "target": {"path": str(folder)},
        "token_budget": 64,
        "threads": 1,
        "drafter": {"layers": 1, "block_size": 4, "taps": [0, 2], "mask_token": "<|mask|>"},
        "data": {"rows": 6, "row_tokens": 32, "continuations": False, "states": "online", "max_bad_rows": 1},
        "objective": {"anchors_per_document": 4, "gamma": 3.0},
        "budget": {"steps": 9},
        "report_every_s": 0.0,
        "evaluate": {"prompts": 0},
    }
    said: list[str] = []
    run(configs.load(section), RunFiles(tmp_path / "run"), said.append)
    assert [line for line in said if "non-finite" in line] == [
        f"rows [{bad}] have non-finite hidden states and were skipped"
    ]
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-0000009"))) == 1


def test_who_made_the_bad_rows_states_is_named() -> None:
    """Of three ranks one made all of them, or most; or nobody stands out."""
    makers: dict[int, Who] = {3: 1, 5: 1, 8: 1, 9: 0, 11: 2}
    with pytest.raises(DataError, match=r"3 of 10 rows .*\(rows 3, 5, 8\); made by rank 1 \(3\)") as caught:
        newly_bad([8, 5, 3], [], allowed=2, total=10, makers=makers)
    assert caught.value.rank == 1
    with pytest.raises(DataError, match=r"made by rank 1 \(2\), rank 0 \(1\)") as caught:
        newly_bad([9, 8, 5], [], allowed=2, total=10, makers=makers)
    assert caught.value.rank == 1
    with pytest.raises(DataError, match=r"made by rank 0 \(1\), rank 2 \(1\)") as caught:
        newly_bad([11, 9], [], allowed=1, total=20, makers=makers)
    assert caught.value.rank is None
    with pytest.raises(DataError, match=r"made by target-0 \(1\)") as caught:
        newly_bad([1], [], allowed=0, total=20, makers={1: "target-0"})
    assert caught.value.rank is None
