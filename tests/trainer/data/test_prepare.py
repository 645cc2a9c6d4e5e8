"""`prepare`: what is in the store, bad rows, what is refused.

Run: python -m pytest tests/trainer/data/test_prepare.py
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from prepare_kit import ALL, Make, content, make, rows, write

from trainer.data import reader
from trainer.data.chat_template import Mode
from trainer.data.meter import Meter
from trainer.data.prepare import Chunk, Tolerance, named, plan, prepare
from trainer.data.reader import Reader, Settings
from trainer.data.report import summary
from trainer.data.store import Store
from trainer.errors import ConfigError, DataError


def test_the_store_holds_every_document_with_its_place(tmp_path: Path, chat_target: Make) -> None:
    target = chat_target("qwen3")
    values = rows(30)
    first = write(tmp_path / "a.jsonl", *values[:20], b"", b"not json")
    (tmp_path / "b.txt").write_text("A file is\na document.")
    third = write(tmp_path / "c.jsonl", *values[20:])
    inputs = [first, tmp_path / "b.txt", third]
    store = prepare(
        inputs, Settings(str(target)), tmp_path / "out", ALL, say=lambda text: None, chunk_bytes=300
    )
    reader = Reader(Settings(str(target)))
    tokenizer = reader.encoder.tokenizer
    assert len(store) == 31 and store.counts["bad_rows"] == 1 and store.counts["rows"] == 32
    places = [f"{first}:{n}" for n in range(1, 21)] + [f"{tmp_path / 'b.txt'}:1"]
    places += [f"{third}:{n}" for n in range(1, 11)]
    assert [store.origin(number) for number in range(len(store))] == places
    for number in range(len(store)):
        ids, marks = store.document(number)
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        trained = tokenizer.decode(ids[marks].tolist(), skip_special_tokens=False)
        value = [*values[:20], {"text": "A file is\na document."}, *values[20:]][number]
        if "text" in value:
            assert text == trained == value["text"] + "<|im_end|>"
        elif "input_ids" in value:
            assert ids.tolist() == value["input_ids"] and marks.tolist() == [False, False, True, True]
        else:
            said = [
                each["content"] + "<|im_end|>" for each in value["messages"] if each["role"] == "assistant"
            ]
            said[-1] = "<think>\n\n</think>\n\n" + said[-1]
            assert trained == "".join(said)
    bad = [json.loads(line) for line in (store.folder / "bad_rows.jsonl").read_text().splitlines()]
    assert bad == [{"file": str(first), "line": 22, "reason": "not JSON: Expecting value at character 1"}]
    assert store.counts["tokens"] == len(store.tokens) == store.lengths.sum()
    assert store.counts["supervised"] == store.supervised.sum()


def test_the_name_is_of_inputs_and_settings_alone(tmp_path: Path, chat_target: Make) -> None:
    qwen = chat_target("qwen3")
    source = write(tmp_path / "a.jsonl", *rows(8))
    names = [make(tmp_path / "1", source, qwen).folder.name]
    copy = write(tmp_path / "copy.jsonl", *rows(8))
    assert make(tmp_path / "2", copy, qwen, chunk_bytes=100).folder.name == names[0]
    for changed in (
        Settings(str(chat_target("chatml"))),
        Settings(str(qwen), mode=Mode(False)),
        Settings(str(qwen), mode=Mode(arguments={"a": 1})),
        Settings(str(qwen), turns="last"),
        Settings(str(qwen), max_line_bytes=77_000),
    ):
        out = prepare([source], changed, tmp_path / "3", ALL, say=lambda text: None)
        names.append(out.folder.name)
    names.append(make(tmp_path / "4", write(tmp_path / "other.jsonl", *rows(9)), qwen).folder.name)
    assert len(set(names)) == len(names)
    said: list[str] = []
    again = make(tmp_path / "1", source, qwen, say=said.append)
    assert said == [f"{again.folder} is there already"]


def test_what_rows_give_has_a_number_that_is_in_the_name(
    tmp_path: Path, chat_target: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store of before is not taken for one of now. When this fails by its digest: raise RULES."""
    asked, said, left = ({"role": role, "content": f"the {role}"} for role in ("user", "assistant", "system"))
    weights = ({}, {"weight": 0}, {"weight": 0.5})
    chats = [{"messages": [left, asked, {**said, **more}, asked, said]} for more in weights]
    shared = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    prompted = {"prompt": "a", "response": "b"}
    source = write(tmp_path / "a.jsonl", *rows(8), *chats, shared, prompted)
    store = make(tmp_path / "1", source, chat_target("chatml"))
    files = content(store.folder)
    digest = hashlib.sha256(files["tokens.bin"] + files["supervised.bin"] + files["ends.bin"]).hexdigest()
    assert {reader.RULES: digest[:16]} == {3: "91e28e93b9fbbff4"}
    monkeypatch.setattr(reader, "RULES", 4)
    assert make(tmp_path / "1", source, chat_target("chatml")).folder != store.folder


