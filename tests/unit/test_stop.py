"""Run with: pytest tests/unit/test_stop.py. Every kind of family is ended, exactly, and nobody else."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stop_kit import PROGRAMS, READY, SLEEP, gone, start

from dflashctl.agent import AgentError
from dflashctl.agent.processes import proc, signals
from dflashctl.agent.records import runfolder
from dflashctl.agent.runs import stop


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_family_is_ended_to_the_last(box: Any, until: Callable[..., Any], name: str) -> None:
    answer, family = start(box, until, name)
    told = box.stop("t", reason="test")
    assert told["outcome"] == "killed" and told["survivors"] == [] and told["problems"] == []
    assert gone(family) and box.family(answer) == []
    assert told["exit"]["cause"] == "killed"
    assert told["exit"]["killed_by"] == {"who": "ada@laptop", "reason": "test"}
    until(lambda: not box.run(answer).live())
    # TERM goes to the leader alone; it is torchrun's to pass it on. The rest gets it once the leader is gone.
    first = next(event for event in box.run(answer).events() if event["event"] == "signalled")
    assert (first["signal"], first["pids"], first["by"]) == (15, [answer["leader"]["pid"]], "supervisor")
    assert told["signalled"]["TERM"][0] == answer["leader"]["pid"]


@pytest.mark.parametrize("name", [name for name in PROGRAMS if "replaces" not in name])
def test_orphans_of_a_killed_supervisor_are_found_and_ended(
    box: Any, until: Callable[..., Any], name: str
) -> None:
    answer, family = start(box, until, name)
    run = box.run(answer)
    wanted = {one.identity for one in family}
    until(lambda: wanted <= set(run.identities()[1]))  # what the supervisor wrote down while it lived
    supervisor = run.identities()[0]
    assert supervisor is not None
    signals.send_signal(supervisor, signal.SIGKILL)
    until(lambda: not run.live())
    assert {one.identity for one in box.family(answer)} >= wanted
    told = box.stop("t")
    assert told["outcome"] == "killed" and gone(family)
    assert told["exit"]["cause"] == "killed" and told["exit"]["code"] is None
    assert "supervisor was gone" in told["exit"]["why"]
    assert told["exit"]["wall_s"] > 0


def test_an_orphan_whose_leader_is_gone_too_is_found_by_its_environment(
    box: Any, until: Callable[..., Any]
) -> None:
    answer, family = start(box, until, "ranks in sessions of their own, deaf")
    run = box.run(answer)
    supervisor = run.identities()[0]
    assert supervisor is not None
    signals.send_signal(supervisor, signal.SIGKILL)
    until(lambda: not run.live())
    for name in ("members.json", "supervisor.json"):  # as if the disk had been full
        Path(run.file(name)).unlink(missing_ok=True)
    signals.send_signal((answer["leader"]["pid"], answer["leader"]["start"]), signal.SIGKILL)
    told = box.stop("t")
    assert told["outcome"] == "killed" and gone(family)


def test_a_leader_that_obeys_gets_its_grace_and_no_kill(box: Any, until: Callable[..., Any]) -> None:
    program = (
        SLEEP
        + "def bye(*_):\n    time.sleep(0.6); print('saved', flush=True); sys.exit(0)\n"
        + "signal.signal(15, bye)\n"
        + READY
        + "time.sleep(60)"
    )
    answer = box.python(program, grace_s=60.0)
    until(lambda: (box.root / "ready").exists())
    told = box.stop("t")
    assert told["signalled"]["KILL"] == []
    assert box.log(answer) == "saved\n"
    assert (told["exit"]["code"], told["exit"]["cause"]) == (0, "killed")
    assert 0.6 <= told["seconds"] < 50, "its end ends the grace"


def test_killing_twice_is_fine(box: Any, until: Callable[..., Any]) -> None:
    start(box, until, "plain")
    first, second = box.stop("t"), box.stop("t")
    assert (first["outcome"], second["outcome"]) == ("killed", "already_ended")
    assert second["exit"] == first["exit"] and second["signalled"] == {"TERM": [], "KILL": []}


def test_two_kills_at_once_send_one_term(box: Any, until: Callable[..., Any]) -> None:
    """Two TERMs would make torchrun drop its ranks before they have saved."""
    program = (
        SLEEP
        + "def bye(*_):\n    open('terms', 'a').write('x'); time.sleep(0.5); sys.exit(0)\n"
        + "signal.signal(15, bye)\n"
        + READY
        + "time.sleep(60)"
    )
    box.python(program, grace_s=60.0)
    until(lambda: (box.root / "ready").exists())
    outcomes: list[str] = []
    threads = [threading.Thread(target=lambda: outcomes.append(box.stop("t")["outcome"])) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (box.root / "terms").read_text() == "x"
    assert outcomes == ["killed"] * 3


def test_a_kill_whose_messenger_dies_goes_on(box: Any, until: Callable[..., Any]) -> None:
    """The connection is lost, the agent killed: the supervisor knows what to do."""
    answer, family = start(box, until, "deaf to TERM")
    request = {"state_dir": box.state_dir, "name": "t", "who": "ada@laptop", "grace_s": 0.8}
    agent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from dflashctl.agent.runs.stop import stop; stop({request!r}, lambda event: None)",
        ],
        cwd=Path(__file__).parents[2],
    )
    until(lambda: any(event["event"] == "signalled" for event in box.run(answer).events()))
    agent.kill()
    agent.wait()
    ended = box.wait(answer)
    assert ended["cause"] == "killed" and ended["killed_by"]["who"] == "ada@laptop" and gone(family)


def test_an_impatient_kill_overtakes_a_patient_one(box: Any, until: Callable[..., Any]) -> None:
    _, family = start(box, until, "deaf to TERM")
    patient = threading.Thread(target=lambda: box.stop("t", grace_s=120.0))
    patient.start()
    until(lambda: box.events)
    told = box.stop("t", grace_s=0.2)
    patient.join(60)
    assert not patient.is_alive() and gone(family)
    assert told["outcome"] == "killed" and told["seconds"] < 60


def test_a_run_that_ended_by_itself_is_not_called_killed(box: Any) -> None:
    answer = box.python("raise SystemExit(3)")
    box.wait(answer)
    told = box.stop("t")
    assert told["outcome"] == "already_ended" and told["exit"]["cause"] == "exited"


def test_strangers_with_the_same_words_in_argv_live_on(box: Any, until: Callable[..., Any]) -> None:
    """What `pkill -f` would have taken: same program, same words, same user, our own process group."""
    answer, _ = start(box, until, "plain")
    words = [sys.executable, "-c", "import time; time.sleep(60)", "train.py", "t", answer["id"]]
    strangers = [
        subprocess.Popen(words),
        subprocess.Popen(words, start_new_session=True, env={"DFLASH_RUN_ID": answer["id"] + "x"}),
    ]
    try:
        assert box.stop("t")["outcome"] == "killed"
        assert [one.poll() for one in strangers] == [None, None]
    finally:
        for one in strangers:
            one.kill()
            one.wait()


def test_a_recycled_pid_of_an_old_run_is_never_signalled(box: Any) -> None:
    """Files of a run say pid P; P is somebody else's now (same boot, another start): already gone."""
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        run = runfolder.folder_of(box.state_dir, runfolder.new_id())
        Path(run.path).mkdir(parents=True)
        recycled = {"pid": stranger.pid, "start": 12345}
        run.write("record.json", {"tag": "t", "grace_s": 0.1, **proc.here()})
        run.write("supervisor.json", {"supervisor": recycled, "leader": recycled, **proc.here()})
        run.write("members.json", {"members": [recycled], **proc.here()})
        told = box.stop("t")
        assert told["outcome"] == "already_ended" and told["signalled"] == {"TERM": [], "KILL": []}
        assert stranger.poll() is None
        assert told["exit"] is None and run.events() == [], "lost stays lost"
    finally:
        stranger.kill()
        stranger.wait()


