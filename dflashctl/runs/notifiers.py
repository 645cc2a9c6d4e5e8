"""How news reach a person: the desktop, a command of theirs, a webhook. Each says in a line why it failed."""

from __future__ import annotations

import html
import http.client
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable

from dflashctl.errors import UsageError
from dflashctl.render.json import finite
from dflashctl.render.text import line
from dflashctl.runs.news import News

Notifier = Callable[[News], str]
"""Delivers; "" when it did, else why not."""

COMMAND_S = 30.0
WEBHOOK_S = 10.0
TRIES = 3
PAUSE_S = 1.0
MAC = "on run argv\ndisplay notification (item 2 of argv) with title (item 1 of argv)\nend run"


def desktop() -> Notifier | None:
    """None where there is no desktop to show it on."""
    if sys.platform == "darwin" and shutil.which("osascript"):
        return lambda news: run_argv(["osascript", "-e", MAC, *_words(news)], b"", {})
    if shutil.which("notify-send") and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return _notify_send
    return None


def _words(news: News) -> list[str]:
    """Title and body: one line each, controls escaped."""
    return [line(news.title), line("; ".join(news.evidence[:3]))]


def _body(news: News) -> bytes:
    """The JSON that leaves this machine: evidence is a line of the log, and may hold a secret."""
    return json.dumps(finite(news.document())).encode()


def _notify_send(news: News) -> str:
    title, body = _words(news)
    urgency = "normal" if news.state == "finished" else "critical"
    # The body is markup there, and evidence comes from a log.
    argv = ["notify-send", "--app-name=dflashctl", f"--urgency={urgency}", "--", title, html.escape(body)]
    return run_argv(argv, b"", {})


def command(words: str) -> Notifier:
    """A hook: the news as JSON on stdin, and in DFLASH_STATE, DFLASH_TAG, DFLASH_ID, DFLASH_HOST and
    DFLASH_EVIDENCE. No shell. Raises UsageError for words that are no command."""
    try:
        argv = shlex.split(words)
    except ValueError as error:
        raise UsageError(f"--command: {error}") from None
    if not argv or shutil.which(argv[0]) is None:
        raise UsageError(f"--command: no such program: {argv[0] if argv else words!r}")

    def send(news: News) -> str:
        told = {
            "DFLASH_STATE": news.state,
            "DFLASH_TAG": line(news.tag),
            "DFLASH_ID": news.id,
            "DFLASH_HOST": news.host,
            "DFLASH_EVIDENCE": line("; ".join(news.evidence)),
        }
        return run_argv(argv, _body(news), told)

    return send


def run_argv(argv: list[str], stdin: bytes, told: dict[str, str]) -> str:
    """Its output is not ours to show; its end is waited for, but not for ever."""
    try:
        done = subprocess.run(
            argv,
            input=stdin,
            env=os.environ | told,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=COMMAND_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{argv[0]} did not end within {COMMAND_S:.0f} s"
    except OSError as error:
        return f"{argv[0]}: {error}"
    if done.returncode == 0:
        return ""
    said = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return f"{argv[0]} ended with {done.returncode}" + (f": {said[-1]}" if said else "")


def webhook(url: str, sleep: Callable[[float], None] = time.sleep) -> Notifier:
    """POSTs the JSON. The address may hold a secret, so no message shows more of it than the host.

    Raises UsageError for what is no http(s) address.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(
            "DFLASHCTL_WEBHOOK: not an http or https address", next="export DFLASHCTL_WEBHOOK=https://…"
        )
    place = f"webhook at {parts.hostname}"

    def send(news: News) -> str:
        body = _body(news)
        why = ""
        for attempt in range(TRIES):
            if attempt:
                sleep(PAUSE_S * 2**attempt)
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
            try:
                with urllib.request.urlopen(request, timeout=WEBHOOK_S):
                    return ""
            except urllib.error.HTTPError as error:
                why = f"{place}: HTTP {error.code}"
                error.close()
                if error.code < 500 and error.code != 429:
                    return why
            except (OSError, ValueError, http.client.HTTPException) as error:
                why = f"{place}: {getattr(error, 'reason', None) or type(error).__name__}"
        return why

    return send
