"""Recipes: found by name, checked with every variant, resolved for a tag, placeholders filled.

Run: python -m pytest tests/unit/test_config_recipe.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dflashctl.config import PLACEHOLDERS, check_tag, fill, load_recipe, resolve
from dflashctl.config.hosts import HostEntry, HostsDocument, HostsFile
from dflashctl.config.resolve import merge, read_recipe
from dflashctl.errors import NotFound, UsageError

PROJECT = Path(__file__).parents[2]

WARM = """
version: 1
name: warm
deploy:
  include: [prog/**]
  entry: prog
  expect:
    - {file: prog/a.py, text: "graphs = False"}
launch:
  command: [python, -m, prog, "{recipe_file}"]
train: {lr: 0.1, policy: {tls: none, start: all}}
variants:
  localtls: {train: {policy: {tls: local}}}
"""


def hosts_in(folder: Path) -> HostsFile:
    return HostsFile(folder / "hosts.yaml", HostsDocument(version=1, hosts={"lab": HostEntry(engine="lab")}))


def written(folder: Path, text: str, name: str = "warm") -> Path:
    path = folder / "recipes" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refused(tmp_path: Path, text: str) -> str:
    with pytest.raises(UsageError) as caught:
        read_recipe(written(tmp_path, text))
    return str(caught.value).replace(f"{tmp_path}/recipes/", "")


# --- finding ------------------------------------------------------------------------------------------------


def test_found_beside_hosts_yaml_first_then_above_the_working_folder(tmp_path: Path) -> None:
    near = written(tmp_path / "conf", WARM)
    far = written(tmp_path / "work", WARM)
    other = written(tmp_path / "work", WARM.replace("name: warm", "name: other"), "other")
    below = tmp_path / "work" / "x"
    below.mkdir()
    hosts = hosts_in(tmp_path / "conf")
    assert load_recipe("warm", hosts, below).path == near != far
    assert load_recipe("other", hosts, below).path == other
    assert load_recipe("other", hosts, below).project_root == tmp_path / "work"


def test_outside_of_a_project_its_folder_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(NotFound) as caught:
        load_recipe("warm", hosts_in(tmp_path), tmp_path)
    missing = "run it from the project's folder, or write recipes/NAME.yaml beside hosts.yaml"
    assert caught.value.next == missing


def test_an_unknown_recipe_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    written(tmp_path, WARM)
    with pytest.raises(NotFound) as caught:
        load_recipe("wram", hosts_in(tmp_path), tmp_path)
    assert caught.value.exit_code == 6
    assert caught.value.next == "did you mean 'warm'? known recipes: warm"
    with pytest.raises(NotFound, match="no recipe file"):
        load_recipe("./nothing.yaml", hosts_in(tmp_path), tmp_path)


def test_who_named_no_recipe_is_not_told_of_one(tmp_path: Path) -> None:
    written(tmp_path, WARM)
    with pytest.raises(NotFound) as caught:
        load_recipe(None, hosts_in(tmp_path), tmp_path)
    assert caught.value.what == "none of these recipes is the default one"
    said = "name one with -r: warm; or for always: defaults: {recipe: warm} in hosts.yaml"
    assert caught.value.next == said


def test_a_path_names_a_file_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "loose.yaml"
    path.write_text(WARM)
    recipe = load_recipe(str(path), hosts_in(tmp_path), tmp_path)
    assert (recipe.name, recipe.project_root) == ("warm", tmp_path)


def test_a_copied_recipe_must_change_its_name(tmp_path: Path) -> None:
    written(tmp_path, WARM, "copy")
    with pytest.raises(UsageError, match=r"copy\.yaml:3:7: name: is 'warm', but the file is named 'copy'"):
        load_recipe("copy", hosts_in(tmp_path), tmp_path)


# --- what a mistake says ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "entry: prog",
            "enrty: prog",
            "warm.yaml:6:3: unknown key: deploy.enrty\nnext: did you mean 'entry'?",
        ),
        ("entry: prog", "entry: prog/x.py", "deploy.entry: 'prog/x.py' is not a module name"),
        ("text:", "txt:", "warm.yaml:8:25: unknown key: deploy.expect[0].txt"),
        (
            'text: "graphs = False"',
            "text: a, regex: b",
            "warm.yaml:8:7: deploy.expect[0]: needs either 'text' or 'regex'",
        ),
        ('text: "graphs = False"', 'regex: "("', "is not a regular expression"),
        ("include: [prog/**]", "include: []", "deploy.include: "),
        ("include: [prog/**]", "include: [/etc/**]", "deploy.include[0]: '/etc/**' must be a path below"),
        ("include: [prog/**]", "include: [../x]", "must be a path below"),
        (
            '"{recipe_file}"]',
            '"{recipe_fil}"]',
            "launch.command[3]: unknown placeholder {recipe_fil}; did you mean {recipe_file}?",
        ),
        (
            'command: [python, -m, prog, "{recipe_file}"]',
            "command: python x",
            "a valid list, but is 'python x' (text)\nnext: write command: [python, x]",
        ),
        (
            'command: [python, -m, prog, "{recipe_file}"]',
            "command: bash -c 'sleep 5; exit 3' 5 no",
            'next: write command: [bash, -c, "sleep 5; exit 3", "5", "no"]',
        ),
        (
            '"{recipe_file}"]',
            "{recipe_file}]",
            '(mapping)\nnext: braces begin keys in YAML; put it in quotes: "{recipe_file}"',
        ),
        ("launch:\n", "launch:\n  gpus: 1\n", "next: write gpus: {count: 1}"),
        ("include: [prog/**]", "include: prog/**", 'next: write include: ["prog/**"]'),
        (
            'command: [python, -m, prog, "{recipe_file}"]',
            "command: []",
            "launch.command: must not be empty",
        ),
        (
            "launch:\n",
            "launch:\n  gpus: {count: 2, ids: [1]}\n",
            "warm.yaml:10:3: launch.gpus: give only one of count, ids",
        ),
        ("launch:\n", "launch:\n  gpus: {ids: [1, 1]}\n", "names a GPU twice"),
        ("launch:\n", "launch:\n  log: train.log\n", "launch: 'log' must be an absolute path or start with"),
        ("launch:\n", "launch:\n  env: {T: x}\n  secrets: [T]\n", "T is both in 'env' and in 'secrets'"),
        ("launch:\n", "launch:\n  grace_s: 0\n", "launch.grace_s: should be greater than 0"),
        ("launch:\n", "observe: {step_regex: 'step (\\d+)'}\nlaunch:\n", "needs a group named step"),
        ("launch:\n", "observe: {pause_regex: '('}\nlaunch:\n", "observe.pause_regex: '(' is not a regular"),
        ("launch:\n", "observe: {rules: {slow_min: 1}}\nlaunch:\n", "'slow_min' is no threshold; they are"),
        ("launch:\n", "observe: {rules: {slow_min_s: 0}}\nlaunch:\n", "should be greater than 0"),
        ("name: warm\n", "", "missing key: name\nnext: write name: warm"),
        ("name: warm", "name: a b", "'a b' is not allowed"),
        (
            "{train: {policy: {tls: local}}}",
            "{lauch: {grace_s: 3}}",
            "warm.yaml:13:14: unknown key: variants.localtls.lauch\nnext: did you mean 'launch'?",
        ),
        (
            "{train: {policy: {tls: local}}}",
            "{launch: {grace_s: soon}}",
            "warm.yaml:13:23: variants.localtls.launch.grace_s: should be a valid number",
        ),
        ("{train: {policy: {tls: local}}}", "{deploy: {entry: x}}", "a variant cannot change 'deploy'"),
        ("{train: {policy: {tls: local}}}", "{name: x}", "a variant cannot change 'name'"),
        ("{train: {policy: {tls: local}}}", "[]", "variants.localtls: should be keys and values"),
        ("localtls: {", "'local tls': {", "'local tls' is not allowed"),
    ],
)
def test_a_wrong_key_is_named_with_its_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in WARM
    assert message in refused(tmp_path, WARM.replace(old, new))


# --- resolving ----------------------------------------------------------------------------------------------


def test_a_tag_with_a_variants_name_gets_it_laid_over(tmp_path: Path) -> None:
    recipe = read_recipe(written(tmp_path, WARM))
    bare, variant = resolve(recipe, "bare"), resolve(recipe, "localtls")
    assert (bare.variant, variant.variant) == (None, "localtls")
    assert bare.train == {"lr": 0.1, "policy": {"tls": "none", "start": "all"}}
    assert variant.train == {"lr": 0.1, "policy": {"tls": "local", "start": "all"}}
    assert "variants" not in variant.document()


def test_the_resolved_document_reads_back_as_itself(tmp_path: Path) -> None:
    resolved = resolve(read_recipe(written(tmp_path, WARM)), "localtls")
    again = read_recipe(written(tmp_path / "again", resolved.dump()))
    assert resolve(again, "localtls").document() == resolved.document() == yaml.safe_load(resolved.dump())


def test_nulls_of_the_trainers_own_section_survive(tmp_path: Path) -> None:
    text = WARM.replace("lr: 0.1", "lr: null")
    assert resolve(read_recipe(written(tmp_path, text)), "x").document()["train"]["lr"] is None


def test_a_recipe_may_have_nothing_to_deploy(tmp_path: Path) -> None:
    path = written(tmp_path, "version: 1\nname: warm\nlaunch: {command: [/usr/bin/nvidia-smi]}\n")
    resolved = resolve(read_recipe(path), "x")
    assert resolved.deploy is None
    assert resolved.launch.log == "{log_dir}/train_{recipe}_{tag}.log"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
mappings = st.dictionaries(st.text(max_size=3), json_values, max_size=4)


@given(mappings, mappings)
def test_merge_keeps_what_is_not_named_and_takes_what_is(base: dict[str, Any], over: dict[str, Any]) -> None:
    before = json.dumps([base, over])
    merged = merge(base, over)
    assert json.dumps([base, over]) == before
    assert set(merged) == set(base) | set(over)
    for key in set(base) - set(over):
        assert merged[key] == base[key]
    for key, value in over.items():
        if not (isinstance(value, dict) and isinstance(base.get(key), dict)):
            assert merged[key] == value
    assert merge(merged, over) == merged
    assert merge(base, {}) == base


# --- tags and placeholders ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", ["a", "localtls", "lr-3e4_v1.2", "9", "a" * 64])
def test_good_tags(tag: str) -> None:
    assert check_tag(tag) == tag


@pytest.mark.parametrize("tag", ["", "-a", ".a", "a b", "a/b", "a\n", "ä", "a" * 65, "$(x)", "a;b"])
def test_bad_tags(tag: str) -> None:
    with pytest.raises(UsageError, match="is not allowed: 1 to 64 letters"):
        check_tag(tag)


def test_fill_replaces_in_one_pass() -> None:
    values = {"tag": "{recipe}", "recipe": "r"}
    assert fill("{tag}-{recipe}", values) == "{recipe}-r"


def test_fill_leaves_json_and_doubled_braces_alone() -> None:
    assert fill('{"a": 1} {} {0} ${HOME:-x} {{tag}}', {"tag": "t"}) == '{"a": 1} {} {0} ${HOME:-x} {tag}'


def test_fill_names_the_key_of_an_unknown_placeholder() -> None:
    with pytest.raises(UsageError) as caught:
        fill("x {taq}", {"tag": "t"}, key_path="launch.command[2]")
    assert caught.value.where == "launch.command[2]"
    assert "unknown placeholder {taq}; did you mean {tag}?" in caught.value.what


@given(st.dictionaries(st.sampled_from(sorted(PLACEHOLDERS)), st.text(max_size=10), min_size=1))
def test_fill_puts_any_value_in_unchanged(values: dict[str, str]) -> None:
    text = "|".join("{" + name + "}" for name in values)
    assert fill(text, values) == "|".join(values.values())


# --- the shipped recipes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["demo", "threadwarm"])
def test_the_shipped_recipes_are_valid_and_expect_what_is_true(name: str) -> None:
    recipe = read_recipe(PROJECT / "recipes" / f"{name}.yaml")
    assert recipe.name == name
    assert recipe.deploy is not None
    assert recipe.deploy.entry == "trainer"
    from dflashctl.agent.releases.proofs import check_expect

    found, problems = check_expect(str(PROJECT), [row.model_dump() for row in recipe.deploy.expect])
    assert not problems
    assert len(found) == len(recipe.deploy.expect) >= 1


def test_the_log_of_threadwarm_carries_the_tag() -> None:
    from dflashctl.config.hosts import read_hosts

    box = read_hosts(PROJECT / "hosts.yaml").host("ct200")
    resolved = resolve(read_recipe(PROJECT / "recipes" / "threadwarm.yaml"), "localtls")
    values = {"log_dir": box.log_dir, "recipe": resolved.name, "tag": resolved.tag}
    assert fill(resolved.launch.log, values) == "/workspace/train_threadwarm_localtls.log"
