"""Run with: pytest tests/local/test_observe_cli.py. status, logs, runs and explain as a person types them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflashctl.cli.main import run
from dflashctl.errors import Unreachable

SLEEP = "import time; print('step 118 loss 2.3', flush=True); time.sleep(600)"
CUDA_OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
HOSTILE = "\\x1b[2J\\x1b]0;owned\\x07[bold]not markup[/]"


@pytest.fixture
def cli(
    box: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> Callable[..., tuple[int, str, str]]:
    """`dflashctl …` against the box as host `here`; (exit code, stdout, stderr)."""
    hosts = tmp_path / "hosts.yaml"
    hosts.write_text(
        f"version: 1\ndefaults: {{host: here}}\n"
        f"hosts:\n  here: {{engine: local, python: {sys.executable}, state_dir: {box.state_dir}}}\n"
    )
    monkeypatch.setenv("DFLASHCTL_HOSTS", str(hosts))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg-state"))
    monkeypatch.delenv("COLUMNS", raising=False)

    def call(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run(list(words))
        out, err = capfd.readouterr()
        return code, out, err

    return call


def test_status_is_a_line_a_run(box: Any, cli: Callable[..., Any], until: Callable[..., Any]) -> None:
    live = box.python(
        SLEEP,
        "live",
        observe={"step_regex": r"step (?P<step>\d+)"},
        gpus=[{"index": n, "uuid": f"GPU-{n}"} for n in range(8)],
    )
    box.wait(box.python("import sys; sys.exit(3)", "bad"))
    until(lambda: "118" in box.log(live))
    code, out, _ = cli("status")
    title, header, *rows = out.splitlines()
    assert code == 0
    assert title.startswith("here · ") and title.endswith("1 run")
    assert header.split() == ["TAG", "STATE", "FOR", "STEP", "TOK/S", "GPUS", "EVIDENCE"]
    assert rows[0].split()[:2] == ["bad", "failed"]
    assert "exit code 3" in rows[0]
    assert rows[1].split()[:2] == ["live", "running"]
    assert " 118 " in rows[1] and " 0-7 " in rows[1]
    assert rows[2] == "next: dflashctl logs bad"


def test_check_exits_with_7_and_names_the_run(box: Any, cli: Callable[..., Any]) -> None:
    box.wait(box.python("pass", "good"))
    assert cli("status", "--check")[0] == 0
    box.wait(box.python("import sys; sys.exit(3)", "bad"))
    code, _, err = cli("status", "--check")
    assert code == 7
    assert err == "error: here: bad failed\nnext: dflashctl logs bad\n"
    code, out, err = cli("status", "bad", "--check")
    assert out.endswith("next: dflashctl logs bad\n") and err == "error: here: bad failed\n", "said once"
    assert cli("status", "bad", "--check", "--json")[2].endswith("next: dflashctl logs bad\n")
    assert cli("status", "good", "--check")[0] == 0
    box.wait(box.python("pass", "bad"))  # the same tag again, and well
    assert cli("status", "--check")[0] == 0


def test_who_named_a_host_is_told_commands_that_name_it(box: Any, cli: Callable[..., Any]) -> None:
    box.wait(box.python(f"print({CUDA_OOM!r}); raise SystemExit(1)", "bad"))
    told = "dflashctl explain -H here bad · dflashctl logs -H here bad"
    shown = cli("status", "-H", "here")[1]
    assert f"next: {told}" in shown and "(known: dflashctl explain -H here bad)" in shown
    assert told in cli("status", "--host", "here", "--check")[2]
    assert json.loads(cli("status", "-H", "here", "--json")[1])["runs"][0]["next"] == told.split(" · ")
    assert "next: dflashctl explain bad · dflashctl logs bad" in cli("status")[1]
    assert "next: dflashctl runs -H here" in cli("logs", "nobody", "-H", "here")[2]


def test_details_of_one_run(box: Any, cli: Callable[..., Any], until: Callable[..., Any]) -> None:
    live = box.python(SLEEP, "live")
    until(lambda: "118" in box.log(live))
    code, out, _ = cli("status", "live")
    assert code == 0
    for piece in (live["id"], "confidence low", "judged by its log and CPU time alone", live["log"], "1×S"):
        assert piece in out


def test_details_name_processes_threads_queues_and_the_last_line(
    box: Any, cli: Callable[..., Any], until: Callable[..., Any]
) -> None:
    import time

    second = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n"
    live = box.python(second + SLEEP)
    until(lambda: "118" in box.log(live))
    now = time.monotonic()
    beat = {"phase": "training", "mono": now, "step": 3, "queues": {"hidden": {"depth": 8, "size": 8}}}
    beat["threads"] = {"drafter-0": False, "\x1b[2Jx": False}
    Path(box.run(live).file("heartbeat.json")).write_text(json.dumps({"version": 1, **beat}))
    out = cli("status", "t")[1]
    assert ["queues", "hidden", "8/8"] in [line.split() for line in out.splitlines()]
    assert "drafter-0" in out and "\\x1b[2Jx" in out and "\x1b" not in out
    assert "last line: step 118 loss 2.3" in out
    process = next(line for line in out.splitlines() if "pid " in line)
    assert "S in " in process and "2 threads" in process and "s of CPU" in process
    (run,) = json.loads(cli("status", "t", "--json")[1])["runs"]
    assert run["dead_threads"] == ["\x1b[2Jx", "drafter-0"]
    assert run["queues"] == {"hidden": {"depth": 8, "size": 8}}
    assert sum(run["process_list"][0]["thread_names"].values()) == 2
    assert run["last_line"] == "step 118 loss 2.3"
    assert any(line.split()[:1] == ["heartbeat"] and "in phase training, which allows 60 s" in line
               for line in out.splitlines())  # fmt: skip
    assert run["heartbeat_deadline_s"] == 60.0 and run["step_age_s"] is None


def test_status_json_has_its_schema_and_raw_values(
    box: Any, cli: Callable[..., Any], until: Callable[..., Any]
) -> None:
    live = box.python(SLEEP, "live")
    until(lambda: "118" in box.log(live))
    code, out, _ = cli("status", "--json")
    document = json.loads(out)
    assert (code, document["schema"], document["host"], document["contact"]) == (
        0,
        "dflashctl.status/1",
        "here",
        "ok",
    )
    assert [(each["tag"], each["state"], each["processes"]) for each in document["runs"]] == [
        ("live", "running", 1)
    ]


def test_no_run_yet(cli: Callable[..., Any]) -> None:
    code, out, _ = cli("status")
    assert code == 0
    assert "nothing is running" in out
    assert cli("runs")[0] == 0
    code, _, err = cli("logs")
    assert code == 6
    assert "no run has been launched yet" in err


@pytest.mark.parametrize("verb", [["status"], ["logs"], ["explain"], ["runs", "show"]])
def test_an_unknown_tag_exits_with_6_and_one_message(
    box: Any, cli: Callable[..., Any], verb: list[str]
) -> None:
    box.wait(box.python("pass", "localtls"))
    code, out, err = cli(*verb, "localtsl")
    assert (code, out) == (6, "")
    assert "no run has the tag 'localtsl'; the newest tags are localtls" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("whole", [True, False])
def test_a_run_is_also_known_by_its_id_or_the_end_of_it(
    box: Any, cli: Callable[..., Any], whole: bool
) -> None:
    """The only name that one with a damaged record has left; an earlier run of a tag has no other, too."""
    first = box.python("print('the first')", "t")
    box.wait(first)
    box.wait(box.python("print('the second')", "t"))
    name = first["id"] if whole else first["id"][-6:]
    assert cli("logs", name)[1] == "the first\n" and cli("logs", "t")[1] == "the second\n"
    for verb in (["status"], ["explain"], ["runs", "show"]):
        assert cli(*verb, name)[0] == 0, verb
    record = Path(box.run(first).file("record.json"))
    record.write_text("{")
    assert "its record cannot be read" in cli("status", name)[1]
    assert cli("logs", name[:-1])[0] == 6, "less of an id is a tag that nobody has"


def test_an_unknown_host_exits_with_6(cli: Callable[..., Any]) -> None:
    assert cli("status", "-H", "nowhere")[0] == 6


def test_no_contact_is_unknown_with_what_was_last_seen(
    box: Any, cli: Callable[..., Any], until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    live = box.python(SLEEP, "live")
    until(lambda: "118" in box.log(live))
    assert cli("status")[0] == 0

    def gone(*words: Any, **more: Any) -> Any:
        raise Unreachable("no route to host", where="here")

    monkeypatch.setattr("dflashctl.remote.local.LocalEngine.run", gone)
    code, out, err = cli("status", "--check")
    assert code == 3
    assert "here · no contact · 1 run" in out
    row = out.splitlines()[2]
    assert row.split()[:2] == ["live", "unknown"]
    assert "no route to host; last seen running" in row
    assert "failed" not in out
    assert "no route to host" in err


def test_watch_without_a_terminal_says_what_changes_and_ends(
    box: Any, cli: Callable[..., Any], until_seen: str
) -> None:
    box.python(until_seen + "print('done')", "short")
    code, out, _ = cli("status", "short", "--watch", "--every", "0.2")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split()[1:3] in (["short", "starting"], ["short", "running"])
    assert any(line.split()[1:3] == ["short", "finished"] for line in lines)
    assert any(line.startswith("short  finished") and "confidence high" in line for line in lines)


def test_watch_with_check_tells_a_failure(box: Any, cli: Callable[..., Any], until_seen: str) -> None:
    box.python(until_seen + "raise SystemExit(3)", "short")
    assert cli("status", "short", "--watch", "--check", "--every", "0.2")[0] == 7


def test_the_log_is_shown_escaped_and_as_json_raw(box: Any, cli: Callable[..., Any]) -> None:
    box.wait(box.python(f"print('{HOSTILE}'); print('10%\\r20%\\r', end=''); print()", "evil"))
    code, out, _ = cli("logs", "evil")
    assert code == 0
    assert out == "\\x1b[2J\\x1b]0;owned\\x07[bold]not markup[/]\n20%\n"
    document = json.loads(cli("logs", "evil", "--json")[1])
    assert document["schema"] == "dflashctl.logs/1"
    assert document["lines"] == ["\x1b[2J\x1b]0;owned\x07[bold]not markup[/]", "20%"]


def test_the_last_lines_and_following(box: Any, cli: Callable[..., Any]) -> None:
    program = "import time\nfor n in range(8):\n    print('line', n, flush=True)\n    time.sleep(0.1)"
    box.python(program, "short")
    code, out, _ = cli("logs", "short", "-f", "-n", "0")
    assert (code, out.splitlines()) == (0, [f"line {n}" for n in range(8)])
    assert cli("logs", "short", "-n", "2")[1].splitlines() == ["line 6", "line 7"]
    assert cli("logs", "-n", "1")[1].splitlines() == ["line 7"]
    assert cli("logs", "short", "-f", "--json")[0] == 2


def test_explain_says_line_meaning_and_help(box: Any, cli: Callable[..., Any]) -> None:
    box.wait(box.python(f"print('step 1'); print({CUDA_OOM!r}); raise SystemExit(1)", "oom"))
    code, out, _ = cli("explain", "oom")
    assert code == 0
    assert "cuda-oom" in out and f"line 2: {CUDA_OOM}" in out and "dflashctl gpu" in out
    document = json.loads(cli("explain", "oom", "--json")[1])
    assert (document["schema"], document["matches"][0]["name"]) == ("dflashctl.explain/1", "cuda-oom")
    (run,) = json.loads(cli("status", "oom", "--json")[1])["runs"]
    assert run["known_lines"] == [{"name": "cuda-oom", "line": 2, "count": 1, "text": CUDA_OOM}]
    assert run["first_exception"] is None
    status = cli("status")[1]
    assert "log line 2" in status and "known: dflashctl explain oom" in status
    assert "next: dflashctl explain oom · dflashctl logs oom" in status


def test_explain_without_a_match_tells_what_the_run_says_of_its_end(
    box: Any, cli: Callable[..., Any]
) -> None:
    answer = box.python("print('no target'); raise SystemExit(2)", "refused")
    box.wait(answer)
    cause = {"version": 1, "error": "ConfigError: no target", "where": "target.py:29", "known": []}
    (Path(box.run(answer).path) / "root_cause.json").write_text(json.dumps(cause))
    out = cli("explain", "refused")[1]
    assert "no line of the log matches" in out and "root cause  ConfigError: no target" in out
    document = json.loads(cli("explain", "refused", "--json")[1])
    assert document["root_cause"].startswith("ConfigError: no target")


def test_explain_without_a_match_shows_the_first_exception(box: Any, cli: Callable[..., Any]) -> None:
    box.wait(box.python("raise KeyError('x')", "bad"))
    out = cli("explain", "bad")[1]
    assert "no line of the log matches" in out
    assert "KeyError: 'x'" in out
