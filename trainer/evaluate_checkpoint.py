"""`python -m trainer eval`: a finished drafter, measured anew."""

from __future__ import annotations

from pathlib import Path

import torch

from trainer.checkpoint import load_drafter, read_drafter_config
from trainer.config import Evaluate
from trainer.data.prompts import draw_prompts
from trainer.evaluate import Evaluator
from trainer.machine import usable_cores
from trainer.model.pair import check_pair
from trainer.model.target import load_target, read_config
from trainer.report import Report, make_report
from trainer.setup import choose_device, find_target, load_tokenizer


def evaluate_checkpoint(folder: Path, target_path: str, section: Evaluate, seed: int) -> Report:
    """Decode held-out prompts with the drafter in `folder`; float32 on whatever device there is.

    Raises:
        ConfigError: no drafter there, or one that was made for another target.
    """
    torch.set_num_threads(usable_cores())
    place = find_target(target_path)
    raw, shape = read_config(place), read_drafter_config(folder)
    check_pair(shape, raw, str(folder), str(place))
    tokenizer = load_tokenizer(place, int(raw["vocab_size"]))
    device = choose_device("auto")
    target = load_target(place, shape.taps, torch.float32, device)
    drafter = load_drafter(folder).to(device).eval()
    prompts = draw_prompts(tokenizer, section.prompts, section.prompt_tokens, True, seed).to(device)
    evaluator = Evaluator(target, prompts, section, shape.block_size)
    return make_report(section, None, evaluator.measure(drafter), evaluator.lookup(), evaluator.repetition)
