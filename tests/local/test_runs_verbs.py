"""Run with: pytest tests/local/test_runs_verbs.py. `runs diff`, filters, notes and `prune`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from history_kit import ROOT, SUMMARY, kept_in, made

from dflashctl.agent.history import curate
from dflashctl.agent.records import runfolder
from dflashctl.cli.main import run
from dflashctl.history.listing import list_runs
from dflashctl.remote.local import LocalEngine


@pytest.fixture
def engine(tmp_path: Path) -> LocalEngine:
    return kept_in(tmp_path / "state")


RECIPE = """\
version: 1
name: threadwarm
launch: {command: [python, -m, trainer], gpus: {count: 8}}
train: {topology: threads, token_budget: 49152, policy: {tls: none}}
"""
ENVIRONMENT = {
    "version": 1, "python": "3.12.3", "executable": "/root/venv/bin/python", "driver": "580.65.06",
    "kernel": "6.8.12", "cpus": 96, "memory_bytes": 512 * 2**30,
    "packages": {"torch": "2.11.0", "triton": "3.6.0", "numpy": "2.3.1"},
}  # fmt: skip


def two_runs(engine: LocalEngine) -> None:
    """Recorded runs of one recipe: the second with another policy, torch, and release, and it worked."""
    for release, text in (("a" * 64, "old"), ("b" * 64, "new")):
        folder = Path(engine.host.code_root) / "releases" / release
        folder.mkdir(parents=True)
        digests = {"trainer/__init__.py": "0" * 64, "trainer/policy.py": text.encode().hex().ljust(64, "0")}
        files = [{"path": path, "sha256": each, "mode": "100644"} for path, each in digests.items()]
        (folder / ".dflash-release.json").write_text(json.dumps({"version": 1, "files": files}))
    common = {"recipe": "threadwarm", "host": "ct200", "env": {"PYTHONUNBUFFERED": "1"}}
    made(
        engine, 1, "bare", **common, release="a" * 64, compile_cache={"path": "/c", "state": "cold"},
        files={
            "recipe.yaml": RECIPE,
            "environment.json": ENVIRONMENT,
            "exit.json": {
                "version": 1, "cause": "exited", "code": 1, "wall_s": 31.0, "peak_rss_bytes": 124 * 2**30,
            },
            "root_cause.json": {"version": 1, "error": "AssertionError: tls", "where": "trees.py:326"},
        },
    )  # fmt: skip
    packages = ENVIRONMENT["packages"] | {"torch": "2.13.0", "einops": "0.8.1"}  # type: ignore[operator]
    made(
        engine, 2, "localtls", **common, release="b" * 64, variant="localtls",
        compile_cache={"path": "/c", "state": "warm"},
        files={
            "recipe.yaml": RECIPE.replace("tls: none", "tls: local"),
            "environment.json": ENVIRONMENT | {"packages": packages},
            "summary.json": SUMMARY,
        },
    )  # fmt: skip


GOLDEN = """\
bare 000001 and localtls 000002
code: 2 differences, 2 alike
                   bare 000001   localtls 000002
release            aaaaaaaaaaaa  bbbbbbbbbbbb
trainer/policy.py  6f6c64000000  6e6577000000
configuration: 2 differences, 9 alike
                  bare 000001  localtls 000002
variant           none         localtls
train.policy.tls  none         local
environment: 3 differences, 8 alike
               bare 000001  localtls 000002
compile cache  cold         warm
torch          2.11.0       2.13.0
einops         -            0.8.1
outcome: 8 differences, 2 alike
                   bare 000001                          localtls 000002
