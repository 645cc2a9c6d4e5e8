"""Run with: pytest tests/unit/test_launch_plan.py. From recipe, tag and facts to the request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflashctl.config import resolve
from dflashctl.config.hosts import Host
from dflashctl.config.recipe import Recipe
from dflashctl.config.resolve import read_recipe
from dflashctl.errors import Locked, NotFound, Unreachable, UsageError
from dflashctl.gpus.idle import Gpu
from dflashctl.gpus.smi import GpuReading
from dflashctl.releases.deploy import read_source
from dflashctl.releases.here import Here
from dflashctl.remote import conversation
from dflashctl.runs import launching
from dflashctl.runs.durations import parse_duration
from dflashctl.runs.ending import end_words, failed
from dflashctl.runs.launch import LaunchPlan, check_before, collect_secrets, plan_launch
from dflashctl.runs.recipes import shown

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
    assert error.value.next == "dflashctl deploy"


def test_a_release_that_was_deployed_for_another_recipe_is_said() -> None:
    assert plan().warnings == ()
    other = {**INSIDE, "release_info": {"recipe": "demo"}}
    assert plan(inside=other).warnings == (
        "release 7f3a91c2 was deployed for recipe demo, not for threadwarm; "
        "if it lacks what this one needs: dflashctl deploy",
    )
    assert plan(inside={**INSIDE, "release_info": {"recipe": "threadwarm"}}).warnings == ()
    # Recipes with the same files share a release: the deploy that was hinted at had nothing to do.
    assert plan(inside=other, here=RELEASE).warnings == ()
    assert len(plan(inside=other, here="0" * 64).warnings) == 1


def test_a_key_that_nothing_reads_is_warned_of_where_the_tag_makes_it_so(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "trainer").symlink_to(Path(__file__).parents[2] / "trainer")
    path = tmp_path / "recipes" / "warm.yaml"
    path.write_text(
        "version: 1\nname: warm\ndeploy: {include: [trainer/**]}\n"
        'launch: {command: [python, -m, trainer, train, "{recipe_file}"]}\n'
        "train:\n  target: {path: x}\n  drafter: {mask_token_id: 1}\n  topology: threads\n"
        "  policy: {start: sequential}\nvariants:\n  together: {train: {topology: colocated}}\n"
    )
    found = read_recipe(path)
    assert plan(resolve(found, "warm")).warnings == () == shown(found, "warm").warnings
    (said,) = plan(resolve(found, "together")).warnings
    assert said.startswith(
        f"{path}:9:12: train.policy.start: counts only with topology: threads | auto; here"
    )
    assert shown(found, "together").payload()["warnings"] == [said]


def test_a_value_in_env_whose_name_sounds_secret_is_warned_of_by_name_alone() -> None:
    key = {"WANDB_API_KEY": "0123456789abcdef"}
    (said,) = plan(recipe(env=key)).warnings
    assert "WANDB_API_KEY" in said and "launch.secrets" in said and "0123456789" not in said
    for harmless in ({"TOKENIZERS_PARALLELISM": "false"}, {"HF_TOKEN_PATH": "/workspace/token"}):
        assert plan(recipe(env=harmless)).warnings == ()


def test_files_that_differ_from_the_release_are_said(tmp_path: Path) -> None:
    assert plan(here=RELEASE).warnings == () == plan(here=None).warnings
    said = "the files here differ from release 7f3a91c2: dflashctl diff · dflashctl deploy"
    assert plan(here="0" * 64).warnings == (said,)
    body = {"version": 1, "name": "x", "launch": {"command": ["sh"]}}
    file = tmp_path / "recipes" / "x.yaml"
    file.parent.mkdir()
    file.write_text(yaml.safe_dump(body | {"deploy": {"include": ["*.py"]}}))
    project = read_recipe(file)
    assert Here(project).release(60) is None, "a launch needs no files here"
    (tmp_path / "a.py").write_text("1\n")
    assert Here(project).release(60) == read_source(project).snapshot.release
    file.write_text(yaml.safe_dump(body))
    assert Here(read_recipe(file)).release(60) is None


def test_a_fresh_cache_lies_in_the_runs_folder() -> None:
    environ = plan(fresh_cache=True).record["env"]
    folder = "/workspace/.dflashctl/runs/20260102T030405678-0a1b2c/compile_cache"
    assert environ["TORCHINDUCTOR_CACHE_DIR"] == f"{folder}/inductor"
    assert environ["TRITON_CACHE_DIR"] == f"{folder}/triton"
    assert "TORCHINDUCTOR_CACHE_DIR" not in plan().record["env"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("10m", 600),
        ("1.5h", 5400),
        ("2d", 172800),
        ("1h30m", 5400),
        (" 1m ", 60),
    ],
)
def test_stretches_of_time(text: str, seconds: float) -> None:
    assert parse_duration(text, option="--wait-idle") == seconds


@pytest.mark.parametrize("text", ["", "m", "-1s", "1 0m", "10min", "1e3", "٣m", "nan", "5w", "10m!"])
def test_what_is_no_stretch_of_time(text: str) -> None:
    with pytest.raises(UsageError, match="--wait-idle: not a length of time"):
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

    host = HOST

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

    def converse(self, engine: Any, op: str, request: Any, *, more: Any, **how: Any) -> dict[str, Any]:
        """The first call, which is told only later what to launch."""
        order = json.loads(next(iter(more)))
        assert (op, how["where"], order["do"]) == ("launch_desk", "inside", "launch")
        return self.call(engine, op, order["request"], timeout_s=how["timeout_s"])


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Line:
    made = Line(losses=request.param)
    monkeypatch.setattr(launching, "call", made.call)
    monkeypatch.setattr(conversation, "call", made.converse)
    return made


def ask(line: Any) -> dict[str, Any]:
    with launching.Attempt(line, samples=0) as attempt:
        return attempt.start(plan(), {})


@pytest.mark.parametrize("line", [0], indirect=True)
def test_a_launch_with_good_contact_is_one_call(line: Line) -> None:
    assert ask(line) == {"outcome": "already_running"} and len(line.asked) == 1


@pytest.mark.parametrize("line", [1], indirect=True)
def test_an_uncertain_launch_is_asked_again_with_the_same_id(line: Line) -> None:
    assert ask(line) == {"outcome": "already_running"}
    assert line.asked == ["20260102T030405678-0a1b2c"] * 2
    assert line.closed == 1


@pytest.mark.parametrize("line", [9], indirect=True)
def test_a_launch_that_stays_uncertain_says_so(line: Line) -> None:
    with pytest.raises(
        Unreachable, match="whether run 20260102T030405678-0a1b2c was started is not known"
    ) as error:
        ask(line)
    assert "dflashctl status localtls" in error.value.next
    assert len(line.asked) == 2
