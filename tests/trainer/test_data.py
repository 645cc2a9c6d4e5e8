"""Rows: which files, which prompts, packing, continuations by the target, rows whose states are broken.

Run: python -m pytest tests/trainer/test_data.py
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import save_target
from tokenizers import Tokenizer

from trainer import config as configs
from trainer.data import stdlib
from trainer.data.continuations import sample, write
from trainer.data.dataset import build, drop_bad_rows
from trainer.data.packing import Document, Rows, from_tokens, pack
from trainer.data.prompts import draw_prompts, packed_text, row_order
from trainer.errors import DataError
from trainer.model.tapped_model import States
from trainer.model.target import Target


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = save_target(tmp_path_factory.mktemp("tokenizer") / "target")
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_files_are_split_by_their_path_alone(tmp_path: Path) -> None:
    kept, held = stdlib.files(False), stdlib.files(True)
    assert len(kept) > 100 and len(held) > 5 and not set(kept) & set(held)
    for path in held:
        name = path.relative_to(stdlib.root()).as_posix()
        assert zlib.crc32(name.encode()) % 25 == 0
    for path in kept + held:
        assert not {"test", "tests", "site-packages", "encodings", "idlelib", "lib2to3"} & set(
            path.parts[-3:-1]
        )
    (tmp_path / "test").mkdir()
    (tmp_path / "json").mkdir()
    for name in ("calendar.py", "heapq.py", "test/heapq.py", "json/decoder.py", "_sysconfigdata_x.py"):
        (tmp_path / name).write_bytes(b"\xff = 1\n")
    assert [path.name for path in stdlib.files(True, tmp_path)] == ["calendar.py", "decoder.py"]
    assert [path.name for path in stdlib.files(False, tmp_path)] == ["heapq.py"]
    assert stdlib.read(tmp_path / "heapq.py") == "\ufffd = 1\n"


def test_prompts_are_distinct_repeatable_and_of_the_asked_side(tokenizer: Tokenizer) -> None:
    drawn = draw_prompts(tokenizer, 12, 20, True, 5)
    assert drawn.shape == (12, 20) and len({tuple(row) for row in drawn.tolist()}) == 12
    assert torch.equal(drawn, draw_prompts(tokenizer, 12, 20, True, 5))
    assert not torch.equal(drawn, draw_prompts(tokenizer, 12, 20, True, 6))
    held = [stdlib.read(path) for path in stdlib.files(True)]
    for row in drawn.tolist():
        text = tokenizer.decode(row).rstrip("\ufffd")
        assert any(text in source for source in held)


def test_too_little_text_is_said(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stdlib, "root", lambda: tmp_path)
    with pytest.raises(DataError, match="no Python sources"):
        draw_prompts(tokenizer, 2, 20, False, 0)
    (tmp_path / "heapq.py").write_text("x = 1\n")
    with pytest.raises(DataError, match="only 0 different prompts of 20 tokens"):
        draw_prompts(tokenizer, 2, 20, False, 0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 70), max_size=25), st.integers(8, 40), st.randoms(use_true_random=False))
def test_packing_keeps_every_token_once_and_documents_whole(
    sizes: list[int], row_tokens: int, chance: random.Random
) -> None:
    documents = [
        Document(
            [1000 * number + place for place in range(size)], [chance.random() < 0.5 for _ in range(size)]
        )
        for number, size in enumerate(sizes)
    ]
    rows = pack(documents, row_tokens, pad_id=-1)
    assert rows.tokens.shape[1] == row_tokens or not len(rows)
    supervised = {t: s for d in documents for t, s in zip(d.tokens, d.supervised, strict=True)}
    found: list[int] = []
    for row in range(len(rows)):
        tokens, numbers, positions, marks = (part[row].tolist() for part in rows.parts())
        assert numbers == sorted(numbers) and numbers[0] == 0
        for place, token in enumerate(tokens):
            first = numbers.index(numbers[place])
            assert positions[place] == place - first == place - int(rows.doc_start[row, place])
            if token == -1:
                assert not marks[place]
                continue
            found.append(token)
            assert marks[place] is supervised[token]
            if positions[place]:  # the token before it in the row is the one before it in its document
                assert tokens[place - 1] == token - 1
            else:
                assert token % 1000 % row_tokens == 0  # a document's beginning, or a long one's next piece
    assert sorted(found) == sorted(supervised)
    assert torch.equal(rows.tokens, pack(documents, row_tokens, pad_id=-1).tokens)


def test_packing_is_tight_on_a_mix_of_lengths() -> None:
    chance = random.Random(0)
    sizes = [min(1024, max(8, int(chance.lognormvariate(5, 1)))) for _ in range(400)]
    rows = pack([Document([1] * size, [True] * size) for size in sizes], 1024)
    assert sum(sizes) / rows.tokens.numel() > 0.97


def test_packed_text_is_whole_files_ended_by_the_end_token(tokenizer: Tokenizer) -> None:
    rows = packed_text(tokenizer, 12, 256, 0, 3)
    assert rows.tokens.shape == (12, 256) and rows.supervised.float().mean() > 0.9
    assert torch.equal(rows.tokens, packed_text(tokenizer, 12, 256, 0, 3).tokens)


@pytest.mark.parametrize(("named", "ends"), [(250, [250]), ([251, 250], [251]), (None, []), ([], [])])
def test_a_text_is_ended_by_the_targets_first_end_token(
    named: Any, ends: list[int], tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a target with several, or with none: never by a token that happens to have id 0."""
    source = tmp_path / "a.py"
    source.write_text("x" * 20)
    monkeypatch.setattr("trainer.data.prompts.stdlib.files", lambda held_out: [source])
    monkeypatch.setattr("trainer.data.prompts.stdlib.root", lambda: tmp_path)
    section: dict[str, Any] = {
        "target": {"path": "unused"},
        "drafter": {"mask_token_id": 1},
        "data": {"continuations": False, "states": "online", "rows": 1, "row_tokens": 32},
        "token_budget": 32,
    }
    target: Any = SimpleNamespace(config=SimpleNamespace(eos_token_id=named))
    data = build(configs.load(section), target, tokenizer, print, lambda: None)
    assert isinstance(data.rows, Rows)
    assert data.rows.tokens[0, : 20 + len(ends)].tolist() == [*tokenizer.encode("x" * 20).ids, *ends]
    assert int(data.rows.supervised.sum()) == 20 + len(ends)