def test_bad_rows_are_borne_up_to_a_bound_and_named(tmp_path: Path, chat_target: Make) -> None:
    target = chat_target("chatml")
    values = [*rows(3), b"{", b"\xff", {"messages": []}, *rows(3)]
    source = write(tmp_path / "a.jsonl", *values)
    with pytest.raises(DataError) as caught:
        make(tmp_path / "out", source, target, tolerance=Tolerance(rows=2), chunk_bytes=150)
    assert str(caught.value).startswith("--max-bad-rows: 3 of ")
    for line, reason in (
        (4, "not JSON: "),
        (5, "not UTF-8: byte 0xff"),
        (6, "messages: the conversation is empty"),
    ):
        assert f"\n  {source}:{line}: {reason}" in str(caught.value)
    assert "bad_rows.jsonl" in caught.value.next
    store = make(tmp_path / "out", source, target, tolerance=Tolerance(rows=3), chunk_bytes=150)
    assert store.counts["bad_rows"] == 3 and len(store) == 6
    assert "3 bad rows left out" in "\n".join(summary(store))


def test_a_share_of_bad_rows_is_judged_when_there_are_enough(tmp_path: Path, chat_target: Make) -> None:
    target = chat_target("chatml")
    few = write(tmp_path / "few.jsonl", b"{", *rows(40))
    with pytest.raises(DataError, match=r"1 of 41 rows are bad, more than 2 %"):
        make(tmp_path / "1", few, target, tolerance=Tolerance(share=0.02), chunk_bytes=200)
    assert make(tmp_path / "2", few, target, tolerance=Tolerance(share=0.03)).counts["bad_rows"] == 1
    ids = {"input_ids": [5, 6], "loss_mask": [1, 1]}
    many = write(tmp_path / "many.jsonl", *[b"{"] * 90, *[ids] * 4000)
    with pytest.raises(DataError, match=r"90 of 1,\d\d\d rows are bad") as caught:  # not only at the end
        make(tmp_path / "3", many, target, tolerance=Tolerance.parse("3%"), chunk_bytes=2000)
    assert str(caught.value).count("many.jsonl:") == 5


@pytest.mark.parametrize("text", ["x", "-1", "101%", "1.5", "%", "nan%"])
def test_a_tolerance_is_a_number_or_a_share(text: str) -> None:
    with pytest.raises(ConfigError, match=r"neither a number of rows nor a share like 0\.5%"):
        Tolerance.parse(text)


def test_token_ids_that_the_target_does_not_have_are_bad(tmp_path: Path, chat_target: Make) -> None:
    source = write(tmp_path / "a.jsonl", {"input_ids": [5, 5000], "loss_mask": [1, 1]}, *rows(2))
    store = make(tmp_path / "out", source, chat_target("chatml"))
    assert (
        "input_ids: 5000 is no token of the target, which has"
        in (store.folder / "bad_rows.jsonl").read_text()
    )


