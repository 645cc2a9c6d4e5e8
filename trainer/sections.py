"""The sections of a recipe's `train:`: dataclasses, importable without torch.

Each key stands here once, with its type, range, default and meaning; docs/recipe.md is made of them. Whoever
wants a configuration asks `trainer.config`, which checks it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from trainer.schema import ranged

# Decay constants that the method's authors pair with a block size; others need an explicit gamma.
GAMMA_BY_BLOCK_SIZE = {16: 7.0, 10: 5.0, 8: 4.0}
LEAST_TEMPERATURE = 0.01  # logits are divided by it; the most likely token is taken long before


@dataclass(frozen=True)
class Target:
    """The frozen model whose decoding is to become faster."""

    path: str  # folder: absolute, or relative to the working folder or to the release
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: float32 on a CPU, bfloat16 on a GPU
    attention: Literal["auto", "sdpa", "flex"] = "auto"  # auto: flex on a GPU, but not among threads
    compile: Literal["auto", "off"] = "auto"  # its layers for whole rows; auto: on a GPU, not among threads
    weights: Literal["file", "random"] = "file"  # random: only to measure rates and memory; needs no weights


@dataclass(frozen=True)
class Drafter:
    """Shape of the drafter; what is left out is taken from the target."""

    layers: int = ranged(5, low=1)  # of the drafter
    block_size: int = ranged(16, low=2, high=64)  # slots of a block, the anchor's too
    taps: list[int] | None = None  # 0-based target layers whose outputs are the context; null: spread evenly
    tap_count: int | None = ranged(None, low=1)  # how many to spread; null: as many as layers
    mask_token: str | None = None  # a token of the target that no text holds; this or the id is needed
    mask_token_id: int | None = ranged(None, low=0)  # the same by its id
    init: Literal["random", "target", "drafter"] = "random"  # copies of the target's layers, or the one below
    init_from: str | None = None  # folder of a drafter whose shape is this section's
    init_layers: list[int] | None = None  # which, one for each drafter layer; null: the target's last ones
    layer_types: list[str] | None = None  # full_attention | sliding_attention, one a layer
    sliding_window: int | None = ranged(None, low=1)  # tokens that a sliding layer reaches back over
    intermediate_size: int | None = ranged(None, low=1)  # null: the target's
    attention_heads: int | None = ranged(None, low=1)  # null: the target's
    key_value_heads: int | None = ranged(None, low=1)  # null: the target's
    head_dim: int | None = ranged(None, low=2)  # null: the target's
    rope_theta: float | None = ranged(None, low=1.0)  # null: the target's


@dataclass(frozen=True)
class Data:
    """Where rows come from. `stdlib`: sources of the running interpreter's own standard library.

    `store`: what `python -m trainer prepare` made, packed anew for every epoch.
    """

    source: Literal["stdlib", "store"] = "stdlib"  # which of the two
    store: str | None = None  # folder: absolute, or relative to the working folder or to the release
    long: Literal["split", "refuse"] = "split"  # a store's documents longer than a row; refuse: left out
    row_tokens: int = ranged(256, low=16)  # tokens of a packed row
    rows: int = ranged(1024, low=1)  # how many are made
    continuations: bool = True  # the target continues short prompts; false: rows are the text itself, packed
    # of packed text: read by the target once, or at every step
    states: Literal["cached", "online"] = "cached"
    prompt_tokens: int = ranged(48, low=1)  # continuations: of each prompt
    greedy_share: float = ranged(0.5, low=0.0, high=1.0)  # the other rows are sampled at `temperature`
    temperature: float = ranged(0.7, low=LEAST_TEMPERATURE)  # continuations: of the sampled ones
    batch: int = ranged(128, low=1)  # continuations: prompts that the target continues at once
    budget_s: float | None = ranged(None, low=0.1)  # stop making rows after this time
    # rows with non-finite hidden states that are skipped before the run ends
    max_bad_rows: int = ranged(8, low=0)


@dataclass(frozen=True)
class Objective:
    """What is asked of the drafter: at which anchors, with which labels and weights."""

    anchors_per_document: int = ranged(512, low=1)  # or as many as it has, if fewer
    anchors_per_row: int | None = ranged(None, low=1)  # the fixed width; null: the most that any row can have
    anchors_per_pass: int | None = ranged(None, low=1)  # a row's anchors in memory at once; null: all
    replays: int = ranged(1, low=1)  # draws of anchors per batch of rows and optimizer step
    weighting: Literal["decay", "dpace"] = "decay"  # of slots: by distance, or by D-PACE
    gamma: float | None = ranged(None, low=0.01)  # decay: its constant; null: by block size
    dpace_alpha: float = ranged(0.5, low=0.0, high=1.0)  # D-PACE: how far confidences are smoothed to 1
    labels: Literal["data", "target", "kl"] = "data"  # the text, the target's choice, or its distribution
    input_noise: float = ranged(0.0, low=0.0)  # uniform in +-input_noise on the context's hidden states
    loss_chunk: int | None = ranged(None, low=1)  # tokens whose logits are held at once; null: by the device


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters whose names match a pattern (fnmatch); each parameter must be in exactly one group."""

    name: str  # for logs and parameters.json
    match: list[str]  # patterns of parameter names
    algorithm: Literal["adamw", "muon"] = "adamw"  # muon: orthogonalised momentum, for matrices only
    lr_scale: float = ranged(1.0, low=0.0)  # times optimizer.lr
    weight_decay: float = ranged(0.0, low=0.0)  # decoupled from the gradient


