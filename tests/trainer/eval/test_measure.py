"""The figures of `eval`, counted again by hand; its document, its tables and its exit codes.

Run: python -m pytest tests/trainer/eval/test_measure.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_bench import TAPS, bench, ragged
from tiny_models import VOCABULARY, random_model
from torch import Tensor
from typer.testing import CliRunner

from trainer.checkpoint import files as checkpoint
from trainer.cli import app
from trainer.evaluation.decode import Output
from trainer.evaluation.evaluate_checkpoint import Evaluation, NotLossless
from trainer.evaluation.figures import Run, Slot
from trainer.evaluation.lossless import Divergence
from trainer.evaluation.measure import Bench, SetResult
from trainer.evaluation.prompt_sets import given
from trainer.evaluation.proposers import PromptLookup
from trainer.evaluation.readers import BatchTarget
from trainer.evaluation.sampling import Draft, Matching, Way
from trainer.evaluation.tables import document, evaluation_report
from trainer.model.drafter import Drafter
from trainer.model.target import Target
from trainer.model.target_files import end_ids
from trainer.sections import Optimizer
from trainer.training.optim import DrafterOptimizer

BLOCK = 4


# --- figures ---


def test_slots_by_hand() -> None:
    """Blocks of 4. The first text ends within its last block, at an accepted slot: what follows it was not
    reached; the second text's last token is the target's own."""
    first = Output([5])
    first.take([1, 2, 3, 4], {0})  # all three accepted
    first.take([1, 9], {0})  # one accepted
    first.take([0, 7, 9], {0})  # two accepted, but the first of them ended the text
    second = Output([5])
    second.take([9], {0})
    second.take([1, 0], {0})
    assert (first.emitted, first.accepted, first.ended) == ([4, 2, 1], [3, 1, 1], True)
    assert (second.emitted, second.accepted, second.ended) == ([1, 2], [0, 1], True)
    run = Run([first, second], 2.0)
    assert run.slots(4) == [Slot(1, 5, 4), Slot(2, 3, 1), Slot(3, 1, 1)]
    assert run.histogram == {1: 2, 2: 2, 4: 1}
    assert (run.tokens, run.passes, run.acceptance_length, run.tokens_per_s) == (10, 5, 2.0, 5.0)
    assert (run + run).slots(4)[0] == Slot(1, 10, 8)
    assert Run().acceptance_length == 0.0 == Run().tokens_per_s


@pytest.mark.parametrize(("named", "ends"), [(None, ()), (7, (7,)), ([7, 9], (7, 9))])
def test_end_tokens_are_one_or_several(named: Any, ends: tuple[int, ...]) -> None:
    config = type("Config", (), {"eos_token_id": named})
    assert end_ids(config) == ends


def test_any_of_several_end_tokens_ends_a_text() -> None:
    output = Output([3])
    output.take([4, 8, 7], {7, 8})
    assert (output.tokens, output.emitted, output.ended) == ([3, 4, 8], [2], True)


def test_lookup_that_finds_nothing_proposes_nothing() -> None:
    lookup, way, start = PromptLookup(3, 3), Matching(lambda *_: torch.zeros(0)), torch.tensor([2, 2])
    draft = lookup.propose(way, torch.tensor([3, 4]), start, [[1, 2, 3], [6, 5, 4]])
    assert draft.tokens.shape == (2, 0) and draft.count.tolist() == [0, 0]
    draft = lookup.propose(way, torch.tensor([3, 1]), start, [[1, 2, 3], [1, 5, 1]])
    assert draft.tokens.tolist() == [[0, 0], [5, 1]] and draft.count.tolist() == [0, 2]


# --- a whole measurement ---


def test_batches_change_no_text(make_drafter: Callable[..., Drafter]) -> None:
    target = Target(random_model("qwen3"), TAPS)
    made, single = (bench(target, make_drafter(), batch=batch, sampled=False) for batch in (2, 1))
    result, one = (each.measure(given("ragged", ragged())) for each in (made, single))
    for method in ("target", "drafter", "prompt_lookup"):
        texts = [output.tokens for output in result.runs["greedy"][method].outputs]
        assert texts == [output.tokens for output in one.runs["greedy"][method].outputs]
    # Neighbours of one length go together, in their order.
    numbered = dict(enumerate(ragged()))
    assert [numbers for numbers, _ in made.batches(numbered)] == [[0, 1], [2], [3], [4, 5]]
    assert [numbers for numbers, _ in single.batches(numbered)] == [[number] for number in range(6)]
    assert result.prompts == 6 and not result.found and result.disagreeing == 0


@pytest.mark.parametrize("kind", ["llama", "qwen3-sliding", "qwen3.5"])
def test_all_methods_write_the_targets_own_greedy_text(
    make_drafter: Callable[..., Drafter], kind: str
) -> None:
    """On every architecture, token by token in float32; the sampled runs are complete too."""
    target = Target(random_model(kind), TAPS)
    result = bench(target, make_drafter(("sliding_attention", "full_attention"))).measure(
        given("two", ragged()[:2])
    )
    own = result.runs["greedy"]["target"].outputs
    for method in ("drafter", "prompt_lookup"):
        for mine, reference in zip(result.runs["greedy"][method].outputs, own, strict=True):
            assert len(mine.tokens) >= 12 and mine.tokens == reference.tokens[: len(mine.tokens)]
    assert not result.found and result.disagreeing == 0
    for run in result.runs["sampled"].values():
        assert len(run.outputs) == 2 and all(len(output.tokens) >= 12 for output in run.outputs)
        assert run.seconds > 0


@pytest.mark.parametrize("spare", [0, 1])
def test_prompts_that_leave_no_room_are_left_out_and_counted(
    make_drafter: Callable[..., Drafter], spare: int
) -> None:
    """12 new tokens and a block of 4 behind a prompt of 9, in a target that reads 25, or one token less."""
    model = random_model("qwen3")
    model.config.max_position_embeddings = 9 + 12 + BLOCK - 1 + spare  # type: ignore[union-attr]
    made = bench(Target(model, TAPS), make_drafter(), sampled=False)
    made.warm_up(given("ragged", [[5] * 30]))
    result = made.measure(given("ragged", ragged()))
    assert (result.prompts, result.left_out) == ((6, 0) if spare else (3, 3))
    assert len(result.runs["greedy"]["drafter"].outputs) == result.prompts
    found = evaluation([result, result], made)
    data = document(found)
    assert data["all"]["left_out"] == 2 * result.left_out and data["sets"][0]["left_out"] == result.left_out
    told = [note for note in evaluation_report(found).notes if "left out" in note]
    assert told == (
        [] if spare else ["left out: 6 prompts longer than the target can read with 12 new tokens"]
    )


def evaluation(results: list[SetResult], made: Bench, dtype: str = "float32") -> Evaluation:
    return Evaluation("d", "t", "cpu", dtype, BLOCK, False, made.section, made.options, results)


def test_the_document_has_every_figure(make_drafter: Callable[..., Drafter]) -> None:
    target = Target(random_model("qwen3"), TAPS)
    made = bench(target, make_drafter())
    results = [made.measure(given("one", ragged()[:2])), made.measure(given("two", ragged()[2:3]))]
    found = evaluation(results, made)
    data = json.loads(json.dumps(document(found)))
    assert data["schema"] == "trainer.eval/1" and data["lossless"] is True and data["training_agrees"] is True
    assert [each["name"] for each in data["sets"]] == ["one", "two"] and data["all"]["prompts"] == 3
    for way in ("greedy", "sampled"):
        for method in ("drafter", "prompt_lookup"):
            parts = [each[way][method] for each in data["sets"]]
            whole = data["all"][way][method]
            for key in ("tokens", "passes", "seconds"):
                assert whole[key] == pytest.approx(sum(part[key] for part in parts))
            assert whole["acceptance_length"] == whole["tokens"] / whole["passes"]  # pooled, not averaged
            assert sum(int(size) * count for size, count in whole["histogram"].items()) == whole["tokens"]
            accepted = sum(slot["accepted"] for slot in whole["slots"])
            assert whole["slots"][0]["reached"] == whole["passes"]
            assert whole["acceptance_length"] == pytest.approx(1 + accepted / whole["passes"])
            alone = data["all"][way]["target"]
            assert whole["speed_up"] == pytest.approx(whole["tokens_per_s"] / alone["tokens_per_s"])
            assert alone["tokens_per_s"] == pytest.approx(alone["tokens"] / alone["seconds"])
    assert data["all"]["as_trained"]["blocks"] == data["all"]["greedy"]["drafter"]["passes"]
    report = evaluation_report(found)
    assert [row[0] for row in report.rows] == [
        f"{name}, {way}" for way in ("greedy", "T=0.8") for name in ("one", "two", "all")
    ]
    assert report.lossless and any(note.startswith("lossless: yes (6 greedy texts") for note in report.notes)


def test_the_end_token_ends_every_method(make_drafter: Callable[..., Drafter]) -> None:
    target = Target(random_model("qwen3"), TAPS)
    made = bench(target, make_drafter(), sampled=False)
    free = made.measure(given("free", ragged()[:2])).runs["greedy"]["target"].outputs
    made.ends = frozenset({free[0].tokens[9], free[1].tokens[4]})
    result = made.measure(given("ended", ragged()[:2]))
    assert not result.found and result.disagreeing == 0
    for run in result.runs["greedy"].values():
        assert all(output.ended and output.tokens[-1] in made.ends for output in run.outputs)


# --- bfloat16, and faults ---


def test_in_bfloat16_ties_are_counted_and_are_no_fault(make_drafter: Callable[..., Drafter]) -> None:
    """Pairs of tokens that the target cannot tell apart, and a text that has the other one of a pair."""
    model: Any = random_model("qwen3")
    weight = model.get_input_embeddings().weight
    weight.data[1::2] = weight.data[::2]
    target = Target(model.to(torch.bfloat16), TAPS)
    made = bench(target, make_drafter().bfloat16(), sampled=False)
    result = made.measure(given("twins", ragged()[:1]))
    result.runs["greedy"]["drafter"].outputs[0].tokens[3] ^= 1
    result.found.clear()
    result.right.clear()
    made.compare(result, torch.tensor(ragged()[:1]))
    found = evaluation([result], made, "bfloat16")
    assert (3, 0.0) in [(each.divergence.position, each.divergence.gap) for each in result.found]
    found.check()  # does not raise
    assert not found.faults and document(found)["divergences"][0]["near_tie"] is True
    note = next(note for note in evaluation_report(found).notes if note.startswith("lossless"))
    assert note.startswith("lossless: yes") and "near-ties went the other way, 0 tokens are wrong" in note
    made.exact = True  # as in float32
    made.compare(result, torch.tensor(ragged()[:1]))
    with pytest.raises(NotLossless):
        evaluation([result], made).check()


def taken_back_too_little(self: BatchTarget, count: int, kept: Tensor) -> None:
    """A usual mistake: one rejected token stays in the cache."""
    right_keep(self, count, (kept + 1).clamp(max=count))


right_keep = BatchTarget.keep


class Wild:
    """Proposes what is never right, so that every pass rejects."""

    def read(self, *given: Any) -> None:
        pass

    def propose(self, way: Way, anchors: Tensor, start: Tensor, texts: Any) -> Draft:
        tokens = (anchors[:, None] + 17 + torch.arange(3)) % VOCABULARY
        return Draft(tokens, torch.full((len(anchors),), 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_that_keeps_a_rejected_token_is_a_fault(
    dtype: torch.dtype, make_drafter: Callable[..., Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(random_model("qwen3").to(dtype), TAPS)
    made = bench(target, make_drafter().to(dtype), sampled=False)
    monkeypatch.setattr(BatchTarget, "keep", taken_back_too_little)
    monkeypatch.setattr("trainer.evaluation.measure.BatchDrafter", lambda *given: Wild())
    monkeypatch.setattr("trainer.evaluation.measure.right_slots", lambda *given: [0] * len(given[3].emitted))
    result = made.measure(given("spoilt", ragged()[:2]))
    found = evaluation([result], made, str(dtype).removeprefix("torch."))
    with pytest.raises(NotLossless) as caught:
        found.check()
    assert caught.value.exit_code == 4
    assert "set spoilt, drafter" in str(caught.value) and "prompt 0" in str(caught.value)
    assert "NO" in next(note for note in evaluation_report(found).notes if note.startswith("lossless"))
    assert document(found)["lossless"] is False and not document(found)["divergences"][0]["near_tie"]


# --- the command ---


@pytest.fixture
def saved(tmp_path: Path, saved_target: Path, make_drafter: Callable[..., Drafter]) -> list[str]:
    vocabulary = json.loads((saved_target / "config.json").read_text())["vocab_size"]
    made = make_drafter(vocab_size=vocabulary)
    folder = checkpoint.save(tmp_path / "run", 1, made, DrafterOptimizer(made, Optimizer()), {}, keep=1)
    return ["eval", str(folder), "--target", str(saved_target), "--prompts", "2", "--new-tokens", "8"]


def test_the_command_prints_a_table(saved: list[str]) -> None:
    result = CliRunner().invoke(app, saved)
    assert result.exit_code == 0, result.output
    assert "lossless: yes (4 greedy texts" in result.output and "T=0.7" in result.output
    assert "acceptance length 1." in result.output and "batch 1)" in result.output


def test_the_command_prints_json_alone(saved: list[str]) -> None:
    result = CliRunner().invoke(app, [*saved, "--json", "--temperature", "0", "--dtype", "bfloat16"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["dtype"] == "bfloat16" and data["temperature"] is None and "sampled" not in data["all"]
    assert data["block_size"] == BLOCK and data["all"]["name"] == "all"


def test_a_set_that_the_target_cannot_read_is_refused(saved: list[str]) -> None:
    result = CliRunner().invoke(app, [*saved, "--new-tokens", "512"])  # it reads 512, and prompts have 64
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert "--new-tokens: no prompt of stdlib leaves room for 512 new tokens" in result.output


def test_a_fault_ends_the_command_with_its_code(saved: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Divergence(3, 7, 9, gap=1.5, allowed=0.0)
    monkeypatch.setattr("trainer.evaluation.measure.divergences", lambda *given: [fault])
    result = CliRunner().invoke(app, [*saved, "--temperature", "0"])
    assert result.exit_code == 4 and "first at token 3 of prompt 0: 9 instead of 7" in result.output
    assert "lossless: NO" in result.output and "Traceback" not in result.output
