"""Run with: pytest tests/unit/test_kin.py. Who belongs to a run, whatever the process table looks like."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dflashctl.agent.processes import kin, proc


def made(pid: int, ppid: int, start: int = 0, state: str = "S") -> proc.Process:
    return proc.Process(pid, ppid, pid, pid, start or pid * 10, state, "x", 1, 0, 0)


def table(*processes: proc.Process) -> proc.Table:
    return {one.pid: one for one in processes}


def test_family_is_what_descends_from_the_supervisor() -> None:
    #        1 - 10 supervisor - 11 leader - 12;  10 - 13 adopted;  1 - 20 a stranger - 21
    ours = [made(10, 1), made(11, 10), made(12, 11), made(13, 10)]
    everything = table(made(1, 0), *ours, made(20, 1), made(21, 20))
    family = kin.family(everything, supervisor=(10, 100))
    assert [one.pid for one in family] == [11, 12, 13]


def test_family_without_its_supervisor_is_found_by_record_and_tag() -> None:
    everything = table(made(1, 0), made(11, 1), made(12, 11), made(13, 1), made(14, 13), made(20, 1))
    family = kin.family(everything, supervisor=(10, 100), known=[(11, 110)], tagged=[13])
    assert [one.pid for one in family] == [11, 12, 13, 14]


def test_a_recycled_pid_is_nobody_of_the_family() -> None:
    everything = table(made(1, 0), made(10, 1, start=999), made(11, 10), made(12, 1, start=998))
    assert kin.family(everything, supervisor=(10, 100), known=[(12, 120)]) == []


def test_ancestors_end_at_the_top_even_in_a_loop() -> None:
    everything = table(made(1, 0), made(5, 1), made(6, 5), made(7, 8), made(8, 7))
    assert kin.ancestors(6, everything) == {6, 5, 1}
    assert kin.ancestors(7, everything) == {7, 8}


@given(
    st.lists(st.tuples(st.integers(2, 40), st.integers(0, 40)), max_size=40),
    st.sets(st.integers(2, 40), max_size=5),
)
def test_descendants_are_closed_and_reach_nobody_else(edges: list[tuple[int, int]], roots: set[int]) -> None:
    everything = {pid: made(pid, ppid) for pid, ppid in edges}
    found = kin.descendants(roots, everything)
    for pid in found:
        assert everything[pid].ppid in roots | found
    for process in everything.values():
        if process.ppid in roots | found:
            assert process.pid in found