@dataclass(frozen=True)
class Optimizer:
    """How weights follow gradients."""

    lr: float = ranged(6e-4, low=0.0)  # the peak of the schedule
    beta1: float = ranged(0.9, low=0.0, high=0.9999)  # adamw's
    beta2: float = ranged(0.95, low=0.0, high=0.999999)  # adamw's
    eps: float = ranged(1e-8, low=0.0)  # adamw's
    momentum: float = ranged(0.95, low=0.0, high=0.9999)  # of the update's direction
    clip: float = ranged(1.0, low=0.0)  # largest norm of the whole gradient; 0: no clipping
    # steps in a row with a non-finite gradient that are skipped before the run ends
    max_bad_steps: int = ranged(8, low=0)
    groups: list[ParameterGroup] = field(
        default_factory=lambda: [
            ParameterGroup("matrices", ["*_proj.weight", "fc.weight"]),
            ParameterGroup("norms", ["*norm.weight", "*.bias"]),
        ]
    )


@dataclass(frozen=True)
class Schedule:
    """The learning rate of a run, by its progress: in steps, or by the clock when the budget is time."""

    kind: Literal["cosine", "constant_linear"] = "cosine"  # of descent
    warmup_steps: int | None = ranged(None, low=0)  # null: 4 % of the steps; 20 when the budget is time
    constant_share: float = ranged(0.5, low=0.0, high=1.0)  # constant_linear: of the run, before the descent
    floor: float = ranged(0.0, low=0.0, high=1.0)  # last learning rate over the peak


@dataclass(frozen=True)
class Budget:
    """When training ends: the first of what is given."""

    steps: int | None = ranged(None, low=1)  # of the optimizer
    train_s: float | None = ranged(None, low=0.1)  # of training, loading and evaluation apart
    # the whole program, with the last evaluation's time set aside
    total_s: float | None = ranged(None, low=1.0)


@dataclass(frozen=True)
class Evaluate:
    """Real block-speculative decoding of held-out prompts, before and after training."""

    prompts: int = ranged(24, low=0)  # 0: no evaluation
    prompts_before: int | None = ranged(None, low=0)  # null: as many
    prompt_tokens: int = ranged(64, low=2)  # of each prompt
    new_tokens: int = ranged(128, low=2)  # decoded after each
    first_tokens: int = ranged(32, low=1)  # of these, the first are measured by themselves, too
    temperature: float = ranged(0.7, low=LEAST_TEMPERATURE)  # of sampled decoding
    # float32: exact comparison, at twice a bfloat16 target's memory
    dtype: Literal["float32", "target"] = "float32"
    lookup_ngram: int = ranged(3, low=1)  # of prompt lookup, the baseline
    # During training: real greedy decoding of a few prompts (which checkpoint is the best follows it), and
    # prefix-match on the same prompts, which costs one forward pass and is checked against it.
    every_steps: int | None = ranged(500, low=1)
    every_s: float | None = ranged(None, low=1.0)  # seconds between looks by decoding
    every_prompts: int = ranged(8, low=1)  # of such a look
    prefix_every_steps: int | None = ranged(100, low=1)  # steps between looks by prefix-match
    prefix_every_s: float | None = ranged(None, low=1.0)  # seconds between them


