"""Too little memory, at whatever place of a run: one message with the place and the keys that take less.

Run: python -m pytest tests/trainer/test_shortage.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_runs import small_library
from test_kill_and_resume import section
from tiny_models import save_target

import trainer
from trainer import config as configs
from trainer.data import continuations
from trainer.errors import OutOfMemory, TrainerError
from trainer.evaluation.evaluator import Evaluator
from trainer.guard import guarded
from trainer.model import target
from trainer.process.runfiles import RunFiles
from trainer.run import train as runs
from trainer.run.out_of_memory import EVALUATION, TARGET, UPDATE, message
from trainer.sections import TrainConfig
from trainer.shortage import LOADING, is_shortage, of_the_host, sizes
from trainer.training.optim import DrafterOptimizer
from trainer.training.step import DrafterStep

CUDA = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.19 "
    "GiB is free. Of the allocated memory 61.02 GiB is allocated by PyTorch. If reserved but unallocated "
    "memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation. "
    "See documentation for Memory Management  (https://pytorch.org/docs)"
)
SAID = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.19 "
    "GiB is free. Of the allocated memory 61.02 GiB is allocated by PyTorch."
)


def fails_at(
    patch: pytest.MonkeyPatch, owner: Any, name: str, phase: str, calls: int, files: RunFiles
) -> None:
    """That function finds no memory, from its call number `calls` of the phase on."""
    real, seen = getattr(owner, name), [0]

    def short(*given: Any, **named: Any) -> Any:
        seen[0] += files.pace.phase == phase
        if seen[0] >= calls:
            raise CUDA
        return real(*given, **named)

    patch.setattr(owner, name, short)


@pytest.mark.parametrize(
    ("owner", "name", "phase", "calls", "where", "keys"),
    [
        (runs, "assemble", "loading", 1, "loading", ["topology: split", "train.target.dtype"]),
        (continuations, "pick", "data", 1, "data", ["train.data.batch (now 10)"]),
        (Evaluator, "measure", "evaluating", 1, "evaluating", ["train.evaluate.prompts (now 2)", "dtype"]),
        (DrafterStep, "gradients", "compiling", 1, "memory", ["train.micro_rows"]),
        (DrafterStep, "gradients", "training", 3, "training, step 1", ["train.micro_rows (now 2)"]),
        (DrafterOptimizer, "step", "training", 3, "training, step 2", ["objective.anchors_per_pass"]),
        (Evaluator, "measure_greedy", "training", 1, "training, step 2", ["every_prompts (now 1)"]),
    ],
)
def test_memory_that_is_short_is_told_with_place_sizes_and_keys(
    owner: Any,
    name: str,
    phase: str,
    calls: int,
    where: str,
    keys: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    library = small_library(tmp_path / "library")
    monkeypatch.setattr("trainer.data.stdlib.root", lambda: library)
    look = {"prompts": 2, "prompt_tokens": 4, "new_tokens": 4, "every_steps": 2, "every_prompts": 1}
    made = section(save_target(tmp_path / "target"), budget={"steps": 4}, evaluate=look)
    files = RunFiles(tmp_path / "run")
    fails_at(monkeypatch, owner, name, phase, calls, files)
    capsys.readouterr()
    code = guarded(lambda: _run(made, files), files.fail)
    shown = capsys.readouterr().err
    assert code == (4 if phase == "compiling" else 1)
    lines = shown.splitlines()
    assert len(lines) == 2 and lines[0].startswith(f"error: {where}: ") and lines[0].endswith(SAID), shown
    assert lines[1].startswith("next: ") and all(key in lines[1] for key in keys), shown
    cause = json.loads((tmp_path / "run" / "root_cause.json").read_text())
    assert "in short\n    raise CUDA" in cause["traceback"] and cause["phase"] == phase
    if phase != "compiling":  # else it is the largest step that does not fit
        assert cause["where"].startswith(__file__), "the allocation, not who told of it"
    assert [each["name"] for each in cause["known"]] == ["cuda-oom"]


def _run(made: dict[str, Any], files: RunFiles) -> None:
    runs.run(configs.load(made), files, lambda text: None)


def raised_in(file: str) -> BaseException:
    """CUDA's, from within a function of that file."""
    code = compile("def work(): raise error", file, "exec")
    names: dict[str, Any] = {"error": torch.OutOfMemoryError("CUDA out of memory.")}
    exec(code, names)  # noqa: S102
    work: Callable[[], None] = names["work"]
    try:
        work()
    except torch.OutOfMemoryError as error:
        return error
    raise AssertionError


def of(**changes: Any) -> TrainConfig:
    return configs.load({**section(Path("unused"), token_budget=192), **changes})


