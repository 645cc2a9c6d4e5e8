"""The frame of the command line: help, completion, streams that are closed, full or gone.

Run: python -m pytest tests/unit/test_cli_frame.py
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from frame_kit import ROOT, command

from dflashctl import __version__
from dflashctl.cli import main as frame

pytestmark = pytest.mark.usefixtures("log")


def test_help_lists_every_verb_and_loads_none() -> None:
    script = (
        "import sys\n"
        "from dflashctl.cli.main import run\n"
        "assert run(['--help']) == 0\n"
        "verbs = [name for name in sys.modules if name.startswith('dflashctl.cli.')]\n"
        "assert verbs == ['dflashctl.cli.main'], verbs\n"
        "heavy = {'rich', 'pydantic', 'yaml', 'fabric', 'paramiko', 'torch', 'dflashctl.remote'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    for name, line in frame.VERBS.items():
        assert re.search(rf"^  {name}\s+{re.escape(line)}$", done.stdout, re.MULTILINE), name


@pytest.mark.alone
def test_help_answers_within_300_ms() -> None:
    """The median of several starts: a person waits for this one."""
    times = []
    for _ in range(9):
        started = time.monotonic()
        assert command("--help").returncode == 0
        times.append(time.monotonic() - started)
    median = statistics.median(times)
    print(f"--help: median {median * 1000:.0f} ms, best {min(times) * 1000:.0f} ms")
    assert median < 0.3


def test_help_shows_the_daily_verbs_first_and_each_verb_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.run(["--help"]) == 0
    shown = capsys.readouterr().out
    daily, others = shown.split("Every day:\n")[1].split("\nThe others:\n")
    listed = [[line.split()[0] for line in part.splitlines() if line] for part in (daily, others)]
    assert listed[0] == ["deploy", "launch", "status", "kill", "logs", "runs", "gpu"]
    assert listed[1] == list(frame.OTHERS) and not set(listed[0]) & set(listed[1])


@pytest.mark.parametrize("name", sorted(frame.VERBS))
def test_every_verb_has_a_help_of_its_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.run([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"dflashctl {name}" in out
    assert "install-completion" not in out


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.run(["--version"]) == 0
    assert capsys.readouterr().out == f"dflashctl {__version__}\n"


@pytest.mark.parametrize("words", [["stauts"], ["status", "--nope"], ["--nope"], ["host", "trust"]])
def test_wrong_usage_is_exit_code_2_without_a_traceback(
    words: list[str], capsys: pytest.CaptureFixture[str], log: Path
) -> None:
    assert frame.run(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(r"error: dflashctl.*\nnext: .*dflashctl.* -h\n", shown.err), shown.err
    assert not log.exists()


def test_a_mistyped_verb_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    frame.run(["stauts"])
    assert "'status'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["ps"], "dflashctl status"),
        (["stop", "a"], "dflashctl kill a"),
        (["launch", "lr 3"], "dflashctl launch --tag 'lr 3'"),
        (["runs", "localtls"], "dflashctl runs show localtls"),
        (["deploy", "demo"], "dflashctl deploy -r demo"),
        (["-H", "ct200", "status"], "options stand behind the verb: dflashctl status -H ct200"),
        (["runs", "note", "a"], None),
        (["launch", "--tga", "x"], None),
        (["kill", "--pid", "1"], None),
    ],
)
def test_what_was_probably_meant_is_there_to_type(
    words: list[str], command: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert frame.run(words) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: dflashctl")
    offered = hint.removeprefix("next: ").split(" · ")
    assert offered[-1].endswith(" -h") and offered[:-1] == ([command] if command else [])


def test_usage_errors_are_one_line_and_documents(capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.run(["schema"]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 2 and "hosts, recipe, doctor" in shown.err
    assert frame.run(["launch", "a", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert (found["where"], found["next"]) == ("dflashctl launch", "dflashctl launch -h")


@pytest.mark.parametrize("group", ["lab", "lock", "runs", "host", "recipe"])
def test_no_line_of_help_is_cut_off(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.run([group, "--help"]) == 0
    assert "..." not in capsys.readouterr().out.split("Commands:")[1]


def test_a_group_without_a_word_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["lab"], ["host"]):
        assert frame.run(words) == 2
        shown = capsys.readouterr().err
        assert shown.startswith("Usage: dflashctl") and "error" not in shown


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A line of sh in which $D is the program."""
    program = {"D": f"{sys.executable} -m dflashctl", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["sh", "-c", line],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **program, **environment},
    )


def test_closed_streams_are_no_error() -> None:
    for line in ("$D recipe list >&-", "$D recipe list 2>&-", "$D recipe list <&- >&- 2>&-"):
        done = shell(line)
        assert (done.returncode, done.stderr) == (0, ""), line


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_said() -> None:
    done = shell("$D --help >/dev/full")
    assert (done.returncode, done.stderr) == (2, "error: cannot write the output: No space left on device\n")
    assert shell("$D nonsense 2>/dev/full").returncode == 2


