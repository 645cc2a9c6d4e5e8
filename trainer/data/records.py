"""What a row of the input says: a conversation, plain text, or token ids with their mask.

Accepted, told apart by their keys:

    {"messages": [{"role": "user", "content": "..."}, ...], "tools": [...]}
    {"conversations": [{"from": "human", "value": "..."}, ...]}      (ShareGPT; role/content work there too)
    either with "system": "...", for what is said before all messages, and "weight": 0 in answers that are
    context alone
    {"text": "..."}
    {"input_ids": [...], "loss_mask": [...]}

Conversations come out in one form, the one that chat templates expect. A key that is null counts as left out:
tools that write tables give every row the keys of all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.data.lines import BadRow

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    **{role: role for role in ROLES},
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
SAYING = {"reasoning_content", "tool_calls"}  # what an answer may say besides its content
REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class Conversation:
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    untrained: frozenset[int] = frozenset()  # answers that are context alone, by their place in `messages`


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Ids:
    """Token ids, and which of them are trained on; both of one length."""

    tokens: list[int]
    supervised: list[bool]


Record = Conversation | Text | Ids


def read(value: Mapping[str, Any], need_answer: bool = True) -> Record:
    """The record in one JSON object; a conversation needs an answer by the assistant unless said otherwise.

    Raises:
        BadRow: none of the known forms, or not well formed.
    """
    said = {key for key, each in value.items() if each is not None}
    for key in ("messages", "conversations"):
        if key in said:
            return _conversation(value, key, need_answer)
    if "input_ids" in said:
        return _ids(value)
    if "text" in said:
        if not isinstance(value["text"], str) or not value["text"]:
            raise BadRow("text: expected text that is not empty")
        return Text(_clean(value["text"], "text"))
    keys = ", ".join(sorted(map(str, value))[:6]) or "none"
    raise BadRow(f"no messages, conversations, text or input_ids in it (keys: {keys})")


def _conversation(value: Mapping[str, Any], key: str, need_answer: bool) -> Conversation:
    listed = value[key]
    if not isinstance(listed, list):
        raise BadRow(f"{key}: expected a list")
    if not listed:
        raise BadRow(f"{key}: the conversation is empty")
    messages = [_message(each, f"{key}[{number}]") for number, each in enumerate(listed)]
    answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    untrained = [n for n in answers if _without_weight(listed[n].get("weight"), f"{key}[{n}]")]
    if need_answer and not answers:
        raise BadRow(f"{key}: no message by the assistant, so nothing to train on")
    if need_answer and untrained == answers:
        raise BadRow(f"{key}: every answer has weight 0, so nothing to train on")
    whole = _with_system(messages, value.get("system"))
    moved = len(whole) - len(messages)
    return Conversation(whole, _tools(value.get("tools")), frozenset(n + moved for n in untrained))


def _without_weight(weight: Any, where: str) -> bool:
    """Whether an answer is context alone; left out, it is trained on."""
    if weight is not None and (not isinstance(weight, (int, float)) or weight not in (0, 1)):
        raise BadRow(f"{where}.weight: {weight!r} is neither 0 nor 1")
    return weight is not None and weight == 0


def _with_system(messages: list[dict[str, Any]], said: Any) -> list[dict[str, Any]]:
    """What stands beside the messages comes before them: the answers were given under it."""
    text = _content(said, "system") if said is None or isinstance(said, str) else None
    if text is None:
        raise BadRow("system: expected text")
    if not text.strip():
        return messages
    if messages[0]["role"] in ("system", "developer"):
        if messages[0]["content"] == text:
            return messages
        raise BadRow("system: another one than the first message, and only one can be meant")
    return [{"role": "system", "content": text}, *messages]


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRow(f"{where}: expected an object")
    if value.get("role") is not None:
        said, content = value["role"], value.get("content")
    else:
        said, content = value.get("from"), value.get("value")
    if said == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": [_call(_json(content, where), where)]}
    role = SHAREGPT_ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        raise BadRow(f"{where}: unknown role {said!r} (known: {', '.join(sorted(SHAREGPT_ROLES))})")
    message: dict[str, Any] = {"role": role, "content": _content(content, where)}
    for name in ("name", "tool_call_id"):
        if isinstance(value.get(name), str):
            message[name] = _clean(value[name], f"{where}.{name}")
    reasoning = next((value[name] for name in REASONING if value.get(name)), None)
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise BadRow(f"{where}.reasoning_content: expected text")
        # Templates ask for it by either name.
        message["reasoning_content"] = message["thinking"] = _clean(reasoning, where)
    if value.get("tool_calls"):
        if not isinstance(value["tool_calls"], list):
            raise BadRow(f"{where}.tool_calls: expected a list")
        message["tool_calls"] = [_call(call, f"{where}.tool_calls") for call in value["tool_calls"]]
    if role == "assistant" and not message["content"].strip() and not message.keys() & SAYING:
        raise BadRow(f"{where}: the assistant says nothing")
    return message


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return _clean(content, where)
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            raise BadRow(f"{where}.content: a part is not text; images and sound cannot be used")
        return _clean("".join(texts), where)
    raise BadRow(f"{where}.content: expected text")


def _call(value: Any, where: str) -> dict[str, Any]:
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow(f"{where}: expected a function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        # OpenAI's API carries them as text; templates and servers render them as the object that they are.
        try:
            parsed = json.loads(arguments)
        except ValueError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    _clean(json.dumps([function["name"], arguments], ensure_ascii=False), where)
    call: dict[str, Any] = {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
    if isinstance(value.get("id"), str):
        call["id"] = value["id"]
    return call


def _tools(tools: Any) -> list[Any] | None:
    if isinstance(tools, str):
        tools = _json(tools, "tools") if tools.strip() else None
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise BadRow("tools: expected a list")
    _clean(json.dumps(tools, ensure_ascii=False), "tools")
    return tools


def _ids(value: Mapping[str, Any]) -> Ids:
    tokens, mask = value["input_ids"], value.get("loss_mask")
    if not isinstance(tokens, list) or not tokens:
        raise BadRow("input_ids: expected a list of token ids that is not empty")
    if not isinstance(mask, list):
        raise BadRow("loss_mask: needed beside input_ids, a list of 0 and 1")
    if len(mask) != len(tokens):
        raise BadRow(f"loss_mask: {len(mask):,} marks for {len(tokens):,} input_ids")
    wrong = next((each for each in tokens if type(each) is not int or each < 0), None)
    if wrong is not None:
        raise BadRow(f"input_ids: {wrong!r} is no token id")
    wrong = next((each for each in mask if each not in (0, 1)), None)
    if wrong is not None:
        raise BadRow(f"loss_mask: {wrong!r} is neither 0 nor 1")
    if not any(mask):
        raise BadRow("loss_mask: all zero, so nothing to train on")
    return Ids(tokens, [bool(each) for each in mask])


def _json(content: Any, where: str) -> Any:
    try:
        return json.loads(content)
    except (TypeError, ValueError):
        raise BadRow(f"{where}: expected JSON") from None


def _clean(text: str, where: str) -> str:
    """The text, if it can be written as UTF-8: JSON may hold half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow(f"{where}: half a surrogate pair at character {error.start + 1}") from None
    return text
