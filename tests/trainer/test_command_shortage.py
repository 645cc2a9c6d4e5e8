"""Too little memory in a command that is no run: one message with the options that take less, exit code 1.

Run: python -m pytest tests/trainer/test_command_shortage.py
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from killed_runs import small_library
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from saved_runs import at, train
from test_kill_and_resume import section
from tiny_models import random_model, save_target
from typer.testing import CliRunner

from trainer.bench import measure as benches
from trainer.bench import shapes
from trainer.checkpoint import drafter as drafters
from trainer.checkpoint import files as checkpoint
from trainer.cli import app
from trainer.data import prepare
from trainer.data.chat_template import ChatTemplate, Mode
from trainer.errors import TrainerError
from trainer.evaluation import readers
from trainer.evaluation.measure import Bench
from trainer.export import commands
from trainer.model import target as targets
from trainer.model.target import Target
from trainer.model.tensors import read_tensors
from trainer.run import setup
from trainer.shortage import is_shortage
from trainer.topology import measure as planning

SAID = "CUDA out of memory. Tried to allocate 2.00 GiB."
UNMAPPED = "unable to mmap 11019736 bytes from file </x>: Cannot allocate memory (12)"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target") / "target")


@pytest.fixture(scope="module")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter")
    library = small_library(folder / "library")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.data.stdlib.root", lambda: library)
        train(section(target, budget={"steps": 1}), folder / "run")
    return at(folder / "run", 1)


def short(*given: Any, **named: Any) -> Any:
    raise torch.OutOfMemoryError(SAID)


def of_system(*given: Any, **named: Any) -> Any:
    raise RuntimeError(UNMAPPED)


def of_python(*given: Any, **named: Any) -> Any:
    raise MemoryError


@pytest.mark.parametrize(
    ("command", "owner", "name", "fails", "head", "next"),
    [
        (
            "eval {drafter} --target {target} --prompts 1 --batch 3 --new-tokens 9",
            Bench,
            "decode",
            short,
            f"eval: out of memory: {SAID}",
            "say --dtype bfloat16, or lower --batch (now 3) or --new-tokens (now 9)",
        ),
        (
            "eval {drafter} --target {target} --prompts 1 --dtype bfloat16",
            targets,
            "pretrained",
            of_system,
            f"eval: out of memory: {UNMAPPED}",
            "take a GPU, machine or container with more memory",
        ),
        (
            "export {drafter} {out}/out --target {target}",
            commands,
            "read_tensors",
            of_system,
            f"export: out of memory: {UNMAPPED}",
            "use a machine or container with more memory",
        ),
        (
            "export {drafter} {out}/out --target {target} --format speculators",
            commands,
            "embedding_and_head",
            of_python,
            "export: out of memory: memory could not be allocated",
            "say --no-head",
        ),
        (
            "import {drafter} {out}/out --target {target}",
            commands,
            "read_tensors",
            of_python,
            "import: out of memory: memory could not be allocated",
            "use a machine or container with more memory",
        ),
        (
            "prepare {out}/rows.jsonl --target {target} --out {out}/data --workers 1",
            prepare.Reader,
            "read",
            of_python,
            "prepare: out of memory: memory could not be allocated",
            "lower --workers (now 1) or --max-line-mb (now 16); the same command goes on from here",
        ),
        (
            "bench step --shape toy --device cpu",
            benches.DrafterOptimizer,
            "step",
            short,
            f"bench step: out of memory: {SAID}",
            "lower --micro-rows, --anchors-per-pass or --context-tokens, or choose a smaller --shape",
        ),
        (
            "bench mask --shape toy --device cpu",
            benches,
            "spans_of",
            short,
            f"bench mask: out of memory: {SAID}",
            "lower --anchors or --context-tokens, or choose a smaller --shape",
        ),
        (
            "bench loss --shape toy --device cpu",
            shapes,
            "Drafter",
            short,
            f"bench loss: out of memory: {SAID}",
            "choose a smaller --shape",
        ),
        (
            "plan {out}/recipe.yaml --seconds 0.1",
            setup,
            "load_target",
            short,
            f"loading: out of memory: {SAID}",
            "topology: split gives the target GPUs of its own",
        ),
        (
            "plan {out}/recipe.yaml --seconds 0.1",
            planning,
            "row_gradients",
            short,
            f"measuring: out of memory: {SAID}",
            "lower train.micro_rows (now 2)",
        ),
    ],
)
def test_one_message_with_the_options_that_take_less(
    command: str,
    owner: Any,
    name: str,
    fails: Callable[..., Any],
    head: str,
    next: str,
    target: Path,
    drafter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = small_library(tmp_path / "library")
    monkeypatch.setattr("trainer.data.stdlib.root", lambda: library)
    (tmp_path / "rows.jsonl").write_text('{"text": "some words"}\n')
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"train": section(target)}))
    monkeypatch.setattr(owner, name, fails)
    words = command.format(drafter=drafter, target=target, out=tmp_path).split()
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1, done.output
    lines = done.stderr.splitlines()
    assert lines[-2] == f"error: {head}" and lines[-1].startswith(f"next: {next}"), done.output
    assert "Traceback" not in done.output
    assert not (tmp_path / "out").exists()


def test_memory_that_is_short_is_no_fault_of_a_file(
    drafter: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told as damaged weights, with exit code 2, and `--resume` set the checkpoint aside."""

    def unmapped(*given: Any, **named: Any) -> Any:
        raise SafetensorError("I/O error: Cannot allocate memory (os error 12)")

    with monkeypatch.context() as patch:
        patch.setattr("trainer.model.tensors.safe_open", unmapped)
        with pytest.raises(SafetensorError):
            read_tensors([drafter / "model.safetensors"])
    with monkeypatch.context() as patch:
        patch.setattr(drafters, "load_file", unmapped)
        with pytest.raises(SafetensorError):
            drafters.load_drafter(drafter)

    def nothing_left(*given: Any, **named: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("hashlib.file_digest", nothing_left)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        checkpoint.verify(drafter)


def test_a_cache_is_not_given_up_for_want_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target was then read anew at every pass, and its rates meant nothing."""
    target = Target(random_model("qwen3-sliding"), (1,))
    assert readers.continues(target)
    monkeypatch.setattr(readers.RollbackTarget, "read", short)
    with pytest.raises(torch.OutOfMemoryError):
        readers.continues(target)
    monkeypatch.setattr(readers.RollbackTarget, "read", of_another_kind)
    assert not readers.continues(target)


def of_another_kind(*given: Any, **named: Any) -> Any:
    raise RuntimeError("this cache cannot go on")


def test_a_row_is_not_bad_for_want_of_memory() -> None:
    template = ChatTemplate("{{ short() }}", Mode(), {}, "here")
    with pytest.raises(MemoryError):
        template.render([], None, False, Mode(arguments={"short": of_python}))


def test_a_file_is_mapped_once_however_many_tensors_it_holds(tmp_path: Path) -> None:
    """Each mapping counts whole against what a container may map: sixty of them were 120 GB of a drafter."""
    path = tmp_path / "model.safetensors"
    save_file({f"weight.{number}": torch.full((40_000,), float(number)) for number in range(20)}, path)
    read = read_tensors([path])
    assert [float(tensor[-1]) for _, tensor in sorted(read.items(), key=lambda item: item[1][0].item())] == [
        float(number) for number in range(20)
    ]
    assert Path("/proc/self/maps").read_text().count(str(path)) <= 1


def test_what_cannot_be_read_back_gets_no_name(
    drafter: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood there whole to see, and a server would have loaded it."""
    real = commands.read_tensors

    def harmed(paths: Any, *rest: Any) -> Any:
        found = real(paths, *rest)
        return found | {"norm.weight": found["norm.weight"] + 1}

    monkeypatch.setattr(commands, "read_tensors", harmed)
    with pytest.raises(TrainerError, match="reads back differently"):
        commands.export(drafter, tmp_path / "out", "hf", target)
    monkeypatch.undo()

    def stopped(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainer.export.files.sync", stopped)
    with pytest.raises(KeyboardInterrupt):
        commands.export(drafter, tmp_path / "out", "hf", target)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    commands.export(drafter, tmp_path / "out", "hf", target)
    assert "norm.weight" in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (RuntimeError(UNMAPPED), True),
        (OSError(errno.ENOMEM, "no"), True),
        (OSError(errno.ENOSPC, "Cannot allocate memory"), False),
        (SafetensorError("I/O error: Cannot allocate memory (os error 12)"), True),
        (Exception("Cannot allocate memory (os error 12)"), True),
        (KeyError("Cannot allocate memory"), False),
    ],
)
def test_what_libraries_say_of_memory(error: Exception, is_one: bool) -> None:
    assert is_shortage(error) == is_one


@pytest.mark.parametrize("format", ["hf", "speculators"])
def test_an_export_to_a_full_disk_leaves_nothing_and_says_to_make_room(
    format: str, drafter: Path, target: Path, tmp_path: Path
) -> None:
    """It said what its library for weights had met, and not what to do."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(TrainerError) as caught:
            commands.export(drafter, tmp_path / "out", format, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(caught.value) == (
        f"{tmp_path}/out: cannot write: File too large\nnext: make room there (df -h, df -i)"
    )
    assert list(tmp_path.iterdir()) == []
