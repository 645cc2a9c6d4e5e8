"""docs/recipe.md, docs/hosts.md and docs/schema/*.json, made from the source. `make schema` runs this; a test
compares what lies here with what it would write.

    python -m docs.reference
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from dflashctl.config import hosts, names, recipe
from dflashctl.config.notes import notes, told
from dflashctl.config.placeholders import PLACEHOLDERS
from dflashctl.config.rules import Rules
from dflashctl.schemas import KINDS, schema_text
from trainer.sections import TrainConfig
from trainer.unread_keys import needs_of

PROJECT = Path(__file__).resolve().parents[1]

WORDS: list[tuple[Any, str]] = [
    (names.Name, "name"),
    (names.Variable, "variable"),
    (names.Address, "text"),
    (names.InsidePath, "path inside"),
    (names.Value, "text"),
    (recipe.Relative, "path or glob"),
    (recipe.Regex, "regex"),
    (recipe.Template, "template"),
    (recipe.Module, "module"),
    (recipe.Rule, "threshold"),
    (str, "text"),
    (int, "whole number"),
    (float, "number"),
    (bool, "true or false"),
    (Any, "anything"),
]
"""Types by the word that people know them by; the pages say what the words mean."""

BOUNDS = {"ge": "from {}", "gt": "above {}", "le": "to {}", "lt": "below {}"}


@dataclass(frozen=True)
class Key:
    """One row of a table."""

    path: str
    type: str
    default: str
    meaning: str


# --- pydantic's models ------------------------------------------------------------------------------------


def model_keys(model: type[BaseModel], path: str, filled: Mapping[str, Any]) -> Iterator[Key]:
    """Every key of a model and of the models below it. `filled`: defaults that stand elsewhere, by path."""
    said, hints = notes(model), typing.get_type_hints(model, include_extras=True)
    for name, field in model.model_fields.items():
        where = f"{path}{name}"
        hint = hints[name]
        below, suffix = _model_in(hint)
        words = _limited(type_words(hint), [entry for entry in field.metadata])
        default = filled.get(where, PydanticUndefined)
        if default is PydanticUndefined:
            default = field.get_default(call_default_factory=True)
        shown = "needed" if default is PydanticUndefined else _default(default)
        yield Key(where, words, shown, said.get(name, ""))
        if below is not None:
            yield from model_keys(below, f"{where}{suffix}.", filled)


def _model_in(hint: Any) -> tuple[type[BaseModel] | None, str]:
    """The model in a type, and how a key under it is written: behind `.`, `[]` or the name of an entry."""
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return hint, ""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is list:
        return _model_in(inner[0])[0], "[]"
    if origin is dict:
        return _model_in(inner[1])[0], ".NAME"
    for each in inner if origin in (Union, types.UnionType) else ():
        found = _model_in(each)
        if found[0] is not None:
            return found
    return None, ""


def type_words(hint: Any) -> str:
    """A type as people write it."""
    for known, word in WORDS:
        if hint == known:
            return word
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _limited(
            type_words(inner[0]), [part for each in inner[1:] for part in getattr(each, "metadata", ())]
        )
    if origin is Literal:
        return " \\| ".join(_value(each) for each in inner)
    if origin in (Union, types.UnionType):
        return " \\| ".join(type_words(each) for each in inner if each is not type(None))
    if origin is list:
        return f"list of {type_words(inner[0])}"
    if origin is dict:
        return f"{type_words(inner[0])}: {type_words(inner[1])}"
    return "keys below"


def _limited(words: str, metadata: list[Any]) -> str:
    bounds = [
        form.format(_number(getattr(entry, name)))
        for name, form in BOUNDS.items()
        for entry in metadata
        if hasattr(entry, name)
    ]
    if any(getattr(entry, "min_length", None) for entry in metadata):
        bounds.append("not empty")
    return ", ".join([words, " ".join(bounds)]) if bounds else words


# --- the trainer's dataclasses ----------------------------------------------------------------------------


def section_keys(section: type, path: str) -> Iterator[Key]:
    """Every key of a `train:` section and of the sections below it."""
    said, hints = notes(section), typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        hint = hints[field.name]
        where = f"{path}{field.name}"
        inner = [each for each in (hint, *get_args(hint)) if dataclasses.is_dataclass(each)]
        low, high = field.metadata.get("low"), field.metadata.get("high")
        bounds = [
            form.format(_number(edge))
            for form, edge in (("from {}", low), ("to {}", high))
            if edge is not None
        ]
        words = ", ".join([type_words(hint), " ".join(bounds)]) if bounds else type_words(hint)
        default = "needed"
        if field.default is not dataclasses.MISSING:
            default = _default(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            made = field.default_factory()
            default = _default([entry.name for entry in made] if isinstance(made, list) and inner else made)
        meaning = said.get(field.name, "") or (told(inner[0]) if inner else "")
        yield Key(where, words, default, _with_others(meaning, where.removeprefix("train.")))
        for each in inner:
            yield from section_keys(each, f"{where}[]." if get_origin(hint) is list else f"{where}.")


def _with_others(meaning: str, key: str) -> str:
    """A meaning, and with which other keys the key counts, if it does not always."""
    others = " and ".join(f"`{each.told}`" if ": " in each.told else each.told for each in needs_of(key))
    return f"{meaning.rstrip('.')}; counts only with {others}" if others else meaning


# --- Markdown ---------------------------------------------------------------------------------------------


def _default(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, BaseModel) or dataclasses.is_dataclass(value):
        return ""
    return _value(value)


def _value(value: Any) -> str:
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else f"{value:,}"


def table(keys: list[Key]) -> str:
    """Rows in the order of the source; a `|` in words must not end a cell."""
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    rows += [f"| `{key.path}` | {key.type} | {key.default} | {_cell(key.meaning)} |" for key in keys]
    return "\n".join(rows)


def _cell(words: str) -> str:
    """What Markdown would read as a column or a tag stays text."""
    return words.replace("|", "\\|").replace("<", "&lt;")


def filled_in() -> dict[str, Any]:
    """What engine pct puts in for the keys of a host that are left out."""
    ssh = hosts.Ssh(host="my-gpu-box")
    entry = hosts.HostEntry(engine="pct", container=200, ssh=ssh)
    host = hosts.complete("NAME", entry)
    return {
        f"hosts.NAME.{name}": getattr(host, name) for name in (*hosts.default_values("NAME", entry), "path")
    }


HEAD = """# {title}

