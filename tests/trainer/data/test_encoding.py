"""Text with spans to tokens with marks: every token proven, borders exact, whatever the tokenizer.

Run: python -m pytest tests/trainer/data/test_encoding.py
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from chat_kinds import CHATML_SPECIAL, TEXT, byte_level, save_chat_target, spaced
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from trainer.data.encoding import Encoded, Encoder, byte_table
from trainer.data.lines import BadRow
from trainer.errors import ConfigError


def encoder_of(folder: Path, tokenizer: Tokenizer, **config: object) -> Encoder:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Encoder(folder)


def one(encoder: Encoder, text: str, *spans: tuple[int, int]) -> Encoded:
    (found,) = encoder.conversations([text], [spans])
    assert isinstance(found, Encoded), found
    return found


def said(encoder: Encoder, found: Encoded) -> str:
    return str(encoder.tokenizer.decode(found.tokens[found.supervised].tolist(), skip_special_tokens=False))


BYTES = byte_level(CHATML_SPECIAL)
TABLE = byte_table(BYTES)


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_the_table_spells_every_text(text: str) -> None:
    assert TABLE is not None
    ids = BYTES.encode(text, add_special_tokens=False).ids
    assert b"".join(TABLE[each] for each in ids) == text.encode()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_spans_anywhere_are_exact(data: st.DataObject) -> None:
    letters = st.one_of(st.sampled_from(list(" \nThe it\U0001f600é")), st.sampled_from(CHATML_SPECIAL))
    text = data.draw(st.lists(letters, min_size=1, max_size=30).map("".join))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    spans = list(zip(cuts[::2], cuts[1::2], strict=False))
    encoder = ENCODER
    found = one(encoder, text, *spans)
    assert TABLE is not None
    spelt = [TABLE[each] for each in found.tokens.tolist()]
    assert b"".join(spelt) == text.encode()
    trained = b"".join(each for each, mark in zip(spelt, found.supervised.tolist(), strict=True) if mark)
    assert trained.decode() == "".join(text[start:stop] for start, stop in spans)


@pytest.fixture(scope="module", autouse=True)
def shared(tmp_path_factory: pytest.TempPathFactory) -> None:
    global ENCODER
    ENCODER = encoder_of(tmp_path_factory.mktemp("e") / "t", BYTES)


ENCODER: Encoder


def test_a_token_across_a_border_is_cut_there_as_a_server_would() -> None:
    whole = ENCODER.tokenizer.encode("\n\n", add_special_tokens=False).ids
    assert len(whole) == 1  # so a border in the middle lies inside a token
    found = one(ENCODER, "is\n\nis", (3, 6))
    one_end = ENCODER.tokenizer.encode("\n", add_special_tokens=False).ids[0]
    assert found.tokens.tolist().count(one_end) == 2 and whole[0] not in found.tokens.tolist()
    assert said(ENCODER, found) == "\nis"
    kept = one(ENCODER, "is\n\nis", (4, 6))
    assert kept.tokens.tolist() == ENCODER.tokenizer.encode("is\n\nis", add_special_tokens=False).ids


def test_a_normalizing_tokenizer_is_taken_at_its_word(tmp_path: Path) -> None:
    encoder = encoder_of(tmp_path / "t", byte_level(CHATML_SPECIAL, normalizer=normalizers.NFC()))
    text = "Zu\u0308rich <|im_end|> e\u0301t cafe\u0301"  # u and a combining diaeresis, which NFC joins
    start = text.index("e\u0301t")
    found = one(encoder, text, (start, len(text)))
    assert said(encoder, found) == "ét café"
    assert encoder.tokenizer.decode(found.tokens.tolist(), skip_special_tokens=False).startswith("Zürich")


def test_tokenizers_with_a_letter_for_the_space(tmp_path: Path) -> None:
    encoder = encoder_of(tmp_path / "t", spaced(["<s>", "</s>"]), eos_token="</s>")
    assert byte_table(encoder.tokenizer) is None
    text = "<s>[INST] the é \U0001f600 [/INST] that</s>[INST] x [/INST] the\n\U0001f600</s>"
    starts = [text.index(" that"), text.rindex(" the\n")]
    spans = [(start, text.index("</s>", start) + 4) for start in starts]
    found = one(encoder, text, *spans)
    assert found.tokens.tolist() == encoder.tokenizer.encode(text, add_special_tokens=False).ids
    assert said(encoder, found) == " that</s> the\n\U0001f600</s>"


def test_what_does_not_decode_back_is_refused(tmp_path: Path) -> None:
    lossy = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    lossy.pre_tokenizer = pre_tokenizers.Whitespace()
    encoder = encoder_of(tmp_path / "t", lossy)
    good, bad = encoder.conversations(["a b", "a z"], [[(2, 3)], [(2, 3)]])
    assert isinstance(good, Encoded) and good.supervised.tolist() == [False, True]
    assert isinstance(bad, BadRow) and "an answer does not decode back: 'z' became '[UNK]'" in str(bad)
    (crossed,) = encoder.conversations(["ab"], [[(1, 2)]])
    assert isinstance(crossed, BadRow)


def test_tokens_that_swallow_white_space_around_them(tmp_path: Path) -> None:
    tokenizer = byte_level([])
    tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True, special=True)])  # as Phi's
    encoder = encoder_of(tmp_path / "t", tokenizer)
    text = "ask<|end|>\nsay it<|end|>\n"
    start = text.index("say")
    found = one(encoder, text, (start, start + len("say it<|end|>")))
    assert said(encoder, found) == "say it<|end|>"


def test_plain_text_gets_what_the_tokenizer_puts_around_it_and_an_end(tmp_path: Path) -> None:
    tokenizer = byte_level(CHATML_SPECIAL)
    encoder = encoder_of(tmp_path / "plain", tokenizer, eos_token="<|endoftext|>")
    (found,) = encoder.plain(["It is"])
    assert encoder.tokenizer.decode(found.tokens.tolist(), skip_special_tokens=False) == "It is<|endoftext|>"
    assert found.supervised.all()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 2)]
    )
    encoder = encoder_of(tmp_path / "begun", tokenizer, eos_token="<|endoftext|>")
    (found,) = encoder.plain(["It is"])
    text = encoder.tokenizer.decode(found.tokens.tolist(), skip_special_tokens=False)
    assert text.replace(" ", "") == "<|im_start|>Itis<|endoftext|>"
    assert found.supervised.tolist() == [False] + [True] * (len(found.tokens) - 1)
    assert found.tokens.dtype == np.int32


def test_plain_text_that_the_tokenizer_has_no_tokens_for_is_bad(tmp_path: Path) -> None:
    """It would be trained on with holes in it, or with a token that says "unknown"."""
    vocabulary = {"</s>": 0, "<unk>": 1, "a": 2, "b": 3, "\u2581": 4}
    bytes_alone = Tokenizer(models.BPE(vocab={"</s>": 0, "a": 1, "b": 2}, merges=[]))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    letters = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    letters.normalizer = normalizers.Replace(" ", "\u2581")
    letters.decoder = decoders.Replace("\u2581", " ")
    for number, tokenizer in enumerate((bytes_alone, letters)):
        encoder = encoder_of(tmp_path / str(number), tokenizer, eos_token="</s>")
        good, bad = encoder.plain(["abba", "ab\u00e9ba"])
        assert isinstance(bad, BadRow) and isinstance(good, Encoded)
        assert encoder.tokenizer.decode(good.tokens.tolist(), skip_special_tokens=False) == "abba</s>"


def test_plain_text_whose_spaces_a_tokenizer_moves_is_good(tmp_path: Path) -> None:
    """One that normalizes, that puts a space in front, and whose special tokens swallow white space."""
    tokenizer = byte_level(CHATML_SPECIAL, normalizer=normalizers.NFC())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.add_special_tokens([AddedToken("<|gap|>", special=True, lstrip=True, rstrip=True)])
    texts = ["cafe\u0301", "look", "a \n<|gap|>  b"]
    encoder = encoder_of(tmp_path / "t", tokenizer)
    assert [isinstance(each, Encoded) for each in encoder.plain(texts)] == [True] * 3


def test_end_tokens_are_gathered_from_every_place(tmp_path: Path) -> None:
    folder = save_chat_target(tmp_path / "t", "chatml")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 99_999]}))
    (folder / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 0}}))
    assert Encoder(folder).ends == ["<|im_end|>", "<|im_start|>", "<|endoftext|>"]


def test_no_tokenizer_and_a_broken_one_are_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: the target has no tokenizer\.json"):
        Encoder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot read the tokenizer"):
        Encoder(tmp_path)


def test_truncation_in_the_tokenizers_file_cuts_nothing(tmp_path: Path) -> None:
    tokenizer = byte_level(CHATML_SPECIAL)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    encoder = encoder_of(tmp_path / "t", tokenizer)
    assert said(encoder, one(encoder, TEXT, (0, len(TEXT)))) == TEXT


def test_the_table_is_only_for_byte_level_decoders() -> None:
    tokenizer = byte_level(CHATML_SPECIAL)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    assert byte_table(tokenizer) == TABLE
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    assert byte_table(tokenizer) is None
