"""The threaded topology gives what one thread gives, whatever the number of threads; its faults end it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY
from torch import Tensor

from trainer import config as configs
from trainer.data.dataset import Dataset
from trainer.data.packing import Document, pack
from trainer.data.prompts import row_order
from trainer.errors import ConfigError
from trainer.model.drafter import Drafter
from trainer.model.target import Target
from trainer.process.runfiles import RunFiles
from trainer.sections import TrainConfig
from trainer.topology.crew import WaitedTooLong
from trainer.topology.threads import Threads, devices_of
from trainer.topology.work import row_gradients, shares
from trainer.training.optim import DrafterOptimizer
from trainer.training.step import DrafterStep

ROW, ROWS, WIDTH, STEPS = 24, 4, 8, 3


def settings(**changes: Any) -> TrainConfig:
    section: dict[str, Any] = {
        "target": {"path": "unused"},
        "topology": "threads",
        "token_budget": ROW * ROWS,
        "data": {"row_tokens": ROW, "continuations": False, "states": "online"},
        "drafter": {"mask_token_id": 1, "block_size": 4},
        "objective": {"anchors_per_document": 5, "gamma": 3.0, "replays": 2, "input_noise": 0.1},
        "optimizer": {"lr": 1e-2},
        "precision": "float32",
        "layout": {"wait_s": 120.0},
    }
    return configs.load({**section, **changes})


@pytest.fixture
def data() -> Dataset:
    generator = torch.Generator().manual_seed(1)
    documents = [
        Document(torch.randint(2, VOCABULARY, (size,), generator=generator).tolist(), [True] * size)
        for size in (24, 11, 13, 24, 7, 17, 24, 24, 20, 4)
    ]
    return Dataset(pack(documents, ROW), None, {}, 0.0, [])


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    return RunFiles(tmp_path / "run")


Made = Callable[..., Threads]


@pytest.fixture
def make_threads(
    make_target: Callable[..., Target], make_drafter: Callable[..., Drafter], data: Dataset, files: RunFiles
) -> Iterator[Made]:
    made: list[Threads] = []

    def make(config: TrainConfig, first: int = 0, said: list[str] | None = None) -> Threads:
        work = Threads(
            config,
            files,
            (said if said is not None else []).append,
            make_target(),
            make_drafter().train(),
            data,
            row_order(len(data.rows), config.seed),
            WIDTH,
            first,
        )
        made.append(work)
        return work

    yield make
    for work in made:
        work.close()
        assert work.crew.alive() == []


def alone(config: TrainConfig, target: Target, drafter: Drafter, data: Dataset) -> list[Tensor]:
    """Losses of some steps, by one thread; the drafter is trained in place."""
    order = row_order(len(data.rows), config.seed)
    step, optimizer = DrafterStep(drafter, target, config, WIDTH), DrafterOptimizer(drafter, config.optimizer)
    losses = []
    for number in range(STEPS):
        batch, _ = data.batch(order(number, config.batch_rows), target)
        sums = row_gradients(step, config, batch, number, slice(0, config.batch_rows))
        optimizer.step(1.0, sums.weight)
        losses.append(sums.loss)
    return losses


@pytest.mark.parametrize(("targets", "drafters"), [(1, 1), (2, 1), (1, 3), (3, 2)])
def test_any_number_of_threads_trains_as_one_does(
    targets: int,
    drafters: int,
    make_threads: Made,
    make_target: Callable[..., Target],
    make_drafter: Callable[..., Drafter],
    data: Dataset,
) -> None:
    config = settings(layout={"targets": targets, "drafters": drafters, "wait_s": 120.0}, micro_rows=1)
    reference = make_drafter().train()
    wanted = alone(config, make_target(), reference, data)
    work = make_threads(config)
    optimizer = DrafterOptimizer(work.drafter, config.optimizer)
    for number in range(STEPS):
        sums, bad = work.gradients(number)
        assert bad is not None and not bool(bad[1].any())
        torch.testing.assert_close(sums.loss, wanted[number], rtol=1e-5, atol=1e-6)
        optimizer.step(1.0, sums.weight)
        work.updated()
    for (name, own), other in zip(work.drafter.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6, msg=name)
        for each in work.copies:
            assert torch.equal(dict(each.named_parameters())[name], own)


def test_targets_are_copied_before_any_of_them_is_read(
    make_threads: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is being read has another attention for that while, and a copy would keep it."""
    reading, copied_to = [], Target.copied_to

    def copied(target: Target, device: torch.device) -> Target:
        reading.append([each.name for each in threading.enumerate() if each.name.startswith("target-")])
        return copied_to(target, device)

    monkeypatch.setattr(Target, "copied_to", copied)
    make_threads(settings(layout={"targets": 3, "drafters": 1, "wait_s": 120.0}))
    assert reading == [[], []]


