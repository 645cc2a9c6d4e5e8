"""Run with: pytest tests/unit/test_inspect.py. What is read of a source, what is said of it, and differences:
pure, without torch."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from dflashctl.config.hosts import HostEntry, HostsDocument, HostsFile
from dflashctl.errors import NotFound, UsageError
from dflashctl.inspect import tables
from dflashctl.inspect.compare import MISSING, compare
from dflashctl.inspect.facts import Facts, Option, Readable, TorchConfig, Variable, read
from dflashctl.inspect.programs import torch_facts, variables
from dflashctl.inspect.programs.env_reads import Source
from dflashctl.inspect.sources import package_files
from dflashctl.inspect.subject import Subject, parse

READS = {
    'import os\na = os.environ["ONE"]': {"ONE"},
    'from os import environ\nif "TWO" in environ: pass': {"TWO"},
    'import os\nx = os.environ.get(\n    "THREE",\n    "1",\n) == "1"': {"THREE"},
    'import os\nx = os.getenv("FOUR") or os.environ.get("FIVE", "0")': {"FOUR", "FIVE"},
    'x = Config(default=1, env_name_force="SIX", env_name_default=["SEVEN", "EIGHT"])': {
        "SIX",
        "SEVEN",
        "EIGHT",
    },
    'class knobs:\n    debug: env_bool = env_bool("NINE")': {"NINE"},
    'def flag(name):\n    return os.environ.get(name) == "1"\nx = flag("TEN")': {"TEN"},
    'NAME = "ELEVEN"\ndef f():\n    return os.getenv(NAME)': {"ELEVEN"},
    'def f():\n    which = "TWELVE"\n    return os.getenv(which)': {"TWELVE"},
    # what is written, or is the name of nothing outside, is not read
    'os.environ["WRITTEN"] = "1"\nos.environ.pop("POPPED")\ndel os.environ["GONE"]': {"POPPED"},
    'putenv("WRITTEN", "1")\nset_env("ALSO", "1")': set(),
    'print("NOT_A_READ")\nenv_bool("lower case")': set(),
}


@pytest.mark.parametrize("text", READS)
def test_the_variables_that_a_source_reads(text: str) -> None:
    assert Source(text).names() == READS[text]


def test_the_variables_that_an_option_comes_from() -> None:
    text = """
import os
def threads():
    if "THREADS" in os.environ:
        return int(os.environ["THREADS"])
    return default_threads()
def default_threads():
    return int(os.getenv("CORES", "1"))
plain = 1
size_asserts = os.environ.get("SIZE_ASSERTS", "1") == "1"
compile_threads: int = threads()
if os.environ.get("LEGACY") == "1":
    policy = "old"
else:
    policy = "new"
class triton:
    cudagraphs = os.environ.get("GRAPHS") == "1"
    cudagraph_trees = True
