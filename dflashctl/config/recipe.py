"""recipes/NAME.yaml: what to deploy, what to launch, how to observe it, and the variants of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr, WithJsonSchema, model_validator

from dflashctl.config.hosts import Strict
from dflashctl.config.names import InsidePath, Name, Value, Variable
from dflashctl.config.placeholders import check_placeholders
from dflashctl.config.rules import RULE_NAMES
from dflashctl.config.yamlfile import Document

DEFAULT_LOG = "{log_dir}/train_{recipe}_{tag}.log"


def _relative(text: str) -> str:
    """A path or glob below the project's root, with '/' on every system."""
    if text.startswith("/") or ".." in text.split("/") or "\0" in text or not text.strip():
        raise ValueError(f"{text!r} must be a path below the project's folder")
    return text


def _regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from None
    return text


def _module(text: str) -> str:
    if not all(part.isidentifier() for part in text.split(".")):
        raise ValueError(f"{text!r} is not a module name such as trainer or my_pkg.train")
    return text


def _template(text: str) -> str:
    check_placeholders(text)
    return text


def _rule(text: str) -> str:
    if text not in RULE_NAMES:
        raise ValueError(f"{text!r} is no threshold; they are {', '.join(RULE_NAMES)}")
    return text


Relative = Annotated[str, AfterValidator(_relative)]
Regex = Annotated[str, AfterValidator(_regex)]
Template = Annotated[Value, AfterValidator(_template)]
Module = Annotated[str, AfterValidator(_module)]
Rule = Annotated[str, AfterValidator(_rule), WithJsonSchema({"type": "string", "enum": list(RULE_NAMES)})]


class Expect(Strict):
    """A line that proves the change: `text` literally, or `regex`, in the deployed `file`."""

    file: Relative  # below `root`, and among what travels
    text: str | None = Field(default=None, min_length=1)  # literally, within one line; or
    regex: Regex | None = Field(default=None, min_length=1)  # Python's, searched in every line
    present: bool = True  # false: no line may match

    @model_validator(mode="after")
    def _one_pattern(self) -> Expect:
        if (self.text is None) == (self.regex is None):
            raise ValueError("needs either 'text' or 'regex'")
        if self.text is not None and "\n" in self.text:
            raise ValueError("'text' must be within one line")
        return self


class Deploy(Strict):
    """Which files travel. Globs are relative to `root`, itself relative to the folder above recipes/.

    `to` is for a single script with an absolute place of its own, which is renamed over; everything else goes
    into a release below the host's code_root.
    """

    root: Relative = "."  # below the project's folder (the one above recipes/)
    include: list[Relative] = Field(min_length=1)  # globs of what travels; `**` goes through folders
    exclude: list[Relative] = Field(default_factory=list)  # globs of what does not, of that
    entry: Module | None = None  # the module that the run imports: its path inside is proven
    expect: list[Expect] = Field(default_factory=list)  # lines that prove the change
    to: InsidePath | None = None  # place of a single script, which is renamed over

    @model_validator(mode="after")
    def _one_script(self) -> Deploy:
        if self.to is None:
            return self
        if len(self.include) != 1 or re.search(r"[*?\[]", self.include[0]) or self.exclude:
            raise ValueError("'to' is for a single script: name exactly that one file in 'include'")
        if self.entry is not None:
            raise ValueError("'entry' proves the import of a package; a script with 'to' is run by its path")
        return self

    def script(self) -> dict[str, str] | None:
        """{"to", "path"} of a single script with a place of its own (agent/releases/script.py)."""
        return None if self.to is None else {"to": self.to, "path": self.include[0].removeprefix("./")}


class LaunchGpus(Strict):
    """Which GPUs the run gets: so many idle ones, or these indices, or these UUIDs. None given: no GPU."""

    count: int | None = Field(default=None, ge=0)  # so many idle ones
    ids: list[Annotated[int, Field(ge=0)]] | None = None  # these, by their index in nvidia-smi
    uuids: list[str] | None = None  # these, by UUID

    @model_validator(mode="after")
    def _one_way(self) -> LaunchGpus:
        given = [key for key in ("count", "ids", "uuids") if getattr(self, key) is not None]
        if len(given) > 1:
            raise ValueError(f"give only one of count, ids and uuids, not {' and '.join(given)}")
        for chosen in (self.ids, self.uuids):
            if chosen is not None and len(set(chosen)) != len(chosen):
                raise ValueError("names a GPU twice")
        return self


