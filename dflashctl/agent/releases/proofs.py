"""Proofs that a deployed tree is what the run will use: it compiles, has the expected lines, is imported.

Everything is decided here, inside, by the interpreter that will run the program; nothing of the tree is
executed and nothing is written into it.
"""

from __future__ import annotations

import ast
import difflib
import os
import re
import subprocess
import sys
import warnings
from typing import Any, Dict, List, Optional, Tuple

from .. import AgentError

MAX_SHOWN = 10
IMPORT_TIMEOUT_S = 60.0

Entry = Dict[str, Any]

_CODING = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*[-\w.]+")  # PEP 263


def compile_source(source: bytes, shown_path: str) -> Optional[str]:
    """None, or `file:line: error` and the line itself, as Python would show it."""
    undeclared = _undeclared_bytes(source)
    if undeclared is not None:
        return "%s:%d: SyntaxError: Non-UTF-8 code, but no encoding declared" % (shown_path, undeclared)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an invalid escape is no reason to stop a deploy
            compile(source, shown_path, "exec", dont_inherit=True)
    except SyntaxError as error:
        head = "%s:%s: %s: %s" % (shown_path, error.lineno or 1, type(error).__name__, error.msg)
        text = (error.text or "").rstrip("\n")
        return head + ("\n    " + text.strip() if text.strip() else "")
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:  # ValueError: a NUL byte
        return "%s:1: %s: %s" % (shown_path, type(error).__name__, error)
    return None


def _undeclared_bytes(source: bytes) -> Optional[int]:
    """The line of the first bytes that are no UTF-8, where no other encoding is declared. compile() passes
    over them in a comment; `python FILE` does not."""
    try:
        source.decode("utf-8")
    except UnicodeDecodeError as error:
        declared = any(_CODING.match(line) for line in source.split(b"\n", 2)[:2])
        return None if declared else source.count(b"\n", 0, error.start) + 1
    return None


def compile_tree(tree: str, files: List[Entry]) -> Tuple[int, List[str]]:
    """(number of .py files that compile, problems)."""
    problems: List[str] = []
    good = 0
    for path in python_files(files):
        with open(os.path.join(tree, path), "rb") as file:
            problem = compile_source(file.read(), path)
        if problem:
            problems.append(problem)
        else:
            good += 1
    return good, problems


def python_files(files: List[Entry]) -> List[str]:
    """Paths of a manifest that Python will be asked to run; a link counts through the file it points to."""
    return [
        entry["path"] for entry in files if entry["path"].endswith(".py") and entry["mode"].startswith("100")
    ]


def check_expect(tree: str, rows: List[Dict[str, Any]]) -> Tuple[List[Dict[str, Any]], List[str]]:
    """(what was found, problems). A row is {"file", "text" or "regex", "present"}.

    Found: {"file", "line" (1-based, null when absence was proven), "text", "pattern", "present"}.
    """
    found: List[Dict[str, Any]] = []
    problems: List[str] = []
    for row in rows:
        pattern = str(row["regex"] if row.get("text") is None else row["text"])
        wanted = row.get("present", True)
        try:
            lines = _lines(os.path.join(tree, row["file"]))
        except OSError as error:
            problems.append("%s: %s (expected: %s)" % (row["file"], error.strerror, pattern))
            continue
        hit = _first(lines, row)
        if wanted and hit is None:
            problems.append("%s: no line has: %s%s" % (row["file"], pattern, _nearest(lines, pattern)))
        elif not wanted and hit is not None:
            problems.append("%s:%d: %s (must not have: %s)" % (row["file"], hit[0], hit[1].strip(), pattern))
        else:
            line, text = hit if hit else (None, "")
            found.append(
                {
                    "file": row["file"],
                    "line": line,
                    "text": text.strip(),
                    "pattern": pattern,
                    "present": wanted,
                }
            )
    return found, problems


def _lines(path: str) -> List[str]:
    """As grep counts them: only a newline ends a line."""
    with open(path, "rb") as file:
        text = file.read().decode("utf-8", "replace")
    return [line.rstrip("\r") for line in text.split("\n")]


def _first(lines: List[str], row: Dict[str, Any]) -> Optional[Tuple[int, str]]:
    if row.get("text") is not None:
        return next(((n, line) for n, line in enumerate(lines, 1) if row["text"] in line), None)
    try:
        regex = re.compile(row["regex"])
    except re.error as error:
        what = "expect: %r is no regular expression for the Python inside: %s" % (row["regex"], error)
        raise AgentError("usage", what, row["file"]) from None
    return next(((n, line) for n, line in enumerate(lines, 1) if regex.search(line)), None)


def _nearest(lines: List[str], pattern: str) -> str:
    """The line that was probably meant; bounded, since difflib is slow on large files."""
    candidates = {line.strip(): number for number, line in enumerate(lines[:5000], 1)}
    close = difflib.get_close_matches(pattern, [each for each in candidates if len(each) < 300], 1, 0.6)
    return "\n    nearest: line %d: %s" % (candidates[close[0]], close[0]) if close else ""


# Asks each finder in turn, as an import would, and imports nothing: the parent of a.b is looked up, not
# executed. The release comes onto sys.path only here, where PYTHONPATH would have put it, so that the start
# of the interpreter cannot execute a sitecustomize.py or re.py of it; sys itself is built in.
_FIND = """
import sys
sys.path[1:1] = sys.argv[2:]
path, found = None, None
parts = sys.argv[1].split(".")
for number in range(len(parts)):
    name = ".".join(parts[: number + 1])
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        found = find(name, path) if find else None
        if found is not None:
            break
    if found is None:
        break
    path = found.submodule_search_locations
places = [] if found is None else [found.origin] if found.origin else list(path or [])
print("\\nDFLASH-FOUND " + ascii([name, places]))
"""


def find_module(entry: str, tree: str, pythonpath: str = "") -> str:
    """The path from which a run, which starts in the tree with it first on PYTHONPATH, would import `entry`.

    Raises AgentError("verification") when that is not inside the tree: the recipe leaves the package out, so
    that Python finds an installed one of the same name, or it is built in.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    search = [tree, *(part for part in pythonpath.split(os.pathsep) if part)]
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    env["CUDA_VISIBLE_DEVICES"] = ""  # whatever the interpreter loads at its start must not touch a GPU
    try:
        done = subprocess.run(
            [sys.executable, "-c", _FIND, entry, *search],
            cwd=tree,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=IMPORT_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        what = "%s did not say within %.0f s where it finds %s" % (sys.executable, IMPORT_TIMEOUT_S, entry)
        raise AgentError("verification", what) from None
    answer = re.search(rb"^DFLASH-FOUND (.*)$", done.stdout, re.MULTILINE)
    if answer is None:
        said = done.stderr.decode("utf-8", "replace").strip()[-500:]
        what = "%s could not look up %s (exit code %d): %s" % (sys.executable, entry, done.returncode, said)
        raise AgentError("verification", what)
    name, places = ast.literal_eval(answer.group(1).decode())
    if not places:
        raise AgentError("verification", "the run could not import %s: nothing is named %s" % (entry, name))
    origin = os.path.join(tree, places[0])
    if not inside(origin, tree):
        hint = "include the files of %s in deploy.include; its folder must be at the top" % entry
        what = "the run would import %s from %s, not from the release" % (entry, origin)
        raise AgentError("verification", what, next=hint)
    return origin


def inside(path: str, folder: str) -> bool:
    """Does `path`, links resolved, lie below `folder`?"""
    real, root = os.path.realpath(path), os.path.realpath(folder)
    return real == root or real.startswith(root.rstrip("/") + "/")