state              failed                               finished
how                exit code 1                          exit code 0
took               31 s                                 4m12s
peak memory        124 GiB                              not recorded
root cause         AssertionError: tls at trees.py:326  none
headline           none                                 acceptance length 1.02 -> 2.44
acceptance length  not measured                         2.440
lossless           not measured                         yes
"""


@pytest.fixture
def typed(
    engine: LocalEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> Callable[..., Any]:
    """`dflashctl runs …` against the engine's host; (exit code, stdout, stderr)."""
    hosts = tmp_path / "hosts.yaml"
    entry = {key: getattr(engine.host, key) for key in ("engine", "python", "state_dir", "code_root")}
    hosts.write_text(json.dumps({"version": 1, "hosts": {"here": entry}}))
    monkeypatch.setenv("DFLASHCTL_HOSTS", str(hosts))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("COLUMNS", raising=False)

    def call(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run(["runs", *words])
        return (code, *capfd.readouterr())

    return call


def test_two_runs_side_by_side(engine: LocalEngine, typed: Callable[..., Any]) -> None:
    two_runs(engine)
    code, out, _ = typed("diff", "bare", "localtls")
    assert code == 0
    assert "\n".join(line.rstrip() for line in out.splitlines()) + "\n" == GOLDEN
    document = json.loads(typed("diff", "bare", "localtls", "--json")[1])
    assert document["schema"] == "dflashctl.rundiff/1"
    assert [section["title"] for section in document["sections"]] == [
        "code", "configuration", "environment", "outcome",
    ]  # fmt: skip
    same = typed("diff", "bare", "bare")[1]
    assert same.count("no difference in") == 4


def test_a_diff_with_a_run_of_before_says_what_is_not_recorded(engine: LocalEngine, typed: Any) -> None:
    two_runs(engine)
    made(engine, 3, "old", files={"recipe.yaml": "{"}, release="c" * 64, env={"X": "\x1b[2J"})
    code, out, _ = typed("diff", "old", "bare")
    assert code == 0 and "\x1b" not in out
    for piece in ("not recorded", "gone with their release", "damaged", "\\x1b[2J"):
        assert piece in out


def test_the_code_of_a_run(engine: LocalEngine, typed: Callable[..., Any]) -> None:
    two_runs(engine)
    out = typed("show", "bare", "--code")[1]
    assert "a" * 64 in out and "6f6c64000000  trainer/policy.py" in out
    made(engine, 3, "old", release="c" * 64)
    assert "gone from the host" in typed("show", "old", "--code")[1]


def test_filters(engine: LocalEngine, typed: Callable[..., Any]) -> None:
    two_runs(engine)
    made(engine, 3, "demo")

    def tags(*words: str) -> list[str]:
        return [each["tag"] for each in json.loads(typed("list", "--json", *words)[1])["runs"]]

    assert tags() == ["demo", "localtls", "bare"]
    assert tags("--recipe", "threadwarm") == ["localtls", "bare"]
    assert tags("--state", "failed") == ["bare"]
    assert tags("--state", "finished", "-n", "1") == ["demo"]
    code, _, err = typed("list", "--state", "good")
    assert code == 2 and "no such state: good" in err


def test_notes_are_kept_and_shown(engine: LocalEngine, typed: Callable[..., Any]) -> None:
    two_runs(engine)
    assert typed("note", "bare", "graphs need \x1b[2J2.13")[0] == 0
    assert typed("note", "000001", "second [bold]thought[/]")[0] == 0
    listed = typed("list")[1]
    assert "second [bold]thought[/]" in listed
    shown = typed("show", "bare")[1]
    assert "graphs need \\x1b[2J2.13" in shown and "\x1b" not in shown
    assert shown.count("note (") == 2
    document = json.loads(typed("show", "bare", "--json")[1])
    noted = [note["text"] for note in document["notes"]]
    assert noted == ["graphs need \x1b[2J2.13", "second [bold]thought[/]"]
    assert typed("note", "bare", "  ")[0] == 2
    assert typed("note", "nobody", "x")[0] == 6


def test_notes_of_two_people_at_once_are_both_kept(engine: LocalEngine) -> None:
    from concurrent.futures import ThreadPoolExecutor

    folder = made(engine, 1, "x")
    request = {"state_dir": engine.host.state_dir, "tag": "x", "who": "ann"}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: curate.note_run({**request, "text": f"{n}" * 100}, None), range(40)))
    assert len(curate.notes(runfolder.RunFolder(str(folder)))) == 40


