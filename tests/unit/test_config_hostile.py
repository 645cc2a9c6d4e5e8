"""Files that nobody writes on purpose: each is refused in words, at its place and at once, or read as meant.

Run: python -m pytest tests/unit/test_config_hostile.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dflashctl.config.resolve import read_recipe, resolve
from dflashctl.errors import UsageError

HEAD = "version: 1\nname: x\nlaunch:\n  command: [sh, -c, 'echo hi']\n"
BOMB = "train:\n  a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)


def recipe(folder: Path, text: str | bytes) -> Path:
    path = folder / "x.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        (HEAD + BOMB, "10:7", "its aliases stand for more than 100,000 values"),
        (HEAD + BOMB.replace("train:", "variants:"), "10:7", "its aliases stand for more than"),
        (HEAD + "train: &t {a: *t}\n", "5:8", "a value that holds itself"),
        (HEAD + "variants: &t {a: {launch: {env: *t}}}\n", "5:11", "a value that holds itself"),
        (HEAD + "train: {a: &t [1, [*t]]}\n", "5:12", "a value that holds itself"),
        (HEAD + "train: !!python/object/apply:os.system [ls]\n", "5:8", "could not determine a constructor"),
        (HEAD + "train: !mine {a: 1}\n", "5:8", "could not determine a constructor"),
        (HEAD + "'launch': {command: [sh]}\n", "5:1", "the key 'launch' is given twice"),
        (HEAD + "---\n" + HEAD, "5:1", "another document"),
        (HEAD + "\tgpus: {count: 0}\n", "5:1", "cannot start any token"),
        (HEAD + "  grace_s: .inf\n", "5:3", "launch.grace_s: should be a finite number, but is inf"),
        (HEAD + "  grace_s: .nan\n", "5:3", "launch.grace_s: should be a finite number, but is nan"),
        (HEAD + '  log: "{log_dir}/a\\nb"\n', "3:1", "launch: 'log' holds a control character"),
        (HEAD + '  env: {A: "a\\0b"}\n', "5:9", "holds a NUL character"),
        (HEAD + "train: {? [a, b] : c}\n", "5:11", "found unhashable key"),
        (HEAD + "train: " + "[" * 3000 + "]" * 3000 + "\n", "", "is nested too deeply"),
        (HEAD + "train: {a: " + "9" * 5000 + "}\n", "", "a value cannot be read"),
        (HEAD.encode("utf-16"), "1", "is not UTF-8 text"),
        ("", "", "a recipe must be a mapping of keys and values, but this is empty"),
        ("- 1\n", "", "but this holds a list"),
    ],
)
def test_a_hostile_recipe_is_refused_at_its_place(
    tmp_path: Path, text: str | bytes, place: str, what: str
) -> None:
    path = recipe(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        read_recipe(path)
    assert what in caught.value.what
    assert caught.value.where == (f"{path}:{place}" if place else str(path))


@pytest.mark.parametrize(
    "text",
    [
        HEAD.replace("\n", "\r\n"),
        "\ufeff" + HEAD,
        HEAD + "  env: &e {A: '1'}\nvariants: {v: {launch: {env: *e}}}\n",
        HEAD + "train: {a: .nan, day: 2024-01-01, raw: !!binary aGk=, some: !!set {a, b}}\n",
        HEAD + "  env: {A: 'ünï😀', B: \"\\u202e\"}\n",
    ],
)
def test_what_is_only_unusual_is_read(tmp_path: Path, text: str) -> None:
    found = resolve(read_recipe(recipe(tmp_path, text)), "v")
    assert found.launch.command == ["sh", "-c", "echo hi"]
    assert read_recipe(recipe(tmp_path, found.dump())).launch == found.launch


def test_a_message_stays_one_where_a_folder_has_a_newline_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "new\nline").mkdir()
    path = recipe(tmp_path / "new\nline", HEAD + "bad: 1\n")
    with pytest.raises(UsageError) as caught:
        read_recipe(path)
    first, *rest = str(caught.value).splitlines()
    assert first == f"{tmp_path}/new\\nline/x.yaml:5:1: unknown key: bad" and len(rest) == 1


@pytest.mark.parametrize(
    "written", ["on", "No", "1.10", "1_000", "0x1F", "0b10", ".5", "1.0e+3", "2024-01-31", "~", "null", "+7"]
)
def test_a_value_that_yaml_changes_is_quoted_as_it_was_written(tmp_path: Path, written: str) -> None:
    """A hint that said "true" for `on`, and "1.1" for 1.10, was obeyed, and the program got another word."""
    for line in (f"  env: {{A: {written}}}\n", f"  command: [sh, {written}]\n"):
        text = HEAD.replace("  command: [sh, -c, 'echo hi']\n", "") if "command" in line else HEAD
        with pytest.raises(UsageError) as caught:
            read_recipe(recipe(tmp_path, text + line))
        assert caught.value.next == f'put it in quotes: "{written}"'
        read_recipe(recipe(tmp_path, text + line.replace(written, f'"{written}"')))


def test_a_list_of_settings_is_shown_as_keys(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_recipe(recipe(tmp_path, HEAD + "  env:\n    - A=1\n    - B=x=y\n"))
    assert caught.value.next == 'write env: {A: "1", B: x=y}'
    read_recipe(recipe(tmp_path, HEAD + '  env: {A: "1", B: x=y}\n'))
