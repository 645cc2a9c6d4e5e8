"""Run with: pytest tests/unit/test_launch.py. Plans, and starts that happen exactly once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dflashctl.agent import AgentError, launch, proc, runfolder, signals, spawn, waiting
from dflashctl.agent.compilecache import compile_cache
from dflashctl.config import resolve
from dflashctl.config.hosts import Host
from dflashctl.config.recipe import Recipe
from dflashctl.errors import Locked, NotFound, Unreachable, UsageError
from dflashctl.gpus.idle import Gpu
from dflashctl.gpus.smi import GpuReading
from dflashctl.runs import launching
from dflashctl.runs.durations import parse_duration
from dflashctl.runs.ending import end_words, failed
from dflashctl.runs.launch import LaunchPlan, check_before, collect_secrets, plan_launch

RELEASE = "7f3a91c2" + "0" * 56
HOST = Host(
    name="ct200",
    engine="local",
    python="/root/venv/bin/python",
    code_root="/root/dflash",
    workdir="/workspace",
    log_dir="/workspace",
    state_dir="/workspace/.dflashctl",
    env={"HF_HOME": "/workspace/hf", "PYTHONPATH": "/opt/lab/python"},
)
INSIDE: dict[str, Any] = {
    "release": RELEASE,
    "release_info": {"git": {"commit": "1c9e4d", "dirty": False}},
    "runs": [],
}


def recipe(tag: str = "localtls", **launch_changes: Any) -> Any:
    body = {
        "command": ["python", "-m", "trainer", "train", "{recipe_file}"],
        "env": {"PYTHONUNBUFFERED": "1", "OUT": "{run_dir}/out"},
        **launch_changes,
    }
    return resolve(
        Recipe.model_validate(
            {
                "version": 1,
                "name": "threadwarm",
                "deploy": {"include": ["trainer/**"]},
                "launch": body,
                "variants": {"localtls": {"launch": {"grace_s": 7}}},
            }
        ),
        tag,
    )


def gpu(index: int) -> Gpu:
    return Gpu(GpuReading(index, f"GPU-{index:08x}", "H200", 0, 143771, 0, 30, 70.0), (), 64, "")


def plan(resolved: Any = None, **changes: Any) -> LaunchPlan:
    facts: dict[str, Any] = {
        "run_id": "20260102T030405678-0a1b2c",
        "inside": INSIDE,
        "gpus": [gpu(5), gpu(7)],
        "created_by": "ada@laptop",
    }
    return plan_launch(HOST, resolved or recipe(), **{**facts, **changes})


def test_the_plan_is_the_record() -> None:
    made = plan()
    run_dir = "/workspace/.dflashctl/runs/20260102T030405678-0a1b2c"
    assert made.record["command"] == [
        "/root/venv/bin/python",
        "-m",
        "trainer",
        "train",
        f"{run_dir}/recipe.yaml",
    ]
    assert made.record["log"] == "/workspace/train_threadwarm_localtls.log"
    assert made.record["cwd"] == made.release_dir == f"/root/dflash/releases/{RELEASE}"
    assert made.record["variant"] == "localtls" and made.record["grace_s"] == 7
    assert made.record["gpus"] == [
        {"index": 5, "uuid": "GPU-00000005"},
        {"index": 7, "uuid": "GPU-00000007"},
    ]
    assert made.record["git"] == {"commit": "1c9e4d", "dirty": False}
    assert made.gpu_words == "5,7"
    assert made.record["env"] == {
        "PATH": f"/root/venv/bin:{HOST.path}",
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "HF_HOME": "/workspace/hf",
        "PYTHONUNBUFFERED": "1",
        "OUT": f"{run_dir}/out",
        "PYTHONPATH": f"/root/dflash/releases/{RELEASE}:/opt/lab/python",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "GPU-00000005,GPU-00000007",
        "DFLASH_RUN_DIR": run_dir,
        "DFLASH_RUN_ID": "20260102T030405678-0a1b2c",
        "DFLASH_TAG": "localtls",
    }


def test_a_request_carries_secrets_beside_the_record_never_in_it() -> None:
    made = plan(recipe(secrets=["HF_TOKEN"]))
    request = made.request({"HF_TOKEN": "hunter2"}, 0.5)
    assert request["secrets"] == {"HF_TOKEN": "hunter2"}
    assert request["record"]["secrets"] == ["HF_TOKEN"]
    rest = {key: value for key, value in request.items() if key != "secrets"}
    assert "hunter2" not in json.dumps(rest)


def test_without_gpus_a_program_sees_none() -> None:
    assert plan(gpus=[]).record["env"]["CUDA_VISIBLE_DEVICES"] == ""


def test_a_recipe_without_deploy_runs_in_the_workdir_without_a_release() -> None:
    plain = resolve(Recipe.model_validate({"version": 1, "name": "x", "launch": {"command": ["sh"]}}), "a")
    made = plan(plain)
    assert made.record["cwd"] == "/workspace" and made.record["release"] is None and made.release_dir is None
    assert made.record["env"]["PYTHONPATH"] == "/opt/lab/python"
    assert made.record["command"] == ["sh"]
    check_before(HOST, plain, {**INSIDE, "release": None})


def test_the_recipes_pythonpath_comes_before_the_hosts() -> None:
    made = plan(recipe(env={"PYTHONPATH": "/mine"}))
    assert made.record["env"]["PYTHONPATH"] == f"/root/dflash/releases/{RELEASE}:/mine:/opt/lab/python"


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "DFLASH_RUN_ID"])
def test_what_dflashctl_sets_nobody_else_sets(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is set by dflashctl itself"):
        plan(recipe(env={name: "0"}))


def test_a_placeholder_without_a_value_names_its_place() -> None:
    plain = resolve(
        Recipe.model_validate({"version": 1, "name": "x", "launch": {"command": ["sh", "{release_dir}"]}}),
        "a",
    )
    with pytest.raises(UsageError, match=r"launch\.command\[1\]"):
        plan(plain)


def test_the_tag_of_a_live_run_is_refused_before_anything_else() -> None:
    live = {"id": "20260101T000000000-aaaaaa", "tag": "localtls", "live": True}
    with pytest.raises(Locked, match="20260101T000000000-aaaaaa is live") as error:
        check_before(HOST, recipe(), {**INSIDE, "runs": [live], "release": None})
    assert "dflashctl kill localtls" in error.value.next
    check_before(HOST, recipe("other"), {**INSIDE, "runs": [live]})


def test_without_a_deploy_there_is_nothing_to_launch() -> None:
    with pytest.raises(NotFound, match="nothing is deployed") as error:
        check_before(HOST, recipe(), {**INSIDE, "release": None})
    assert error.value.next == "dflashctl deploy --recipe threadwarm --host ct200"


def test_a_release_that_was_deployed_for_another_recipe_is_said() -> None:
    assert plan().warnings == ()
    other = {**INSIDE, "release_info": {"recipe": "demo"}}
    assert plan(inside=other).warnings == (
        "release 7f3a91c2 was deployed for recipe demo, not for threadwarm",
    )
    assert plan(inside={**INSIDE, "release_info": {"recipe": "threadwarm"}}).warnings == ()


def test_a_fresh_cache_lies_in_the_runs_folder() -> None:
    environ = plan(fresh_cache=True).record["env"]
    folder = "/workspace/.dflashctl/runs/20260102T030405678-0a1b2c/compile_cache"
    assert environ["TORCHINDUCTOR_CACHE_DIR"] == f"{folder}/inductor"
    assert environ["TRITON_CACHE_DIR"] == f"{folder}/triton"
    assert "TORCHINDUCTOR_CACHE_DIR" not in plan().record["env"]


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400), ("2d", 172800), (" 1m ", 60)]
)
def test_stretches_of_time(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-1s", "1 0m", "10min", "1e3", "٣m", "nan"])
def test_what_is_no_stretch_of_time(text: str) -> None:
    with pytest.raises(UsageError, match="--wait-idle: cannot read"):
        parse_duration(text, option="--wait-idle")


def test_a_missing_secret_is_named_before_any_contact() -> None:
    assert collect_secrets(["A"], {"A": "1", "B": "2"}) == {"A": "1"}
    with pytest.raises(UsageError, match="HF_TOKEN is not set"):
        collect_secrets(["A", "HF_TOKEN"], {"A": "1"})


@pytest.mark.parametrize(
    ("ended", "words", "bad"),
    [
        ({"cause": "exited", "code": 0, "wall_s": 3.1}, "exit code 0 after 3.1 s", False),
        ({"cause": "exited", "code": 2, "wall_s": 3.1}, "failed: exit code 2 after 3.1 s", True),
        ({"cause": "signalled", "signal": 11, "wall_s": 1}, "died of SIGSEGV after 1.0 s", True),
        ({"cause": "signalled", "signal": 9, "oom": True}, "died of SIGKILL: out of memory", True),
        (
            {"cause": "killed", "code": 0, "killed_by": {"who": "a@b", "reason": "slow"}},
            "was killed by a@b (slow)",
            True,
        ),
        ({"cause": "spawn_failed", "why": "no such file"}, "did not start: no such file", True),
        ({"cause": "signalled", "signal": None}, "died of signal None", True),
    ],
)
def test_an_end_in_words(ended: dict[str, Any], words: str, bad: bool) -> None:
    assert end_words(ended) == words
    assert failed(ended) is bad
    assert failed(None)


class Line:
    """An engine whose contact is lost after the request has arrived, `losses` times."""

    def __init__(self, losses: int) -> None:
        self.losses = losses
        self.asked: list[str] = []
        self.closed = 0

    def close(self) -> None:
        self.closed += 1

    def call(self, engine: Any, op: str, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        self.asked.append(request["id"])
        if len(self.asked) <= self.losses:
            raise Unreachable("connection lost")
        return {"outcome": "already_running"}


def test_an_uncertain_launch_is_asked_again_with_the_same_id(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(losses=1)
    monkeypatch.setattr(launching, "call", line.call)
    assert launching.start(line, plan(), {}) == {"outcome": "already_running"}  # type: ignore[arg-type]
    assert line.asked == ["20260102T030405678-0a1b2c"] * 2
    assert line.closed == 1


def test_a_launch_that_stays_uncertain_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(losses=9)
    monkeypatch.setattr(launching, "call", line.call)
    with pytest.raises(
        Unreachable, match="whether run 20260102T030405678-0a1b2c was started is not known"
    ) as error:
        launching.start(line, plan(), {})  # type: ignore[arg-type]
    assert "dflashctl status localtls" in error.value.next
    assert len(line.asked) == 2


# From here on: the operation itself, with real processes.

COUNT = "open('starts', 'a').write('x'); import time; time.sleep({seconds})"


def starts(box: Any) -> int:
    file = box.root / "starts"
    return len(file.read_text()) if file.exists() else 0


def test_the_answer_and_the_record(box: Any) -> None:
    answer = box.launch(["sleep", "30"], created_by="ada@laptop")
    assert answer["outcome"] == "started"
    assert proc.cmdline(answer["leader"]["pid"]) == ["sleep", "30"]
    record = box.run(answer).record().value
    assert record["id"] == answer["id"] and record["log_start"] == 0
    assert record["boot_id"] == proc.boot_id() and record["init_start"] == proc.init_start()
    assert abs(record["created_at"] - time.time()) < 20
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
    time.sleep(0.3)
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
    time.sleep(0.3)
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


def test_a_tag_is_free_again_after_the_end_and_the_old_log_is_kept(box: Any) -> None:
    first = box.python("print('KeyError of the first')")
    box.wait(first)
    second = box.python("print('second')")
    box.wait(second)
    assert second["rotated"] == f"{first['log']}.{first['id']}"
    assert box.log(second) == "second\n"
    record = box.run(first).record().value
    assert Path(box.run(first).log_path(record)).read_text() == "KeyError of the first\n"


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


def test_a_run_whose_supervisor_was_killed_keeps_its_tag(box: Any) -> None:
    """Its program still writes the log and holds the GPUs: not a tag to give away."""
    first = box.launch(["sleep", "60"])
    supervisor = box.run(first).identities()[0]
    signals.send_signal(supervisor, signal.SIGKILL)
    while box.run(first).live():
        time.sleep(0.01)
    with pytest.raises(AgentError, match="lost its supervisor, but its processes live") as error:
        box.launch(["sleep", "60"])
    assert error.value.kind == "locked" and error.value.next.startswith("dflashctl kill t")


AGENT = (
    "import json, sys; from dflashctl.agent.launch import launch;"
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
    time.sleep(0.3)
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
    answer = box.python("import time; time.sleep(1)")
    request = {"state_dir": box.state_dir, "id": answer["id"], "wait_s": 0.0}
    assert waiting.wait_end(request, None) == {"exit": None, "live": True, "problem": None, "log_tail": ""}
    assert box.wait(answer)["code"] == 0
    with pytest.raises(AgentError, match="no run"):
        waiting.wait_end({**request, "id": runfolder.new_id()}, None)


def test_waiting_for_a_lost_run_says_so(box: Any) -> None:
    answer = box.launch(["sleep", "60"])
    signals.send_signal(box.run(answer).identities()[0], signal.SIGKILL)
    request = {"state_dir": box.state_dir, "id": answer["id"], "wait_s": 10.0}
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
