"""`dflashctl recipe` and `dflashctl schema`, and what a broken file looks like on the command line.

Run: python -m pytest tests/unit/test_config_cli.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from dflashctl.cli.main import run

HOSTS = "version: 1\ndefaults: {recipe: warm}\nhosts:\n  lab: {engine: lab}\n"
RECIPE = """
version: 1
name: warm
launch: {command: [python, -m, prog], grace_s: 15}
variants:
  quick: {launch: {grace_s: 1}}
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "hosts.yaml").write_text(HOSTS)
    (tmp_path / "recipes" / "warm.yaml").write_text(RECIPE)
    monkeypatch.delenv("DFLASHCTL_HOSTS", raising=False)
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_recipes_are_listed_broken_ones_too(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "recipes" / "broken.yaml").write_text("version: 1\nnmae: broken\n")
    assert run(["recipe", "list", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["schema"] == "dflashctl.recipes/1"
    rows = {row["name"]: row for row in body["recipes"]}
    assert rows["warm"] == {
        "name": "warm",
        "file": str(project / "recipes" / "warm.yaml"),
        "default": True,
        "variants": ["quick"],
        "problem": None,
    }
    assert "nmae" in rows["broken"]["problem"] or "missing key" in rows["broken"]["problem"]
    assert run(["recipe", "list"]) == 0
    assert "warm (default)" in capsys.readouterr().out


def test_where_no_recipe_is_it_is_said_where_to_write_one(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "recipes" / "warm.yaml").unlink()
    assert run(["recipe", "list"]) == 0
    out, err = capsys.readouterr()
    assert out == "" and "write recipes/NAME.yaml" in err


def test_a_recipe_is_shown_as_a_tag_gets_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipe", "show", "--tag", "quick"]) == 0
    out, err = capsys.readouterr()
    assert yaml.safe_load(out)["launch"]["grace_s"] == 1
    assert "variant quick applied" in err
    assert run(["recipe", "show", "warm", "--tag", "other", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["variant"], body["recipe"]["launch"]["grace_s"]) == (None, 15)


@pytest.mark.parametrize("kind", ["hosts", "recipe"])
def test_a_schema_is_printed_as_json_alone(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema", kind]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == f"dflashctl {kind}"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["schema", "hots"], 2, "hots"),
        (["recipe", "show", "wram"], 6, "did you mean 'warm'?"),
        (["recipe", "show", "--tag", "a b"], 2, "the tag 'a b' is not allowed"),
    ],
)
def test_mistakes(words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == code
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_a_broken_hosts_file_is_one_message(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "hosts.yaml").write_text(HOSTS.replace("engine: lab", "enigne: lab"))
    assert run(["recipe", "list"]) == 2
    said = capsys.readouterr().err
    assert f"{project}/hosts.yaml:4:9: unknown key: hosts.lab.enigne\nnext: did you mean 'engine'?" in said
    assert "missing" not in said
    assert "Traceback" not in said


def test_an_empty_name_is_not_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    """`-H "$HOST"` with the variable unset must not act on whatever the default is."""
    assert run(["status", "--host", ""]) == 2
    assert run(["logs", "--host", ""]) == 6
    assert run(["recipe", "show", ""]) == 6
    assert run(["kill", ""]) == 2
    assert run(["rollback", ""]) == 2
    assert capsys.readouterr().out == ""
