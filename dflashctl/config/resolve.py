"""Finding a recipe, and making of recipe and tag the one document that a run is started from."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from dflashctl.config.hosts import HostsFile
from dflashctl.config.names import check_tag
from dflashctl.config.problems import key_path, nearest, problems, usage_error, validate
from dflashctl.config.recipe import Deploy, Launch, Observe, Recipe, RecipeBody, project_root
from dflashctl.config.train_section import KeyPath, check_train, train_warnings, trainer_root
from dflashctl.config.yamlfile import Document, read_document
from dflashctl.errors import NotFound

Problem = tuple[str, str, str]


@dataclass(frozen=True)
class ResolvedRecipe:
    """What one run is made of: the recipe with the tag's variant applied, and which variant that was."""

    body: RecipeBody
    tag: str
    variant: str | None
    source: Recipe

    @property
    def name(self) -> str:
        return self.body.name

    @property
    def deploy(self) -> Deploy | None:
        return self.body.deploy

    @property
    def has_release(self) -> bool:
        return self.body.has_release

    @property
    def script(self) -> dict[str, str] | None:
        """{"to", "path"} of a single script with a place of its own."""
        return self.body.deploy.script() if self.body.deploy else None

    @property
    def launch(self) -> Launch:
        return self.body.launch

    @property
    def observe(self) -> Observe:
        return self.body.observe

    @property
    def train(self) -> dict[str, Any] | None:
        return self.body.train

    def document(self) -> dict[str, Any]:
        """Plain data: the resolved recipe, written to the run's folder as recipe.yaml (without variants)."""
        return self.body.model_dump(mode="json", exclude_none=True) | (
            {"train": self.body.train} if self.body.train is not None else {}
        )

    def dump(self) -> str:
        """The document as YAML."""
        return yaml.safe_dump(self.document(), sort_keys=False, allow_unicode=True, width=100)


def merge(base: Any, over: Any) -> Any:
    """`over` laid over `base`: mappings key by key, everything else (a list too) replaced whole. Pure."""
    if isinstance(base, dict) and isinstance(over, dict):
        return {
            **base,
            **{key: merge(base[key], value) if key in base else value for key, value in over.items()},
        }
    return over


def resolve(recipe: Recipe, tag: str) -> ResolvedRecipe:
    """Apply the variant that has the tag's name, if there is one. Raises UsageError for a bad tag."""
    check_tag(tag)
    variant = tag if tag in recipe.variants else None
    written = recipe.model_dump(exclude={"variants"}, exclude_unset=True)
    merged = merge(written, recipe.variants[variant]) if variant else written
    return ResolvedRecipe(RecipeBody.model_validate(merged), tag, variant, recipe)


def load_recipe(name_or_path: str | None, hosts: HostsFile, start: Path | None = None) -> Recipe:
    """The recipe of that name (the default one for None), or of that file.

    A name is looked for in recipes/ beside hosts.yaml, then in recipes/ of the working folder or above.
    Raises NotFound (exit 6) listing the names, UsageError (exit 2) for a broken file.
    """
    wanted = hosts.defaults.recipe if name_or_path is None else name_or_path
    if "/" in wanted or wanted.endswith((".yaml", ".yml")):
        path = Path(wanted).expanduser()
        if not path.is_file():
            raise NotFound(f"no recipe file {wanted}", next="give the name of a recipe, or an existing file")
        return read_recipe(path.absolute())
    known = find_recipes(hosts, start or Path.cwd())
    if wanted in known:
        return _read_named(known[wanted])
    folders = recipe_folders(hosts, start or Path.cwd())
    close = nearest(wanted, known)
    hint = f"did you mean '{close}'? " if close else ""
    looked = ", ".join(str(folder) for folder in folders) or "no recipes/ folder here or above"
    missing = "run it from the project's folder, or write recipes/NAME.yaml beside hosts.yaml"
    if name_or_path is None and known and "recipe" not in hosts.defaults.model_fields_set:
        listing = (
            f"name one with -r: {', '.join(known)}; or for always: defaults: {{recipe: {next(iter(known))}}}"
        )
        raise NotFound(
            "none of these recipes is the default one", where=looked, next=f"{listing} in hosts.yaml"
        )
    listing = f"known recipes: {', '.join(known)}" if known else missing
    raise NotFound(f"no recipe named {wanted!r}", where=looked, next=hint + listing)


