"""Mistakes that this project must never make, each as a small patch, and the tests that must not let it pass.

The `old` text of an edit must stand exactly once in its file. When code moves on, test_mutants.py says which
patch no longer applies; rewrite the patch so that it makes the same mistake, never drop it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    """One replacement in one file of the repository."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """`tests` are node ids; each must fail under the mutation. `bed`: they need root, LXC and sshd."""

    name: str
    mistake: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
    bed: bool = False


_CONNECTION = "tests/unit/test_remote_connection.py"
_CONTACT = "tests/unit/test_remote_contact.py"
_ENGINE = "tests/unit/test_remote_pct_engine.py"

_QUOTED_TWICE = Edit(
    "dflashctl/remote/connection.py",
    "    command = shlex.join(argv)\n",
    "    command = shlex.join(shlex.quote(word) for word in argv)\n",
)
_ONE_STREAM = Edit(
    "dflashctl/remote/channel.py",
    "        if channel.recv_stderr_ready():\n",
    "        if ended and channel.recv_stderr_ready():\n",
)
_ANY_HOST_KEY = Edit(
    "dflashctl/remote/hostkeys.py",
    "        check(self.known, self.offered(key), label=self.label, where=self.where)\n",
    "        pass\n",
)
_PUSH_SUCCEEDED = Edit(
    "dflashctl/remote/pct.py",
    '        if said:\n            raise VerificationFailed(f"pct push to',
    '        if False:\n            raise VerificationFailed(f"pct push to',
)
_FAMILY = "supervisor=supervisor, known=known, tagged=by_run.get(self.id, ())"


def _kill_by(pattern: str) -> Edit:
    """`pattern`: an expression over `words`, a process's command line, that makes it the run's."""
    return Edit(
        "dflashctl/agent/records/runfolder.py",
        f"        return kin.family(everything, {_FAMILY})\n",
        f"        mine = kin.family(everything, {_FAMILY})\n"
        "        lines = {one.pid: proc.cmdline(one.pid) for one in everything.values()}\n"
        "        taken = {one.pid for one in mine}\n"
        f"        alike = [pid for pid, words in lines.items() if words and ({pattern})]\n"
        "        return mine + [everything[pid] for pid in alike if pid not in taken]\n",
    )


MUTANTS = (
    Mutant(
        "double-quoting",
        "argv is quoted word by word and then once more as a whole",
        (_QUOTED_TWICE,),
        (f"{_ENGINE}::test_arguments_arrive_unchanged",),
    ),
    Mutant(
        "no-quoting",
        "argv is joined by spaces, so the host's shell reads it",
        (Edit(_QUOTED_TWICE.file, _QUOTED_TWICE.old, '    command = " ".join(argv)\n'),),
        (f"{_ENGINE}::test_arguments_arrive_unchanged",),
    ),
    Mutant(
        "trusting-push",
        "pct push exited with 0, so the file is there",
        (_PUSH_SUCCEEDED,),
        (f"{_ENGINE}::test_a_push_that_fails_with_exit_0_is_a_failure",),
    ),
    Mutant(
        "trusting-what-arrived",
        "neither the archive's contents nor the tree made of them are compared with the manifest",
        (
            Edit("dflashctl/agent/releases/tree.py", "if digest != member.name:", "if False:"),
            Edit(
                "dflashctl/agent/releases/install.py",
                "            if wrong:\n                raise AgentError(",
                "            if False:\n                raise AgentError(",
            ),
        ),
        ("tests/unit/test_install_refusals.py::test_an_archive_that_arrived_wrong_changes_nothing",),
    ),
    Mutant(
        "kill-by-pattern",
        "whoever has the run's id in its command line belongs to it",
        (_kill_by("self.id in ' '.join(words)"),),
        ("tests/unit/test_stop.py::test_strangers_with_the_same_words_in_argv_live_on",),
    ),
    Mutant(
        "pid-is-enough",
        "a process is known by its pid, whenever it started",
        (
            Edit(
                "dflashctl/agent/processes/proc.py",
                "process is not None and process.start == identity[1] and not process.dead else None",
                "process is not None and not process.dead else None",
            ),
        ),
        ("tests/unit/test_proc.py::test_another_start_is_another_process",),
    ),
    Mutant(
        "no-deadline",
        "a silent command is waited for, however long it takes",
        (
            Edit(
                "dflashctl/remote/channel.py",
                "            break\n        if now >= deadline:\n            raise CallTimeout\n",
                "            break\n",
            ),
        ),
        (f"{_CONNECTION}::test_a_deadline_ends_the_wait_at_once",),
    ),
    Mutant(
        "one-stream-at-a-time",
        "stderr is read when stdout has ended",
        (_ONE_STREAM,),
        (f"{_CONNECTION}::test_50_mb_on_both_streams_and_on_stdin_at_once",),
    ),
    Mutant(
        "any-host-key",
        "whatever key the server shows is good",
        (_ANY_HOST_KEY,),
        (
            f"{_CONTACT}::test_a_changed_key_has_its_own_error",
            f"{_CONTACT}::test_an_unknown_key_is_refused_with_its_fingerprint_and_the_way_out",
            f"{_CONTACT}::test_nothing_is_sent_to_a_server_with_a_wrong_key",
        ),
    ),
    Mutant(
        "unreadable-is-idle",
        "a GPU that cannot be read shows no memory, so it is free",
        (
            Edit(
                "dflashctl/gpus/idle.py",
                "    if gpu.problem:\n        busy, readable = gpu.problem, False\n    elif",
                "    if",
            ),
        ),
        ("tests/unit/test_gpus_idle.py::test_what_is_idle",),
    ),
    Mutant(
        "on-the-bed-double-quoting",
        "the same, where it goes through a real sshd, pct and LXC",
        (_QUOTED_TWICE,),
        ("tests/bed/test_properties.py::test_every_awkward_word",),
        bed=True,
    ),
    Mutant(
        "on-the-bed-trusting-push",
        "the same, with pct's own words",
        (_PUSH_SUCCEEDED,),
        ("tests/bed/test_properties.py::test_a_push_that_cannot_work_is_a_failure",),
        bed=True,
    ),
    Mutant(
        "on-the-bed-kill-by-pattern",
        "whoever has the command line that the record names belongs to the run",
        (_kill_by("words[1:] == (self.record().value or {}).get('command', [])[1:]"),),
        ("tests/bed/test_cycle.py::test_kill_touches_no_bystander",),
        bed=True,
    ),
    Mutant(
        "on-the-bed-any-host-key",
        "the same, against a real sshd",
        (_ANY_HOST_KEY,),
        ("tests/bed/test_trouble.py::test_a_changed_host_key_stops_everything",),
        bed=True,
    ),
    Mutant(
        "on-the-bed-one-stream-at-a-time",
        "the same, with megabytes through a real sshd",
        (_ONE_STREAM,),
        ("tests/bed/test_properties.py::test_megabytes_on_all_three_streams_at_once",),
        bed=True,
    ),
)
