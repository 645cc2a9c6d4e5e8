"""`python -m trainer eval`: a finished drafter, measured by real decoding on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trainer.checkpoint.drafter import load_drafter
from trainer.errors import ConfigError, TrainerError
from trainer.evaluation.figures import repeated_ngrams
from trainer.evaluation.given import Questions, read_pair
from trainer.evaluation.measure import Bench, Found, Options, SetResult
from trainer.evaluation.prompt_sets import held_out
from trainer.evaluation.readers import RereadTarget, reader
from trainer.machine import choose_device, usable_cores
from trainer.model.target import load_target
from trainer.sections import Evaluate
from trainer.words import plural


class NotLossless(TrainerError):
    """Greedy speculative text is not the target's own."""

    exit_code = 4


@dataclass(frozen=True)
class Evaluation:
    drafter: str
    target: str
    device: str
    dtype: str
    block_size: int
    uncached: bool  # the target is read anew at every pass: right, but its rates mean nothing
    section: Evaluate
    options: Options
    sets: list[SetResult]

    @property
    def all(self) -> SetResult:
        total = self.sets[0]
        for each in self.sets[1:]:
            total = total + each
        return replace(total, name="all")

    @property
    def faults(self) -> list[Found]:
        return [each for each in self.all.found if not each.divergence.near_tie]

    @property
    def repetition(self) -> float:
        """Share of repeated 8-grams in the target's greedy text."""
        return repeated_ngrams(self.all.runs["greedy"]["target"].outputs)

    def check(self) -> None:
        """Raises NotLossless when a text diverges from the target's own elsewhere than at a near-tie."""
        if self.faults:
            first = self.faults[0]
            what = first.divergence
            raise NotLossless(
                f"{len(self.faults)} tokens are not the target's own and no near-ties, first at token "
                f"{what.position} of prompt {first.prompt}: {what.said} instead of {what.expected}, "
                f"{what.gap:.4g} below the best logit",
                where=f"set {first.set}, {first.method}",
                next="this is a fault of the decoder or of the target's cache; do not trust these figures",
            )


def evaluate_checkpoint(
    folder: Path,
    target_path: str,
    section: Evaluate,
    seed: int,
    options: Options | None = None,
    asked: Questions | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Evaluation:
    """Measure the drafter in `folder`.

    Args:
        asked: evaluation sets; None: held-out text of the standard library.
        say: hears what is being done.
    Raises:
        ConfigError: no drafter there, one that was made for another target, or no prompt of a set leaves
            room for what is asked for.
    """
    options = options or Options()
    torch.set_num_threads(usable_cores())
    pair = read_pair(folder, target_path)
    place, shape, encoder = pair.target, pair.shape, pair.encoder
    if asked is None:
        sets = held_out(encoder, section.prompts, section.prompt_tokens, seed)
    else:
        sets = asked.read(place, encoder, section.prompts)
    device = choose_device(options.device, "--device")
    narrow = options.dtype == "bfloat16" or (options.dtype == "auto" and device.type == "cuda")
    dtype = torch.bfloat16 if narrow else torch.float32
    target = load_target(place, shape.taps, dtype, device)
    drafter = load_drafter(folder).to(device, dtype).eval()
    # A chat ends its turns with tokens that only the tokenizer's files may name.
    ends = [token for token in map(encoder.tokenizer.token_to_id, encoder.ends) if token is not None]
    bench = Bench(target, drafter, section, options, seed, ends)
    bench.warm_up(sets[0])
    results = []
    for each in sets:
        prompts = plural(len(each.conversations), "prompt")
        say(f"{each.name}: {prompts}, up to {section.new_tokens} tokens each")
        results.append(bench.measure(each))
        if not results[-1].prompts:
            raise ConfigError(
                f"no prompt of {each.name} leaves room for {section.new_tokens:,} new tokens in what the "
                "target can read (max_position_embeddings)",
                where="--new-tokens",
                next="ask for fewer",
            )
    return Evaluation(
        str(folder),
        str(place),
        device.type,
        str(dtype).removeprefix("torch."),
        shape.block_size,
        isinstance(reader(target), RereadTarget),
        section,
        options,
        results,
    )
