"""`data show`: what is context, what is trained on, where documents begin.

Run: python -m pytest tests/trainer/data/test_show.py
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from typer.testing import CliRunner, Result

from trainer.cli import app
from trainer.data import show
from trainer.data.encoding import Encoder
from trainer.data.prepare import Tolerance, prepare
from trainer.data.reader import Settings
from trainer.data.show import Shown

Make = Callable[[str], Path]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def talk(number: int) -> dict[str, Any]:
    asked = {"role": "user", "content": f"question {number}"}
    return {"messages": [asked, {"role": "assistant", "content": f"answer {number}"}]}


def command(*words: Any) -> Result:
    return CliRunner().invoke(app, ["data", "show", *map(str, words)])


def test_a_row_of_a_store_in_the_order_that_training_reads(tmp_path: Path, chat_target: Make) -> None:
    target = chat_target("chatml")
    source = write(tmp_path / "a.jsonl", *(talk(number) for number in range(9)), {"text": "long " * 90})
    store = prepare(
        [source], Settings(str(target)), tmp_path / "out", Tolerance(rows=0), say=lambda text: None
    )
    seen = []
    for row in range(12):
        done = command(store.folder, "--row", row, "--row-tokens", 128, "--seed", 3)
        assert done.exit_code == 0, done.output
        seen.append(done.stdout)
        if "answer 8" in done.stdout:
            assert "«answer 8<|im_end|>»" in done.stdout
            assert "question 8<|im_end|>\n<|im_start|>assistant\n«answer" in done.stdout
            assert f"{source}:9" in done.stdout and "document 1 of " in done.stdout
    text = "".join(seen)
    for number in range(9):  # 12 rows are several epochs: everything comes
        assert f"«answer {number}<|im_end|>»" in text
    assert "128 of its " in text  # a piece of the long document says so
    again = command(store.folder, "--row", 0, "--row-tokens", 128, "--seed", 3)
    assert again.stdout == seen[0]
    assert seen[0] != command(store.folder, "--row", 0, "--row-tokens", 128, "--seed", 4).stdout


def test_a_row_of_a_file_before_it_is_prepared(tmp_path: Path, chat_target: Make) -> None:
    source = write(tmp_path / "a.jsonl", talk(1), "", talk(2), "{")
    target = chat_target("qwen3")
    done = command(source, "--row", 1, "--target", target, "--thinking", "off")
    assert done.exit_code == 0, done.output
    assert f"{source}:3, " in done.stdout
    assert "<think>\n\n</think>\n\n«answer 2<|im_end|>»" in done.stdout
    done = command(source, "--row", 1, "--target", target)
    assert "«<think>\n\n</think>\n\nanswer 2<|im_end|>»" in done.stdout
    for words, code, problem in (
        (("--row", 2, "--target", target), 1, f"error: {source}:4: not JSON"),
        (("--row", 3, "--target", target), 1, "no row 3: it has 3 rows, counted from 0"),
        ((), 2, "--target: needed for a file that is not prepared"),
        (("--target", tmp_path / "none"), 2, "no such folder"),
        (("--target", target, "--template-arg", "x"), 2, "--template-arg: 'x': expected NAME=VALUE"),
        (("--target", target, "--date", "soon"), 2, "--date: 'soon' is no date like 2026-01-01"),
    ):
        done = command(source, *words)
        assert done.exit_code == code and problem in done.stderr and "Traceback" not in done.output
    assert command(tmp_path / "none.jsonl", "--target", target).exit_code == 2


def test_colours_say_it_where_there_are_colours(chat_target: Make) -> None:
    encoder = Encoder(chat_target("chatml"))
    ids = encoder.tokenizer.encode("ask<|im_end|>say", add_special_tokens=False).ids
    end = ids.index(1)
    shown = Shown("document 1 of 1", ids, [number > end for number in range(len(ids))])
    out = io.StringIO()
    show.show([shown], chat_target("chatml"), Console(file=out, force_terminal=True, color_system="standard"))
    assert "\x1b[30;46m document 1 of 1" in out.getvalue()
    assert "ask<|im_end|>\x1b[1;32m«say»" in out.getvalue()


def test_text_cannot_steer_the_terminal(chat_target: Make) -> None:
    encoder = Encoder(chat_target("chatml"))
    ids = encoder.tokenizer.encode("a\x1b[2J\x07 é\n\tb", add_special_tokens=False).ids
    text = show.render([Shown("x", ids, [True] * len(ids))], encoder.tokenizer).plain
    assert "«a\\x1b[2J\\x07 é\n\tb»" in text and "\x1b" not in text