def test_a_working_folder_that_is_gone_is_said(tmp_path: Path) -> None:
    done = shell(f"mkdir {tmp_path}/gone && cd {tmp_path}/gone && rmdir {tmp_path}/gone && $D recipe list")
    assert done.returncode == 2
    assert done.stderr == "error: the working folder is not there any more\nnext: cd to one that is\n"


def test_a_terminal_without_utf_8_gets_escapes() -> None:
    script = (
        "import sys; from dflashctl.cli import main as frame\n"
        "frame.run = lambda words: print('lab \\u00b7 demo') or 0\n"
        "frame.main([])\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert said.stdout == "lab \\xb7 demo\n"


def test_a_reader_that_goes_away_is_no_error() -> None:
    script = (
        "import sys, types, typer\n"
        "module = types.ModuleType('dflashctl.cli.status')\n"
        "module.app = typer.Typer()\n"
        "@module.app.command()\n"
        "def talk():\n"
        "    for _ in range(200000): print('a line of text')\n"
        "sys.modules['dflashctl.cli.status'] = module\n"
        "from dflashctl.cli.main import main\n"
        "main(['status'])\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(20) == 0
        assert process.stderr.read() == ""


def test_the_program_is_also_a_module() -> None:
    done = command("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"dflashctl {__version__}\n", "")


def test_completion_knows_verbs_and_their_options() -> None:
    def complete(line: str) -> str:
        words = {
            "_DFLASHCTL_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(line.count(" ")),
        }
        return command(env={**os.environ, **words}).stdout

    assert "status" in complete("dflashctl sta")
    assert "--replace" in complete("dflashctl host trust --re")


def test_completion_knows_hosts_recipes_variants_and_tags(tmp_path: Path) -> None:
    """From files of this machine alone; a broken one offers nothing, and says nothing."""
    from dflashctl.config import load_hosts
    from dflashctl.runs import lastseen

    (tmp_path / "hosts.yaml").write_text(
        "version: 1\ndefaults: {host: near, recipe: warm}\n"
        "hosts: {near: {engine: local}, ct200: {engine: local}, ct201: {engine: local}}\n"
    )
    (tmp_path / "recipes").mkdir()
    for name in ("warm", "other"):
        (tmp_path / "recipes" / f"{name}.yaml").write_text(
            f"version: 1\nname: {name}\nlaunch: {{command: [x]}}\n"
            f"variants: {{{name}tls: {{observe: {{}}}}}}\n"
        )
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_STATE_HOME": str(tmp_path / "s")}
    env.pop("DFLASHCTL_HOSTS", None)
    for host, tag in (("near", "localtls"), ("ct200", "bare")):
        with pytest.MonkeyPatch.context() as patch:
            for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
                patch.setenv(name, env[name])
            seen = lastseen.Seen("20260101T000000000-aaaaaa", tag, "running", 1, (), 1.0)
            lastseen.store(load_hosts(tmp_path).host(host), [seen])

    def offered(line: str) -> list[str]:
        words = {
            "_DFLASHCTL_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(line.count(" ")),
        }
        path = {"PYTHONPATH": str(ROOT)}
        done = command(env={**env, **words, **path}, cwd=tmp_path)
        assert done.stderr == "", (line, done.stderr)
        return done.stdout.split()

    assert offered("dflashctl status -H ") == ["ct200", "ct201", "near"]
    assert offered("dflashctl status -H near,ct2") == ["near,ct200", "near,ct201"]
    assert offered("dflashctl deploy -r ") == ["other", "warm"]
    assert offered("dflashctl launch --tag ") == ["warmtls"]
    assert offered("dflashctl launch -r other --tag ") == ["othertls"]
    for verb in ("kill", "logs", "status", "stacks", "explain", "pull", "report", "notify", "runs show"):
        assert offered(f"dflashctl {verb} ") == ["localtls"], verb
    assert offered("dflashctl kill -H ct200 b") == ["bare"]
    (tmp_path / "hosts.yaml").write_text("version: [")
    assert offered("dflashctl status -H ") == [] == offered("dflashctl kill ")


def test_verbose_shows_steps_escaped_on_stderr(verb: Any, capsys: pytest.CaptureFixture[str]) -> None:
    import logging

    from dflashctl.cli.common import VerboseOption

    def step(verbose: VerboseOption = False) -> None:
        logging.getLogger("dflashctl.remote").debug("step \x1b[2J")

    step.__annotations__["verbose"] = VerboseOption
    verb(step)
    try:
        assert frame.run(["status"]) == 0
        assert capsys.readouterr().err == ""
        assert frame.run(["status", "-v"]) == 0
        err = capsys.readouterr().err
        assert "step \\x1b[2J" in err
    finally:
        logger = logging.getLogger("dflashctl")
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.NOTSET)


def test_windows_is_told_where_to_run_it() -> None:
    """The first import would end with `No module named 'fcntl'`, a bug in dflashctl."""
    code = "import os, dflashctl.start as s; os.name = 'nt'; s.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"error: dflashctl does not run on Windows") and b"WSL" in done.stderr
