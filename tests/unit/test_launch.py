"""Run with: pytest tests/unit/test_launch.py. Starts that happen exactly once, with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflashctl.agent import AgentError
from dflashctl.agent.processes import proc, signals
from dflashctl.agent.records import runfolder
from dflashctl.agent.runs import launch, spawn, waiting
from dflashctl.agent.runs.compilecache import compile_cache

COUNT = "open('starts', 'a').write('x'); import time; time.sleep({seconds})"


def starts(box: Any) -> int:
    """How often COUNT has begun: waits for the first, and a moment for one too many."""
    file, end = box.root / "starts", time.monotonic() + 60
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(0.2)
    return len(file.read_text()) if file.exists() else 0


def test_the_answer_and_the_record(box: Any) -> None:
    answer = box.launch(["sleep", "30"], created_by="ada@laptop")
    assert answer["outcome"] == "started"
    assert proc.cmdline(answer["leader"]["pid"]) == ["sleep", "30"]
    record = box.run(answer).record().value
    assert record["id"] == answer["id"] and record["log_start"] == 0
    assert record["boot_id"] == proc.boot_id() and record["init_start"] == proc.init_start()
    assert abs(record["created_at"] - time.time()) < 120
    assert Path(box.run(answer).file("recipe.yaml")).read_text() == "version: 1\n"


def test_the_record_says_whether_the_compile_cache_was_warm(box: Any) -> None:
    cache = box.root / "cache"
    environ = {"PATH": os.environ["PATH"], "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    states = []
    for step in ("nothing", "empty folders", "a file"):
        if step == "empty folders":
            (cache / "ab").mkdir(parents=True)
        if step == "a file":
            (cache / "ab" / "kernel.py").write_text("x")
        answer = box.launch(["true"], env=environ)
        states.append(box.run(answer).record().value["compile_cache"])
        box.wait(answer)
    assert states == [{"path": str(cache), "state": state} for state in ("cold", "cold", "warm")]
    assert compile_cache({"TMPDIR": "/elsewhere"})["path"].startswith("/elsewhere/torchinductor_")


def test_asking_again_starts_nothing(box: Any) -> None:
    request = box.request([sys.executable, "-c", COUNT.format(seconds=30)])
    first = launch.launch(request, None)
    again = launch.launch(request, None)
    assert (first["outcome"], again["outcome"]) == ("started", "already_running")
    assert again["leader"] == first["leader"]
    assert starts(box) == 1


def test_asking_again_after_the_end_tells_the_end(box: Any) -> None:
    request = box.request(["false"])
    box.wait(launch.launch(request, None))
    again = launch.launch(request, None)
    assert again["outcome"] == "already_ended" and again["exit"]["code"] == 1


def together(requests: list[dict[str, Any]]) -> list[Any]:
    """Launch all at the same moment; outcomes, or the kinds of errors."""
    results: list[Any] = [None] * len(requests)
    barrier = threading.Barrier(len(requests))

    def one(number: int) -> None:
        barrier.wait()
        try:
            results[number] = launch.launch(requests[number], None)["outcome"]
        except AgentError as error:
            results[number] = error.kind

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(results)


def test_the_same_request_four_times_at_once_starts_one_run(box: Any) -> None:
    request = box.request([sys.executable, "-c", COUNT.format(seconds=30)])
    assert together([request] * 4) == ["already_running"] * 3 + ["started"]
    assert starts(box) == 1


def test_of_two_launches_of_one_tag_at_once_one_is_refused(box: Any) -> None:
    command = [sys.executable, "-c", COUNT.format(seconds=30)]
    assert together([box.request(command), box.request(command)]) == ["locked", "started"]


def test_of_two_launches_on_one_gpu_at_once_one_is_refused(box: Any) -> None:
    shared, other = {"index": 3, "uuid": "GPU-3"}, {"index": 4, "uuid": "GPU-4"}
    pair = [
        box.request(["sleep", "30"], "a", gpus=[shared, other]),
        box.request(["sleep", "30"], "b", gpus=[shared]),
    ]
    assert together(pair) == ["gpus_busy", "started"]
    free = box.request(["sleep", "30"], "c", gpus=[{"index": 5, "uuid": "GPU-5"}])
    assert together([free]) == ["started"]
    allowed = box.request(["sleep", "30"], "d", gpus=[shared], allow_busy=True)
    assert together([allowed]) == ["started"]


def test_a_log_of_a_live_run_is_not_shared(box: Any) -> None:
    first = box.launch(["sleep", "30"], "a")
    with pytest.raises(AgentError, match="writes this log") as error:
        box.launch(["sleep", "30"], "b", log=first["log"])
    assert error.value.kind == "locked"


def test_a_live_run_of_a_newer_dflashctl_is_not_taken_for_none(box: Any) -> None:
    """Its tag was given away and its log moved aside; a damaged record alone stops nobody."""
    first = box.launch(["sleep", "30"], "a")
    record = Path(box.run(first).file("record.json"))
    whole = record.read_text()
    record.write_text(json.dumps({**json.loads(whole), "version": 2}))
    with pytest.raises(AgentError, match="newer dflashctl") as error:
        box.launch(["sleep", "30"], "a")
    assert error.value.kind == "locked" and "update" in error.value.next
    supervisor = Path(box.run(first).file("supervisor.json"))
    theirs = supervisor.read_text()
    supervisor.write_text(json.dumps({**json.loads(theirs), "version": 2}))
    with pytest.raises(AgentError, match="newer dflashctl"):
        box.launch(["sleep", "30"], "a")
    supervisor.write_text(theirs)
    record.write_text("{")
    box.launch(["sleep", "30"], "b")
    record.write_text(whole)


def test_a_tag_is_free_again_after_the_end_and_the_old_log_is_kept(box: Any) -> None:
    first = box.python("print('KeyError of the first')")
    box.wait(first)
    second = box.python("print('second')")
    box.wait(second)
    assert second["rotated"] == f"{first['log']}.{first['id']}"
    assert box.log(second) == "second\n"
    record = box.run(first).record().value
    assert Path(box.run(first).log_path(record)).read_text() == "KeyError of the first\n"


def test_a_log_that_was_moved_aside_is_never_overwritten(box: Any) -> None:
    """Ids of an older version tell the time of the laptop: the first one here was two hours ahead."""
    first = box.python("print('first')", id=runfolder.new_id(time.time() + 7200))
    box.wait(first)
    second = box.python("print('second')")
    box.wait(second)
    third = box.python("print('third')")
    box.wait(third)
    for answer, said in ((first, "first"), (second, "second"), (third, "third")):
        run = box.run(answer)
        assert Path(run.log_path(run.record().value)).read_text() == f"{said}\n"


def test_a_log_of_nobody_is_kept_too(box: Any) -> None:
    (box.root / "train_t.log").write_text("by hand\n")
    answer = box.python("pass")
    assert answer["rotated"] == f"{box.root}/train_t.log.before-{answer['id']}"
    assert Path(answer["rotated"]).read_text() == "by hand\n"
    box.wait(answer)


@pytest.mark.parametrize("kind", ["folder", "device"])
def test_a_log_that_is_no_file_is_refused(box: Any, kind: str) -> None:
    log = "/dev/full" if kind == "device" else str(box.root)
    with pytest.raises(AgentError, match="not an ordinary file"):
        box.launch(["true"], log=log)
    assert runfolder.list_runs(box.state_dir) == []


def test_a_program_that_does_not_exist_is_a_failed_run_with_a_trace(box: Any) -> None:
    answer = box.launch(["/nowhere/python"])
    assert answer["outcome"] == "failed" and "/nowhere/python" in answer["why"]
    assert box.run(answer).exit().value["cause"] == "spawn_failed"
    box.wait(box.launch(["true"]))  # the tag is free


def test_a_program_that_dies_at_once_is_told_with_its_log(box: Any) -> None:
    answer = box.python("import nothing_of_that_name", settle_s=10.0)
    assert answer["outcome"] == "started" and answer["exit"]["code"] == 1
    assert "ModuleNotFoundError" in answer["log_tail"]


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"id": "../../etc"}, "usage"),
        ({"tag": "a b"}, "usage"),
        ({"tag": "../x"}, "usage"),
        ({"cwd": "/nowhere"}, "not_found"),
        ({"release_dir": "/nowhere"}, "not_found"),
        ({"command": []}, "not_found"),
    ],
)
def test_a_bad_request_leaves_nothing(box: Any, changes: dict[str, Any], kind: str) -> None:
    request = box.request(["true"])
    for key, value in changes.items():
        (request if key in request else request["record"])[key] = value
    with pytest.raises(AgentError) as error:
        launch.launch(request, None)
    assert error.value.kind == kind
    assert runfolder.list_runs(box.state_dir) == []


def test_a_full_disk_starts_nothing_and_leaves_no_half_run(box: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: str, data: bytes, mode: int = 0o644, *, durable: bool = True) -> None:
        raise OSError(28, "No space left on device", path)

    monkeypatch.setattr(launch, "write_bytes", full)
    with pytest.raises(AgentError, match="No space left") as error:
        box.launch(["true"])
    assert error.value.kind == "verification" and "nothing was started" in error.value.what
    assert runfolder.list_runs(box.state_dir) == []


def test_a_run_whose_supervisor_was_killed_keeps_its_tag(box: Any, until: Callable[..., Any]) -> None:
    """Its program still writes the log and holds the GPUs: not a tag to give away."""
    first = box.launch(["sleep", "60"])
    supervisor = box.run(first).identities()[0]
    signals.send_signal(supervisor, signal.SIGKILL)
    until(lambda: not box.run(first).live())
    with pytest.raises(AgentError, match="lost its supervisor, but its processes live") as error:
        box.launch(["sleep", "60"])
    assert error.value.kind == "locked" and error.value.next.startswith("dflashctl kill t")


AGENT = (
    "import json, sys; from dflashctl.agent.runs.launch import launch;"
    "print(json.dumps(launch(json.loads(sys.stdin.read()), None)))"
)


@pytest.mark.parametrize("moment", range(12))
def test_a_launch_killed_at_any_moment_is_found_out_by_asking_again(box: Any, moment: int) -> None:
    """The agent dies of SIGKILL between its first instruction and its answer; the same request again leaves
    exactly one program running, whether the first attempt had started it or not."""
    request = box.request([sys.executable, "-c", COUNT.format(seconds=30)])
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert agent.stdin is not None and agent.stdout is not None
    agent.stdin.write(json.dumps(request).encode())
    agent.stdin.close()
    run = runfolder.folder_of(box.state_dir, request["id"])
    if moment:  # from the first trace of the launch on, in steps of 15 ms
        while not Path(run.path).exists() and agent.poll() is None:
            time.sleep(0.001)
        time.sleep((moment - 1) * 0.015)
    agent.kill()
    agent.wait()
    agent.stdout.close()
    answer = launch.launch(request, None)
    assert answer["outcome"] in ("started", "already_running"), answer
    assert starts(box) == 1
    assert len(box.family(answer)) == 1


def test_a_supervisor_is_recognised_by_its_exact_command_line(box: Any) -> None:
    answer = box.launch(["sleep", "30"])
    run = box.run(answer)
    found = spawn.find_supervisor(run)
    assert found is not None and found.identity == run.identities()[0]
    other = runfolder.folder_of(box.state_dir, runfolder.new_id())
    assert spawn.find_supervisor(other) is None


def test_waiting_ends_with_the_run_or_with_its_time(box: Any) -> None:
    answer = box.launch(["sh", "-c", "until [ -e go ]; do sleep 0.05; done"])
    request = {"state_dir": box.state_dir, "id": answer["id"], "wait_s": 0.0}
    goes_on = {"exit": None, "live": True, "problem": None, "log_tail": "", "root_cause": None}
    assert waiting.wait_end(request, None) == goes_on
    (box.root / "go").touch()
    assert box.wait(answer)["code"] == 0
    with pytest.raises(AgentError, match="no run"):
        waiting.wait_end({**request, "id": runfolder.new_id()}, None)


def test_waiting_for_a_lost_run_says_so(box: Any) -> None:
    answer = box.launch(["sleep", "60"])
    signals.send_signal(box.run(answer).identities()[0], signal.SIGKILL)
    request = {"state_dir": box.state_dir, "id": answer["id"], "wait_s": 60.0}
    told = waiting.wait_end(request, None)
    assert told["exit"] is None and told["live"] is False
    assert told["problem"] == "its supervisor is gone without an exit.json"


def test_the_lock_is_held_by_the_living_only(box: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(box.state_dir).mkdir()
    monkeypatch.setattr(launch, "LOCK_S", 0.2)
    with launch.launch_lock(box.state_dir), pytest.raises(AgentError, match=f"pid {os.getpid()}") as error:
        box.launch(["true"])
    assert error.value.kind == "locked"
    box.wait(box.launch(["true"]))