"""
    assert Source(text).options() == {
        "size_asserts": ["SIZE_ASSERTS"],
        "compile_threads": ["CORES", "THREADS"],
        "policy": ["LEGACY"],
        "triton.cudagraphs": ["GRAPHS"],
    }


def test_where_a_name_stands_that_is_not_read(tmp_path: Path) -> None:
    package = tmp_path / "torch"
    (package / "lib").mkdir(parents=True)
    (package / "a.py").write_text("names = ['TORCH_IN_A_LIST']\nother = 'TORCH_IN_A_LIST_TOO'\n")
    (package / "lib" / "libtorch.so").write_bytes(b"\x7fELF\0TORCH_IN_C\0TORCH_IN_C_ALSO\0")
    (package / "empty.py").write_text("")
    found = variables.named_in([package], ["TORCH_IN_A_LIST", "TORCH_IN_C", "TORCH_IN", "TORCH_NOWHERE"])
    assert found == {
        "TORCH_IN_A_LIST": ["torch/a.py"],
        "TORCH_IN_C": ["torch/lib/libtorch.so"],
        "TORCH_IN": [],
        "TORCH_NOWHERE": [],
    }


def test_sets_are_shown_the_same_each_time() -> None:
    assert torch_facts.plain({"b", "a"}) == "{'a', 'b'}"
    assert torch_facts.plain({"a": [1, None]}) == {"a": [1, None]}
    assert torch_facts.plain(open) == str(open)


def option(name: str, value: Any, default: Any, origin: str = "default", *variables: str) -> Option:
    return Option("torch._inductor.config", name, value, default, origin, variables)  # type: ignore[arg-type]


CONFIG = TorchConfig(
    torch="2.11.0",
    options=(
        option("triton.cudagraphs", True, False, "environment", "TORCHINDUCTOR_CUDAGRAPHS"),
        option("triton.cudagraph_trees", True, True),
        option("max_autotune", True, False, "set", "TORCHINDUCTOR_MAX_AUTOTUNE"),
        option("size_asserts", True, True, "default", "TORCHINDUCTOR_SIZE_ASSERTS"),
    ),
    modes={"default": {}, "reduce-overhead": {"triton.cudagraphs": True}},
    readable={
        "TORCHINDUCTOR_CUDAGRAPHS": Readable(("torch._inductor.config.triton.cudagraphs",), ("torch/x.py",)),
        "TORCHINDUCTOR_CUDAGRAPH_OR_ERROR": Readable(),
        "TORCH_LOGS": Readable(),
    },
    given=(
        Variable("TORCHINDUCTOR_CUDAGRAPHS", "1", "read"),
        Variable("TORCHINDUCTOR_CUDAGRAPH_TREES", "0", "unread"),
        Variable("TORCH_COMPILE_BACKEND", "x", "named", ("torch/y.py",)),
    ),
)


def test_options_are_chosen_by_name_or_variable_and_by_difference() -> None:
    def names(pattern: str | None, diff_default: bool = False) -> list[str]:
        return [each.name for each in CONFIG.chosen(pattern, diff_default=diff_default)]

    assert names(None) == ["triton.cudagraphs", "triton.cudagraph_trees", "max_autotune", "size_asserts"]
    assert names("CUDAGRAPH|graph") == ["triton.cudagraphs", "triton.cudagraph_trees"]
    assert names("torchinductor_size") == ["size_asserts"]
    assert names(None, diff_default=True) == ["triton.cudagraphs", "max_autotune"]
    assert names("nothing like it") == []


def test_each_value_says_where_it_comes_from() -> None:
    rows = tables.option_rows(CONFIG.options, CONFIG)
    assert rows[0] == (
        "torch._inductor.config.triton.cudagraphs",
        "True",
        "False",
        "TORCHINDUCTOR_CUDAGRAPHS",
        "TORCHINDUCTOR_CUDAGRAPHS",
    )
    assert [row[3] for row in rows[1:]] == ["default", "set by the program", "default"]
    assert rows[1][2] == ""  # a default that is in force is not shown twice
    alias = Option("m", "old", 1, 1, "alias", alias="m.new")
    assert alias.came_from({}) == "alias of m.new"


def test_a_variable_that_nobody_reads_is_flagged_with_what_is_meant() -> None:
    (words,) = tables.mistake_words(CONFIG)
    assert "TORCHINDUCTOR_CUDAGRAPH_TREES=0 is set, but nothing in torch 2.11.0 reads it" in words
    assert "torch._inductor.config.triton.cudagraph_trees can only be set by the program" in words
    assert "nearest that are read: TORCHINDUCTOR_CUDAGRAPHS" in words
    assert "TORCH_LOGS" not in words


def test_modes_are_a_table_of_mode_and_option() -> None:
    assert tables.mode_table(CONFIG.modes) == (
        ["OPTION", "default", "reduce-overhead"],
        [("triton.cudagraphs", "", "True")],
    )


def test_differences_of_two_looks() -> None:
    a = Facts("a", CONFIG, {"python": "3.12.3", "driver": None}, {"torch": "2.11.0", "fla": "0.3"})
    other = TorchConfig("2.13.0", CONFIG.options[1:], {"default": {}, "lite": {"x": 1}}, {}, ())
    b = Facts("b", other, {"python": "3.11.7", "driver": None}, {"torch": "2.13.0"})
    rows = {(row.section, row.name): (row.a, row.b) for row in compare(a, b) if not row.same}
    assert rows == {
        ("machine", "python"): ("3.12.3", "3.11.7"),
        ("package", "torch"): ("2.11.0", "2.13.0"),
        ("package", "fla"): ("0.3", MISSING),
        ("variable", "TORCHINDUCTOR_CUDAGRAPHS"): ("1", MISSING),
        ("variable", "TORCHINDUCTOR_CUDAGRAPH_TREES"): ("0", MISSING),
        ("variable", "TORCH_COMPILE_BACKEND"): ("x", MISSING),
        ("option", "torch._inductor.config.triton.cudagraphs"): (True, MISSING),
        ("mode", "reduce-overhead"): ("listed", MISSING),
        ("mode", "reduce-overhead: triton.cudagraphs"): (True, MISSING),
        ("mode", "lite"): (MISSING, "listed"),
        ("mode", "lite: x"): (MISSING, 1),
    }
    same = [row.name for row in compare(a, b) if row.same]
    assert {"driver", "torch._inductor.config.size_asserts"} <= set(same)
    assert [row for row in compare(a, a) if not row.same] == []


def test_the_document_of_differences_tells_null_from_missing() -> None:
    a, b = Facts("a", None, {"driver": None}, {}), Facts("b", None, {}, {})
    document = tables.difference_document("a", "b", compare(a, b))
    assert document["rows"] == [{"section": "machine", "name": "driver", "same": False, "a": None}]
    json.dumps(document)


ANSWER = {
    "facts": {"env": {"torch": "2.13.0+cpu", "nccl": None}},
    "machine": {"python": "3.12.3", "packages": {"torch": "2.13.0+cpu"}},
    "run": None,
}


def test_a_run_is_told_by_what_it_wrote_down() -> None:
    host = read("ct200", ANSWER)
    assert host.machine == {"python": "3.12.3", "torch": "2.13.0+cpu", "torch nccl": None}
    assert host.packages == {"torch": "2.13.0+cpu"} and host.notes == ()
    then = {"version": 1, "python": "3.11.0", "packages": {"torch": "2.11.0"}}
    run = read("ct200/x", {**ANSWER, "run": {"id": "i", "tag": "x", "env": {}, "environment": then}})
    assert run.machine["python"] == "3.11.0" and run.packages == {"torch": "2.11.0"}
    assert any("had torch 2.11.0, there is torch 2.13.0+cpu now" in note for note in run.notes)
    old = read("ct200/x", {**ANSWER, "run": {"id": "i", "tag": "x", "env": {}, "environment": None}})
    assert old.packages == {"torch": "2.13.0+cpu"} and "wrote nothing down" in old.notes[0]


def hosts() -> HostsFile:
    document = HostsDocument(
        version=1,
        defaults={"host": "one"},  # type: ignore[arg-type]
        hosts={"one": HostEntry(engine="local"), "two": HostEntry(engine="local")},
    )
    return HostsFile(None, document)


@pytest.mark.parametrize(
    ("text", "default", "name"),
    [
        (None, None, "one"),
        (None, "two", "two"),
        ("two", None, "two"),
        ("localtls", None, "one/localtls"),
        ("localtls", "two", "two/localtls"),
        ("two/localtls", None, "two/localtls"),
        ("one/two", None, "one/two"),
    ],
)
def test_whom_a_word_means(text: str | None, default: str | None, name: str) -> None:
    assert parse(text, hosts(), default).name == name


def test_words_that_mean_nobody() -> None:
    with pytest.raises(NotFound):
        parse("three/x", hosts(), None)
    for text in ("two/", "/x", "a/b/c"):
        with pytest.raises(UsageError):
            parse(text, hosts(), None)
    assert parse("one", hosts(), None) == Subject(hosts().host("one"))


def test_the_programs_that_travel() -> None:
    files = package_files("dflashctl.inspect.programs", sent_as="sent")
    programs = ("__init__", "env_reads", "torch_facts", "variables")
    assert set(files) == {f"sent/{name}.py" for name in programs}
    assert "dflashctl" not in "".join(
        line for text in files.values() for line in text.splitlines() if "import" in line
    )


# --- configuration modules of other torches -----------------------------------------------------------------

PLAIN = """
import os
size_asserts = os.environ.get("SIZE_ASSERTS", "1") == "1"
ignored = {"b", "a"}
def function(): ...
class triton:
    cudagraphs = os.environ.get("GRAPHS") == "1"
    cudagraph_trees = True
