"""The folder of a run: names, atomic writes, tolerant readers. The formats' home is docs/run-folder.md.

What is damaged is named and skipped, never guessed: one broken record must not hide the other runs.
"""

from __future__ import annotations

import json
import os
import re
import time
from calendar import timegm
from datetime import datetime, timezone
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple

from .. import AgentError
from ..processes import cgroup, kin, proc

VERSION = 1
NEWER = "newer than this dflashctl knows"
MOST_DEPTH = 32
ID_PATTERN = re.compile(r"\d{8}T\d{9}-[0-9a-f]{6}")
TAG_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def new_id(now_s: Optional[float] = None, after: str = "") -> str:
    """YYYYMMDDTHHMMSSmmm-xxxxxx: sorts by time, unique without coordination. It sorts behind the id `after`,
    also where the clock was set back since."""
    stamp = _stamp(time.time() if now_s is None else now_s)
    if stamp <= after[: len(stamp)]:
        try:
            stamp = _stamp(time_of(after) + 0.0015)  # a float may lie below its millisecond
        except (ValueError, OverflowError):  # digits that are no time
            pass
    return "%s-%s" % (stamp, os.urandom(3).hex())


def _stamp(at: float) -> str:
    moment = datetime.fromtimestamp(at, timezone.utc)
    return "%s%03d" % (moment.strftime("%Y%m%dT%H%M%S"), moment.microsecond // 1000)


def time_of(run_id: str) -> float:
    """The time in an id, in seconds since the epoch: 20261130T120000500-abcdef is 12:00:00.5 UTC."""
    return timegm(time.strptime(run_id[:15], "%Y%m%dT%H%M%S")) + int(run_id[15:18]) / 1000.0


class Loaded(NamedTuple):
    """A file's object, or why there is none. Both None: there is no such file."""

    value: Optional[Dict[str, Any]]
    problem: Optional[str]


def parse(text: str) -> Any:
    """JSON that a program wrote, so anything may stand there. Raises ValueError, also for what is nested too
    deep to be passed on."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if _deeper(value, MOST_DEPTH):
        raise ValueError("nested too deep")
    return value


def _deeper(value: Any, levels: int) -> bool:
    within = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return bool(within) and (levels == 0 or any(_deeper(each, levels - 1) for each in within))


def read_json(path: str) -> Loaded:
    """An object with a version that we understand."""
    try:
        with open(path, encoding="utf-8") as file:
            value = parse(file.read())
    except FileNotFoundError:
        return Loaded(None, None)
    except NotADirectoryError:
        return Loaded(None, None)
    except (OSError, ValueError) as error:  # ValueError: not JSON, or not UTF-8
        return Loaded(None, "%s: %s" % (path, error))
    if not isinstance(value, dict):
        return Loaded(None, "%s: not a JSON object" % path)
    version = whole(value.get("version"))
    if version is None:
        return Loaded(None, "%s: no version" % path)
    if version > VERSION:
        return Loaded(None, "%s: version %d, %s (%d)" % (path, version, NEWER, VERSION))
    return Loaded(value, None)


def read_ours(path: str) -> Dict[str, Any]:
    """What is to be written anew with changes; {} where nothing that can be read is there. Raises
    AgentError("locked") for a file of a later dflashctl: what it says would be lost."""
    value, problem = read_json(path)
    if NEWER in (problem or ""):
        what = "it was written by a newer dflashctl, and this one would lose what it says"
        raise AgentError("locked", what, path, "use that one, or update this one")
    return value or {}


def read_lines(path: str, having: str = "") -> Iterator[Dict[str, Any]]:
    """Objects of a .jsonl file; a half-written or damaged line is skipped. Only lines with the text `having`
    are parsed: a history of a thousand runs is read for its few notes."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            yield from objects(line for line in file if having in line)
    except OSError:
        return


def objects(lines: Iterable[str]) -> Iterator[Dict[str, Any]]:
    """Those of the lines that are JSON objects."""
    for line in lines:
        try:
            value = parse(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def number(value: Any) -> Optional[float]:
    """A number of such an object; None for anything else that stands there."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:  # damaged: no time, size or step has 300 digits
        return None


def whole(value: Any) -> Optional[int]:
    """As `number`, but whole."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def write_bytes(path: str, data: bytes, mode: int = 0o644, *, durable: bool = True) -> None:
    """Replace a file: all of it or nothing, when `durable` also across a power cut. Raises OSError; then the
    old file stands."""
    aside = "%s.%d.tmp" % (path, os.getpid())
    try:
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        try:
            os.unlink(aside)
        except OSError:
            pass
        raise
    if durable:
        sync_folder(os.path.dirname(path))


def write_json(path: str, value: Dict[str, Any], *, durable: bool = True) -> None:
    body = dict(value)
    body["version"] = VERSION
    write_bytes(path, (json.dumps(body, indent=1, sort_keys=True) + "\n").encode(), durable=durable)


def sync_folder(path: str) -> None:
    """A rename is durable once its folder is."""
    try:
        descriptor = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems refuse
        pass
    finally:
        os.close(descriptor)


class RunFolder:
    """`<state_dir>/runs/<id>/`: the one place that knows the names in it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.id = os.path.basename(path.rstrip("/"))

    def file(self, name: str) -> str:
        return os.path.join(self.path, name)

    def read(self, name: str) -> Loaded:
        """`name` is e.g. "record.json"."""
        return read_json(self.file(name))

    def write(self, name: str, value: Dict[str, Any], *, durable: bool = True) -> None:
        write_json(self.file(name), value, durable=durable)

    def has(self, name: str) -> bool:
        return os.path.exists(self.file(name))

    def record(self) -> Loaded:
        return self.read("record.json")

    def supervisor(self) -> Loaded:
        return self.read("supervisor.json")

    def exit(self) -> Loaded:
        return self.read("exit.json")

    def events(self) -> List[Dict[str, Any]]:
        return list(read_lines(self.file("events.jsonl")))

    def append_event(self, event: str, **details: Any) -> None:
        """One object, one write: concurrent writers never mix. Raises OSError."""
        body: Dict[str, Any] = {
            "version": VERSION,
            "at": time.time(),
            "mono": time.monotonic(),
            "event": event,
        }
        body.update(details)
        path = self.file("events.jsonl")
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"  # a write cut short by a full disk
            os.write(descriptor, (b"\n" if torn else b"") + json.dumps(body).encode() + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def identities(self) -> Tuple[Optional[proc.Identity], List[proc.Identity]]:
        """(supervisor, everything else that it wrote down): only those of this boot and this start of the
        container, so an old folder never names a process of today."""
        supervisor = self.supervisor().value
        if supervisor is None or not proc.same_place(supervisor):
            return None, []
        recorded = [supervisor.get("leader")]
        members = self.read("members.json").value
        if members is not None and proc.same_place(members) and isinstance(members.get("members"), list):
            recorded += members["members"]
        known = [identity for identity in map(proc.as_identity, recorded) if identity is not None]
        return proc.as_identity(supervisor.get("supervisor")), known

    def group(self) -> Optional[str]:
        """The control group of its own that it was given, in this boot and this start of the container."""
        supervisor = self.supervisor().value or {}
        path = supervisor.get("cgroup")
        return path if cgroup.is_ours(path, self.id) and proc.same_place(supervisor) else None

    def live(self, processes: Optional[proc.Table] = None) -> bool:
        """Its supervisor lives (and so the run is not over)."""
        return proc.living(self.identities()[0], processes) is not None

    def family(
        self,
        processes: Optional[proc.Table] = None,
        tagged: Optional[Dict[str, List[int]]] = None,
    ) -> List[proc.Process]:
        """All processes of the run that can be found, zombies included, the supervisor not. Pass the table
        and kin.tagged() of it when asking for several runs."""
        everything = proc.table() if processes is None else processes
        by_run = kin.tagged(everything) if tagged is None else tagged
        supervisor, known = self.identities()
        by_run = {self.id: [*by_run.get(self.id, ()), *cgroup.pids(self.group())]}
        return kin.family(everything, supervisor=supervisor, known=known, tagged=by_run.get(self.id, ()))

    def log_path(self, record: Dict[str, Any]) -> str:
        """Where this run's log is now: a later launch with the same log name moved it aside."""
        log = str(record.get("log") or "")
        aside = "%s.%s" % (log, self.id)
        return aside if log and os.path.exists(aside) else log


def runs_folder(state_dir: str) -> str:
    return os.path.join(state_dir, "runs")


def folder_of(state_dir: str, run_id: str) -> RunFolder:
    """Raises ValueError for what is not an id: it becomes a path."""
    if not ID_PATTERN.fullmatch(run_id):
        raise ValueError("not a run id: %r" % run_id)
    return RunFolder(os.path.join(runs_folder(state_dir), run_id))


def list_runs(state_dir: str) -> List[RunFolder]:
    """All run folders, newest first; folders with another kind of name are nobody's.

    Raises OSError where they cannot be looked at: that is another answer than that there are none.
    """
    try:
        names = os.listdir(runs_folder(state_dir))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder_of(state_dir, name) for name in sorted(names, reverse=True) if ID_PATTERN.fullmatch(name)]


def unfinished_runs(state_dir: str) -> List[RunFolder]:
    """Runs without an exit.json: live ones, and those whose supervisor went without a trace."""
    return [run for run in list_runs(state_dir) if not run.has("exit.json")]