def test_token_ids_above_a_gap_in_the_vocabulary_are_the_targets(tmp_path: Path, chat_target: Make) -> None:
    """Tokenizers leave ids free: how many tokens there are does not say which id is the last."""
    target = tmp_path / "target"
    shutil.copytree(chat_target("chatml"), target)
    path = target / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    (last,) = [each for each in tokenizer["added_tokens"] if each["content"] == "<|im_end|>"]
    last["id"] = tokenizer["model"]["vocab"]["<|im_end|>"] = 900
    path.write_text(json.dumps(tokenizer))
    source = write(
        tmp_path / "a.jsonl",
        {"input_ids": [5, 900], "loss_mask": [1, 1]},
        {"input_ids": [5, 901], "loss_mask": [1, 1]},
    )
    store = make(tmp_path / "out", source, target)
    assert store.tokens.tolist() == [5, 900]
    assert "901 is no token of the target" in (store.folder / "bad_rows.jsonl").read_text()


def test_a_text_file_without_its_byte_order_mark(tmp_path: Path, chat_target: Make) -> None:
    found = []
    for name, mark in (("a", b""), ("b", b"\xef\xbb\xbf")):
        path = tmp_path / f"{name}.txt"
        path.write_bytes(mark + "Zürich\n".encode())
        found.append(make(tmp_path / name, path, chat_target("chatml")).tokens.tolist())
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("one list.json", b'\xef\xbb\xbf \n [{"text": "a"}]', "one JSON list, not a JSON object a line"),
        ("a.parquet", b"", "neither .jsonl nor .txt"),
        ("a.jsonl.gz", b"", r"neither .jsonl nor .txt\nnext: gunzip -k .*a.jsonl.gz, and name .*a.jsonl$"),
        ("none.jsonl", None, "no such file"),
        ("empty.jsonl", b"", r"nothing to train on in 0 rows \(0 bad\)"),
        (
            "all-bad.jsonl",
            b"{\n{\n",
            r"nothing to train on in 2 rows \(2 bad\)\n  .*all-bad.jsonl:1: not JSON",
        ),
        ("all-bad.txt", b"\xff", r"nothing to train on in 1 row \(1 bad\)\n  .*all-bad.txt:1: not UTF-8"),
    ],
)
def test_inputs_that_give_nothing(
    name: str, content: bytes | None, problem: str, tmp_path: Path, chat_target: Make
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises((ConfigError, DataError), match=problem):
        make(tmp_path / "out", path, chat_target("chatml"))


@pytest.mark.parametrize("name", ["talks", "talks.jsonl"])
def test_a_folder_is_told_as_one(name: str, tmp_path: Path, chat_target: Make) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=f"{name}: a folder\nnext: name the files themselves"):
        make(tmp_path / "out", tmp_path / name, chat_target("chatml"))


def test_why_a_row_is_bad_can_always_be_shown(tmp_path: Path, chat_target: Make) -> None:
    """What it quotes of the row may be half a surrogate pair, steer a terminal, or have no end."""
    source = write(tmp_path / "a.jsonl", {"text": "good"}, {"\ud800": 1}, {"\x1b[2J": 1}, {"k" * 10_000: 1})
    store = make(tmp_path / "out", source, chat_target("chatml"))
    with (store.folder / "bad_rows.jsonl").open() as file:
        half, steering, long = named(file, 3)
    assert half.endswith(r"(keys: \xd800)") and steering.endswith(r"(keys: \x1b[2J)") and len(long) < 800
    assert any(half in line for line in summary(store))


