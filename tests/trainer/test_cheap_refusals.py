"""What files show already is refused before torch is imported, which takes seconds.

Run: python -m pytest tests/trainer/test_cheap_refusals.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.model.drafter_config import DrafterConfig

DEMO = Path(__file__).parents[2] / "recipes" / "demo" / "target"
OTHER_TARGET = DrafterConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=99,
    block_size=4,
    num_target_layers=6,
    taps=(0, 2),
    mask_token_id=1,
    layer_types=("full_attention",),
)
CONVERSATION = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
EVERY_CASE = """
import contextlib, io, json, sys
from trainer.cli import app
found = {}
for name, arguments in json.loads(sys.argv[1]).items():
    said = io.StringIO()
    code = 0
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            app(arguments)
        except SystemExit as end:
            code = end.code
    found[name] = (code, said.getvalue(), "torch" in sys.modules)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("refused")
    for name in ("other", "weightless"):
        (made / name).mkdir()
    (made / "other" / "config.json").write_text(json.dumps(OTHER_TARGET.to_json()))
    facts = json.loads((DEMO / "config.json").read_text())
    fitting = {"hidden_size": facts["hidden_size"], "vocab_size": facts["vocab_size"]}
    told = OTHER_TARGET.to_json() | fitting | {"num_target_layers": facts["num_hidden_layers"]}
    (made / "weightless" / "config.json").write_text(json.dumps(told))
    (made / "set.jsonl").write_text("{}\n")
    (made / "there").mkdir()
    (made / "rows.jsonl").write_text(CONVERSATION)
    (made / "broken.jinja").write_text("{% if %}")
    (made / "arun" / "checkpoints" / "best").mkdir(parents=True)
    recipe = "train:\n  target: {path: %s}\n  drafter: {mask_token_id: 1}\n"
    stored = "  data: {source: store, store: /nowhere, continuations: false, states: online}\n"
    (made / "no_target.yaml").write_text(recipe % "/nowhere")
    (made / "no_store.yaml").write_text(recipe % DEMO + stored)
    return made


@pytest.fixture(scope="module")
def refused(folder: Path) -> dict[str, tuple[int, str, bool]]:
    """What each command line answered: exit code, text, and whether torch was in by then."""
    demo, out, made_in = str(DEMO), str(folder / "out"), folder / "there"
    other, weightless, there = (str(folder / name) for name in ("other", "weightless", "there"))
    rows, broken = str(folder / "rows.jsonl"), str(folder / "broken.jinja")
    answers = ["regenerate", rows, "--out", out, "--target"]
    cases = {
        "eval: no folder": ["eval", "/nowhere", "--target", demo],
        "eval: no checkpoint": ["eval", demo, "--target", demo],
        "eval: no target": ["eval", other, "--target", "/nowhere"],
        "eval: another target": ["eval", other, "--target", demo],
        "eval: no weights": ["eval", weightless, "--target", demo],
        "eval: bad date": ["eval", other, "--target", demo, "--set", rows, "--date", "today"],
        "eval: unknown dtype": ["eval", other, "--target", demo, "--dtype", "float8"],
        "export: no folder": ["export", "/nowhere", out],
        "export: is there": ["export", weightless, there],
        "export: no weights": ["export", weightless, out],
        "export: no target": ["export", weightless, out, "--target", "/nowhere"],
        "export: another target": ["export", other, out, "--target", demo],
        "export: unknown format": ["export", other, out, "--format", "gguf"],
        "import: no folder": ["import", "/nowhere", out],
        "import: no drafter": ["import", demo, out],
        "import: is there": ["import", weightless, there],
        "import: no weights": ["import", weightless, out],
        "data show: no file": ["data", "show", "/nowhere", "--target", demo],
        "data show: no target": ["data", "show", rows],
        "regenerate: no file": ["regenerate", "/nowhere", "--out", out, "--target", demo],
        "regenerate: no template": [*answers, demo],
        "regenerate: bad template": [*answers, demo, "--chat-template", broken],
        "eval: a run's folder": ["eval", str(folder / "arun"), "--target", demo],
        "train: no target": ["train", str(folder / "no_target.yaml")],
        "train: no store": ["train", str(folder / "no_store.yaml")],
        "train: nothing to resume": ["train", str(DEMO.parents[1] / "demo.yaml"), "--resume", "/nowhere"],
        "prepare: bad template": ["prepare", rows, "--target", demo, "--out", out, "--chat-template", broken],
    }
    env = {key: value for key, value in os.environ.items() if not key.startswith("DFLASH")}
    done = subprocess.run(
        [sys.executable, "-c", EVERY_CASE, json.dumps(cases)],
        cwd=made_in,
        env=env | {"PYTHONPATH": str(DEMO.parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not (made_in / "runs").exists()
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[int, str, bool]] = json.loads(done.stdout)
    assert list(found) == list(cases)
    return found


def test_every_refusal_comes_without_torch(refused: dict[str, tuple[int, str, bool]]) -> None:
    late = [name for name, (_, _, torch) in refused.items() if torch]
    assert not late
    assert {name: code for name, (code, _, _) in refused.items() if code != 2} == {}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("eval: no folder", "/nowhere/config.json: no drafter there"),
        (
            "eval: no checkpoint",
            "no block_size, so not the configuration of a drafter\nnext: name a drafter's folder",
        ),
        ("eval: no target", "no target (config.json) at /nowhere"),
        ("eval: another target", "this drafter was made for another target"),
        ("eval: no weights", "cannot read the weights"),
        ("eval: bad date", "'today' is no date"),
        ("export: is there", "there: is there already"),
        ("eval: a run's folder", "arun/checkpoints/best\n"),
        ("train: no target", "no target (config.json) at /nowhere"),
        ("train: no store", "/nowhere: no prepared store there"),
        ("export: no weights", "cannot read the weights"),
        ("export: no target", "no target there"),
        ("import: no drafter", "architectures is"),
        ("import: no weights", "no weights: neither model.safetensors nor its index"),
        ("data show: no target", "--target: needed for a file that is not prepared"),
        ("regenerate: no file", "/nowhere: no such file"),
        ("regenerate: bad template", "the chat template is not valid"),
        ("train: nothing to resume", "/nowhere: no such folder to resume from"),
        ("prepare: bad template", "the chat template is not valid"),
    ],
)
def test_each_says_what_is_wrong(
    refused: dict[str, tuple[int, str, bool]], name: str, text: str, folder: Path
) -> None:
    assert text in refused[name][1]
    assert not list(folder.glob("out*"))
