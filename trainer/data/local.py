"""Answers by the target on this machine, through transformers: batched, with its KV cache, sorted by length.

A row's answers depend on the row, the seed and its window alone: random numbers are drawn for each row, and
windows begin at the same rows after an interruption.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from trainer.data import chat_template
from trainer.data.chat_template import Mode
from trainer.data.continuations import pick
from trainer.data.encoding import Encoder
from trainer.data.journal import Result
from trainer.data.lines import BadRow
from trainer.data.regenerate import Answer, Job, Refused, Sampling, row_seed
from trainer.errors import ConfigError
from trainer.machine import choose_device
from trainer.model.architectures import pretrained, told_by_transformers
from trainer.model.positions import positions


class Draw(LogitsProcessor):
    """Leaves only the token that a row's own random numbers choose: sampling that no other row changes."""

    def __init__(self, seeds: list[int]) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        uniform = torch.stack([torch.rand(1, generator=each) for each in self._generators])
        chosen = pick(scores.float(), uniform.to(scores.device))
        return torch.full_like(scores, -torch.inf).scatter(1, chosen[:, None], 0.0)


class LocalTarget:
    """The target in `folder`, loaded to answer.

    Raises:
        ConfigError: no model, tokenizer, chat template or end token there.
    """

    def __init__(
        self,
        folder: Path,
        mode: Mode,
        template_file: Path | None,
        sampling: Sampling,
        batch: int,
        device: str,
    ) -> None:
        self.encoder = Encoder(folder)
        self.template = chat_template.load(folder, mode, template_file)
        self.sampling, self.batch = sampling, batch
        tokenizer = self.encoder.tokenizer
        self.ends = [n for n in map(tokenizer.token_to_id, self.encoder.ends) if n is not None]
        if not self.ends:
            raise ConfigError("no token ends a turn (eos_token, eos_token_id)", where=str(folder))
        if not (folder / "config.json").is_file():
            raise ConfigError("no model there (config.json)", where=str(folder))
        self.device = choose_device(device, "--device")
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        with told_by_transformers(
            "transformers cannot load the model", folder, "it must be one that transformers itself knows"
        ):
            model = pretrained(folder, dtype)
        self.model = model.to(self.device).eval()
        self.context = positions(model.config.get_text_config().to_dict())
        self.written, self.seconds = 0, 0.0  # tokens, and the time that they took

    def answering(
        self, window: int
    ) -> Callable[[Iterator[Job | Result], Callable[[int], None]], Iterator[Result]]:
        """For `regenerate`: so many rows at a time, their turns one after the other, the longest first."""

        def answer(rows: Iterator[Job | Result], told: Callable[[int], None]) -> Iterator[Result]:
            while some := list(islice(rows, window)):
                jobs = [row for row in some if isinstance(row, Job)]
                written = 0
                while open_jobs := [
                    (each, prompt) for each in jobs if (prompt := each.next_prompt()) is not None
                ]:
                    for written_now in self._turn(open_jobs):
                        written += written_now
                        told(written)
                yield from (row if isinstance(row, Result) else row.result() for row in some)

        return answer

    def _turn(self, jobs: list[tuple[Job, list[dict[str, Any]]]]) -> Iterator[int]:
        """The next answer of every job; yields the tokens of each batch."""
        ready: list[tuple[list[int], Job]] = []
        for each, prompt in jobs:
            try:
                text = self.template.render(prompt, each.tools, True)
            except BadRow as error:
                each.refused = Refused(str(error), "skipped")
                continue
            ids = self.encoder.tokenizer.encode(text, add_special_tokens=False).ids
            if self.context is not None and len(ids) >= self.context:
                each.refused = Refused("the prompt is longer than the target's context", "skipped")
                continue
            ready.append((ids, each))
        # The longest first: a batch too large for memory shows at once.
        ready.sort(key=lambda pair: (-len(pair[0]), pair[1].line))
        for at in range(0, len(ready), self.batch):
            yield self._generate(ready[at : at + self.batch])

    @torch.no_grad()
    def _generate(self, some: list[tuple[list[int], Job]]) -> int:
        began = time.monotonic()
        longest = max(len(ids) for ids, _ in some)
        pad = self.ends[0]
        tokens = torch.tensor([[pad] * (longest - len(ids)) + ids for ids, _ in some], device=self.device)
        mask = torch.tensor(
            [[0] * (longest - len(ids)) + [1] * len(ids) for ids, _ in some], device=self.device
        )
        room = self.sampling.max_new_tokens
        if self.context is not None:
            room = min(room, self.context - longest)
        config = GenerationConfig(
            max_new_tokens=room, do_sample=False, eos_token_id=self.ends, pad_token_id=pad, use_cache=True
        )
        output = self.model.generate(
            tokens,
            attention_mask=mask,
            generation_config=config,
            logits_processor=self._processors([job for _, job in some]),
        )
        total = 0
        for ids, (_, job) in zip(output[:, longest:].tolist(), some, strict=True):
            end = next((place for place, token in enumerate(ids) if token in self.ends), None)
            written = len(ids) if end is None else end + 1
            total += written
            if end is None:
                job.tokens += written
                job.refused = Refused("cut off before its end (--max-new-tokens, or the context)", "skipped")
            elif not (text := self.encoder.tokenizer.decode(ids[:end], skip_special_tokens=False)).strip():
                job.refused = Refused("the target says nothing", "skipped")
            else:
                job.answered(Answer(text, written))
        self.written += total
        self.seconds += time.monotonic() - began
        return total

    def _processors(self, jobs: list[Job]) -> Any:
        sampling = self.sampling
        if not sampling.temperature:
            return LogitsProcessorList()
        processors = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
        if sampling.top_k:
            processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            processors.append(TopPLogitsWarper(sampling.top_p))
        processors.append(Draw([row_seed(sampling.seed, job) for job in jobs]))
        return processors