def test_what_follows_the_end_of_what_was_written_is_nobodys() -> None:
    """Decoding stops at an end token: it is trained on, what a continuation says after it is not. One in the
    prompt ends nothing."""
    tokens = torch.tensor([[7, 1, 1, 1, 7, 1, 7, 1], [1, 1, 1, 1, 1, 1, 1, 8], [1, 1, 8, 1, 1, 1, 1, 1]])
    rows = from_tokens(tokens, 2, ends={7, 8})
    wanted = [[0, 0, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0, 0, 0]]
    assert rows.supervised.long().tolist() == wanted
    assert from_tokens(tokens, 2).supervised.long().sum() == 18


def test_every_epoch_is_a_permutation_of_its_own() -> None:
    order = row_order(10, 3)
    seen = torch.cat([order(number, 4) for number in range(5)]).tolist()
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    assert torch.equal(order(3, 4), row_order(10, 3)(3, 4))
    assert not torch.equal(order(0, 10), row_order(10, 4)(0, 10))


@pytest.mark.parametrize("keep_final", [False, True])
def test_continuations_are_the_targets_text_and_their_states_are_its_states(
    make_target: Callable[..., Target], keep_final: bool
) -> None:
    target = make_target()
    prompts = torch.randint(2, 90, (6, 5), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    written = write(target, prompts, 20, 3, 0.8, generator, keep_final, torch.float32)
    assert torch.equal(written.tokens[:, :5], prompts)
    states = target.run(written.tokens, torch.arange(20).expand(6, 20), full=True)
    assert torch.allclose(written.taps, states.taps, atol=1e-4)
    assert (written.final is not None) is keep_final
    if written.final is not None and states.final is not None:
        assert torch.allclose(written.final, states.final, atol=1e-4)
    assert states.final is not None
    best = target.logits(states.final[:, 4:-1]).argmax(-1)
    assert torch.equal(written.tokens[:3, 5:], best[:3])  # the greedy rows
    assert not torch.equal(written.tokens[3:, 5:], best[3:])  # the sampled ones


def test_sampling_draws_from_the_softmax() -> None:
    logits = torch.tensor([0.3, -float("inf"), 2.0, 1.0])
    drawn = sample(logits.expand(20_000, 4), torch.Generator().manual_seed(0))
    counts, wanted = torch.bincount(drawn, minlength=4), logits.softmax(-1) * 20_000
    assert counts[1] == 0
    kept = torch.tensor([0, 2, 3])
    assert ((counts[kept] - wanted[kept]) ** 2 / wanted[kept]).sum() < 13.8  # 2 degrees of freedom


def test_broken_rows_are_counted_named_and_bounded() -> None:
    rows = from_tokens(torch.randint(2, 90, (6, 8)), supervised_from=2)
    taps = torch.randn(6, 8, 4)
    taps[1, 3, 2], taps[4, 7, 0] = float("nan"), float("inf")
    with pytest.raises(DataError, match=r"2 of 6 rows have non-finite hidden states \(rows 1, 4\)"):
        drop_bad_rows(rows, States(taps), allowed=1)
    kept, states, bad = drop_bad_rows(rows, States(taps.clone()), allowed=2)
    assert bad == [1, 4]
    assert kept.supervised.any(1).tolist() == [True, False, True, True, False, True]
    assert bool(states.taps.isfinite().all()) and torch.equal(states.taps[0], taps[0])