def test_an_old_folder_from_another_boot_names_nobody(box: Any) -> None:
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        process = proc.read_process(stranger.pid)
        assert process is not None
        run = runfolder.folder_of(box.state_dir, runfolder.new_id())
        Path(run.path).mkdir(parents=True)
        place = {"boot_id": "of last week", "init_start": proc.init_start()}
        same = proc.as_json(process.identity)
        run.write("record.json", {"tag": "t", "grace_s": 0.1, **place})
        run.write("supervisor.json", {"supervisor": same, "leader": same, **place})
        assert box.stop("t")["signalled"] == {"TERM": [], "KILL": []}
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_kill_from_within_the_run_spares_the_messenger(box: Any, until: Callable[..., Any]) -> None:
    """A program that ends its own run: the rest of the family goes, the one that asks lives to tell."""
    request = {"state_dir": box.state_dir, "name": "t", "who": "itself", "grace_s": 0.2}
    killer = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r});"
        "from dflashctl.agent.runs import stop; stop.EXIT_S = 0.5;"  # the supervisor waits for this process
        f"told = stop.stop({request!r}, lambda event: None); open('told', 'w').write(told['outcome'])"
    )
    program = (
        SLEEP
        + "subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        + f"subprocess.run([sys.executable, '-c', {killer!r}])\n"
        + "time.sleep(60)"
    )
    answer = box.python(program)
    until(lambda: (box.root / "told").exists() and (box.root / "told").read_text())
    names = {one.comm for one in box.family(answer)}
    assert "sleep" not in names