@pytest.mark.parametrize(
    ("file", "changes", "rank", "where", "next"),
    [
        (
            "/x/trainer/model/tapped_model.py",
            {"topology": "split", "layout": {"targets": 1, "drafters": 2}},
            2,
            "rank 2 (target), training, step 5",
            "lower train.token_budget (now 192: the target reads 4 rows at once)",
        ),
        (
            "/x/trainer/model/prefill.py",
            {"topology": "threads", "layout": {"drafters": 2}},
            None,
            "training, step 5",
            "lower train.token_budget (now 192: the target reads 8 rows at once) "
            "or train.layout.queue (now 2)",
        ),
        (
            "/x/trainer/training/loss.py",
            {"topology": "split", "layout": {"drafters": 2}, "micro_rows": None},
            1,
            "rank 1 (drafter), training, step 5",
            "lower train.micro_rows (now 4) or train.objective.anchors_per_pass (now all of a row's): "
            "the step stays what it is",
        ),
        (
            "/x/trainer/training/optim.py",
            {"layout": {"ranks": 4}, "optimizer": {}},
            3,
            "rank 3, training, step 5",
            "say train.layout.shard_optimizer: on, or lower train.micro_rows (now 2) or "
            "train.objective.anchors_per_pass (now all of a row's): the step stays what it is",
        ),
        (
            "/x/trainer/training/optim.py",  # with a group of Muon's, which shard_optimizer: on would refuse
            {"layout": {"ranks": 4}},
            3,
            "rank 3, training, step 5",
            "lower train.micro_rows (now 2) or train.objective.anchors_per_pass (now all of a row's): "
            "the step stays what it is",
        ),
    ],
)
def test_whose_memory_it_was_is_read_from_the_traceback(
    file: str, changes: dict[str, Any], rank: int | None, where: str, next: str
) -> None:
    told = message(raised_in(file), of(**changes), "training", 5, rank)
    assert (told.where, told.next) == (where, next)
    assert told.what == "out of memory: CUDA out of memory." and isinstance(told, OutOfMemory)


STORED = {"source": "store", "store": "s", "row_tokens": 24, "continuations": False, "states": "online"}


@pytest.mark.parametrize(
    ("changes", "phase", "next"),
    [
        ({"data": STORED}, "data", "a store's documents are laid out in rows in the host's memory"),
        (
            {"data": {"rows": 9, "row_tokens": 24, "continuations": False, "states": "online"}},
            "data",
            "lower train.data.rows (now 9): the host keeps all rows' tokens",
        ),
        ({"topology": "split", "target": {"path": "t", "dtype": "bfloat16"}}, "loading", "a smaller drafter"),
    ],
)
def test_nothing_is_advised_that_the_recipe_has_already_or_cannot_have(
    changes: dict[str, Any], phase: str, next: str
) -> None:
    told = message(MemoryError(), of(**changes), phase, None, None)
    assert told.next.startswith(next)
    assert "dtype" not in told.next and ("data.rows" in told.next) == ("data.rows" in next)


@pytest.mark.parametrize("part", [EVALUATION, TARGET, UPDATE])
def test_the_parts_that_have_keys_of_their_own_are_there(part: tuple[str, ...]) -> None:
    """Renamed, one would be advised of another's keys."""
    root = Path(trainer.__file__).parents[1]
    assert [name for name in part if not (root / name.removeprefix("/")).exists()] == []


def test_the_functions_that_bring_models_into_memory_are_there() -> None:
    """Renamed, one would be told of options that count only later."""
    sources = [path.read_text() for path in Path(trainer.__file__).parent.rglob("*.py")]
    assert [name for name in LOADING if not any(f"def {name}(" in text for text in sources)] == []


def test_a_threads_name_stands_for_a_rank() -> None:
    error = raised_in("/x/trainer/topology/threads.py")
    error.add_note("in thread target-1")
    told = message(error, of(topology="threads"), "training", None, None)
    assert told.where == "thread target-1, training"
    assert told.next.startswith("lower train.token_budget (now 192: the target reads 8 rows at once)")


def test_the_host_says_what_it_could_not_give() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert is_shortage(caught.value)
    assert sizes(caught.value).startswith(
        "can't allocate memory: you tried to allocate 1125899906842624 bytes"
    )
    assert of_the_host(caught.value) and of_the_host(MemoryError()) and not of_the_host(CUDA)
    told = message(caught.value, of(), "data", None, None)
    assert told.next.startswith("lower train.data.rows (now 10)")
    assert sizes(MemoryError()) == "memory could not be allocated"


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("CUDA out of memory"), False),
        (TrainerError("CUDA out of memory"), False),
    ],
)
def test_what_is_a_shortage_of_memory(error: Exception, short: bool) -> None:
    assert is_shortage(error) == short


def test_a_target_for_which_the_host_has_no_memory_is_not_a_wrong_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told as a target that transformers cannot load, with exit code 2."""

    def too_large(*given: Any, **named: Any) -> Any:
        return torch.empty(1 << 50, dtype=torch.uint8)

    monkeypatch.setattr(target, "pretrained", too_large)
    with pytest.raises(OutOfMemory, match="can't allocate memory"):
        _run(section(save_target(tmp_path / "target")), RunFiles(tmp_path / "run"))
