"""Checkpoints: complete or absent, checked when read.

Run: python -m pytest tests/trainer/test_checkpoint.py
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainer.checkpoint import files as checkpoint
from trainer.checkpoint import optimizer_state
from trainer.checkpoint.drafter import load_drafter
from trainer.checkpoint.writer import Writer
from trainer.errors import ConfigError, Stopped, TrainerError
from trainer.model.drafter import Drafter
from trainer.sections import Optimizer, ParameterGroup
from trainer.training.optim import DrafterOptimizer


def saved(root: Path, drafter: Drafter, step: int = 7, keep: int = 2) -> Path:
    optimizer = DrafterOptimizer(drafter, Optimizer())
    return checkpoint.save(root, step, drafter, optimizer, {"data": {"rows": 3}}, keep)


def test_a_drafter_comes_back_bit_for_bit(tmp_path: Path, make_drafter: Callable[..., Drafter]) -> None:
    drafter = make_drafter(("sliding_attention", "full_attention"))
    folder = saved(tmp_path, drafter)
    assert folder.name == "step-0000007"
    back = load_drafter(folder)
    assert back.config == drafter.config
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor)
    weights = load_file(folder / "model.safetensors")
    assert set(weights) == set(drafter.state_dict()) and len(weights) == 25
    facts = json.loads((folder / "trainer.json").read_text())
    assert facts["step"] == 7 and facts["data"] == {"rows": 3} and facts["version"] == checkpoint.VERSION
    assert {path.name for path in folder.iterdir()} == {
        "model.safetensors",
        "state.safetensors",
        "trainer.json",
        "config.json",
        "checksums.json",
    }
    checkpoint.verify(folder)


def test_old_checkpoints_go_and_no_half_written_one_stays(
    tmp_path: Path, make_drafter: Callable[..., Drafter]
) -> None:
    drafter = make_drafter()
    for step in (1, 2, 3, 3):
        saved(tmp_path, drafter, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000002", "step-0000003"]


def test_weights_that_are_not_finite_replace_nothing(
    tmp_path: Path, make_drafter: Callable[..., Drafter]
) -> None:
    drafter = make_drafter()
    good = saved(tmp_path, drafter, 1)
    drafter.norm.weight.data[3] = float("nan")
    with pytest.raises(TrainerError, match=r"weights of norm\.weight are not finite; nothing was saved"):
        saved(tmp_path, drafter, 2)
    assert [path for path in tmp_path.iterdir() if not path.name.startswith(".")] == [good]


def test_wrong_weights_are_named(tmp_path: Path, make_drafter: Callable[..., Drafter]) -> None:
    folder = saved(tmp_path, make_drafter())
    path = folder / "model.safetensors"
    weights = load_file(path)

    def refused(changed: dict[str, torch.Tensor], message: str) -> None:
        save_file(changed, path)
        with pytest.raises(ConfigError, match=message):
            load_drafter(folder)

    refused({k: v for k, v in weights.items() if k != "fc.weight"}, r"weight fc\.weight is missing")
    refused({**weights, "lm_head.weight": torch.zeros(2)}, r"weight lm_head\.weight is not a drafter's")
    refused({**weights, "norm.weight": torch.zeros(2)}, r"weight norm\.weight has shape \(2,\), not \(32,\)")
    path.write_bytes(path.read_bytes()[:100])  # a copy that broke off
    with pytest.raises(ConfigError, match=r"model\.safetensors has 100 bytes") as caught:
        load_drafter(folder)
    assert caught.value.next == "take another checkpoint"
    for name in ("checksums.json", "state.safetensors", "trainer.json"):  # an exported folder has none
        (folder / name).unlink()
    with pytest.raises(ConfigError, match="cannot read the weights"):
        load_drafter(folder)
    with pytest.raises(ConfigError, match="no drafter there"):
        load_drafter(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_drafter_that_is_not_what_was_saved_is_not_loaded(
    tmp_path: Path, make_drafter: Callable[..., Drafter], name: str
) -> None:
    """One bit of a weight, or one digit of the configuration: nothing else would notice."""
    folder = saved(tmp_path, make_drafter())
    content = bytearray((folder / name).read_bytes())
    content[-3 if name == "model.safetensors" else content.index(b'"rope_theta": 1') + 14] ^= 2
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name} is not what was written") as caught:
        load_drafter(folder)
    assert str(folder) in str(caught.value)
    checkpoint.verify(saved(tmp_path, make_drafter(), 8))
    for left in ("checksums.json", "state.safetensors", "trainer.json"):  # an exported folder has none
        (tmp_path / "step-0000008" / left).unlink()
        if left != "trainer.json":
            with pytest.raises(ConfigError, match="not written to its end"):
                load_drafter(tmp_path / "step-0000008")
    load_drafter(tmp_path / "step-0000008")


def test_what_training_alone_needs_may_be_gone(tmp_path: Path, make_drafter: Callable[..., Drafter]) -> None:
    folder = saved(tmp_path, make_drafter())
    (folder / "state.safetensors").unlink()
    load_drafter(folder)


FILES = ("model.safetensors", "state.safetensors", "trainer.json", "config.json", "checksums.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", ["truncated", "flipped", "missing", "empty"])
def test_any_harm_to_any_file_is_found(
    tmp_path: Path, make_drafter: Callable[..., Drafter], name: str, harm: str
) -> None:
    folder = saved(tmp_path, make_drafter())
    checkpoint.verify(folder)
    path, content = folder / name, bytearray((folder / name).read_bytes())
    if harm == "missing":
        path.unlink()
    else:
        content[len(content) // 2] ^= 4
        path.write_bytes({"truncated": content[: len(content) // 2], "flipped": content, "empty": b""}[harm])
    with pytest.raises(checkpoint.Damaged) as caught:
        checkpoint.verify(folder)
    assert str(folder) in str(caught.value)
    if name != "checksums.json":
        assert name in caught.value.what


@pytest.mark.parametrize("name", FILES[:-1])
def test_a_file_without_a_checksum_is_not_trusted(
    tmp_path: Path, make_drafter: Callable[..., Drafter], name: str
) -> None:
    folder = saved(tmp_path, make_drafter())
    table = json.loads((folder / "checksums.json").read_text())
    del table["files"][name]
    (folder / "checksums.json").write_text(json.dumps(table))
    with pytest.raises(checkpoint.Damaged, match=f"does not know {name}"):
        checkpoint.verify(folder)


def test_masters_moments_and_generators_come_back_bit_for_bit(
    tmp_path: Path, make_drafter: Callable[..., Drafter]
) -> None:
    """Two steps from the same place are the same step, with AdamW and Muon side by side."""
    section = Optimizer(
        groups=[
            ParameterGroup("matrices", ["*_proj.weight", "fc.weight"], algorithm="muon"),
            ParameterGroup("norms", ["*norm.weight"]),
        ]
    )

    def step(drafter: Drafter, optimizer: DrafterOptimizer) -> None:
        for parameter in drafter.parameters():
            parameter.grad = torch.rand(parameter.shape)
        optimizer.step(1.0, torch.tensor(2.0))

    torch.manual_seed(5)
    drafter = make_drafter()
    optimizer = DrafterOptimizer(drafter, section)
    for _ in range(3):
        step(drafter, optimizer)
    folder = checkpoint.save(tmp_path, 3, drafter, optimizer, {}, keep=1)
    step(drafter, optimizer)
    other = make_drafter(seed=9)
    again = DrafterOptimizer(other, section)
    checkpoint.restore(folder, again)
    step(other, again)
    for name, parameter in drafter.named_parameters():
        assert torch.equal(dict(other.named_parameters())[name], parameter), name
    mine, theirs = optimizer_state.moments(optimizer), optimizer_state.moments(again)
    assert set(mine) == set(theirs) and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert {name.split("|")[0] for name in mine} == {"momentum_buffer", "step", "exp_avg", "exp_avg_sq"}


def test_masters_of_a_bfloat16_drafter_are_saved_in_full(
    tmp_path: Path, make_drafter: Callable[..., Drafter]
) -> None:
    drafter = make_drafter().bfloat16()
    optimizer = DrafterOptimizer(drafter, Optimizer())
    for master in optimizer.masters:
        master.data += 1e-4  # lost in bfloat16
    folder = checkpoint.save(tmp_path, 1, drafter, optimizer, {}, keep=1)
    other = make_drafter(seed=3).bfloat16()
    again = DrafterOptimizer(other, Optimizer())
    checkpoint.restore(folder, again)
    for mine, theirs, parameter in zip(optimizer.masters, again.masters, again.parameters, strict=True):
        assert torch.equal(mine, theirs) and torch.equal(parameter, theirs.bfloat16())
        assert not torch.equal(mine, mine.bfloat16().float())


def test_the_newest_and_the_best_are_kept(tmp_path: Path, make_drafter: Callable[..., Drafter]) -> None:
    drafter = make_drafter()
    optimizer = DrafterOptimizer(drafter, Optimizer())
    for step in range(1, 7):
        written = checkpoint.write(tmp_path, checkpoint.take(step, drafter, optimizer, {}))
        assert checkpoint.settle(tmp_path, written, best=step in (1, 2), keep=2) == {}
    assert [path.name[-1] for path in checkpoint.listed(tmp_path)] == ["6", "5", "2"]
    assert (tmp_path / "best").resolve() == (tmp_path / "step-0000002").resolve()
    load_drafter(tmp_path / "best")


def test_an_old_one_or_a_link_that_cannot_be_had_is_told_and_no_failed_write(
    tmp_path: Path, make_drafter: Callable[..., Drafter]
) -> None:
    root, drafter = tmp_path / "checkpoints", make_drafter()
    writer = Writer(root, keep=1)
    (root / "best" / "taken").mkdir(parents=True)
    (root / "step-0000001").symlink_to(tmp_path)  # not removed as a folder is; nor is one that NFS holds
    writer.start(2, drafter, DrafterOptimizer(drafter, Optimizer()), {}, best=True)
    writer.finish(lambda: None)
    assert writer.outcomes() == [(2, root / "step-0000002")]
    assert set(writer.left) == {root / "best", root / "step-0000001"}
    writer.close()


def test_what_killed_writers_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    litter = [".step-0000004.tmp", ".step-0000004.old", ".step-0000004.123.tmp"]
    others = ["step-0000003", ".mine", "damaged-step-0000002", "notes"]
    for name in (*litter, *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    checkpoint.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)
    assert checkpoint.listed(tmp_path) == [tmp_path / "step-0000003"]


def test_a_disk_that_fails_at_any_write_leaves_the_earlier_ones(
    tmp_path: Path, make_drafter: Callable[..., Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece of each file, then each flush to disk, says that there is no space; until none does."""
    drafter = make_drafter()
    good = saved(tmp_path, drafter, 1)
    real, calls, fails_at = os.fsync, 0, 0

    def full() -> None:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fsync(descriptor: int) -> None:
        full()
        real(descriptor)

    monkeypatch.setattr("trainer.checkpoint.tensorfile.before_piece", full)
    monkeypatch.setattr(os, "fsync", fsync)
    while calls >= fails_at:
        calls, fails_at = 0, fails_at + 1
        try:
            saved(tmp_path, drafter, 2)
        except OSError as error:
            assert error.errno == errno.ENOSPC
            # Behind the last file's flush come the folder's two, the second of them after the rename.
            assert good in checkpoint.listed(tmp_path) and not list(tmp_path.glob(".*"))
            checkpoint.verify(checkpoint.listed(tmp_path)[0])
    assert fails_at > 30 and len(checkpoint.listed(tmp_path)) == 2
    checkpoint.verify(good)


