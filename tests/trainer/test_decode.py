"""Speculative decoding is lossless and counted truly, on tiny random models of every architecture.

Run: python -m pytest tests/trainer/test_decode.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, random_model
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from trainer.evaluation.decode import Output, plain, speculative
from trainer.evaluation.evaluator import Evaluator, figure, lookup
from trainer.evaluation.figures import acceptance, repeated_ngrams
from trainer.evaluation.proposers import lookup_draft
from trainer.evaluation.readers import BatchTarget, RereadTarget, RollbackTarget, continues, reader
from trainer.evaluation.sampling import FixedNoise, greedy
from trainer.model.cache import target_cache
from trainer.model.drafter import Drafter
from trainer.model.target import Target
from trainer.sections import Evaluate

BLOCK = 4
TAPS = (0, 2, 4)


def prompts(rows: int = 5, size: int = 6) -> Tensor:
    return torch.randint(2, VOCABULARY, (rows, size), generator=torch.Generator().manual_seed(4))


def noise(temperature: float = 0.8) -> FixedNoise:
    return FixedNoise(temperature, VOCABULARY, 200, 11, torch.device("cpu"))


class Clairvoyant(nn.Module):
    """Stands in for a drafter: knows the target's own text, and errs where told.

    It sits behind the same interface as the real drafter (states in, head's input out), so the decoder cannot
    tell them apart.
    """

    def __init__(self, target: Target, texts: list[list[int]], wrong_every: int) -> None:
        super().__init__()
        self.target, self.texts, self.wrong_every = target, texts, wrong_every

    def logits(self, anchors: Tensor, start: Tensor) -> Tensor:
        out = torch.full((len(anchors), BLOCK - 1, VOCABULARY), -1.0)
        for row, begin in enumerate(start.tolist()):
            for slot in range(1, BLOCK):
                place = begin + slot
                token = self.texts[row][place] if place < len(self.texts[row]) else 2
                if place % self.wrong_every == 0:
                    token = (token + 1) % VOCABULARY
                out[row, slot - 1, token] = 1e6
        return out


@pytest.mark.parametrize("choose", [greedy, noise()], ids=["greedy", "sampled"])
def test_speculative_text_equals_plain_text(
    kind: str, choose: Callable[[Tensor, Tensor], Tensor], make_drafter: Callable[..., Drafter]
) -> None:
    target = Target(random_model(kind), TAPS)
    drafter = make_drafter(("sliding_attention", "full_attention"))
    own = plain(target, prompts(), 30, choose)
    outputs = speculative(target, drafter, prompts(), 24, choose)
    for output, reference in zip(outputs, own, strict=True):
        assert len(output.tokens) >= 24
        assert output.tokens == reference.tokens[: len(output.tokens)]
        assert 1 + sum(output.emitted) == len(output.tokens)
        assert all(1 <= count <= BLOCK for count in output.emitted)


def test_plain_greedy_text_is_transformers_own(kind: str) -> None:
    model = random_model(kind)
    wanted = model.generate(  # type: ignore[operator]
        prompts(), attention_mask=torch.ones_like(prompts()), max_new_tokens=12, do_sample=False
    )[:, 6:]
    got = plain(Target(model, TAPS), prompts(), 12, greedy)
    assert [output.tokens for output in got] == wanted.tolist()


@pytest.mark.parametrize("wrong_every", [1000, 5, 3])
def test_acceptance_is_counted_truly(
    wrong_every: int, make_drafter: Callable[..., Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that knows the text and errs at every so many-th position: its passes are known."""
    target = Target(random_model("qwen3"), TAPS)
    own = plain(target, prompts(), 40, greedy)
    texts = [[*prompt, *output.tokens] for prompt, output in zip(prompts().tolist(), own, strict=True)]
    stand_in = Clairvoyant(target, texts, wrong_every)
    monkeypatch.setattr(
        "trainer.evaluation.decode.BatchDrafter.logits", lambda self, *given: stand_in.logits(*given)
    )
    outputs = speculative(target, make_drafter(), prompts(), 24, greedy)
    for row, output in enumerate(outputs):
        assert output.tokens == own[row].tokens[: len(output.tokens)]
        start, wanted = 6, []
        while start - 6 + 1 < 24:
            right = 0
            while right < BLOCK - 1 and (start + 1 + right) % wrong_every:
                right += 1
            wanted.append(right + 1)
            start += right + 1
        assert output.emitted == wanted
    if wrong_every == 1000:
        assert acceptance([output.emitted for output in outputs]) == BLOCK


def test_the_real_drafter_reads_the_context_that_training_would_give(
    make_drafter: Callable[..., Drafter],
) -> None:
    """A drafter's proposals while decoding, against its plain forward on the true states so far."""
    target, drafter = (
        Target(random_model("qwen3"), TAPS),
        make_drafter(("sliding_attention", "full_attention")),
    )
    own = plain(target, prompts(1), 30, greedy)[0]
    text = [*prompts(1)[0].tolist(), *own.tokens]
    seen: list[tuple[int, Tensor]] = []
    original = drafter.forward

    def spy(x: Tensor, positions: Tensor, context: object, masks: object) -> Tensor:
        out = original(x, positions, context, masks)  # type: ignore[arg-type]
        seen.append((int(positions[0, 0]), out[0]))
        return out

    drafter.forward = spy  # type: ignore[method-assign, assignment]
    speculative(target, drafter, prompts(1), 20, greedy)
    drafter.forward = original  # type: ignore[method-assign]
    assert len(seen) > 5
    for start, got in seen:
        positions = torch.arange(start)[None]
        states = target.run(torch.tensor([text[:start]]), positions)
        context = drafter.context_keys_values(states.taps, positions)
        tokens = torch.tensor([[text[start], 1, 1, 1]])
        masks = []
        for layer in range(2):
            mask = torch.ones(1, 1, BLOCK, start + BLOCK, dtype=torch.bool)
            window = drafter.config.window(layer)
            if window is not None:
                for slot in range(BLOCK):
                    mask[0, 0, slot, : max(0, start + slot - window + 1)] = False
                    mask[0, 0, slot, start + slot + 1 :] = False
            masks.append(mask)
        wanted = original(
            target.embedding(tokens), positions[:, -1:] + 1 + torch.arange(BLOCK), context, masks
        )
        assert torch.allclose(got, wanted[0], atol=1e-3)


def test_decoding_stops_at_the_end_token(make_drafter: Callable[..., Drafter]) -> None:
    target = Target(random_model("qwen3"), TAPS)
    free = plain(target, prompts(), 30, greedy)
    end = free[0].tokens[9]
    own = plain(target, prompts(), 30, greedy, {end})
    outputs = speculative(target, make_drafter(), prompts(), 24, greedy, {end})
    assert own[0].ended and len(own[0].tokens) <= 10 and own[0].tokens[-1] == end
    for output, reference in zip(outputs, own, strict=True):
        assert output.tokens == reference.tokens[: len(output.tokens)]
        assert end not in output.tokens[:-1]
        assert 1 + sum(output.emitted) == len(output.tokens)
    assert outputs[0].ended and outputs[0].tokens == own[0].tokens


@pytest.mark.parametrize("way", [BatchTarget, RollbackTarget])
def test_every_way_of_reading_gives_the_same_states(way: Callable[[Target], Any], kind: str) -> None:
    """What was taken back leaves no trace: in keys and values, windows, recurrent and convolution states.

    Rows keep one token, two, all and none; twice, so that what was kept is built upon.
    """
    target = Target(random_model(kind), TAPS)
    if way is BatchTarget and set(target.layer_types) != {"full_attention"}:
        assert isinstance(reader(target), RollbackTarget)
        return
    cached, anew = way(target), RereadTarget(target)
    tokens, starts = prompts(4, 16), torch.full((4, 1), 8)
    place = torch.arange(8).expand(4, 8)
    for model in (cached, anew):
        model.read(tokens[:, :8], place)
    for begin, kept in ((8, [1, 2, 3, 0]), (11, [3, 0, 1, 2])):
        one, other = (
            model.read(tokens[:, begin : begin + 3], starts + torch.arange(3), trial=True)
            for model in (cached, anew)
        )
        for a, b in zip(one, other, strict=True):
            assert torch.allclose(a, b, atol=1e-4)
        for model in (cached, anew):
            model.keep(3, torch.tensor(kept))
        starts = starts + torch.tensor(kept)[:, None]
    one, other = (model.read(tokens[:, 14:], starts + torch.arange(2)) for model in (cached, anew))
    for a, b in zip(one, other, strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_what_all_rows_rejected_is_no_longer_in_the_cache() -> None:
    target = Target(random_model("qwen3"), TAPS)
    model = BatchTarget(target)
    tokens = prompts(2, 12)
    model.read(tokens[:, :6], torch.arange(6).expand(2, 6))
    model.read(tokens[:, 6:10], torch.arange(6, 10).expand(2, 4), trial=True)
    model.keep(4, torch.tensor([1, 2]))
    assert model.cache.get_seq_length() == 8 == model.alive.shape[1]
    assert model.alive.tolist() == [[True] * 7 + [False], [True] * 8]


def test_an_architecture_that_cannot_read_on_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that forgets its recurrent state on a block, as some transformers do, is noticed."""
    target = Target(random_model("qwen3.5"), TAPS)
    assert continues(target) and isinstance(reader(target), RollbackTarget)
    forgetful = Target(random_model("qwen3.5"), TAPS)
    monkeypatch.setattr(DynamicCache, "get_recurrent_state", lambda *args, **named: None)
    assert not continues(forgetful) and isinstance(reader(forgetful), RereadTarget)


def test_the_growing_cache_equals_transformers_own() -> None:
    from transformers.cache_utils import DynamicCache

    target = Target(random_model("qwen3"), TAPS)
    tokens = prompts(2, 150)
    ours, theirs = target_cache(6), DynamicCache()
    done = 0
    for count in (3, 1, 90, 1, 55):
        part, place = tokens[:, done : done + count], torch.arange(done, done + count).expand(2, count)
        one = target.run(part, place, cache=ours, full=True).final
        other = target.run(part, place, cache=theirs, full=True).final
        assert one is not None and other is not None and torch.equal(one, other)
        done += count
    assert ours.get_seq_length() == theirs.get_seq_length() == 150


def test_fixed_noise_samples_from_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    fixed = FixedNoise(0.7, 4, 40_000, 3, torch.device("cpu"))
    positions = torch.arange(40_000)[None]
    drawn = fixed(logits.expand(1, 40_000, 4), positions)[0]
    wanted = (logits / 0.7).softmax(-1) * 40_000
    counts = torch.bincount(drawn, minlength=4)
    assert ((counts - wanted) ** 2 / wanted).sum() < 16.3  # 3 degrees of freedom, one chance in a thousand
    assert torch.equal(drawn, fixed(logits.expand(1, 40_000, 4), positions)[0])


# --- figures ---


def test_acceptance_pools_passes_over_prompts() -> None:
    emitted = [[4, 4], [1, 1, 1, 1, 1, 1, 1, 1]]
    assert acceptance(emitted) == 16 / 10
    assert acceptance(emitted, first_tokens=4) == (4 + 4) / (1 + 4)
    assert acceptance(emitted, first_tokens=5) == (8 + 5) / (2 + 5)
    assert acceptance([]) == 0.0


def test_a_single_different_token_is_seen() -> None:
    own = [Output([1, 2, 3, 4]), Output([5, 6, 7, 8])]
    good = [Output([1, 2, 3], [2]), Output([5, 6, 7], [1, 1])]
    assert figure(good, own, 2).lossless
    bad = figure([good[0], Output([5, 6, 9], [1, 1])], own, 2)
    assert (bad.equal, bad.prompts, bad.lossless) == (1, 2, False)
    assert bad.histogram == {1: 2, 2: 1}


def test_lookup_drafts_what_followed_the_latest_longest_match() -> None:
    text = [1, 2, 3, 9, 1, 2, 3, 8, 7, 1, 2, 3]
    assert lookup_draft(text, 3, 3) == [8, 7, 1]
    assert lookup_draft([5, 6, 5], 3, 4) == [6, 5]
    assert lookup_draft([1, 2, 3], 3, 4) == []
    assert lookup_draft([4], 3, 4) == []


def test_replayed_lookup_equals_lookup_decoding_with_the_target() -> None:
    """Against a plain loop that asks the target itself at every pass."""
    target = Target(random_model("qwen3"), TAPS)
    for row, own in enumerate(plain(target, prompts(), 40, greedy)):
        prompt = prompts()[row].tolist()
        replayed = lookup(prompt, own, 24, 2, BLOCK)
        text, emitted = [*prompt, own.tokens[0]], []
        while len(text) - len(prompt) < 24:
            drafted = lookup_draft(text, 2, BLOCK - 1)
            tokens = torch.tensor([[*text, *drafted]])
            final = target.run(tokens, torch.arange(tokens.shape[1])[None], full=True).final
            assert final is not None
            chosen = target.logits(final[0, len(text) - 1 :]).argmax(-1).tolist()
            right = 0
            while right < len(drafted) and drafted[right] == chosen[right]:
                right += 1
            text += chosen[: right + 1]
            emitted.append(right + 1)
        assert replayed.emitted == emitted
        assert replayed.tokens == text[len(prompt) :]


def test_repeated_ngrams() -> None:
    assert repeated_ngrams([Output([1, 2, 3, 1, 2, 3])], size=3) == 1 / 4
    assert repeated_ngrams([Output([1] * 10)], size=8) == 2 / 3
    assert repeated_ngrams([Output([1, 2])], size=8) == 0.0


def test_the_evaluator_measures_all_of_it(make_drafter: Callable[..., Drafter]) -> None:
    target = Target(random_model("qwen3"), TAPS)
    section = Evaluate(new_tokens=16, first_tokens=8, temperature=0.8)
    evaluator = Evaluator(target, prompts(), section, BLOCK)
    measured = evaluator.measure(make_drafter(), 3)
    for one in (measured.greedy, measured.sampled):
        assert one.prompts == 3 and one.lossless and 1.0 <= one.acceptance_length <= BLOCK
        assert sum(size * count for size, count in one.histogram.items()) >= 3 * 15
    found = evaluator.lookup()
    assert found.greedy.prompts == 5 and found.greedy.lossless and found.sampled.lossless
    assert 0.0 <= evaluator.repetition <= 1.0
    assert evaluator.last_s > 0
    cut = evaluator.measure(make_drafter(), 3, limit_s=0.0)
    assert cut.greedy.acceptance_length == 0.0 and cut.greedy.lossless  # nothing but the prompts' own pass