def test_conversations_need_a_template_that_shows_answers(tmp_path: Path, chat_target: Make) -> None:
    target = tmp_path / "target"
    target.mkdir()
    for path in chat_target("chatml").iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    source = write(tmp_path / "a.jsonl", *rows(4))
    (target / "chat_template.jinja").write_text("{{ messages[0].content }}")
    for workers in (1, 2):
        with pytest.raises(ConfigError, match="the chat template shows no assistant spans"):
            make(tmp_path / "out", source, target, workers=workers, chunk_bytes=200)
    (target / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="the target has no chat template"):
        make(tmp_path / "out", source, target)
    texts = write(tmp_path / "texts.jsonl", *(row for row in rows(8) if "messages" not in row))
    assert make(tmp_path / "out", texts, target).identity["template"] is None  # texts need none


@pytest.fixture
def store(tmp_path: Path, chat_target: Make) -> Iterator[Path]:
    yield make(tmp_path / "out", write(tmp_path / "a.jsonl", *rows(8)), chat_target("chatml")).folder


def test_damaged_and_unfinished_stores_are_refused(store: Path) -> None:
    assert len(Store(store)) == 8
    (store / "tokens.bin").write_bytes((store / "tokens.bin").read_bytes()[:-4])
    with pytest.raises(ConfigError, match=r"tokens\.bin: has [\d,]+ bytes, not [\d,]+: the store is damaged"):
        Store(store)
    (store / "tokens.bin").unlink()
    with pytest.raises(ConfigError, match=r"tokens\.bin: is missing: the store is damaged"):
        Store(store)
    facts = json.loads((store / "store.json").read_text())
    (store / "store.json").write_text(json.dumps({**facts, "version": 99}))
    with pytest.raises(ConfigError, match="version 99; this trainer reads version 1"):
        Store(store)
    (store / "store.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"store\.json: cannot be read"):
        Store(store)
    with pytest.raises(ConfigError, match="no prepared store there") as caught:
        Store(store.parent)
    assert "trainer prepare" in caught.value.next
    store.rename(store.with_name(store.name + ".partial"))
    (store.with_name(store.name + ".partial") / "store.json").unlink()
    for folder in (store, store.with_name(store.name + ".partial")):
        with pytest.raises(ConfigError, match="the store is not finished"):
            Store(folder)


def test_facts_for_checkpoints_name_inputs_template_and_mode(tmp_path: Path, chat_target: Make) -> None:
    source = write(tmp_path / "a.jsonl", *rows(4))
    settings = Settings(str(chat_target("qwen3")), mode=Mode(True))
    facts = prepare([source], settings, tmp_path / "out", ALL, say=lambda text: None).facts()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["template"]["thinking"] is True and "<think>" in facts["template"]["template"]
    assert facts["inputs"][0]["bytes"] == source.stat().st_size and len(facts["tokenizer_sha256"]) == 64
    assert facts["store"] and facts["counts"]["documents"] == 4


def test_plans_cover_every_byte_once(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"x" * 25)
    (tmp_path / "b.txt").write_bytes(b"x" * 25)
    (tmp_path / "c.jsonl").write_bytes(b"")
    paths = [tmp_path / name for name in ("a.jsonl", "b.txt", "c.jsonl")]
    assert plan(paths, 10) == [
        Chunk(0, paths[0], 0, 10), Chunk(0, paths[0], 10, 20), Chunk(0, paths[0], 20, 25),
        Chunk(1, paths[1], 0, 25),
    ]  # fmt: skip


def test_the_meter_counts_from_where_work_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("trainer.data.meter.time.monotonic", lambda: clock[0])
    with Meter("prepare", 100e6, 20e6, 1e6, "MB", tokens=5_000) as meter:
        assert meter.words() == "20.0 of 100.0 MB, 0.0 MB/s, 0 tokens/s, - left"
        clock[0] += 10
        meter.update(40e6, 25_000, "3 bad rows")
    assert capsys.readouterr().err == (
        "prepare: 40.0 of 100.0 MB, 2.0 MB/s, 2,000 tokens/s, 30.0 s left, 3 bad rows\n"
    )