{text}

*Made from the source by `make schema`; [schema/{kind}.json](schema/{kind}.json) is the same for editors.*
"""

TYPES = f"""## The words for types

| word | |
|---|---|
| name | {names.NAME_RULE} |
| variable | the name of an environment variable |
| path inside | absolute, in the container (engines `ssh`, `local`: on the machine); no `..`, no `~` |
"""

RECIPE_TYPES = """| path or glob | below the project's folder; `*` within a folder, `**` through folders |
| regex | a regular expression of Python |
| template | text with placeholders |
| module | such as `trainer` or `my_pkg.train` |
| threshold | a name of `observe.rules` |
"""

HOSTS_TEXT = """\
The machines that runs go to. It is looked for in `DFLASHCTL_HOSTS`, in the working folder or above, then as
`dflashctl/hosts.yaml` in your XDG configuration folder; without any there is one host, `lab`. An unknown key,
a value of another type or a key given twice is refused with its place. `NAME` stands for a name that you
choose.

Defaults of paths are those of engine `pct`, and of `ssh` as root. For `ssh` as another user `/root` becomes
`/home/USER`; engine `local` uses the Python that runs dflashctl and folders below
`~/.local/state/dflashctl/local/NAME`; engine `lab` its own. `dflashctl host list` shows what a host got."""

RECIPE_TEXT = """\
What to deploy, what to launch, how to watch it. A recipe lies in `recipes/NAME.yaml` beside hosts.yaml, or in
the working folder or above; `-r path/to/file.yaml` takes any file. The project's folder is the one above its
`recipes/`, else the file's own. Every command that uses a recipe checks all of it first, its variants and its
`train:` section too, and names every wrong key with its place. `dflashctl recipe show NAME --tag TAG` prints
it as a run gets it."""

PLACEHOLDER_TEXT = """\
In `launch.command`, `launch.log` and the values of `launch.env`; `{{word}}` stays `{word}`, and any other
brace is plain text. The word `python` at the beginning of `launch.command` is the host's `python`.

| placeholder | becomes |
|---|---|
"""

PROGRAM_TEXT = """\

The program itself finds `DFLASH_RUN_DIR`, `DFLASH_RUN_ID`, `DFLASH_TAG`, `CUDA_VISIBLE_DEVICES` (UUIDs) and,
for a release, `PYTHONPATH` in its environment.
"""

TRAIN_TEXT = """\
For programs started as `python -m trainer`; another program's `train:` is its own affair. What the keys are
for: [trainer.md](trainer.md).
"""


def recipe_page() -> str:
    rules = ", ".join(f"`{each.name}`" for each in dataclasses.fields(Rules))
    return "\n".join(
        [
            HEAD.format(title="Recipes: every key", text=RECIPE_TEXT, kind="recipe"),
            "## The recipe\n",
            table(list(model_keys(recipe.Recipe, "", {}))),
            f"\nThe names under `observe.rules`, told in [verdict.md](verdict.md): {rules}.\n",
            "## Placeholders\n",
            PLACEHOLDER_TEXT
            + "\n".join(f"| `{{{name}}}` | {_cell(what)} |" for name, what in PLACEHOLDERS.items()),
            PROGRAM_TEXT,
            "## `train:` of the bundled trainer\n",
            TRAIN_TEXT,
            table(list(section_keys(TrainConfig, "train."))) + "\n",
            TYPES + RECIPE_TYPES,
        ]
    )


def hosts_page() -> str:
    keys = list(model_keys(hosts.HostsDocument, "", filled_in()))
    head = HEAD.format(title="hosts.yaml: every key", text=HOSTS_TEXT, kind="hosts")
    return "\n".join([head, table(keys), "", TYPES])


def files() -> dict[Path, str]:
    """Every file that is made from the source, and its text."""
    docs = PROJECT / "docs"
    made = {docs / "schema" / f"{kind}.json": schema_text(kind) for kind in KINDS}
    return made | {docs / "recipe.md": recipe_page(), docs / "hosts.md": hosts_page()}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(PROJECT))