class Launch(Strict):
    """How the run starts. `python` as the first word of `command` is the host's `python`."""

    command: list[Template] = Field(min_length=1)  # program and arguments; no shell reads them
    log: Template = DEFAULT_LOG  # inside: an absolute path, or one that starts with a folder's placeholder
    gpus: LaunchGpus = Field(default_factory=LaunchGpus)  # none given: no GPU; --gpus comes before it
    env: dict[Variable, Template] = Field(default_factory=dict)  # over the host's own
    secrets: list[Variable] = Field(default_factory=list)  # names only: values come from your environment
    grace_s: float = Field(default=15, gt=0)  # from SIGTERM to SIGKILL when it is killed: time to save
    started_within_s: float = Field(
        default=60, gt=0
    )  # after this without "started", a launch counts as cut off

    @model_validator(mode="after")
    def _makes_sense(self) -> Launch:
        if not self.command[0]:
            raise ValueError("the first word of 'command' is empty")
        if any(ord(character) < 32 or ord(character) == 127 for character in self.log):
            raise ValueError("'log' holds a control character")
        if not self.log.startswith(("/", "{log_dir}", "{workdir}", "{run_dir}")):
            raise ValueError("'log' must be an absolute path or start with {log_dir}, {workdir} or {run_dir}")
        both = sorted(set(self.env) & set(self.secrets))
        if both:
            raise ValueError(f"{both[0]} is both in 'env' and in 'secrets'; keep it out of 'env'")
        return self


class Observe(Strict):
    """How `status` judges the run. The regexes are for a program that writes no heartbeat: `step_regex` finds
    the step in its log, `pause_regex` a line that announces a long silence (compiling, evaluating). `rules`
    are thresholds other than the usual ones: docs/verdict.md."""

    step_regex: Regex | None = None  # with a group named step: (?P<step>\d+)
    pause_regex: Regex | None = None  # lines that announce a long silence
    # Thresholds by name, in seconds or as factors.
    rules: dict[Rule, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _has_step(self) -> Observe:
        if self.step_regex is not None and "step" not in re.compile(self.step_regex).groupindex:
            raise ValueError("'step_regex' needs a group named step: (?P<step>\\d+)")
        return self


class RecipeBody(Strict):
    """A recipe without its variants: what one run is made of."""

    version: Literal[1]  # of this format
    name: Name  # the file's own, without .yaml
    deploy: Deploy | None = None  # which files travel; left out: a run without a release
    launch: Launch  # how the run starts
    observe: Observe = Field(default_factory=Observe)  # how `status` judges it
    train: dict[str, Any] | None = None  # the program's own section; the bundled trainer's keys are below

    @property
    def has_release(self) -> bool:
        """Does a run start in a release below code_root?"""
        return self.deploy is not None and self.deploy.to is None


class Recipe(RecipeBody):
    """A recipe as written. A variant is a partial recipe, laid over it for the tag of that name."""

    # By tag: a partial recipe, laid over this one key by key (a list is replaced whole); `deploy` stays.
    variants: dict[Name, dict[str, Any]] = Field(default_factory=dict)

    _source: Document | None = PrivateAttr(default=None)

    @property
    def path(self) -> Path:
        """The file that it was read from."""
        if self._source is None:
            raise ValueError(f"recipe {self.name} was not read from a file")
        return self._source.path

    @property
    def project_root(self) -> Path:
        """The folder that the recipe's paths are relative to."""
        return project_root(self.path)


def project_root(recipe_file: Path) -> Path:
    """The folder above recipes/; the recipe's own folder when it lies elsewhere."""
    folder = recipe_file.absolute().parent
    return folder.parent if folder.name == "recipes" else folder
