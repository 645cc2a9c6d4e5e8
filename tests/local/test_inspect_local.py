"""Run with: pytest tests/local/test_inspect_local.py. The whole of `inspect` on engine `local`, with the
torch that is installed here."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflashctl.agent import AgentError
from dflashctl.agent.doctor import inspecting
from dflashctl.cli import main as frame
from dflashctl.config.hosts import Host
from dflashctl.inspect import reading
from dflashctl.inspect.document import AnyInspectDocument
from dflashctl.remote.local import LocalEngine

VARIABLES = {
    "TORCHINDUCTOR_CUDAGRAPH_TREES": "0",
    "TORCHINDUCTOR_CUDAGRAPHS": "1",
    "TORCH_COMPILE_BACKEND": "x",
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Callable[..., tuple[int, str, str]]:
    """Run a command line with two hosts that are this machine; (exit code, stdout, stderr)."""
    base = {"engine": "local", "python": sys.executable, "state_dir": str(tmp_path / "state")}
    document = {
        "version": 1,
        "defaults": {"host": "odd"},
        "hosts": {
            "odd": {**base, "env": VARIABLES},
            "plain": base,
            "none": {**base, "python": "/usr/bin/true"},
        },
    }
    (tmp_path / "hosts.yaml").write_text(yaml.safe_dump(document))
    monkeypatch.setenv("DFLASHCTL_HOSTS", str(tmp_path / "hosts.yaml"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))

    def go(*words: str) -> tuple[int, str, str]:
        code = frame.run(list(words))
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return go


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every remote command, by the host that it went to."""
    found: list[str] = []
    genuine = LocalEngine.run

    def counted(self: LocalEngine, *args: Any, **options: Any) -> Any:
        found.append(self.host.name)
        return genuine(self, *args, **options)

    monkeypatch.setattr(LocalEngine, "run", counted)
    return found


def test_inductor_in_one_remote_command(run: Any, calls: list[str]) -> None:
    import torch
    from torch._inductor import list_mode_options

    code, out, err = run("inspect", "inductor", "--json")
    assert code == 0 and calls == ["odd"]
    told = json.loads(out)
    AnyInspectDocument.model_validate(told)
    assert told["schema"] == "dflashctl.inspect/1" and told["torch"] == torch.__version__
    options = {f"{each['module']}.{each['name']}": each for each in told["options"]}
    assert {each["module"] for each in told["options"]} == {
        "torch._inductor.config",
        "torch._dynamo.config",
        "torch._functorch.config",
    }
    graphs = options["torch._inductor.config.triton.cudagraphs"]
    assert (graphs["value"], graphs["default"], graphs["from"]) == (True, False, "TORCHINDUCTOR_CUDAGRAPHS")
    trees = options["torch._inductor.config.triton.cudagraph_trees"]
    assert (trees["value"], trees["default"], trees["from"]) == (True, True, "default")
    off = [name for name, each in options.items() if each["value"] != each["default"]]
    assert off == ["torch._inductor.config.triton.cudagraphs"]
    assert set(told["modes"]) == set(list_mode_options())
    assert told["modes"]["reduce-overhead"] == {"triton.cudagraphs": True}
    assert "torch._inductor.config.size_asserts" in told["variables"]["TORCHINDUCTOR_SIZE_ASSERTS"]["options"]
    assert {each["name"]: each["known"] for each in told["set"]} == {
        "TORCHINDUCTOR_CUDAGRAPHS": "read",
        "TORCHINDUCTOR_CUDAGRAPH_TREES": "unread",
        "TORCH_COMPILE_BACKEND": "named",
    }
    (mistake,) = told["mistaken"]
    assert mistake["name"] == "TORCHINDUCTOR_CUDAGRAPH_TREES"
    assert mistake["options"] == ["torch._inductor.config.triton.cudagraph_trees"]
    assert "TORCHINDUCTOR_CUDAGRAPHS" in mistake["nearest"]
    assert told["problems"] == []
    assert "TORCHINDUCTOR_CUDAGRAPH_TREES=0 is set, but nothing" in err


