"""Run with: pytest tests/unit/test_probe_verdict.py. What a probe plans, and what its programs' ends mean:
pure."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpu_kit import answer, reading, row
from gpu_kit import judge as judge_gpus

from dflashctl.errors import GpusBusy, RunBad, UsageError
from dflashctl.gpus.choose import Wish
from dflashctl.gpus.idle import Box
from dflashctl.probe import expect, tables
from dflashctl.probe.cases import ALL, PROBES, Case
from dflashctl.probe.expect import Expectation, expected
from dflashctl.probe.plan import gpus_for, of_file, of_probe, variables
from dflashctl.probe.verdict import Verdict, error_of, judge, torch_of
from trainer.failures import by_name

TLS = "AssertionError: assert torch._C._is_key_in_tls(attr_name)"
POINTER = "    assert dst.data_ptr() == src.data_ptr()\nAssertionError"
RACE = "RuntimeError: Detected that you are using FX to symbolically trace a dynamo-optimized function. No."


def ended(case: str, **changes: Any) -> list[dict[str, Any]]:
    line = {
        "case": case,
        "state": "ended",
        "exit": 0,
        "signal": None,
        "timed_out": False,
        "unkillable": False,
        "seconds": 2.0,
        "answer": {"ok": True, "figures": {"GB/s": 370.1}},
        "tail": "",
        **changes,
    }
    return [{"case": case, "state": "began"}, line]


def failed(text: str, said: str = "") -> dict[str, Any]:
    return {"exit": 1, "answer": {"ok": False, "said": said, "errors": [{"who": "worker-0", "text": text}]}}


ROWS: list[tuple[str, str, dict[str, Any], str, bool | None, bool]] = [
    # case, torch, what its process came to -> the words, agrees with the table?, bad?
    ("main-thread", "2.11.0+cu130", {}, "passes", True, False),
    ("main-thread", "2.11.0+cu130", failed(TLS), "fails: cudagraph-trees-tls", False, True),
    ("one-thread", "2.11.0+cu130", failed(TLS), "fails: cudagraph-trees-tls", True, False),
    ("one-thread", "2.12.1", failed(TLS), "fails: cudagraph-trees-tls", True, False),
    ("one-thread", "2.13.0+cu130", failed(TLS), "fails: cudagraph-trees-tls", False, True),
    ("one-thread", "2.13.0+cu130", {}, "passes", True, False),
    ("one-thread", "2.14.0.dev20260901+cu130", {}, "passes", True, False),
    ("one-thread", "2.11.0+cu130", {}, "passes", False, True),
    ("one-thread", "2.11.0+cu130", failed(POINTER), "fails: cudagraph-legacy-pointer", False, True),
    ("local-tls", "2.11.0+cu130", failed(TLS), "fails: cudagraph-trees-tls", True, False),
    ("stashed-tls", "2.11.0+cu130", {}, "passes", True, False),
    ("trees-off", "2.11.0+cu130", {}, "passes", True, False),
    (
        "trees-off-threads-at-once",
        "2.11.0+cu130",
        failed(POINTER, "2 of 3 failed"),
        "fails: cudagraph-legacy-pointer",
        True,
        False,
    ),
    ("inductor-threads-at-once", "2.11.0+cu130", {}, "passes", True, False),
    ("inductor-threads-at-once", "2.13.0", failed(RACE), "fails: fx-trace-race", True, False),
    ("inductor-threads-at-once", "2.13.0", failed(TLS), "fails: cudagraph-trees-tls", False, True),
    # of several failures the expected one counts
    (
        "trees-off-threads-at-once",
        "2.11.0+cu130",
        failed(f"{RACE}\n{POINTER}", "2 of 3 failed"),
        "fails: cudagraph-legacy-pointer",
        True,
        False,
    ),
    # nothing is expected of these
    ("trees-off", "2.13.0", {}, "passes", None, False),
    ("trees-off", "2.13.0", failed("ValueError: odd"), "fails: ValueError: odd", None, True),
    ("own-capture", "not a version", {}, "passes", None, False),
    # ends of other kinds
    (
        "one-thread",
        "2.11.0",
        {"exit": None, "signal": 11, "answer": None, "tail": "x\nboom\n"},
        "crashes",
        False,
        True,
    ),
    ("one-thread", "2.11.0", {"exit": None, "timed_out": True, "answer": None}, "hangs", False, True),
    ("own-capture", "2.13.0", {"exit": None, "timed_out": True, "answer": None}, "hangs", None, True),
    # an end without an answer, or with one that its exit code belies, is no pass
    (
        "main-thread",
        "2.11.0",
        {"answer": None, "tail": "ImportError: x\n"},
        "fails: ImportError: x",
        False,
        True,
    ),
    ("main-thread", "2.11.0", {"exit": 3, "tail": "after all\n"}, "fails: after all", False, True),
    ("main-thread", "2.11.0", {"exit": 1, "answer": None}, "fails: without a word", False, True),
]


def case_of(name: str) -> Case:
    return next(case for case in PROBES["threads"].cases if case.name == name)


@pytest.mark.parametrize(("case", "torch", "end", "words", "agrees", "bad"), ROWS)
def test_verdicts(case: str, torch: str, end: dict[str, Any], words: str, agrees: Any, bad: bool) -> None:
    verdict = judge("threads", case_of(case), ended(case, **end), torch, 120)
    assert (verdict.words, verdict.agrees, verdict.bad) == (words, agrees, bad)


def test_what_was_not_tried() -> None:
    case = case_of("one-thread")
    skipped = {"case": case.name, "state": "skipped", "lacks": "gpus", "why": "a GPU: torch sees none"}
    verdict = judge("threads", case, [skipped], "2.11.0", 120)
    assert (verdict.words, verdict.agrees, verdict.bad) == ("needs a GPU: torch sees none", None, False)
    for lines in (
        [],
        [{"case": case.name, "state": "began"}],
        [{**skipped, "lacks": None, "why": "x cannot be ended"}],
    ):
        verdict = judge("threads", case, lines, "2.11.0", 120)
        assert (verdict.words, verdict.agrees, verdict.bad) == ("not run", None, True)


def test_what_is_said_of_a_hang_and_a_crash() -> None:
    case = case_of("one-thread")
    stuck = judge("threads", case, ended(case.name, timed_out=True, unkillable=True), "2.11.0", 90)
    assert stuck.said == "not done within 90 s, and even SIGKILL does not end it"
    crash = judge("threads", case, ended(case.name, exit=None, signal=11, tail="a\nb\n"), "2.11.0", 90)
    assert crash.said == "SIGSEGV: b"
    several = judge("threads", case, ended(case.name, **failed(TLS, "2 of 3 failed")), "2.11.0", 90)
    assert several.said == f"{TLS} (2 of 3 failed)"


def test_the_table_marks_differences() -> None:
    passes = judge("threads", case_of("one-thread"), ended("one-thread"), "2.11.0+cu130", 120)
    assert tables.row(passes)[1:5] == ("passes", "fails: cudagraph-trees-tls (measured)", "DIFFERS", "2.0 s")
    assert tables.details(passes) == [
        "one-thread: GB/s 370.1",
        "one-thread: expected fails with cudagraph-trees-tls: one H200 with torch 2.11.0+cu130",
    ]
    fine = judge("threads", case_of("main-thread"), ended("main-thread"), "2.11.0+cu130", 120)
    assert tables.row(fine)[1:4] == ("passes", "passes (measured)", "as expected")
    document = tables.documents([passes], {"torch": "2.11.0"})
    assert document["cases"][0]["expected"]["basis"] == "measured" and document["cases"][0]["agrees"] is False
    json.dumps(document)


def test_how_the_command_ends() -> None:
    def verdict(answer: Any, wanted: str | None = None) -> Verdict:
        row = Expectation("p", "c", ">=2", wanted, "read", "s") if wanted else None  # type: ignore[arg-type]
        lacks: Any = "gpus" if answer == "needs" else ""
        return Verdict(Case("c", "?"), answer, "a GPU: torch sees none", lacks, expected=row)

    def kind(*verdicts: Verdict) -> type | None:
        error = error_of(verdicts, host="h", tag="t")
        return None if error is None else type(error)

    assert kind(verdict("passes"), verdict("passes", "passes"), verdict("fails", "fails")) is None
    assert kind(verdict("passes"), verdict("needs")) is GpusBusy
    assert kind(verdict("needs"), verdict("fails")) is RunBad
    assert kind(replace(verdict("needs"), lacks="compiler", said="a compiler for this GPU")) is UsageError
    assert kind(verdict("passes", "fails")) is RunBad
    assert kind(verdict("not run", "passes")) is RunBad
    assert "not as expected" in str(error_of([verdict("passes", "fails")], host="h", tag="t"))


# --- expectations -------------------------------------------------------------------------------------------


def test_every_row_of_the_table_is_about_a_case_that_there_is() -> None:
    rows = expect.table()
    assert {each.probe for each in rows} == {"threads", "step", "ipc"}
    for each in rows:
        assert each.case in {case.name for case in PROBES[each.probe].cases}, each
        assert all(by_name()[name].severity == "fatal" for name in each.failures)


MEASURED_ON_H200 = {
    "main-thread": "passes",
    "one-thread": "fails",
    "local-tls": "fails",
    "stashed-tls": "passes",
    "trees-off": "passes",
    "trees-off-threads-at-once": "fails",
    "inductor-threads-at-once": "either",
    "own-capture": "passes",
}


@pytest.mark.parametrize("case", MEASURED_ON_H200)
def test_what_was_measured_on_an_h200_with_torch_2_11(case: str) -> None:
    row = expected("threads", case, "2.11.0+cu130")
    assert row is not None and (row.answer, row.basis) == (MEASURED_ON_H200[case], "measured")
    assert "H200" in row.source


def test_the_first_row_that_fits_counts() -> None:
    rows = (
        Expectation("p", "c", "==2.11.*", "passes", "measured", "a"),
        Expectation("p", "c", "<2.13", "either", "read", "b", ("x",)),
    )
    found = [expected("p", "c", version, rows) for version in ("2.11.1+cu130", "2.12.1", "2.13.0", None, "?")]
    assert [row and row.source for row in found] == ["a", "b", None, None, None]
    assert expected("p", "other", "2.11.0", rows) is None


@pytest.mark.parametrize(
    "change",
    [
        {"torch": "2.11"},
        {"answer": "perhaps"},
        {"basis": "guessed"},
        {"source": ""},
        {"failures": ["no-such-row"]},
        {"failures": []},
        {"answer": "passes"},
    ],
)
def test_a_wrong_row_is_refused_by_name(change: dict[str, Any]) -> None:
    good = {
        "probe": "threads",
        "case": "one-thread",
        "torch": "<2.13",
        "answer": "fails",
        "failures": ["cudagraph-trees-tls"],
        "basis": "read",
        "source": "s",
    }
    assert len(expect.parse(json.dumps({"probes": [good]}), list(by_name()))) == 1
    with pytest.raises(ValueError, match="threads one-thread"):
        expect.parse(json.dumps({"probes": [{**good, **change}]}), list(by_name()))


def test_the_page_shows_what_the_table_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "probe.md").read_text()
    for case in PROBES["threads"].cases:
        (line,) = re.findall(rf"^\| `{case.name}` \| .* \| (.+) \| (.+) \|$", page, re.MULTILINE)
        rows = [expected("threads", case.name, torch) for torch in ("2.11.0+cu130", "2.13.0+cu130")]
        assert line == tuple(f"{row.words} ({row.basis})" if row else "-" for row in rows), case.name
    assert all(f"`{name}`" in page for name in PROBES)


# --- what is sent and on which GPUs -------------------------------------------------------------------------


def test_the_files_of_a_probe() -> None:
    work = of_probe(PROBES["ipc"], "two-gpus,expandable-segments", tag=None, deadline_s=60, env={"A": "1"})
    files = work.files("/s/runs/R")
    assert {"dflash_probe/driver.py", "dflash_probe/common.py", "dflash_probe/ipc.py"} < set(files)
    plan = json.loads(files["plan.json"])
    assert (
        plan["look"] == "dflash_probe.look" and plan["pythonpath"] == "/s/runs/R/files" and not plan["alone"]
    )
    first, second = plan["cases"]
    assert first["argv"] == ["-m", "dflash_probe.ipc", "two-gpus"]
    assert first["needs"] == {"gpus": 2, "compiler": False} and first["deadline_s"] == 60
    assert first["env"]["TRITON_CACHE_DIR"] == "/s/runs/R/compile_cache/two-gpus/triton"
    assert second["env"]["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    recipe = work.recipe()
    assert (work.tag, recipe.name, recipe.launch.env) == ("probe-ipc", "probe", {"A": "1"})
    assert recipe.launch.log == "{log_dir}/{tag}.log"
    with pytest.raises(UsageError, match="no case 'nothing'"):
        of_probe(PROBES["ipc"], "nothing", tag=None, deadline_s=60, env={})


def test_the_files_of_a_snippet() -> None:
    work = of_file("my case (1).py", "print(1)", ["-x"], tag=None, deadline_s=5, env={})
    files = work.files("/s/runs/R")
    assert set(files) == {"dflash_probe/driver.py", "my_case__1_.py", "plan.json"}
    plan = json.loads(files["plan.json"])
    assert plan["alone"] and plan["look"] is None and plan["pythonpath"] is None
    (entry,) = plan["cases"]
    assert entry["argv"] == ["/s/runs/R/files/my_case__1_.py", "-x"] and entry["needs"]["gpus"] == 0
    assert work.tag == "probe-my_case__1_"
    assert "plan.json" in of_file("plan.json", "1", [], tag="t", deadline_s=5, env={}).files("/r")
    other = of_file("x.py", "1", [], tag="mine", deadline_s=5, env={})
    assert other.recipe().launch.log == "{log_dir}/probe_{tag}.log"


def test_every_probe_has_a_program_with_its_cases() -> None:
    import ast

    for probe in PROBES.values():
        work = of_probe(probe, None, tag=None, deadline_s=1, env={})
        text = work.files("/r")[f"dflash_probe/{probe.name}.py"]
        texts = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
        assert {case.name for case in probe.cases} <= texts, probe.name


def test_variables() -> None:
    assert variables(["A=1", "B=", "C=x=y"]) == {"A": "1", "B": "", "C": "x=y"}
    for wrong in ("A", "1A=2", "=x", "A=\0"):
        with pytest.raises(UsageError):
            variables([wrong])


MISSING = {"samples": [{"problem": "missing"}]}
BROKEN = {"samples": [{"problem": None}]}


def box_of(*used_mib: int) -> Box:
    return judge_gpus(answer(reading(*(row(index, str(used)) for index, used in enumerate(used_mib)))))


def test_gpus_for_a_probe() -> None:
    free, half = box_of(0, 0, 0), box_of(0, 9000, 0)

    def indices(box: Box, want: int, wish: Wish | None = None) -> list[int]:
        return [gpu.index for gpu in gpus_for(box, BROKEN, wish, want)[0]]

    assert indices(free, 1) == [0]
    assert indices(free, ALL) == [0, 1, 2]
    assert indices(half, ALL) == [0, 2]
    assert indices(half, 2) == [0, 2] and indices(box_of(0), 2) == [0]
    assert indices(half, 1, Wish(names=(2,))) == [2] and indices(half, 1, Wish()) == []
    with pytest.raises(GpusBusy, match="GPU 1"):
        indices(half, 1, Wish(names=(1,)))
    with pytest.raises(GpusBusy, match="1 wanted, 0 of 1 idle"):
        indices(box_of(9000), ALL)


def test_a_machine_without_gpus_is_probed_without_and_one_that_is_broken_is_not() -> None:
    nothing = replace(Box(()), problem="there is no nvidia-smi")
    assert gpus_for(nothing, MISSING, None, 1) == ((), "no GPU is there: there is no nvidia-smi")
    with pytest.raises(GpusBusy, match="cannot be read"):
        gpus_for(replace(Box(()), problem="version mismatch"), BROKEN, None, 1)
    with pytest.raises(GpusBusy, match="cannot be read"):
        gpus_for(nothing, MISSING, Wish(count=1), 1)


def test_the_look_before_the_cases() -> None:
    assert torch_of([{"case": "x"}, {"look": {"torch": "2.11.0"}}]) == {"torch": "2.11.0"}
    assert torch_of([]) == {}
