"""Run with: pytest tests/local/test_report.py. A run as one document, whatever its files hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from history_kit import SUMMARY, kept_in, made

from dflashctl.cli.main import run
from dflashctl.history.listing import add_note, show_run
from dflashctl.remote.local import LocalEngine
from dflashctl.views.report import document, markdown

ENVIRONMENT = {
    "version": 1,
    "python": "3.12.3",
    "packages": {"torch": "2.11.0", "six": "1"},
    "driver": "580.1",
}


@pytest.fixture
def engine(tmp_path: Path) -> LocalEngine:
    return kept_in(tmp_path / "state")


def test_a_finished_run_is_told_whole(engine: LocalEngine) -> None:
    files = {
        "summary.json": SUMMARY,
        "environment.json": ENVIRONMENT,
        "recipe.yaml": "name: demo\nnote: '```'\n",
    }
    folder = made(
        engine, 3, "localtls", files=files, variant="localtls", reason="lower rate",
        command=["sh", "-c", "sleep 1; exit 3"],
    )  # fmt: skip
    for step in (100, 200):
        (folder / "checkpoints" / f"step-{step}").mkdir(parents=True)
        (folder / "checkpoints" / f"step-{step}" / "w").write_bytes(b"x" * 2048)
    (folder / "checkpoints" / ".step-300.tmp").mkdir()
    (folder / "checkpoints" / "best").symlink_to("step-100")
    add_note(engine, "localtls", "it was | the *rate*", "ann@laptop")
    text = markdown(show_run(engine, "localtls"))
    assert text.startswith("# localtls: finished\n\n- exit code 0\n- ran 4m12s\n")
    for told in (
        "## Figures\n\n**acceptance length 1.02 -\\> 2.44**\n",
        "| recipe | demo, variant localtls |",
        f"| release | {'7f3a91c2' * 8} |",
        "| commit | git 1c9e4d0aa, with changes |",
        "| launched | 2027-01-15 08:00 UTC by ann@laptop |",
        "| took | 4m12s |",
        "| command | sh -c 'sleep 1; exit 3' |",
        "| log | /nowhere/train_localtls.log |",
        "| GPUs | 0 (GPU-0) |",
        "- it was \\| the \\*rate\\* (ann@laptop, ",
        "| figure | before | after |\n|---|---|---|\n| greedy | 1.02 | 2.44 |\n| T=0.7 | 1.01 |  |",
        "Lossless: yes.",
        "- step-100, 2.0 kB (best by real decoding)\n- step-200, 2.0 kB\n",
        "| python | 3.12.3 |\n| driver | 580.1 |\n| torch | 2.11.0 |\n",
        "````yaml\nname: demo\nnote: '```'\n````\n",
    ):
        assert told in text, told
    assert "\x1b" not in text and "step-300" not in text and "| six |" not in text
    told = document(show_run(engine, "localtls"))
    assert told["checkpoints"]["best"] == "step-100" and told["environment"]["packages"]["six"] == "1"
    assert told["recipe_text"].startswith("name: demo")


def test_a_failed_run_says_why_and_what_is_unknown_is_left_out(engine: LocalEngine) -> None:
    cause = {
        "version": 1, "error": "ValueError: NaN", "where": "step.py:8", "traceback": "Traceback\n  x\n",
        "known": [{"name": "nan", "meaning": "Numbers <broke>.", "do": ["lower the rate"]}],
    }  # fmt: skip
    files = {"exit.json": {"version": 1, "cause": "exited", "code": 1}, "root_cause.json": cause}
    made(engine, 1, "bare", files=files)
    text = markdown(show_run(engine, "bare"))
    assert "# bare: failed\n" in text
    assert (
        "- ValueError: NaN at step.py:8\n- known as nan: Numbers \\<broke\\>.\n  - lower the rate\n" in text
    )
    assert "```\nTraceback\n  x\n```" in text
    for absent in ("## Learnt", "## Figures", "## Checkpoints", "## Environment", "## Recipe", "| took |"):
        assert absent not in text


def test_hostile_files_stay_text(engine: LocalEngine) -> None:
    summary = {
        "version": 1, "headline": "# a\n# b", "lossless": "maybe", "notes": [["x"], None, "<script>"],
        "table": {"columns": ["a|b"], "rows": [["1|2", "3"], "no list"]},
    }  # fmt: skip
    made(
        engine,
        1,
        "bad",
        files={"summary.json": summary, "environment.json": "{", "recipe.yaml": "x\x1b[2J\n"},
    )
    text = markdown(show_run(engine, "bad"))
    assert "**\\# a\\\\n\\# b**" in text and "| a\\|b |\n|---|\n| 1\\|2 |\n" in text
    assert "<script>" not in text and "\x1b" not in text and "x\\x1b[2J" in text


def test_as_a_person_types_it(
    engine: LocalEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    made(engine, 1, "short")
    entry = engine.host.model_dump(include={"engine", "state_dir"})
    hosts = tmp_path / "hosts.yaml"
    hosts.write_text(json.dumps({"version": 1, "defaults": {"host": "here"}, "hosts": {"here": entry}}))
    monkeypatch.setenv("DFLASHCTL_HOSTS", str(hosts))

    def cli(*words: str) -> tuple[int, str, str]:
        code = run(list(words))
        out, err = capfd.readouterr()
        return code, out, err

    code, out, err = cli("report", "short")
    assert (code, err) == (0, "") and out.startswith("# short: finished\n")
    code, out, _ = cli("report", "short", "--json")
    told = json.loads(out)
    assert (code, told["schema"], told["checkpoints"]) == (
        0,
        "dflashctl.report/1",
        {"folders": [], "best": None},
    )
    code, out, err = cli("report", "nobody")
    assert (code, out) == (6, "") and "nobody" in err