def test_two_people_on_two_laptops_have_one_history(engine: LocalEngine, tmp_path: Path) -> None:
    """Each with a home, caches and a hosts.yaml of their own, which name the machine differently."""
    two_runs(engine)
    made(engine, 3, "localtls")

    def laptop(who: str, *words: str) -> subprocess.Popen[str]:
        home = tmp_path / who
        home.mkdir(exist_ok=True)
        entry = {key: getattr(engine.host, key) for key in ("engine", "python", "state_dir", "code_root")}
        (home / "hosts.yaml").write_text(json.dumps({"version": 1, "hosts": {f"box-of-{who}": entry}}))
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), "USER": who, "LOGNAME": who}
        return subprocess.Popen(
            [sys.executable, "-m", "dflashctl", "runs", *words],
            cwd=home,
            env=environment | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def said(process: subprocess.Popen[str]) -> dict[str, Any]:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        return dict(json.loads(out))

    both = [laptop(who, "note", "bare", f"seen by {who}", "--json") for who in ("ann", "ben")]
    assert {said(each)["host"] for each in both} == {"box-of-ann", "box-of-ben"}
    notes = said(laptop("ann", "show", "bare", "--json"))["notes"]
    assert sorted(each["text"] for each in notes) == ["seen by ann", "seen by ben"]
    assert {each["by"].partition("@")[0] for each in notes} == {"ann", "ben"}
    both = [laptop(who, "prune", "--keep", "1", "--yes", "--json") for who in ("ann", "ben")]
    answers = [said(each) for each in both]
    pruned = [each["id"] for answer in answers for each in answer["pruned"]]
    assert len(set(pruned)) == 1, "the older run of localtls; the newest of each tag stays"
    for who in ("ann", "ben"):
        assert [each["tag"] for each in said(laptop(who, "--json"))["runs"]] == ["localtls", "bare"]


def test_prune_keeps_the_newest_of_each_tag_and_asks(
    engine: LocalEngine, typed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        folder = made(engine, number, "even" if number % 2 == 0 else "odd")
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "w").write_bytes(b"x" * 1000)
    assert typed("prune", "--keep", "1", "--json")[0] == 2
    code, out, _ = typed("prune", "--keep", "1", "--dry-run")
    assert code == 0 and "would remove 4 runs" in out
    assert list_runs(engine, limit=9).total == 6
    code, out, _ = typed("prune", "--keep", "1", "--yes")
    assert "removed 4 runs" in out and "2 runs kept" in out
    assert [each.facts.tag for each in list_runs(engine, limit=9).entries] == ["odd", "even"]
    assert "removed 0 runs" in typed("prune", "--keep", "1", "--yes")[1]


def test_prune_by_age_and_never_a_live_run(box: Any, until: Callable[..., Any]) -> None:
    live = box.python("import time; print('up', flush=True); time.sleep(600)", "t")
    until(lambda: "up" in box.log(live))
    for _ in range(3):
        box.wait(box.python("pass", "u"))
    request = {"state_dir": box.state_dir, "keep": 1}
    assert curate.prune_runs({**request, "older_than_s": 3600}, None)["pruned"] == []
    pruned = curate.prune_runs(request, None)["pruned"]
    assert {each["tag"] for each in pruned} == {"u"} and len(pruned) == 2
    box.python("import time; time.sleep(600)", "v")
    left = {run.id for run in runfolder.list_runs(box.state_dir)}
    assert live["id"] in left and len(left) == 3
    assert box.family(live)


def test_prune_takes_a_log_only_when_it_is_that_runs_alone(box: Any, engine: LocalEngine) -> None:
    first, second = box.python("print(1)", "t"), None
    box.wait(first)
    second = box.python("print(2)", "t")
    box.wait(second)
    aside = Path(f"{first['log']}.{first['id']}")
    assert aside.read_text() == "1\n"
    (pruned,) = curate.prune_runs({"state_dir": box.state_dir, "keep": 1}, None)["pruned"]
    assert pruned["log"] == str(aside) and not aside.exists()
    assert Path(second["log"]).read_text() == "2\n"


def test_an_interrupted_prune_leaves_no_half_run(engine: LocalEngine) -> None:
    folder = made(engine, 1, "x")
    made(engine, 2, "x")
    folder.rename(folder.with_name(curate.DOOMED + folder.name))
    assert list_runs(engine, limit=9).total == 1
    curate.prune_runs({"state_dir": engine.host.state_dir, "keep": 1}, None)
    assert len(list(folder.parent.iterdir())) == 1


def test_a_run_records_what_it_runs_on(box: Any, until: Callable[..., Any]) -> None:
    answer = box.python("import time; time.sleep(600)", "t")
    until(lambda: box.run(answer).has("environment.json"))
    written = box.run(answer).read("environment.json").value
    assert written["packages"]["pytest"] == pytest.__version__
    assert written["python"] == sys.version.split()[0]
