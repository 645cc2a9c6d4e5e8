"""Memory, disk and time: looked at before the first step, refused with the number that fails.

Run: python -m pytest tests/trainer/test_preflight.py
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from killed_runs import small_library
from test_kill_and_resume import section
from tiny_models import save_target

from trainer import config as configs
from trainer.checkpoint.optimizer_state import moments, whole_shapes
from trainer.checkpoint.writer import Writer
from trainer.errors import Refused
from trainer.machine import available_memory
from trainer.model.drafter import Drafter
from trainer.process.runfiles import RunFiles
from trainer.run import preflight
from trainer.run.loop import Trainer
from trainer.run.progress import Clock
from trainer.run.train import run
from trainer.sections import Optimizer, ParameterGroup
from trainer.training.optim import DrafterOptimizer, Share, trained_bytes


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    library = small_library(tmp_path / "library")
    monkeypatch.setattr("trainer.data.stdlib.root", lambda: library)
    return section(save_target(tmp_path / "target"), budget={"steps": 12})


def train(made: dict[str, Any], folder: Path) -> list[str]:
    said: list[str] = []
    run(configs.load(made), RunFiles(folder), said.append)
    return said


def test_the_size_of_a_checkpoint_is_foretold(made: dict[str, Any], tmp_path: Path) -> None:
    said = train(made, tmp_path / "run")
    folders = list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert folders
    real = sum(path.stat().st_size for path in folders[0].iterdir())
    sections = [line for line in said if line.startswith("disk: ")]
    assert len(sections) == 1 and "for 3 checkpoints, the best and the one being written" in sections[0]

    def foretold(self: Trainer) -> None:
        raise Refused(str(preflight.checkpoint_bytes(self.optimizer)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "prepare", foretold)
        with pytest.raises(Refused) as caught:
            train(made, tmp_path / "other")
    assert 0.9 * real <= int(caught.value.what) <= 1.2 * real


def test_too_little_disk_is_refused_before_the_first_step(
    made: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=400_000))
    with pytest.raises(Refused, match=r"0\.00 GiB of disk are needed \(3 checkpoints.* 0\.00 GiB are free"):
        train(made, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_checkpoints_that_are_there_need_no_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3 * 2**30))
    with pytest.raises(
        Refused, match=r"4\.00 GiB of disk are needed .* 1\.00 GiB each\), 3\.00 GiB are free"
    ):
        preflight.check_disk(tmp_path, 2, 2**30)
    for step in (1, 2):
        folder = tmp_path / f"step-000000{step}"
        folder.mkdir()
        with (folder / "model.safetensors").open("wb") as file:
            file.truncate(2**30)  # sparse
    assert preflight.check_disk(tmp_path, 2, 2**30).startswith("disk: 2.00 GiB for 2 checkpoints")


def test_moments_are_counted_by_algorithm(make_drafter: Callable[..., Drafter]) -> None:
    drafter = make_drafter()
    matrices = sum(p.numel() for n, p in drafter.named_parameters() if "norm" not in n)
    norms = sum(p.numel() for n, p in drafter.named_parameters() if "norm" in n)
    groups = [
        ParameterGroup("matrices", ["*_proj.weight", "fc.weight"], algorithm="muon"),
        ParameterGroup("norms", ["*norm.weight"]),
    ]
    weights, moments = trained_bytes(DrafterOptimizer(drafter, Optimizer(groups=groups)))
    assert weights == 4 * (matrices + norms) and moments == 4 * (matrices + 2 * norms)


def test_too_little_memory_is_refused_with_both_numbers(
    made: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "available_memory", lambda: 1000)
    with pytest.raises(Refused, match=r"GiB of memory are needed .*, 0\.00 GiB are available"):
        train(made, tmp_path / "run")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB\nand much more"),
        RuntimeError("can't allocate memory: 9 bytes"),
        MemoryError("no"),
    ],
)
def test_a_worst_case_that_does_not_fit_is_refused_with_its_shape(
    made: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def too_large(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(DrafterOptimizer, "step", too_large)
    with pytest.raises(Refused) as caught:
        train(made, tmp_path / "run")
    first = str(error).split("\n")[0]
    shape = "one step of 2 rows of 24 tokens with 4 anchors each does not fit: "
    assert caught.value.what == shape + first and "train.micro_rows" in caught.value.next


def test_another_error_of_the_rehearsal_is_a_bug(
    made: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(DrafterOptimizer, "step", broken)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        train(made, tmp_path / "run")


def test_a_real_allocation_that_fails_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(Refused, match=r"one step of 1 row does not fit: .*can't allocate memory"),
        preflight.worst_case("1 row"),
    ):
        torch.empty(1 << 50, dtype=torch.uint8)


def test_the_rehearsal_leaves_everything_as_it_was(
    made: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, torch.Tensor]] = []
    real = Trainer.prepare

    def prepare(self: Trainer) -> None:
        def now() -> dict[str, torch.Tensor]:
            return {
                "rng": torch.get_rng_state(),
                **{name: p.detach().clone() for name, p in self.parts.drafter.named_parameters()},
            }

        seen.append(now())
        real(self)
        seen.append(now())
        assert all(not algorithm.state for algorithm in self.optimizer.algorithms)
        assert all(p.grad is None for p in self.parts.drafter.parameters())

    monkeypatch.setattr(Trainer, "prepare", prepare)
    train(made, tmp_path / "run")
    before, after = seen
    assert all(torch.equal(before[name], after[name]) for name in before) and len(before) == 26


def test_only_a_rank_that_saves_keeps_copies_in_host_memory(
    made: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: list[Writer] = []
    real, called = Trainer.prepare, preflight.check_host_memory
    needed: list[bool] = []

    def prepare(self: Trainer) -> None:
        others = Writer(self.files.folder / "checkpoints", 2, writes=False)
        mine, self.writer = self.writer, others
        real(self)  # as a rank whose checkpoints another one writes
        self.writer = mine
        real(self)
        writers.extend([others, mine])
        assert mine.copies is not None
        names = {each.name for each in self.optimizer.assigned}
        held = [name.rpartition("|") for name in mine.copies._buffers]
        assert names == {name for moment, _, name in held if moment not in ("", "rng")}  # moments of all
        assert names == {name for moment, _, name in held if not moment}

    def check(optimizer: DrafterOptimizer, on_host: bool, saves: bool) -> None:
        needed.append(saves)
        called(optimizer, on_host, saves)

    monkeypatch.setattr(Trainer, "prepare", prepare)
    monkeypatch.setattr(preflight, "check_host_memory", check)
    train(made, tmp_path / "run")
    assert needed == [False, True] and writers[0].copies is None
    with pytest.raises(RuntimeError, match="another rank writes"):
        writers[0].start(1, None, None, {}, False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("on_host", "saves", "needed"), [(False, True, 3), (False, False, 1), (True, False, 4)]
)
def test_memory_is_counted_for_what_a_rank_keeps(
    make_drafter: Callable[..., Drafter],
    monkeypatch: pytest.MonkeyPatch,
    on_host: bool,
    saves: bool,
    needed: int,
) -> None:
    optimizer = DrafterOptimizer(make_drafter(), Optimizer())
    weights, _ = trained_bytes(optimizer)
    monkeypatch.setattr(preflight, "available_memory", lambda: needed * weights)
    preflight.check_host_memory(optimizer, on_host, saves)
    monkeypatch.setattr(preflight, "available_memory", lambda: needed * weights - 1)
    with pytest.raises(Refused, match="of memory are needed"):
        preflight.check_host_memory(optimizer, on_host, saves)


def test_room_for_shared_moments_is_that_of_whole_ones(make_drafter: Callable[..., Drafter]) -> None:
    drafter, other = make_drafter(), make_drafter()
    whole, share = (
        DrafterOptimizer(each, Optimizer(), part) for each, part in ((drafter, None), (other, Share(0, 3)))
    )
    for optimizer in (whole, share):
        optimizer.step(0.0, torch.tensor(1.0))
    wanted = {name: value.shape for name, value in moments(whole).items()}
    assert whole_shapes(whole) == whole_shapes(share) == wanted


def test_available_memory_is_the_least_of_machine_and_cgroup(tmp_path: Path) -> None:
    meminfo, limit, used = (tmp_path / name for name in ("meminfo", "max", "current"))
    assert available_memory(meminfo, limit, used) is None
    meminfo.write_text("MemTotal: 900 kB\nMemAvailable:     500 kB\n")
    assert available_memory(meminfo, limit, used) == 512_000
    limit.write_text("max\n")
    used.write_text("7\n")
    assert available_memory(meminfo, limit, used) == 512_000
    limit.write_text("300000\n")
    used.write_text("100000\n")
    assert available_memory(meminfo, limit, used) == 200_000
    used.write_text("290000\n")  # mostly page cache
    assert available_memory(meminfo, limit, used) == 150_000


def test_after_ten_steps_the_time_is_estimated(made: dict[str, Any], tmp_path: Path) -> None:
    said = train(made, tmp_path / "run")
    (line,) = [line for line in said if "more steps take about" in line]
    assert "s a step: 2 more steps take about" in line
    assert any(line.startswith("memory: the process took at most") for line in said)
    assert any(line.startswith("self-check: ") for line in said)


def test_what_is_left_of_training() -> None:
    assert Clock(100, None, 0.0).left_s(40, 0.5) == pytest.approx(30.0)
    assert Clock(100, None, 0.0).left_s(40, None) is None
    clock = Clock(None, 1e9, __import__("time").monotonic() - 10)
    assert clock.left_s(40, 0.5) == pytest.approx(1e9 - 10, abs=5)
    both = Clock(100, 1e9, __import__("time").monotonic())
    assert both.left_s(90, 1.0) == pytest.approx(10.0)
