"""The target's own chat template, rendered as transformers does, in one chosen mode.

The environment is the one of transformers (sandboxed, its filters and its `{% generation %}` blocks; tests
hold both to the same text) without its imports, so that worker processes start at once. Two things are fixed
that would otherwise change under a resumed run: the date that a template asks for, and the mode (`thinking`).
Template and mode together are part of the identity of the data.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import ext, nodes
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trainer.data.lines import BadRow
from trainer.errors import ConfigError

DEFAULT_DATE = "2026-01-01"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
Span = tuple[int, int]
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Mode:
    """How the template is asked to write."""

    thinking: bool | None = None  # enable_thinking; None: not passed, the template's own default
    arguments: dict[str, Any] = field(default_factory=dict)  # further variables of the template
    date: str = DEFAULT_DATE  # what `strftime_now` tells the template: a day of its own for every row

    def variables(self) -> dict[str, Any]:
        thinking = {} if self.thinking is None else {"enable_thinking": self.thinking}
        return {**thinking, **self.arguments}

    def other_thinking(self) -> list[Mode]:
        """The same with thinking said otherwise."""
        return [
            Mode(each, self.arguments, self.date) for each in (True, False, None) if each is not self.thinking
        ]


class _Generation(ext.Extension):
    """`{% generation %}...{% endgeneration %}`: where a template itself says what the assistant wrote."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own way)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Any) -> str:
        # The marks travel in the text itself: rendering is a stream, and positions are only known at its end.
        return f"{OPEN}{caller()}{CLOSE}"


# Noncharacters: Unicode keeps them out of all text that travels. Rows that hold one are refused.
OPEN, CLOSE = "\ufdd0", "\ufdd1"


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a short way for `message.role`, `loop.first` and a namespace's own names: most of
    rendering is looking those up. Names that begin with an underscore, and methods, go the long way.
    """

    _attributes = frozenset(dir(dict))

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in self._attributes:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if kind is LoopContext and attribute in ("first", "last", "index", "index0"):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


def _environment() -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment


class ChatTemplate:
    """A compiled template with its mode.

    Args:
        text: the template; named variants (as some tokenizers have) by name, "default" among them.
        tokens: bos_token and its like, as the tokenizer's configuration names them.
    Raises:
        ConfigError: the template is not valid Jinja.
    """

    def __init__(self, text: str | dict[str, str], mode: Mode, tokens: dict[str, str], where: str) -> None:
        self.text = {"default": text} if isinstance(text, str) else text
        self.mode, self.tokens, self.where = mode, tokens, where
        self._marked = {name for name, each in self.text.items() if _GENERATION.search(each)}
        day = datetime.date.fromisoformat(mode.date)
        environment = _environment()
        environment.globals["strftime_now"] = lambda form: day.strftime(form)
        try:
            self._compiled = {name: environment.from_string(each) for name, each in self.text.items()}
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template is not valid: {error.message}", where=f"{where}, line {error.lineno}"
            ) from None

    @property
    def uses_date(self) -> bool:
        return any("strftime_now" in each for each in self.text.values())

    def marked(self, tools: list[Any] | None) -> bool:
        """Whether the template, or its variant for these tools, says itself what the assistant wrote."""
        return self._name(tools) in self._marked

    def _name(self, tools: list[Any] | None) -> str:
        return "tool_use" if tools and "tool_use" in self._compiled else "default"

    def render(
        self, messages: Messages, tools: list[Any] | None, generation_prompt: bool, mode: Mode | None = None
    ) -> str:
        """The text; `generation_prompt` opens the assistant's next turn. Marks of the template are left out.

        Raises:
            BadRow: the template refuses these messages.
        """
        text = self.raw(messages, tools, generation_prompt, mode)
        return text.replace(OPEN, "").replace(CLOSE, "") if self.marked(tools) else text

    def raw(
        self, messages: Messages, tools: list[Any] | None, generation_prompt: bool, mode: Mode | None = None
    ) -> str:
        """As `render`, with the marks of `{% generation %}` blocks left in."""
        values = {**self.tokens, **(mode or self.mode).variables()}
        try:
            return self._compiled[self._name(tools)].render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=generation_prompt,
                **values,
            )
        except MemoryError:  # of this machine, not of the row
            raise
        except Exception as error:  # a template is somebody else's program and may raise anything
            raise BadRow(f"the chat template refuses it: {error or type(error).__name__}") from None

    def identity(self) -> dict[str, Any]:
        """What fixes the rendering: to be kept with the data and with every checkpoint trained on it."""
        known = json.dumps(self.text, sort_keys=True)
        return {
            "template": self.text["default"] if set(self.text) == {"default"} else self.text,
            "template_sha256": hashlib.sha256(known.encode()).hexdigest(),
            "thinking": self.mode.thinking,
            "arguments": self.mode.arguments,
            "date": self.mode.date if self.uses_date else None,
        }


def special_tokens(folder: Path) -> dict[str, str]:
    """bos_token, eos_token and the others that the tokenizer's configuration names."""
    config = _read_json(folder / "tokenizer_config.json")
    found = {**_read_json(folder / "special_tokens_map.json"), **config}
    tokens = {}
    for name, value in found.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def load(folder: Path, mode: Mode, file: Path | None = None) -> ChatTemplate:
    """The template of the target in `folder`, or the one in `file`.

    Raises:
        ConfigError: there is none.
    """
    tokens = special_tokens(folder)
    path = file or folder / "chat_template.jinja"
    if file is not None or path.is_file():
        try:
            return ChatTemplate(path.read_text(encoding="utf-8"), mode, tokens, str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the chat template: {error}", where=str(path)) from None
    path = folder / "tokenizer_config.json"
    text = _read_json(path).get("chat_template")
    if isinstance(text, list):  # named variants
        text = {each["name"]: each["template"] for each in text}
    if not text or (isinstance(text, dict) and "default" not in text):
        raise ConfigError(
            "the target has no chat template (no chat_template.jinja, none in tokenizer_config.json)",
            where=str(folder),
            next="name one with --chat-template FILE: the one that the target will be served with",
        )
    return ChatTemplate(text, mode, tokens, str(path))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not a JSON file: {error}", where=str(path)) from None
    return value if isinstance(value, dict) else {}
