"""Chat templates of the kinds that targets have, written here, and small tokenizers that know their tokens.

Each does in its own way what makes finding the assistant's words hard: reasoning that is cut from earlier
turns, an empty thought where thinking is off, white space that is stripped, tool calls, a date.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CHATML = """{% for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

CHATML_MARKED = """{% for message in messages %}
{%- if message.role == 'assistant' -%}
<|im_start|>assistant
{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{{ '\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endif -%}
{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Thoughts are kept only after the last question; with thinking off the prompt closes an empty thought.
QWEN3 = """
{%- if tools %}
  {{- '<|im_start|>system\\n' }}
  {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
  {{- '# Tools\\n<tools>' }}
  {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{% endfor %}
  {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
  {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set seen = namespace(question=-1) %}
{%- for message in messages %}
  {%- if message.role == 'user' %}{% set seen.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
  {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
  {%- elif message.role == 'assistant' %}
    {%- set words = message.content %}
    {%- set thought = '' %}
    {%- if message.reasoning_content is string %}
      {%- set thought = message.reasoning_content %}
    {%- elif '</think>' in words %}
      {%- set thought = words.split('</think>')[0].split('<think>')[-1] %}
      {%- set words = words.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if loop.index0 > seen.question and (loop.last or thought) %}
      {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- words.lstrip('\\n') if thought else words }}
    {%- for call in message.tool_calls or [] %}
      {%- if words or not loop.first %}{{- '\\n' }}{% endif %}
      {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
      {%- set given = call.function.arguments %}
      {{- given if given is string else given | tojson }}
      {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
  {%- elif message.role == 'tool' %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
    {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\\n' }}
  {%- if enable_thinking is defined and not enable_thinking %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
  {%- endif %}
{%- endif %}"""

# Everything is trimmed; a system turn with the date always comes first.
LLAMA3 = """{{- bos_token }}
{%- set said = '' %}
{%- set rest = messages %}
{%- if messages[0]['role'] == 'system' %}
  {%- set said = messages[0]['content'] | trim %}
  {%- set rest = messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + strftime_now('%d %b %Y') + '\\n\\n' }}
{{- said + '<|eot_id|>' }}
{%- for message in rest %}
  {%- set role = 'ipython' if message.role == 'tool' else message.role %}
  {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
  {%- if message.tool_calls %}
    {%- if message.tool_calls | length != 1 %}{{- raise_exception('one tool call at a time') }}{% endif %}
    {%- set call = message.tool_calls[0].function %}
    {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
  {%- else %}
    {{- message['content'] | trim }}
  {%- endif %}
  {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

# Generation blocks, and both modes of thinking.
SMOLLM = """{%- set mode = '/think' if enable_thinking | default(true) else '/no_think' %}
{{- '<|im_start|>system\\nMode: ' + mode + ', ' + strftime_now('%d %B %Y') }}
{%- if messages[0].role == 'system' %}{{- '\\n' + messages[0].content }}{% endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
  {%- if message.role == 'assistant' %}
    {%- if mode == '/no_think' %}
      {{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' }}
      {%- generation %}{{- message.content.lstrip('\\n') + '<|im_end|>' }}{% endgeneration %}
      {{- '\\n' }}
    {%- else %}
      {{- '<|im_start|>assistant\\n' }}
      {%- generation %}{{- message.content.lstrip('\\n') + '<|im_end|>' }}{% endgeneration %}
      {{- '\\n' }}
    {%- endif %}
  {%- elif message.role != 'system' %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\\n' + ('<think>\\n\\n</think>\\n' if mode == '/no_think' else '') }}
{%- endif %}"""

# No header of its own for the assistant, and a tokenizer with a letter for the space.
INST = """{{- bos_token }}{% for message in messages %}
{%- if message.role == 'user' %}{{- '[INST] ' + message.content + ' [/INST]' }}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content | trim + eos_token }}
{%- endif %}
{%- endfor %}"""

TEMPLATES = {
    "chatml": CHATML,
    "chatml-marked": CHATML_MARKED,
    "qwen3": QWEN3,
    "llama3": LLAMA3,
    "smollm": SMOLLM,
    "inst": INST,
}
SPECIAL = {
    "llama3": ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
    "inst": ["<s>", "</s>"],
}
CHATML_SPECIAL = ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]
TEXT = """The quick brown fox jumps over the lazy dog.\n\n\nIt is what it is, and that is that.
    def look(self):\n        return self.there\n\n
What do you say? <think> said the assistant user system.\n\n"""


def byte_level(
    special: list[str], size: int = 420, text: str = 5 * TEXT, normalizer: Any = None
) -> Tokenizer:
    """A byte-level BPE trained on the text: "\\n\\n" and the like are tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def spaced(special: list[str]) -> Tokenizer:
    """A tokenizer that writes the space as a letter and falls back to bytes, as sentencepiece ones do."""
    letters = sorted(set(TEXT.replace(" ", "\u2581").replace("\n", "")) | set("[]INST/0123456789é"))
    names = [*special, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "\u2581t", "\u2581th"]
    vocabulary = {name: number for number, name in enumerate(names)}
    merges = [("\u2581", "t"), ("\u2581t", "h")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    return tokenizer


def save_chat_target(folder: Path, kind: str, normalizer: Any = None) -> Path:
    """A target's folder as `prepare` needs it: tokenizer, its configuration, template; no weights."""
    special = SPECIAL.get(kind, CHATML_SPECIAL)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = spaced(special) if kind == "inst" else byte_level(special, normalizer=normalizer)
    if kind == "qwen3":
        tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": special[1]}
    if kind in ("llama3", "inst"):
        config["bos_token"] = special[0]
    (folder / "chat_template.jinja").write_text(TEMPLATES[kind])
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1]}))
    return folder
