"""Where a text is not the target's own: found, weighed, and told apart from rounding.

Run: python -m pytest tests/trainer/eval/test_lossless.py
"""

from __future__ import annotations

import pytest
import torch
from tiny_models import VOCABULARY, random_model
from torch import Tensor, nn

from trainer.evaluation.decode import Output, plain
from trainer.evaluation.lossless import NEAR_TIE_SPACINGS, divergences, spacing
from trainer.evaluation.sampling import greedy
from trainer.model.target import Target

TAPS = (0, 2, 4)


def prompt() -> Tensor:
    return torch.randint(2, VOCABULARY, (6,), generator=torch.Generator().manual_seed(4))


def twins() -> nn.Module:
    """A target with pairs of tokens that it cannot tell apart: 2k and 2k + 1 share embedding and head."""
    model = random_model("qwen3")
    weight = model.get_input_embeddings().weight  # type: ignore[operator]
    weight.data[1::2] = weight.data[::2]
    return model


@pytest.mark.parametrize(
    ("value", "step"), [(1.0, 2**-7), (1.99, 2**-7), (-20.0, 2**-3), (0.4, 2**-9), (0.0, 0.0)]
)
def test_spacing_of_bfloat16(value: float, step: float) -> None:
    assert spacing(value) == step
    if value:
        near = torch.tensor(value).bfloat16()
        bits = near.view(torch.int16) + 1
        assert abs(float(bits.view(torch.bfloat16)) - float(near)) == step


def test_the_targets_own_text_has_none() -> None:
    target = Target(random_model("qwen3"), TAPS)
    own = plain(target, prompt()[None], 20, greedy)[0]
    assert divergences(target, prompt(), own, Output(own.tokens[:14]), exact=True) == []


def test_a_wrong_token_is_found_with_its_gap() -> None:
    target = Target(random_model("qwen3"), TAPS)
    own = plain(target, prompt()[None], 20, greedy)[0]
    text = [*prompt().tolist(), *own.tokens[:7]]
    final = target.run(torch.tensor([text]), torch.arange(13)[None], full=True).final
    assert final is not None
    logits = target.logits(final[0, -1])
    worst = int(logits.argmin())
    said = Output([*own.tokens[:7], worst])
    for exact in (True, False):
        (found,) = divergences(target, prompt(), own, said, exact)
        assert (found.position, found.expected, found.said) == (7, own.tokens[7], worst)
        assert found.gap == pytest.approx(float(logits.max() - logits.min()), rel=1e-4)
        assert not found.near_tie


def test_a_tie_is_a_near_tie_in_bfloat16_and_none_in_float32() -> None:
    """After it the text is another one; it is right as long as it is what the target says after itself."""
    target = Target(twins(), TAPS)
    own = plain(target, prompt()[None], 20, greedy)[0]
    assert all(token % 2 == 0 for token in own.tokens)  # the first of equals
    said = Output([*own.tokens[:5], own.tokens[5] + 1, *own.tokens[6:12]])
    for exact, near in ((True, False), (False, True)):
        (found,) = divergences(target, prompt(), own, said, exact)
        assert (found.position, found.gap, found.near_tie) == (5, 0.0, near)


def test_what_follows_a_near_tie_is_not_free() -> None:
    target = Target(twins(), TAPS)
    own = plain(target, prompt()[None], 20, greedy)[0]
    wrong = (own.tokens[8] + 20) % VOCABULARY
    said = Output([*own.tokens[:5], own.tokens[5] + 1, *own.tokens[6:8], wrong])
    found = divergences(target, prompt(), own, said, exact=False)
    assert [each.position for each in found] == [5, 8]
    assert found[0].near_tie and not found[1].near_tie and found[1].expected == own.tokens[8]


def test_the_allowed_gap_grows_with_the_logits() -> None:
    target = Target(twins(), TAPS)
    own = plain(target, prompt()[None], 20, greedy)[0]
    said = Output([own.tokens[0] + 1])
    final = target.run(prompt()[None], torch.arange(6)[None], full=True).final
    assert final is not None
    top = float(target.logits(final[0, -1]).max())
    (found,) = divergences(target, prompt(), own, said, exact=False)
    assert found.allowed == NEAR_TIE_SPACINGS * spacing(top) > 0
