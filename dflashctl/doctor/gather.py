"""Read the facts of one box: ssh, then its host, then the inside. Two remote commands; nothing is changed.

The host is asked first: it knows whether the container runs, is frozen, and has the Python that hosts.yaml
names, so the inside is only asked what it can answer. Whatever fails leaves its reason, and the rest goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from dflashctl.config.hosts import Host
from dflashctl.doctor.facts import Clock, Contact, Facts
from dflashctl.errors import DflashError
from dflashctl.remote.agent_call import AgentBug, Event, call
from dflashctl.remote.engine import Engine
from dflashctl.remote.factory import open_engine
from dflashctl.runs.facts import number, text

PROGRAM_S = 20.0
"""nvidia-smi, pct and the others on the host."""
TORCH_S = 90.0
"""torch from a cold disk takes half a minute."""
HOST_CALL_S, SLACK_S = 90.0, 60.0
NO_CONTACT = "there is no connection: see above"

Say = Callable[[str], None]


def gather(host: Host, say: Say, *, torch_s: float = TORCH_S) -> Facts:
    """Everything that can be read now. `say` hears what is being done."""
    try:
        engine = open_engine(host)
    except DflashError as error:
        return _lost(host, Contact("no contact", error.what, error.next))
    with engine:
        contact = None
        connection = getattr(engine, "connection", None)
        if connection is not None:
            say("connecting")
            from dflashctl.doctor.contact import look

            contact = look(connection)
            if contact.trouble:
                return _lost(host, contact)
        return _read(engine, contact, say, torch_s)


def _lost(host: Host, contact: Contact) -> Facts:
    return Facts(host, contact, box_problem=NO_CONTACT, inside_problem=NO_CONTACT, inside_asked=False)


def _read(engine: Engine, contact: Contact | None, say: Say, torch_s: float) -> Facts:
    host, clocks = engine.host, dict[str, Clock]()
    say("looking at the host" if host.container else "looking at the machine")
    request: dict[str, Any] = {
        "container": host.container,
        "python": host.python,
        "code_root": host.code_root,
        "staging_dir": host.staging_dir,
        "paths": _paths(host),
        "program_timeout_s": PROGRAM_S,
    }
    box, box_problem, box_next = _ask(engine, "doctor_host", request, "host", HOST_CALL_S, clocks, say)
    seen = Facts(host, contact, box, box_problem, box_next)
    python, why = runnable_python(seen)
    inside: Mapping[str, Any] | None = None
    asked = not why
    if asked:
        say("looking inside")
        engine.host = host.model_copy(update={"python": python})
        request = {
            "paths": _paths(host),
            "env": dict(host.env),
            "python": host.python if python == host.python else None,
            "torch_timeout_s": torch_s,
            "program_timeout_s": PROGRAM_S,
        }
        inside, why, _ = _ask(engine, "doctor_inside", request, "inside", torch_s + SLACK_S, clocks, say)
    return Facts(host, contact, box, box_problem, box_next, inside, why, asked, clocks)


def runnable_python(seen: Facts) -> tuple[str, str]:
    """(the Python to ask inside with, why nothing inside can be asked). Pure."""
    wanted = seen.host.python
    if seen.box is None:
        return wanted, ""  # the inside may answer all the same
    if seen.host.container is not None and seen.running is False:
        return "", f"container {seen.host.container} is stopped"
    if seen.host.container is not None and seen.running is None:
        return "", "the container could not be reached: see state"
    if seen.frozen:
        return "", f"container {seen.host.container} is frozen"
    if seen.interpreter.get("exists") is not False:
        return wanted, ""
    other = text(seen.interpreter.get("other"))
    return other, "" if other else f"neither {wanted} nor another Python is there"


def _paths(host: Host) -> list[str]:
    return list(dict.fromkeys([host.workdir, host.code_root, host.log_dir, host.state_dir]))


def _ask(
    engine: Engine,
    op: str,
    request: dict[str, Any],
    where: Literal["inside", "host"],
    timeout_s: float,
    clocks: dict[str, Clock],
    say: Say,
) -> tuple[dict[str, Any] | None, str, str]:
    """(the answer, "", "") or (None, why there is none and in brackets what to do, the latter alone)."""
    sent = time.time()

    def hear(event: Event) -> None:
        there, waited = number(event.get("clock")), number(event.get("torch_s"))
        if there is not None:
            clocks.setdefault(where, Clock(there, sent, time.time()))
        if waited is not None:
            say(f"importing torch inside ({waited:.0f} s)")

    try:
        return call(engine, op, request, where=where, timeout_s=timeout_s, on_event=hear), "", ""
    except DflashError as error:
        return None, f"{error.what}{f' ({error.next})' if error.next else ''}", error.next
    except AgentBug as error:
        return None, str(error).splitlines()[0], ""
