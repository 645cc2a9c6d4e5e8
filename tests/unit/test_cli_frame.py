"""The frame of the command line: help, errors and exit codes, the log of errors, a reader that goes away.

Run: python -m pytest tests/unit/test_cli_frame.py
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from dflashctl import __version__, errors
from dflashctl.cli import errorlog
from dflashctl.cli import main as frame
from dflashctl.errors import DflashError, ExitCode
from dflashctl.render.json import emit

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "logs" / "errors.log"
    monkeypatch.setenv("DFLASHCTL_LOG", str(path))
    return path


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Make `dflashctl status` be the given function."""

    def install(function: Callable[..., Any]) -> None:
        module = types.ModuleType("dflashctl.cli.status")
        module.app = typer.Typer()  # type: ignore[attr-defined]
        module.app.command()(function)
        monkeypatch.setitem(sys.modules, "dflashctl.cli.status", module)

    return install


def command(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The real program."""
    return subprocess.run(
        [sys.executable, "-m", "dflashctl", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
        **options,
    )


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
    assert "Usage: dflashctl" in shown.err and "Traceback" not in shown.err
    assert not log.exists()


def test_a_mistyped_verb_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    frame.run(["stauts"])
    assert "'status'" in capsys.readouterr().err


KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, DflashError)]


@pytest.mark.parametrize("kind", KINDS)
def test_errors_end_with_their_exit_code_and_say_what_where_next(
    kind: type[DflashError], verb: Any, capsys: pytest.CaptureFixture[str], log: Path
) -> None:
    def fail() -> None:
        raise kind("what happened", where="ct200", next="dflashctl gpu")

    verb(fail)
    assert frame.run(["status"]) == int(kind.exit_code)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "error: ct200: what happened\nnext: dflashctl gpu\n"
    assert "Traceback" in log.read_text()


def test_every_exit_code_but_three_has_an_error_class() -> None:
    covered = {kind.exit_code for kind in KINDS} | {ExitCode.OK, ExitCode.BUG, ExitCode.INTERRUPTED}
    assert covered == set(ExitCode)


def test_hostile_text_in_an_error_is_made_visible(verb: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise DflashError("\x1b]0;owned\x07\x1b[2J[red]", next="a\rb")

    verb(fail)
    frame.run(["status"])
    err = capsys.readouterr().err
    assert "\x1b" not in err and "\r" not in err and "\x07" not in err
    assert "\\x1b[2J[red]" in err


def test_a_bug_is_one_line_with_the_log_s_name(
    verb: Any, capsys: pytest.CaptureFixture[str], log: Path
) -> None:
    def fail() -> None:
        raise ValueError("first line\nsecond line")

    verb(fail)
    assert frame.run(["status"]) == 1
    err = capsys.readouterr().err
    assert err == f"a bug in dflashctl: ValueError: first line (full traceback in {log})\n"
    assert "second line" in log.read_text() and "Traceback" in log.read_text()


def test_the_log_is_private_and_appended_to(verb: Any, log: Path) -> None:
    def fail() -> None:
        raise ValueError("once more")

    verb(fail)
    frame.run(["status"])
    frame.run(["status"])
    assert log.read_text().count("ValueError: once more") == 2
    assert log.stat().st_mode & 0o777 == 0o600
    assert log.parent.stat().st_mode & 0o777 == 0o700


def test_a_full_log_is_put_aside(verb: Any, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ValueError("x")

    verb(fail)
    monkeypatch.setattr(errorlog, "MAX_BYTES", 10)
    frame.run(["status"])
    frame.run(["status"])
    assert log.with_name("errors.log.1").exists()


def test_a_log_that_cannot_be_written_is_told_and_does_not_hide_the_error(
    verb: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DFLASHCTL_LOG", str(tmp_path / "file" / "log"))

    def fail() -> None:
        raise ValueError("the cause")

    verb(fail)
    assert frame.run(["status"]) == 1
    assert "the cause (no traceback kept" in capsys.readouterr().err


def test_secrets_do_not_reach_the_log(verb: Any, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnop")
    monkeypatch.setenv("DFLASHCTL_SSH_PASSPHRASE", "correct horse")
    monkeypatch.setenv("MY_API_KEY", "0123456789")

    def fail() -> None:
        raise ValueError(
            "hf_abcdefghijklmnop, correct horse, 0123456789, password=hunter22, --token: 'tuvwxyz1'"
        )

    verb(fail)
    frame.run(["status"])
    text = log.read_text()
    for secret in ("abcdefghijklmnop", "correct horse", "0123456789", "hunter22", "tuvwxyz1"):
        assert secret not in text, secret


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nothing secret here", "nothing secret here"),
        ("HF_TOKEN=abcdefgh rest", "HF_TOKEN=*** rest"),
        ('"api_key": "abcdefgh"', '"api_key": "***"'),
        ("ghp_0123456789abcdef", "ghp_***"),
        ("step 12 tokens/s 49152", "step 12 tokens/s 49152"),
        ("tokens: 12", "tokens: 12"),
        ("value abc", "value abc"),
    ],
)
def test_masking(text: str, expected: str) -> None:
    assert errorlog.mask(text, {"X_TOKEN": "abc"}) == expected


def test_ctrl_c_says_interrupted(verb: Any, capsys: pytest.CaptureFixture[str], log: Path) -> None:
    def wait() -> None:
        raise KeyboardInterrupt

    verb(wait)
    assert frame.run(["status"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert not log.exists()


def test_ctrl_c_in_the_real_program(tmp_path: Path) -> None:
    script = (
        "import sys, time, types, typer\n"
        "module = types.ModuleType('dflashctl.cli.status')\n"
        "module.app = typer.Typer()\n"
        "@module.app.command()\n"
        "def wait():\n"
        "    print('waiting', flush=True)\n"
        "    time.sleep(30)\n"
        "sys.modules['dflashctl.cli.status'] = module\n"
        "from dflashctl.cli.main import main\n"
        "main(['status'])\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert process.stderr.read() == "interrupted\n"


def test_ctrl_c_while_the_program_is_still_being_imported(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    done = command("status", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_ctrl_c_that_python_wrapped_into_another_error(
    verb: Any, capsys: pytest.CaptureFixture[str], log: Path
) -> None:
    def build_a_class() -> None:
        raise RuntimeError("Error calling __set_name__") from KeyboardInterrupt()

    verb(build_a_class)
    assert frame.run(["status"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert not log.exists()


def test_ctrl_c_in_a_callback_is_not_lost() -> None:
    script = (
        "import sys, time, types, typer, weakref\n"
        "module = types.ModuleType('dflashctl.cli.status')\n"
        "module.app = typer.Typer()\n"
        "class Thing: ...\n"
        "def interrupt(_):\n"
        "    raise KeyboardInterrupt\n"
        "@module.app.command()\n"
        "def wait():\n"
        "    thing = Thing()\n"
        "    reference = weakref.ref(thing, interrupt)\n"
        "    del thing\n"
        "    for _ in range(1000): time.sleep(0.01)\n"
        "sys.modules['dflashctl.cli.status'] = module\n"
        "from dflashctl.start import main\n"
        "sys.argv[1:] = ['status']\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_ctrl_c_that_something_made_another_error_of_is_still_ctrl_c() -> None:
    """As pydantic does while it builds a model: its error does not carry the cause."""
    script = (
        "import os, signal, sys, types, typer\n"
        "module = types.ModuleType('dflashctl.cli.status')\n"
        "module.app = typer.Typer()\n"
        "@module.app.command()\n"
        "def wait():\n"
        "    try:\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "    except KeyboardInterrupt:\n"
        "        raise ValueError('Error building the serializer') from None\n"
        "sys.modules['dflashctl.cli.status'] = module\n"
        "from dflashctl.start import main\n"
        "sys.argv[1:] = ['status']\n"
        "main()\n"
    )
    # A background job ignores SIGINT, and its children inherit that.
    done = subprocess.run(
        [sys.executable, "-c", f"import signal; signal.signal(2, signal.default_int_handler)\n{script}"],
        capture_output=True, text=True, timeout=60, check=False, cwd=ROOT,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize(
    ("raised", "code", "what"),
    [
        (errors.NotFound("no run x", where="runs", next="dflashctl runs"), 6, "no run x"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ZeroDivisionError("1/0"), 1, "a bug in dflashctl: ZeroDivisionError: 1/0"),
        (typer.BadParameter("too many"), 2, "Invalid value: too many"),
    ],
)
def test_an_error_is_a_document_with_json(
    raised: BaseException, code: int, what: str, verb: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(json: bool = False) -> None:
        raise raised

    verb(fail)
    assert frame.run(["status", "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["exit_code"], found["error"]) == ("dflashctl.error/1", code, what)
    assert set(found) == {"schema", "error", "where", "next", "exit_code"}
    assert frame.run(["status"]) == code
    assert capsys.readouterr().out == ""


def test_an_error_after_the_document_adds_no_other(verb: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def fail_late(json: bool = False) -> None:
        emit("dflashctl.status/1", {"runs": []})
        raise errors.RunBad("demo failed")

    verb(fail_late)
    for _ in range(2):
        assert frame.run(["status", "--json"]) == 7
        assert json.loads(capsys.readouterr().out) == {"schema": "dflashctl.status/1", "runs": []}


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


def test_an_outcome_that_is_no_error_keeps_its_code(verb: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def bad_run() -> None:
        raise typer.Exit(int(ExitCode.RUN_BAD))

    verb(bad_run)
    assert frame.run(["status"]) == 7
    assert capsys.readouterr().err == ""


def test_results_of_verbs_are_no_exit_codes(verb: Any) -> None:
    def answer() -> bool:
        return True

    verb(answer)
    assert frame.run(["status"]) == 0


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


def test_the_table_of_exit_codes_is_complete() -> None:
    rows = re.findall(
        r"^\| (\d+) \| ([A-Z_]+) \| (.+) \|$", (ROOT / "docs" / "exit-codes.md").read_text(), re.MULTILINE
    )
    assert [(int(number), name) for number, name, _ in rows] == [(int(code), code.name) for code in ExitCode]


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
