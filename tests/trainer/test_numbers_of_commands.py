"""Numbers on a command line that nothing can be computed with are refused by their option.

Run: python -m pytest tests/trainer/test_numbers_of_commands.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
from saved_runs import at, train
from test_kill_and_resume import section
from tiny_models import save_target
from typer.testing import CliRunner

from trainer.cli import app
from trainer.sections import LEAST_TEMPERATURE

EVAL = "eval {drafter} --target {target} --prompts 1 --new-tokens 2"
REGENERATE = "regenerate {rows} --out {folder}/out --target {target} --device cpu --max-new-tokens 2"


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("numbers")
    target, rows = save_target(folder / "target"), folder / "rows.jsonl"
    (target / "chat_template.jinja").write_text("{% for each in messages %}{{ each.content }} {% endfor %}")
    rows.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    train(section(target, budget={"steps": 1}), folder / "run")
    return {"folder": folder, "target": target, "rows": rows, "drafter": at(folder / "run", 1)}


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        *((EVAL, "--temperature", value) for value in ("inf", "nan", "1e-45", "0.009", "-1")),
        *((REGENERATE, "--temperature", value) for value in ("inf", "nan", "1e-45", "0.009")),
        (REGENERATE, "--timeout-s", "inf"),
        ("prepare {rows} --target {target} --out {folder}/store", "--max-line-mb", "inf"),
        ("plan {folder}/recipe.yaml", "--seconds", "inf"),
    ],
)
def test_refused_by_the_option(command: str, option: str, value: str, names: dict[str, Path]) -> None:
    """A temperature of 1e-45 was a traceback of torch, an infinite length of a line one of Python."""
    done = CliRunner().invoke(app, [*command.format(**names).split(), option, value])
    assert done.exit_code == 2 and option in done.output and "Traceback" not in done.output, done.output


@pytest.mark.parametrize("command", [EVAL, REGENERATE])
@pytest.mark.parametrize("value", [0, LEAST_TEMPERATURE, 1e30])
def test_all_others_are_computed_with(command: str, value: float, names: dict[str, Path]) -> None:
    (names["folder"] / "out").unlink(missing_ok=True)
    words = [*command.format(**names).split(), "--temperature", str(value)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