def test_a_look_leaves_nothing_behind(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(inspecting.tempfile, "tempdir", str(folder))
    request = {
        "files": {"p/__init__.py": "", "p/m.py": "import os\nos.write(int(os.environ['DFLASH_ANSWER_FD']),"},
        "module": "p.m",
        "argv": [],
        "env": {"PATH": "/usr/bin:/bin"},
        "deadline_s": 30,
        "state_dir": str(tmp_path / "state"),
        "run": None,
    }
    with pytest.raises(AgentError) as broken:
        inspecting.inspect(request, print)
    assert "SyntaxError" in broken.value.what and "hosts.yaml" in broken.value.next
    request["files"] = {"p/__init__.py": "", "p/m.py": "import time\ntime.sleep(600)"}
    with pytest.raises(AgentError, match="not read within"):
        inspecting.inspect({**request, "deadline_s": 0.5}, print)
    request["files"] = {
        "p/__init__.py": "",
        "p/m.py": "import os, sys\nprint('noise')\n"
        "out = os.fdopen(int(os.environ['DFLASH_ANSWER_FD']), 'w')\n"
        'out.write(\'{"progress": "half"}\\n{"answer": \' + str(len(sys.argv)) + \'}\\n\')',
    }
    heard: list[Any] = []
    assert inspecting.inspect(request, heard.append)["facts"] == 1
    assert heard == [{"progress": "half"}]
    assert list(folder.iterdir()) == []
    for path in ("../x", "/x", "a/b/c", "a/../x", ".x"):
        with pytest.raises(AgentError, match="not the name"):
            inspecting.inspect({**request, "files": {path: ""}}, print)


def test_questions_that_cannot_be_answered(run: Any, calls: list[str]) -> None:
    assert run("inspect", "nonsense")[0] == 2
    assert run("inspect", "inductor", "--filter", "(")[0] == 2
    assert calls == []
    code, _, err = run("inspect", "env", "--run", "nobody")
    assert code == 6 and "no run has the tag 'nobody'" in err
    assert run("inspect", "env", "--host", "none")[0] != 0


def test_a_run_is_inspected_in_its_own_environment(run: Any, tmp_path: Path, box: Any) -> None:
    record = {"PATH": "/usr/bin:/bin", "TORCHINDUCTOR_MAX_AUTOTUNE": "1", "TORCHINDUCTOR_CUDAGRAPHS": "0"}
    state = str(tmp_path / "state")
    answer = box.launch(["true"], "old", env=record, state_dir=state)
    for name in ("old", answer["id"]):
        found = inspecting._run_of({"state_dir": state, "run": name})
        assert found is not None and found["id"] == answer["id"] and found["env"] == record
    code, out, err = run("inspect", "inductor", "--run", "old", "--diff-default", "--json")
    assert code == 0 and "today's torch" in err
    changed = {each["name"]: (each["value"], each["from"]) for each in json.loads(out)["options"]}
    assert changed == {"max_autotune": (True, "TORCHINDUCTOR_MAX_AUTOTUNE")}


CANNED = """
import json, os
given = {name: value for name, value in os.environ.items() if name.startswith("TORCH")}
option = {"module": "m", "name": "graphs", "value": os.environ.get("TORCHINDUCTOR_CUDAGRAPHS") == "1",
          "default": False, "origin": "environment", "variables": ["TORCHINDUCTOR_CUDAGRAPHS"], "alias": None}
facts = {"torch": "2.11.0", "options": [option], "modes": {}, "variables": {}, "problems": [],
         "set": [{"name": n, "value": v, "known": "read", "named_in": []} for n, v in given.items()]}
with os.fdopen(int(os.environ["DFLASH_ANSWER_FD"]), "w") as out:
    out.write(json.dumps({"answer": {"inductor": facts, "env": {"torch": "2.11.0"}}}) + "\\n")
"""


def test_a_host_against_another_in_two_remote_commands(
    run: Any, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way there and back alone: the program needs no torch."""
    files = {f"{reading.SENT_AS}/__init__.py": "", f"{reading.SENT_AS}/torch_facts.py": CANNED}
    monkeypatch.setattr(reading, "package_files", lambda package, sent_as: files)
    code, out, _ = run("inspect", "odd", "--against", "plain")
    assert code == 0 and calls == ["odd", "plain"]
    assert "odd against plain · 4 differences in" in out
    assert [line.split() for line in out.splitlines()[2:]] == [
        ["variable", "TORCHINDUCTOR_CUDAGRAPHS", "1", "(not", "there)"],
        ["variable", "TORCHINDUCTOR_CUDAGRAPH_TREES", "0", "(not", "there)"],
        ["variable", "TORCH_COMPILE_BACKEND", "x", "(not", "there)"],
        ["option", "m.graphs", "True", "False"],
    ]
    _, everything, _ = run("inspect", "odd", "--against", "plain", "--all", "--json")
    AnyInspectDocument.model_validate_json(everything)
    rows = {row["name"]: row["same"] for row in json.loads(everything)["rows"]}
    assert rows["python"] is True and rows["m.graphs"] is False


def test_the_host_type_is_what_the_environment_is_made_of() -> None:
    host = Host(
        name="h",
        engine="local",
        python="/venv/bin/python",
        code_root="/c",
        workdir="/w",
        log_dir="/w",
        state_dir="/s",
        env={"HF_HOME": "/hf"},
    )
    made = reading.run_environment(host, None)
    assert made["HF_HOME"] == "/hf" and made["PATH"].startswith("/venv/bin:")
    assert "CUDA_VISIBLE_DEVICES" not in made and "DFLASH_TAG" not in made