def recipe_folders(hosts: HostsFile, start: Path) -> list[Path]:
    """The recipes/ folders that count, nearest claim first."""
    above = [start.absolute(), *start.absolute().parents]
    candidates = [hosts.path.parent] if hosts.path else []
    candidates += above
    return [folder / "recipes" for folder in dict.fromkeys(candidates) if (folder / "recipes").is_dir()]


def find_recipes(hosts: HostsFile, start: Path) -> dict[str, Path]:
    """{name: file} of the recipes that can be named, sorted; the nearest folder wins."""
    found: dict[str, Path] = {}
    for folder in recipe_folders(hosts, start):
        for path in folder.glob("*.yaml"):
            if path.is_file():
                found.setdefault(path.stem, path)
    return dict(sorted(found.items()))


def _read_named(path: Path) -> Recipe:
    """A copied recipe that kept its old name would write into the other's logs: refused."""
    recipe = read_recipe(path)
    if recipe.name != path.stem and recipe._source:
        where = recipe._source.position(("name",), of_key=False)
        what = f"name: is {recipe.name!r}, but the file is named {path.stem!r}"
        raise usage_error([(where, what, f"write name: {path.stem}")])
    return recipe


def read_recipe(path: Path) -> Recipe:
    """Check one recipe with all its variants. Raises UsageError with file, line and key path."""
    document = read_document(path)
    recipe = validate(Recipe, document, kind="a recipe")
    recipe._source = document
    own = _train_problems(recipe, document, ())
    found = list(own)
    for name, over in recipe.variants.items():
        for where, what, hint in _variant_problems(document, name, over):
            if (where, what, hint) not in own:
                whose = f" (with variant {name})" if what.startswith("train.") else ""
                found.append((where, what + whose, hint))
    if found:
        raise usage_error(found)
    return recipe


def _variant_problems(document: Document, name: str, over: dict[str, Any]) -> list[Problem]:
    prefix = ("variants", name)
    for key in ("version", "name", "variants", "deploy"):
        if key in over:
            loc = (*prefix, key)
            why = "deploy knows no tag; write another recipe" if key == "deploy" else ""
            return [(document.position(loc), f"{key_path(loc)}: a variant cannot change {key!r}", why)]
    written = {key: value for key, value in document.data.items() if key != "variants"}
    merged = merge(written, over)
    try:
        body = RecipeBody.model_validate(merged)
    except ValidationError as error:
        return problems(RecipeBody, error, document, prefix)
    return _train_problems(body, document, prefix)


def warnings(resolved: ResolvedRecipe) -> tuple[str, ...]:
    """Of a checked recipe as a run gets it: keys of `train:` that nothing will read, each with its place."""
    document = resolved.source._source
    if document is None:
        return ()
    prefix = ("variants", resolved.variant) if resolved.variant else ()
    return tuple(
        f"{where}: {what}" for where, what, _ in _train(train_warnings, resolved.body, document, prefix)
    )


def _train_problems(body: RecipeBody, document: Document, prefix: tuple[str, ...]) -> list[Problem]:
    """What the bundled trainer says about its own section."""
    return _train(check_train, body, document, prefix)


def _train(
    ask: Callable[[dict[str, Any], Path | None], list[tuple[KeyPath, str]]],
    body: RecipeBody,
    document: Document,
    prefix: tuple[str, ...],
) -> list[Problem]:
    """The bundled trainer's answer, with places; another program's `train:` is its own affair."""
    command = body.launch.command
    runs_trainer = any(pair == ("-m", "trainer") for pair in itertools.pairwise(command))
    if body.train is None or not runs_trainer:
        return []
    rows = []
    for path, what in ask(body.train, trainer_root(project_root(document.path), Path.cwd())):
        written_here = (*prefix, *path)
        inherited = document.depth(path) == len(path) and document.depth(written_here) < len(written_here)
        loc = path if inherited or document.depth(written_here) <= len(prefix) else written_here
        rows.append((document.position(loc), f"{key_path(loc)}: {what}", ""))
    return rows
