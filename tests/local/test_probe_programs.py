"""Run with: pytest tests/local/test_probe_programs.py. The programs of the probes as far as a CPU takes them.

The threads' cases run here with the backend aot_eager, which traces and compiles like Inductor but builds
nothing, and has no graphs: what is tested is that each case asks what it says, and sees a wrong answer. That
Inductor itself passes on this CPU is a soak test; the graphs need a GPU (tests/gpu).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dflashctl.inspect.sources import package_files
from dflashctl.probe.cases import PROBES
from dflashctl.probe.programs import common, step, threads


def traced(module: Any, *, dynamic: bool, **how: Any) -> Any:
    """torch.compile without Inductor's options, which other backends do not take."""
    assert dynamic is False and set(how) <= {"mode", "options"}
    return torch.compile(module, dynamic=False, backend="aot_eager")


@pytest.fixture(autouse=True)
def _one_thread_and_a_clean_slate() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch._dynamo.reset()


CPU_CASES = [case.name for case in PROBES["threads"].cases if case.name != "own-capture"]
ONE_AT_A_TIME = [name for name in CPU_CASES if "at-once" not in name]


@pytest.mark.parametrize("name", ONE_AT_A_TIME)
def test_the_threads_cases_that_have_one_worker(name: str) -> None:
    assert threads.cases("cpu", traced)[name]() in ({}, {"threads": 1})


@pytest.mark.parametrize("name", sorted(set(CPU_CASES) - set(ONE_AT_A_TIME)))
def test_the_threads_cases_that_have_three(name: str) -> None:
    """Without any compiling: that races, which is what the case asks on a real backend."""
    assert threads.cases("cpu", lambda module, **how: module)[name]() == {"threads": 3}


def wrong_output(module: Any, **how: Any) -> Any:
    return lambda data: module(data) * 1.01


def wrong_gradient(module: Any, **how: Any) -> Any:
    """The output is right to the last bit."""

    def forward(data: Any) -> Any:
        more = module(data) * 0.05
        return module(data) + (more - more.detach())

    return forward


def stale(module: Any, **how: Any) -> Any:
    """Replays the first data for ever, as a graph with moved inputs does."""
    first: list[Any] = []

    def forward(data: Any) -> Any:
        first.append(data)
        return module(first[0])

    return forward


@pytest.mark.parametrize("broken", [wrong_output, wrong_gradient, stale])
@pytest.mark.parametrize("name", CPU_CASES)
def test_wrong_numbers_do_not_pass(name: str, broken: Callable[..., Any]) -> None:
    with pytest.raises((AssertionError, common.Failed)) as caught:
        threads.cases("cpu", broken)[name]()
    if isinstance(caught.value, common.Failed):
        assert {type(error) for _, error in caught.value.errors} == {AssertionError}
    else:
        assert "not close" in str(caught.value)


def test_every_worker_that_fails_is_told() -> None:
    barrier = threading.Barrier(2)

    def good() -> None:
        barrier.wait(30)

    def bad() -> None:
        barrier.wait(30)
        raise ValueError("of a thread")

    with pytest.raises(common.Failed, match="1 of 2 failed") as caught:
        common.in_threads([good, bad])
    ((who, error),) = caught.value.errors
    assert who == "worker-1" and isinstance(error, ValueError)


def test_the_states_are_set_in_the_thread_that_asks() -> None:
    trees, found = threads.trees_module(), {}

    def look() -> None:
        found["before"] = hasattr(trees.local, "tree_manager_containers")
        threads.local_tls()
        found["local"] = hasattr(trees.local, "tree_manager_containers")
        found["stashed"] = torch._C._is_key_in_tls("tree_manager_containers")
        threads.stashed_tls()
        found["then"] = torch._C._is_key_in_tls("tree_manager_containers")
        found["same"] = (
            torch._C._get_obj_in_tls("tree_manager_containers") is trees.local.tree_manager_containers
        )

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == {"before": False, "local": True, "stashed": False, "then": True, "same": True}


def test_a_compiled_step_equals_the_plain_one_and_a_wrong_one_does_not() -> None:
    figures = step.compare("cpu", "compiled", traced)
    assert set(figures) == {"eager ms", "compiled ms"}

    def slightly_off(module: Any, dynamic: bool) -> Any:
        return lambda x: module(x) + 0.05 * x

    with pytest.raises(AssertionError):
        step.compare("cpu", "compiled", slightly_off)


def test_a_step_that_does_not_learn_is_seen() -> None:
    """Weights that stay where they were are further off than the tolerance."""
    torch.manual_seed(0)
    model = step.Block()
    trainee = step.Trainee(model, "cpu")
    step.timed("cpu", trainee.step)
    moved = [
        not torch.allclose(mine, theirs, **step.CLOSE)
        for mine, theirs in zip(trainee.model.parameters(), model.parameters(), strict=True)
    ]
    assert sum(moved) > len(moved) // 2


def run_program(module: str, case: str, folder: Path) -> tuple[int, dict[str, Any], str]:
    """As the driver starts it: sent under another name, without dflashctl on the path."""
    for name, text in package_files("dflashctl.probe.programs", sent_as="dflash_probe").items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    answer = folder / "answer.json"
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(folder),
        "OMP_NUM_THREADS": "1",
        "DFLASH_PROBE_ANSWER": str(answer),
    }
    done = subprocess.run(
        [sys.executable, "-m", f"dflash_probe.{module}", case],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode, json.loads(answer.read_text()), done.stdout


def test_a_program_tells_an_error_and_ends_with_one(tmp_path: Path) -> None:
    code, answer, out = run_program("p2p", "no-such-case", tmp_path)
    assert code == 1 and not answer["ok"]
    assert "KeyError" in answer["errors"][0]["text"] and "KeyError" in out


@pytest.mark.soak
@pytest.mark.parametrize(
    ("module", "case"), [("threads", "inductor"), ("step", "compiled"), ("nccl", "gloo")]
)
def test_on_this_cpu(module: str, case: str, tmp_path: Path) -> None:
    assert shutil.which("g++"), "Inductor needs g++ (Debian: g++)"
    code, answer, out = run_program(module, case, tmp_path)
    assert (code, answer["ok"]) == (0, True), out


def test_an_option_that_one_thread_sets_is_another_threads_default() -> None:
    """As docs/inspect.md says of torch 2.13; so the cases pass options to torch.compile."""
    import torch._inductor.config as config

    seen: list[bool] = []
    with config.patch({"triton.cudagraph_trees": False}):
        thread = threading.Thread(target=lambda: seen.append(config.triton.cudagraph_trees))
        thread.start()
        thread.join()
        assert config.triton.cudagraph_trees is False
    assert seen == [True] or torch.__version__ < "2.13"
