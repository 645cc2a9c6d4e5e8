"""Memory for hidden states that two processes share, and the conversation about it."""

from __future__ import annotations

import multiprocessing
import socket
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.errors import ConfigError, TrainerError
from trainer.topology import slots as memory
from trainer.topology import split
from trainer.topology.link import Door, Line, knock, maker
from trainer.topology.ranks import PeerLost

SHAPE = memory.Shape(rows=2, tokens=3, width=4, final=2, dtype=torch.bfloat16)
CPU = torch.device("cpu")


def write_from_outside(ticket: Any) -> None:
    opened = memory.opened(ticket)
    for slot in range(len(opened)):
        taps, final = opened[slot]
        taps.fill_(slot + 1)
        assert final is not None
        final.fill_(-slot - 1)


def test_what_another_process_writes_is_read_here_and_nothing_is_left() -> None:
    before = set(Path("/dev/shm").iterdir())
    owned = memory.make(SHAPE, 3, CPU)
    assert set(Path("/dev/shm").iterdir()) == before
    # A fork: a new interpreter would import torch first.
    writer = multiprocessing.get_context("fork").Process(target=write_from_outside, args=(owned.ticket,))
    writer.start()
    writer.join(120)
    assert writer.exitcode == 0
    owned.opened_by_all()
    for slot in range(3):
        taps, final = owned.slots[slot]
        assert final is not None
        assert taps.shape == (2, 3, 4) and final.shape == (2, 3, 2)
        assert bool((taps == slot + 1).all()) and bool((final == -slot - 1).all())


def test_without_final_states_a_slot_is_only_taps() -> None:
    taps, final = memory.make(memory.Shape(2, 3, 4, 0, torch.float32), 1, CPU).slots[0]
    assert taps.numel() == 24 and final is None


def test_no_room_is_said_with_the_size() -> None:
    huge = memory.Shape(1 << 20, 1 << 20, 1 << 10, 0, torch.float32)
    with pytest.raises(ConfigError, match="no room for 2 batches of hidden states") as caught:
        memory.make(huge, 2, CPU)
    assert caught.value.where == "train.layout.queue"


@pytest.mark.parametrize("name", memory.ALLOCATOR_SETTINGS)
def test_expandable_segments_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        memory.refuse_expandable_segments({name: "max_split_size_mb:64, Expandable_Segments: True"})
    memory.refuse_expandable_segments({name: "expandable_segments:False"})
    memory.refuse_expandable_segments({})


def test_a_checksum_tells_other_contents() -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(4, 50, 8, generator=generator)
    assert memory.checksum((states, None)) == memory.checksum((states.clone(), None))
    assert memory.checksum((states, None)) != memory.checksum((states.roll(1, 0), None))


@pytest.mark.parametrize(("drafters", "targets"), [(1, 1), (3, 5), (2, 3), (3, 3), (2, 1)])
def test_every_target_makes_as_much_as_the_others(drafters: int, targets: int) -> None:
    made = [maker(number, d, drafters, targets) for number in range(targets) for d in range(drafters)]
    assert [made.count(target) for target in range(targets)] == [drafters] * targets


def test_a_slow_link_is_refused_and_a_small_slot_is_not_judged() -> None:
    large = memory.Shape(64, 1024, 256, 0, torch.float32)
    split._check_floor(0.3 * split.GIB, large, 0.25)
    with pytest.raises(TrainerError, match=r"0\.200 GiB/s, less than 0\.25 GiB/s"):
        split._check_floor(0.2 * split.GIB, large, 0.25)
    split._check_floor(0.0001 * split.GIB, SHAPE, 0.25)


def pair() -> tuple[Connection, Connection]:
    one, other = socket.socketpair()
    return Connection(one.detach()), Connection(other.detach())


def test_a_peer_that_vanishes_is_noticed_and_one_that_ends_is_not_missed() -> None:
    (mine, ends), (also_mine, vanishes) = pair(), pair()
    line = Line([mine, also_mine], "target", lambda: None)
    heard: list[tuple[int, Any]] = []
    ends.send(("filled", 3))
    ends.send(("end",))
    ends.close()
    line.hear(lambda peer, message: heard.append((peer, message)), lambda: bool(heard), 60, "step 3")
    assert heard == [(0, ("filled", 3))]
    vanishes.close()
    with pytest.raises(PeerLost, match="step 4: target 1 is gone"):
        line.hear(lambda peer, message: None, lambda: False, 60, "step 4")
    line.tell(0, "taken", 3)  # it has ended: no failure
    with pytest.raises(PeerLost, match="target 1 is gone"):
        for _ in range(100):
            line.tell(1, "taken", 3)


def test_a_peer_that_has_said_its_end_may_go_before_that_is_heard() -> None:
    mine, theirs = pair()
    line = Line([mine], "drafter", lambda: None)
    theirs.send(("taken", 5))
    theirs.send(("end",))
    theirs.close()
    for number in range(100):  # works ahead, into a connection that nobody reads any more
        line.tell(0, "filled", number, None, 0.0)
    assert line.all_ended


def test_silence_ends_with_what_was_waited_for() -> None:
    mine, _other = pair()
    with pytest.raises(PeerLost, match="step 4: nothing from the targets for 0 s"):
        Line([mine], "target", lambda: None).hear(lambda *said: None, lambda: False, 0.1, "step 4")


def test_targets_find_the_door_by_its_note_and_come_in_any_order(tmp_path: Path) -> None:
    note = tmp_path / "door.json"
    made: dict[int, Connection] = {}

    def come(target: int, delay_s: float) -> None:
        time.sleep(delay_s)
        made[target] = knock(note, target, lambda: None, 60)

    threads = [threading.Thread(target=come, args=(0, 0.3)), threading.Thread(target=come, args=(1, 0.0))]
    for thread in threads:
        thread.start()
    peers = Door(note).accept(2, lambda: None, 60)
    for thread in threads:
        thread.join(60)
    for target in (0, 1):
        made[target].send(f"I am {target}")
        assert peers[target].recv() == f"I am {target}"


def test_a_target_that_does_not_come_is_named(tmp_path: Path) -> None:
    note = tmp_path / "door.json"
    with pytest.raises(PeerLost, match=r"targets \[0, 1\] did not come"):
        Door(note).accept(2, lambda: None, 0.0)
    with pytest.raises(PeerLost, match="no drafter behind"):
        knock(tmp_path / "none.json", 0, lambda: None, 0.0)