@pytest.mark.parametrize("warmup", ["lazy", "main-thread", "own-thread"])
@pytest.mark.parametrize("start", ["parallel", "sequential"])
def test_warming_up_and_starting_change_no_result(warmup: str, start: str, make_threads: Made) -> None:
    layout = {"targets": 1, "drafters": 3, "wait_s": 120.0}
    plain = make_threads(settings(layout=layout)).gradients(0)[0]
    said: list[str] = []
    work = make_threads(settings(layout=layout, policy={"warmup": warmup, "start": start}), said=said)
    assert torch.equal(work.gradients(0)[0].loss, plain.loss)
    assert said == [f"threads: 1 target, 3 drafter, started {start}, mode eager, warm-up {warmup}, tls none"]


def test_a_run_that_goes_on_begins_at_its_step(make_threads: Made) -> None:
    config = settings(layout={"targets": 2, "drafters": 1, "wait_s": 120.0})
    whole = make_threads(config)
    for number in range(2):
        whole.gradients(number)
        whole.drafter.zero_grad()
    assert torch.equal(make_threads(config, first=2).gradients(2)[0].loss, whole.gradients(2)[0].loss)


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_a_dead_thread_ends_the_run_with_its_own_error(
    role: str, make_threads: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = make_threads(settings(layout={"targets": 2, "drafters": 2, "wait_s": 120.0}))
    work.gradients(0)

    def fails(*given: Any) -> Any:
        raise AssertionError("assert torch._C._is_key_in_tls(attr_name)")

    monkeypatch.setattr(work, "_made" if role == "target" else "_share", fails)
    with pytest.raises(AssertionError, match="_is_key_in_tls") as caught:
        for number in range(1, 20):
            work.gradients(number)
    assert caught.value.__notes__[0].startswith(f"in thread {role}-")


def test_a_thread_that_hangs_ends_the_run_at_its_deadline(
    make_threads: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    work = make_threads(settings(layout={"targets": 1, "drafters": 1, "wait_s": 120.0}))
    work.gradients(0)
    monkeypatch.setattr(work, "_share", lambda *given: release.wait(300))
    # Only now a short deadline: nothing else may be late on a busy machine.
    monkeypatch.setattr(work, "config", settings(layout={"targets": 1, "drafters": 1, "wait_s": 0.5}))
    with pytest.raises(WaitedTooLong, match="step 1 of drafter-0"):
        work.gradients(1)
    release.set()


def test_an_unsound_policy_starts_no_thread(make_threads: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    unsound = {"mode": "inductor", "start": "parallel"}
    with pytest.raises(ConfigError, match="fx-trace-race"):
        make_threads(settings(layout={"targets": 1, "drafters": 2, "wait_s": 1.0}, policy=unsound))


@pytest.mark.parametrize(("gpus", "fits"), [(8, True), (7, False), (9, True)])
def test_gpus_are_dealt_out_in_order(gpus: int, fits: bool) -> None:
    config = settings(layout={"targets": 5, "drafters": 3})
    if not fits:
        with pytest.raises(ConfigError, match="5 targets and 3 drafters need 8 GPUs; torch sees 7"):
            devices_of(config, "cuda", gpus)
        return
    feeding, learning = devices_of(config, "cuda", gpus)
    assert [device.index for device in feeding] == [0, 1, 2, 3, 4]
    assert [device.index for device in learning] == [5, 6, 7]


@pytest.mark.parametrize(
    ("rows", "workers", "sizes"), [(4, 1, [4]), (4, 3, [1, 1, 2]), (8, 3, [2, 3, 3]), (2, 3, [0, 1, 1])]
)
def test_rows_are_shared_out(rows: int, workers: int, sizes: list[int]) -> None:
    parts = shares(rows, workers)
    assert [part.stop - part.start for part in parts] == sizes
    assert [row for part in parts for row in range(rows)[part]] == list(range(rows))
