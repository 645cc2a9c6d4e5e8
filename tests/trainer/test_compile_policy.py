"""Which compile policies are refused for which torch, by the table of known failures."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainer import compile_policy, failures
from trainer.compile_policy import hazards, of_version, refuse_unsound
from trainer.errors import ConfigError
from trainer.model.gpu_kernels import Facts
from trainer.sections import Policy

TREES, POINTER, RACE = "cudagraph-trees-tls", "cudagraph-legacy-pointer", "fx-trace-race"


@pytest.mark.parametrize(
    ("policy", "threads", "version", "cuda", "names"),
    [
        ({}, 3, "2.11.0+cu130", True, []),
        ({"mode": "inductor"}, 1, "2.11.0+cu130", True, []),
        ({"mode": "inductor"}, 3, "2.11.0+cu130", True, [RACE]),
        ({"mode": "inductor"}, 3, "2.13.0", False, [RACE]),
        ({"mode": "inductor", "start": "sequential"}, 3, "2.13.0", True, []),
        ({"mode": "inductor", "warmup": "main-thread"}, 3, "2.11.0", True, []),
        ({"mode": "reduce-overhead"}, 1, "2.11.0+cu130", True, [TREES]),
        ({"mode": "reduce-overhead", "tls": "local"}, 1, "2.12.1", True, [TREES]),
        ({"mode": "reduce-overhead", "tls": "stashed"}, 1, "2.11.0", True, []),
        ({"mode": "reduce-overhead", "tls": "stashed", "start": "sequential"}, 2, "2.11.0", True, [TREES]),
        ({"mode": "reduce-overhead", "start": "sequential"}, 3, "2.13.0", True, []),
        ({"mode": "reduce-overhead"}, 1, "2.11.0", False, []),
        ({"mode": "reduce-overhead-no-trees"}, 1, "2.14.1", True, [POINTER]),
        ({"mode": "reduce-overhead-no-trees"}, 3, "2.11.0", True, [POINTER, RACE]),
    ],
)
def test_what_a_policy_runs_into(
    policy: dict[str, Any], threads: int, version: str, cuda: bool, names: list[str]
) -> None:
    assert [row.name for row in hazards(Policy(**policy), threads, version, cuda)] == names


@pytest.mark.parametrize(
    ("specifier", "version", "holds"),
    [
        ("any", "2.11.0", True),
        ("any (the flag is per thread from 2.14)", "2.15.0", True),
        ("<2.13", "2.12.1+cu130", True),
        ("<2.13", "2.13.0", False),
        ("<2.13", "2.13.0+cpu", False),
        (">=2.12,<2.13", "2.12.0", True),
        (">=2.12,<2.13", "2.11.9", False),
    ],
)
def test_versions_of_a_row(specifier: str, version: str, holds: bool) -> None:
    assert of_version(specifier, version) is holds


def test_every_condition_of_the_table_names_settings_that_exist() -> None:
    conditions = [condition for row in failures.table() for condition in row.policies]
    assert len(conditions) >= 4
    for condition in conditions:
        for key, wanted in condition.items():
            values = wanted if isinstance(wanted, list) else [wanted]
            if key == "threads":
                assert all(isinstance(value, int) for value in values)
                continue
            assert all(value in str(Policy.__annotations__[key]) for value in values), (key, values)


def test_an_unsound_policy_is_refused_by_name_and_runs_when_forced() -> None:
    said: list[str] = []
    unsound = Policy(mode="reduce-overhead", tls="local")
    with pytest.raises(ConfigError, match=r"torch 2\.11\.0: cudagraph-trees-tls") as caught:
        refuse_unsound(unsound, 3, "2.11.0", True, said.append)
    assert caught.value.where == "train.policy" and "policy.force" in caught.value.next
    assert said == []
    refuse_unsound(Policy(mode="reduce-overhead", tls="local", force=True), 3, "2.11.0", True, said.append)
    assert said == [
        "policy (mode reduce-overhead, tls local, warmup lazy, start parallel) is known to break with torch "
        "2.11.0: cudagraph-trees-tls, fx-trace-race; forced"
    ]
    refuse_unsound(Policy(), 3, "2.11.0", True, said.append)


@pytest.mark.parametrize(
    ("mode", "trees", "line", "arguments"),
    [
        ("eager", True, [], None),
        (
            "inductor",
            True,
            ["compiling forward (cudagraphs=False)"],
            {"dynamic": False, "options": {"triton.cudagraphs": False}},
        ),
        (
            "reduce-overhead",
            True,
            ["compiling forward (cudagraphs=True, cudagraph_trees=True)"],
            {"dynamic": False, "mode": "reduce-overhead"},
        ),
        (
            "reduce-overhead-no-trees",
            False,
            ["compiling forward (cudagraphs=True, cudagraph_trees=False)"],
            {"dynamic": False, "mode": "reduce-overhead"},
        ),
    ],
)
def test_what_torch_is_asked_for(
    mode: Any, trees: bool, line: list[str], arguments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._inductor.config as inductor

    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **given: asked.append(given))
    said: list[str] = []
    with inductor.patch({"triton.cudagraph_trees": True}):
        compile_policy.compile_forward(nn.Linear(2, 2), Policy(mode=mode), said.append)
        assert inductor.triton.cudagraph_trees is trees
    assert said == line and asked == ([] if arguments is None else [arguments])


@pytest.mark.parametrize(
    ("tls", "own", "stashed"), [("none", False, False), ("local", True, False), ("stashed", True, True)]
)
def test_what_a_thread_sets_up(tls: Any, own: bool, stashed: bool) -> None:
    from torch._inductor import cudagraph_trees

    found: list[bool] = []

    def work() -> None:
        compile_policy.setup_thread(Policy(tls=tls))
        found.append(hasattr(cudagraph_trees.local, "tree_manager_containers"))
        found.append(torch._C._is_key_in_tls("tree_manager_containers"))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [own, stashed]


@pytest.mark.parametrize(
    ("mode", "cuda", "compiler", "refused"),
    [
        ("eager", False, False, False),
        ("inductor", True, False, False),
        ("inductor", False, True, False),
        ("inductor", False, False, True),
        ("reduce-overhead", False, False, True),
    ],
)
def test_a_cpu_without_a_compiler_is_told_before_anything_starts(
    mode: Any, cuda: bool, compiler: bool, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("trainer.model.gpu_kernels.facts_here", Facts)
    if compiler:
        (tmp_path / "g++").touch(mode=0o755)
    if not refused:
        compile_policy.needs_compiler(Policy(mode=mode), cuda)
        return
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler"):
        compile_policy.needs_compiler(Policy(mode=mode), cuda)


def test_every_thread_has_the_options_of_the_policy() -> None:
    import torch._inductor.config as inductor

    found: list[bool] = []

    def work() -> None:
        compile_policy.setup_thread(Policy(mode="reduce-overhead-no-trees"))
        found.append(inductor.triton.cudagraph_trees)

    with inductor.patch({"triton.cudagraph_trees": True}):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found == [False]