"""
TABLED = (
    PLAIN
    + """
import sys
from types import ModuleType
UNSET = object()
class Entry:
    def __init__(self, default): self.default, self.user_override, self.alias = default, UNSET, None
class Module(ModuleType):
    def __getattr__(self, name):
        try: entry = self._config[name]
        except KeyError: raise AttributeError(name) from None
        return entry.default if entry.user_override is UNSET else entry.user_override
_config = {"size_asserts": Entry(size_asserts), "triton.cudagraphs": Entry(triton.cudagraphs)}
_config["triton.cudagraph_trees"] = Entry(triton.cudagraph_trees)
del size_asserts, triton
sys.modules[__name__].__class__ = Module
"""
)


@pytest.mark.parametrize("text", [PLAIN, TABLED], ids=["plain attributes", "a table, override an attribute"])
def test_values_defaults_and_origins_of_a_module(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "oldtorch"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "config.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("oldtorch", "oldtorch.config"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("GRAPHS", "1")
    monkeypatch.setenv("SIZE_ASSERTS", "1")
    module = importlib.import_module("oldtorch.config")
    if text is TABLED:
        module._config["triton.cudagraph_trees"].user_override = False
    else:
        module.triton.cudagraph_trees = False
    options, problem = torch_facts.module_options(module, set(), {"GRAPHS": "1", "SIZE_ASSERTS": "1"})
    found = {each["name"]: (each["value"], each["default"], each["origin"]) for each in options}
    assert problem == ""
    assert {name: row for name, row in found.items() if name != "ignored"} == {
        "size_asserts": (True, True, "environment"),
        "triton.cudagraphs": (True, False, "environment"),
        "triton.cudagraph_trees": (False, True, "set"),
    }
    assert "GRAPHS" in os.environ and "oldtorch.dflash_clean_config" not in sys.modules


def test_a_module_that_cannot_be_computed_again_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "onceonly.py").write_text(
        "import os\nlevel = int(os.environ['LEVEL'])\n"  # without LEVEL it cannot be imported
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("LEVEL", "3")
    options, problem = torch_facts.module_options(importlib.import_module("onceonly"), set(), {"LEVEL": "3"})
    assert "onceonly: its defaults cannot be computed again: KeyError" in problem
    assert [(each["name"], each["value"], each["origin"]) for each in options] == [
        ("level", 3, "environment")
    ]