class Slow:
    """Holds back every write to disk until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.begun = threading.Event(), threading.Event()
        monkeypatch.setattr("trainer.checkpoint.tensorfile.before_piece", self.wait)

    def wait(self) -> None:
        self.begun.set()
        assert self.go.wait(60)


def test_training_goes_on_while_a_checkpoint_is_written_and_is_not_in_it(
    tmp_path: Path, make_drafter: Callable[..., Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make_drafter()
    optimizer = DrafterOptimizer(drafter, Optimizer())
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    writer = Writer(tmp_path / "checkpoints", keep=2)
    slow = Slow(monkeypatch)
    writer.start(1, drafter, optimizer, {}, best=True)
    assert slow.begun.wait(60) and writer.busy and writer.outcomes() == []
    for parameter in drafter.parameters():  # a training step, meanwhile
        parameter.data += 1
    with pytest.raises(RuntimeError, match="step 1 is still being written"):
        writer.start(2, drafter, optimizer, {}, best=False)
    slow.go.set()
    writer.finish(lambda: None)
    ((step, folder),) = writer.outcomes()
    assert step == 1 and isinstance(folder, Path) and writer.outcomes() == []
    back = load_drafter(folder).state_dict()
    assert all(torch.equal(back[name], tensor) for name, tensor in before.items())
    writer.close()


def test_a_stop_while_waiting_for_a_write_is_raised_when_it_is_on_disk(
    tmp_path: Path, make_drafter: Callable[..., Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make_drafter()
    writer = Writer(tmp_path / "checkpoints", keep=2)
    slow = Slow(monkeypatch)
    writer.start(4, drafter, DrafterOptimizer(drafter, Optimizer()), {}, best=False)

    def beat() -> None:
        if not slow.go.is_set():
            slow.go.set()
            raise Stopped("SIGTERM", 143)

    with pytest.raises(Stopped):
        writer.finish(beat)
    checkpoint.verify(tmp_path / "checkpoints" / "step-0000004")
    writer.close()


def test_what_goes_wrong_in_the_background_is_heard(
    tmp_path: Path, make_drafter: Callable[..., Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make_drafter()
    optimizer = DrafterOptimizer(drafter, Optimizer())
    writer = Writer(tmp_path / "checkpoints", keep=2)

    def outcome(problem: BaseException) -> object:
        def fail() -> None:
            raise problem

        monkeypatch.setattr("trainer.checkpoint.tensorfile.before_piece", fail)
        writer.start(1, drafter, optimizer, {}, best=False)
        writer.finish(lambda: None)
        return writer.outcomes()

    full = OSError(errno.ENOSPC, "full")
    assert outcome(full) == [(1, full)]  # for the loop to say
    with pytest.raises(ZeroDivisionError):
        outcome(ZeroDivisionError())  # a bug: it ends the run
    drafter.norm.weight.data[0] = float("inf")
    monkeypatch.undo()
    writer.start(2, drafter, optimizer, {}, best=False)
    writer.finish(lambda: None)
    with pytest.raises(TrainerError, match=r"norm\.weight are not finite"):
        writer.outcomes()
    assert checkpoint.listed(tmp_path / "checkpoints") == []
    writer.close()


def test_a_write_that_ends_while_the_others_are_heard_is_not_lost(tmp_path: Path) -> None:
    class Growing(list[tuple[int, Path | BaseException]]):
        """The thread adds to it whenever the main thread has read something."""

        late: tuple[tuple[int, Path], ...] = ((2, tmp_path / "2"),)

        def __getitem__(self, index: Any) -> Any:
            found = super().__getitem__(index)
            self.extend(self.late)
            self.late = ()
            return found

        def pop(self, index: Any = -1) -> Any:
            found = super().pop(index)
            self.extend(self.late)
            self.late = ()
            return found

    writer = Writer(tmp_path / "checkpoints", keep=2)
    writer._done = Growing([(1, tmp_path / "1")])
    heard = [*writer.outcomes(), *writer.outcomes()]
    assert heard == [(1, tmp_path / "1"), (2, tmp_path / "2")]
    writer.close()


def test_two_processes_do_not_write_to_one_run(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "checkpoints", keep=2)
    with pytest.raises(ConfigError, match="another process trains in this folder"):
        Writer(tmp_path / "checkpoints", keep=2)
    writer.close()
    Writer(tmp_path / "checkpoints", keep=2).close()
