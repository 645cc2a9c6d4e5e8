"""Run with: pytest tests/local/test_notify.py. News are told once, through every channel; nothing else is."""

from __future__ import annotations

import http.server
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflashctl.cli.main import run
from dflashctl.errors import UsageError
from dflashctl.render import secrets
from dflashctl.runs import notifiers
from dflashctl.runs.facts import RunFacts
from dflashctl.runs.news import News
from dflashctl.runs.notify import Once
from dflashctl.runs.status import Look, Row
from dflashctl.runs.vocabulary import Verdict

RUN_ID = "20261130T120000000-abcdef"
NEWS = News("ct200", RUN_ID, "lo\x1b[2Jcal", "failed", ("exit code 1", "<b>x</b> & \x07"))


def look(*states: str, contact: Any = "ok") -> Look:
    rows = tuple(
        Row(RunFacts(id=f"run-{number}", tag=f"t{number}"), Verdict(state, "high", (state,)))  # type: ignore[arg-type]
        for number, state in enumerate(states)
    )
    return Look("here", rows, contact)


def told(*looks: Look) -> list[tuple[str, str]]:
    once = Once()
    return [(news.id, news.state) for each in looks for news in once.news(each)]


def test_each_event_is_told_once() -> None:
    running, failed = look("running"), look("failed")
    assert told(running, running, failed, failed) == [("run-0", "failed")]


def test_a_wedge_must_last_two_looks_and_is_told_once() -> None:
    running, wedged = look("running"), look("wedged")
    assert told(running, wedged, running, wedged, running) == []
    assert told(running, wedged, wedged, wedged, running, wedged, wedged) == [("run-0", "wedged")]
    assert told(wedged, wedged, look("killed")) == [("run-0", "wedged")]
    assert told(wedged, wedged, look("failed")) == [("run-0", "wedged"), ("run-0", "failed")]


def test_what_had_ended_before_is_no_news() -> None:
    assert told(look("failed", "running"), look("failed", "finished")) == [("run-1", "finished")]


def test_states_that_are_no_news() -> None:
    quiet = ("running", "slow", "compiling", "starting", "queued", "frozen", "unknown", "killed", "cancelled")
    assert told(look("running"), *(look(state) for state in quiet)) == []


def test_lost_contact_is_no_news() -> None:
    assert told(look("running"), look("unknown", contact="lost"), look("finished")) == [("run-0", "finished")]
    assert told(look("failed", contact="lost"), look("running")) == []


def test_a_run_that_starts_later_counts_too() -> None:
    assert told(look("running"), look("running", "failed")) == [("run-1", "failed")]


def test_a_hook_gets_json_and_variables_without_a_shell(tmp_path: Path) -> None:
    script = tmp_path / "my hook"
    script.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "got = [json.load(sys.stdin), os.environ['DFLASH_TAG'], sys.argv[1:]]\n"
        f"json.dump(got, open({str(tmp_path / 'got')!r}, 'w'))\n"
    )
    script.chmod(0o755)
    assert notifiers.command(f"'{script}' '$(touch {tmp_path}/pwned)' '; x'")(NEWS) == ""
    body, tag, argv = json.loads((tmp_path / "got").read_text())
    assert body["schema"] == "dflashctl.news/1" and body["evidence"] == list(NEWS.evidence)
    assert tag == "lo\\x1b[2Jcal"
    assert argv == [f"$(touch {tmp_path}/pwned)", "; x"]
    assert not (tmp_path / "pwned").exists()


def test_a_hook_that_fails_or_hangs_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = notifiers.command("sh -c 'echo no such room >&2; exit 3'")
    assert failing(NEWS) == "sh ended with 3: no such room"
    monkeypatch.setattr(notifiers, "COMMAND_S", 0.2)
    assert notifiers.command("sleep 60")(NEWS) == "sleep did not end within 0 s"


@pytest.mark.parametrize("words", ["", "no-such-program-here", "'unclosed"])
def test_a_command_that_is_none(words: str) -> None:
    with pytest.raises(UsageError):
        notifiers.command(words)