@dataclass(frozen=True)
class Checkpoint:
    """When to save besides the end; the best one by real decoding is kept, too."""

    every_steps: int | None = ranged(None, low=1)  # steps between two
    every_s: float | None = ranged(1800.0, low=1.0)  # seconds between two
    keep: int = ranged(2, low=1)  # the newest so many stay, and the best


@dataclass(frozen=True)
class Logging:
    """Where figures go besides the console and metrics.jsonl."""

    # null: tensorboard, if it is there
    trackers: list[Literal["tensorboard", "wandb", "trackio"]] | None = None
    project: str = "dflash"  # wandb's and trackio's


@dataclass(frozen=True)
class Policy:
    """Compile policy of the threaded topology; the others have `execution`."""

    # of compiling
    mode: Literal["eager", "inductor", "reduce-overhead", "reduce-overhead-no-trees"] = "eager"
    tls: Literal["none", "local", "stashed"] = "none"  # what a thread sets up for the graph trees' state
    warmup: Literal["lazy", "main-thread", "own-thread"] = "lazy"  # who runs the first forward and backward
    start: Literal["parallel", "sequential"] = "parallel"  # whether a thread waits for the one before it
    force: bool = False  # run a combination that is known to break with the installed torch


@dataclass(frozen=True)
class Layout:
    """Who computes what."""

    ranks: int | None = ranged(None, low=1)  # processes of the topology colocated; null: one a GPU
    targets: int = ranged(1, low=1)  # split, threads: a GPU each
    drafters: int = ranged(1, low=1)  # split, threads: a GPU each, after the targets'
    queue: int = ranged(2, low=1)  # batches of hidden states that may wait for the drafters
    floor_gib_s: float = ranged(0.25, low=0.0)  # split: hidden states must travel faster than this
    # Each rank of topology colocated keeps a share of the optimizer's state; auto: where memory is short.
    shard_optimizer: Literal["auto", "on", "off"] = "auto"
    wait_s: float = ranged(300.0, low=0.1)  # the longest wait of one for the other; then the run ends


@dataclass(frozen=True)
class TrainConfig:
    target: Target
    seed: int = ranged(0, low=0)  # of everything that is drawn
    token_budget: int = ranged(2048, low=16)  # context tokens of one batch: token_budget // row_tokens rows
    micro_rows: int | None = ranged(None, low=1)  # rows of one forward; null: the whole batch
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU if torch sees one
    # of the drafter's products; weights stay float32
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    attention: Literal["auto", "dense", "flex", "triton"] = "auto"  # auto: triton on a GPU, else dense
    execution: Literal["eager", "compiled", "captured"] = "eager"  # of the drafter's step; captured: GPU only
    threads: int | None = ranged(None, low=1)  # null: the cores that this process may use
    report_every_s: float = ranged(2.0, low=0.0)  # seconds between lines of the log
    topology: Literal["colocated", "split", "threads", "auto"] = "colocated"  # auto: by plan
    drafter: Drafter = field(default_factory=Drafter)
    data: Data = field(default_factory=Data)
    objective: Objective = field(default_factory=Objective)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    budget: Budget = field(default_factory=lambda: Budget(steps=1000))
    evaluate: Evaluate = field(default_factory=Evaluate)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    logging: Logging = field(default_factory=Logging)
    policy: Policy = field(default_factory=Policy)
    layout: Layout = field(default_factory=Layout)

    @property
    def batch_rows(self) -> int:
        return self.token_budget // self.data.row_tokens

    @property
    def batch_tokens(self) -> int:
        """Context tokens of a batch, padding included: whole rows, which the budget may not divide into."""
        return self.batch_rows * self.data.row_tokens

    @property
    def gamma(self) -> float:
        """The decay constant of slots' weights; infinite, so that all are 1, where D-PACE weighs them."""
        if self.objective.weighting != "decay":
            return math.inf
        if self.objective.gamma is not None:
            return self.objective.gamma
        return GAMMA_BY_BLOCK_SIZE[self.drafter.block_size]