def test_names_are_tags_and_ids_and_the_newest_wins(box: Any) -> None:
    first = box.launch(["true"])
    box.wait(first)
    second = box.launch(["sleep", "60"])
    assert box.stop(first["id"])["outcome"] == "already_ended"
    assert box.stop("t")["id"] == second["id"]
    with pytest.raises(AgentError, match="no run has the tag 'nope'; the newest tags are t") as error:
        box.stop("nope")
    assert error.value.kind == "not_found"


def test_a_run_with_a_damaged_record_is_ended_by_its_id(box: Any, until: Callable[..., Any]) -> None:
    answer, family = start(box, until, "plain")
    Path(box.run(answer).file("record.json")).write_text("{")
    assert box.stop(answer["id"], grace_s=0.3)["outcome"] == "killed"
    assert gone(family)


def test_a_full_disk_prevents_no_kill(
    box: Any, until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, family = start(box, until, "plain")

    def full(self: Any, event: str, **details: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runfolder.RunFolder, "append_event", full)
    assert box.stop("t")["outcome"] == "killed"
    assert gone(family)


def test_who_cannot_be_signalled_is_named(
    box: Any, until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process in state D, or of another user: the answer names it and claims nothing."""
    answer, family = start(box, until, "plain")

    def refused(identity: proc.Identity, number: int) -> bool:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(stop, "tell_to_end", refused)
    monkeypatch.setattr(stop.cgroup, "kill", lambda group: False)
    monkeypatch.setattr(stop, "KILL_S", 0.3)
    told = box.stop("t")
    assert told["outcome"] == "survivors" and told["exit"] is None
    assert [one["pid"] for one in told["survivors"]] == [one.pid for one in family]
    assert told["survivors"][0]["cmdline"][0] == sys.executable
    assert any("Operation not permitted" in problem for problem in told["problems"])
    assert box.run(answer).live()


def test_the_request_is_written_before_the_first_signal(box: Any, until: Callable[..., Any]) -> None:
    answer, _ = start(box, until, "plain")
    box.stop("t", reason="too slow")
    events = box.run(answer).events()
    names = [event["event"] for event in events]
    assert names.index("kill_requested") < names.index("signalled")
    request = next(event for event in events if event["event"] == "kill_requested")
    assert (request["who"], request["reason"]) == ("ada@laptop", "too slow")


def test_progress_is_told_while_it_goes_on(box: Any, until: Callable[..., Any]) -> None:
    _, family = start(box, until, "deaf to TERM")
    box.stop("t")
    pids = [one.pid for one in family]
    assert box.events == [{"signalled": "SIGTERM", "pids": pids}, {"signalled": "SIGKILL", "pids": pids}]