def test_the_desktop_gets_one_escaped_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "notify-send"
    tool.write_text(f'#!/bin/sh\nfor word; do echo "$word"; done > {tmp_path}/got\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert notifiers.desktop() is None
    monkeypatch.setenv("DISPLAY", ":0")
    send = notifiers.desktop()
    assert send is not None and send(NEWS) == ""
    got = (tmp_path / "got").read_text()
    assert got.splitlines()[-2:] == [
        "lo\\x1b[2Jcal failed on ct200",
        "exit code 1; &lt;b&gt;x&lt;/b&gt; &amp; \\x07",
    ]


class Hook(http.server.BaseHTTPRequestHandler):
    answers: list[int]
    bodies: list[dict[str, Any]]

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.answers.pop(0) if self.answers else 200)
        self.end_headers()

    def log_message(self, *words: Any) -> None: ...


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, type[Hook]]]:
    """A loopback server; (its address with a secret in it, its handler)."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    handler = type("ThisHook", (Hook,), {"answers": [], "bodies": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/s3cret", handler
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def test_a_webhook_gets_the_json(hook: tuple[str, type[Hook]]) -> None:
    url, handler = hook
    assert notifiers.webhook(url)(NEWS) == ""
    assert handler.bodies == [NEWS.document()]


def test_a_secret_in_the_evidence_leaves_this_machine_by_no_channel(
    hook: tuple[str, type[Hook]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_RUN", "hunter2x")
    secrets.begin({})
    secrets.hide(["OF_THE_RUN"])
    news = News("ct200", RUN_ID, "local", "failed", ("log line 3: ValueError: no access with hunter2x",))
    try:
        url, handler = hook
        assert notifiers.webhook(url)(news) == ""
        got = tmp_path / "got"
        command = f"sh -c 'cat > {got}; echo \"$DFLASH_EVIDENCE\" >> {got}'"
        assert notifiers.command(command)(news) == ""
    finally:
        secrets.begin({})
    assert handler.bodies[0]["evidence"] == ["log line 3: ValueError: no access with ***"]
    assert got.read_text().count("with ***") == 2 and "hunter2x" not in got.read_text()


def test_a_webhook_that_speaks_no_http_is_said_and_ends_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for _ in range(notifiers.TRIES):
                other, _where = server.accept()
                with other:
                    other.recv(65536)
                    other.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        said = notifiers.webhook(f"http://127.0.0.1:{server.getsockname()[1]}/x", lambda s: None)(NEWS)
        thread.join(10)
    assert said == "webhook at 127.0.0.1: BadStatusLine"


def test_a_webhook_is_tried_again_and_its_secret_not_told(hook: tuple[str, type[Hook]]) -> None:
    url, handler = hook
    pauses: list[float] = []
    handler.answers[:] = [503, 429]
    assert notifiers.webhook(url, pauses.append)(NEWS) == ""
    assert len(handler.bodies) == 3 and len(pauses) == 2
    handler.answers[:] = [404]
    assert notifiers.webhook(url, pauses.append)(NEWS) == "webhook at 127.0.0.1: HTTP 404"
    assert len(pauses) == 2, "a wrong address does not get better"
    closed = notifiers.webhook("http://127.0.0.1:1/s3cret", pauses.append)(NEWS)
    assert closed.startswith("webhook at 127.0.0.1: ") and "s3cret" not in closed


@pytest.mark.parametrize("url", ["", "ftp://x/y", "file:///etc/passwd", "http://", "s3cret"])
def test_an_address_that_is_none_is_not_repeated(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        notifiers.webhook(url)
    assert "s3cret" not in str(caught.value)


@pytest.fixture
def cli(box: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Callable[..., Any]:
    hosts = tmp_path / "hosts.yaml"
    entry = f"{{engine: local, python: {sys.executable}, state_dir: {box.state_dir}}}"
    hosts.write_text(f"version: 1\ndefaults: {{host: here}}\nhosts:\n  here: {entry}\n")
    monkeypatch.setenv("DFLASHCTL_HOSTS", str(hosts))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DFLASHCTL_WEBHOOK", raising=False)

    def call(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run(["notify", "--no-desktop", "--every", "0.2", *words])
        return (code, *capfd.readouterr())

    return call


def test_as_a_person_types_it(
    box: Any,
    cli: Callable[..., Any],
    hook: tuple[str, type[Hook]],
    monkeypatch: pytest.MonkeyPatch,
    until_seen: str,
) -> None:
    url, handler = hook
    monkeypatch.setenv("DFLASHCTL_WEBHOOK", url)
    box.python(until_seen + "raise SystemExit(3)", "bad")
    code, out, err = cli("bad", "--command", "false")
    assert code == 0
    assert "bad failed on here: exit code 3" in out and out.splitlines()[-1] == "over: bad failed"
    assert "not delivered: false ended with 1" in err
    assert [body["state"] for body in handler.bodies] == ["failed"]


def test_a_run_that_has_ended_already_is_no_news(
    box: Any, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    box.wait(box.python("pass", "t"))
    code, out, err = cli("t")
    assert (code, out) == (0, "over: t finished\n")
    assert "it is told here alone" in err
    assert "t had ended before: nothing is told; dflashctl status" in err
    told = tmp_path / "told"
    code, out, err = cli("t", "--command", f"touch {told}")
    assert (code, out, told.exists()) == (0, "over: t finished\n", False)
    assert err == "t had ended before: nothing is told; dflashctl status\n"
    assert cli("t", "--json")[1:] == ("", err)
    code, out, err = cli("nobody")
    assert (code, out) == (6, "") and "told here" not in err
    monkeypatch.setenv("DFLASHCTL_WEBHOOK", "ftp://s3cret")
    code, _, err = cli("t")
    assert code == 2 and "s3cret" not in err


def test_json_is_a_document_for_each(box: Any, cli: Callable[..., Any], until_seen: str) -> None:
    box.python(until_seen, "t")
    code, out, _ = cli("t", "--json")
    assert code == 0
    assert json.loads(out)["state"] == "finished" and json.loads(out)["schema"] == "dflashctl.news/1"
