"""From a configuration to a loaded target, a new drafter and what else a run needs, each checked early."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from trainer.errors import ConfigError
from trainer.export.start import begin_with
from trainer.machine import choose_device, usable_cores
from trainer.model.drafter import Drafter
from trainer.model.ends import bytes_of, is_whole, keep_ends, load_ends, random_ends
from trainer.model.gpu_kernels import warnings_here
from trainer.model.init import copy_target_layers
from trainer.model.kernels import absent_kernels, slow_for_want_of
from trainer.model.pair import dimension, drafter_config, mask_token_id
from trainer.model.positions import positions
from trainer.model.random_target import RANDOM, WORTHLESS, random_target
from trainer.model.target import Target, load_target
from trainer.model.target_files import end_ids, find_target, load_tokenizer, read_config
from trainer.model.target_identity import identify
from trainer.sections import Target as TargetSection
from trainer.sections import TrainConfig
from trainer.topology.start import Part
from trainer.words import plural

Say = Callable[[str], None]


def target_dtype(section: TargetSection, device: torch.device) -> torch.dtype:
    if section.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[section.dtype]


@dataclass(frozen=True)
class Assembled:
    target: Target
    target_path: Path
    drafter: Drafter
    tokenizer: Tokenizer
    facts: dict[str, Any]  # for the checkpoint: who the target is


def choose_reading(config: TrainConfig, target: Target, say: Say) -> None:
    """How the target reads rows, by the recipe; said where it will be slow.

    In the topology of threads train.policy says what compiles, and in which thread.
    """
    cuda, threads = target.device.type == "cuda", config.topology == "threads"
    target.prefill.say = say
    if config.target.attention != "auto":
        target.prefill.attention = config.target.attention
    elif threads:
        target.prefill.attention = "sdpa"
    target.prefill.compile = cuda and not threads and config.target.compile == "auto"
    for line in warnings_here() if cuda else []:
        say(line)
        target.prefill.compile = False
        if config.target.attention == "auto":
            target.prefill.attention = "sdpa"
    if cuda and "linear_attention" in target.layer_types:
        for line in slow_for_want_of(absent_kernels()):
            say(line)


def get_target(
    config: TrainConfig, path: Path, taps: Sequence[int], device: torch.device, part: Part
) -> Target:
    """The target, or its two ends where that is enough and they can be had alone.

    A drafter that begins as copies of the target's layers has all of it until then.
    """
    dtype = target_dtype(config.target, device)
    only_ends = part == "ends" and config.drafter.init != "target"
    if config.target.weights == RANDOM:
        make = random_ends if only_ends else random_target
        return make(path, taps, dtype, device, config.seed)
    ends = load_ends(path, taps, dtype, device) if only_ends else None
    return ends or load_target(path, taps, dtype, device)


def assemble(config: TrainConfig, say: Say, part: Part = "all") -> Assembled:
    """Load and check everything but the data. The cheap checks come before the weights.

    Args:
        part: what this process needs, if it is one of several.
    """
    torch.set_num_threads(config.threads or usable_cores())
    torch.manual_seed(config.seed)
    device = choose_device(config.device, "train.device")
    path = find_target(config.target.path)
    raw = read_config(path)
    vocabulary = dimension(raw, "vocab_size")
    tokenizer = load_tokenizer(path, vocabulary)
    mask_id = mask_token_id(config.drafter, tokenizer.get_vocab(), vocabulary)
    identity, begun = identify(path, raw, config.target.weights == RANDOM), None
    if config.drafter.init == "drafter":
        begun = begin_with(config.drafter, mask_id, identity, raw, str(path))
    shape = begun.config if begun else drafter_config(config.drafter, raw, mask_id, identity)
    if config.target.weights == RANDOM:
        say(WORTHLESS)
    say(f"loading the target from {path}")
    target = get_target(config, path, shape.taps, device, part)
    choose_reading(config, target, say)
    if config.data.continuations and set(target.layer_types) != {"full_attention"}:
        kinds = ", ".join(sorted(set(target.layer_types)))
        raise ConfigError(
            f"writing continuations needs a target of full attention; this one has layers of {kinds}",
            where="train.data.continuations",
            next="use continuations: false",
        )
    torch.manual_seed(config.seed)  # whatever was loaded, the drafter begins alike everywhere
    drafter = (begun or Drafter(shape)).to("cpu" if part == "target" else device)
    if config.drafter.init == "target":
        copy_target_layers(drafter, target, config.drafter.init_layers)
        if part == "ends":
            target = keep_ends(target, path)
            gc.collect()  # its hooks hold the whole one in a circle
    kind = (raw.get("architectures") or ["model"])[0]
    millions = sum(parameter.numel() for parameter in drafter.parameters()) / 1e6
    total = sum(parameter.numel() for parameter in target.model.parameters()) / 1e6
    if mask_id in end_ids(target.config):
        say(
            f"WARNING: the mask token (id {mask_id}) is one that ends texts, so it stands in them, too: name "
            "one that no text holds (drafter.mask_token)"
        )
    known = positions(raw)
    if known is not None and known < config.data.row_tokens:
        say(
            f"WARNING: rows of {config.data.row_tokens:,} tokens (data.row_tokens) are longer than the "
            f"target can read (max_position_embeddings {known:,}): what it says beyond is not worth learning"
        )
    say(
        f"target {kind}, {plural(shape.num_target_layers, 'layer')} of {shape.hidden_size}, "
        f"{total:.2f} M parameters, on {device.type} with {plural(torch.get_num_threads(), 'thread')}"
    )
    if not is_whole(target):
        say(f"only the target's embedding and head are loaded here: {bytes_of(target) / 2**30:.2f} GiB")
    say(
        f"drafter {plural(shape.num_hidden_layers, 'layer')}, {millions:.2f} M parameters, "
        f"block {shape.block_size}, taps {list(shape.taps)}, start: {config.drafter.init}"
    )
    facts = {
        "target": {
            "path": str(path),
            "weights": config.target.weights,
            "architecture": kind,
            "layers": shape.num_target_layers,
            "hidden_size": shape.hidden_size,
            "vocab_size": shape.vocab_size,
        }
    }
    return Assembled(target, path, drafter, tokenizer, facts)
