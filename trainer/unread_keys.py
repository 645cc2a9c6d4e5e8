"""Which keys of a `train:` section count only with others: one table, for the check and for docs/recipe.md.

Whoever sets a key and sees no effect looks for the reason in the training. So a key that differs from its
default although nothing reads it is refused, or said where a recipe may well keep it: for another topology,
or for when it evaluates again. A test trains with every key of the table (tests/trainer/test_unread_keys.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from trainer.sections import Evaluate, TrainConfig

Met = Callable[[TrainConfig], bool]


@dataclass(frozen=True)
class Needs:
    """What must hold for a key to count."""

    told: str  # "data.source: store", or in words
    met: Met
    here: Callable[[TrainConfig], str]  # what holds instead, if it is not met
    refused: bool = True  # False: a key that does not count for this reason is only said


def being(key: str, *values: object, refused: bool = True, met: Met | None = None) -> Needs:
    """`key` has one of these values. `met`: where that is not all."""
    get = attrgetter(key)
    told = f"{key}: {' | '.join(map(shown, values))}"
    return Needs(
        told,
        met or (lambda config: get(config) in values),
        lambda config: f"{key} is {shown(get(config))}",
        refused,
    )


def shown(value: object) -> str:
    """A value as YAML has it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _looks(evaluate: Evaluate) -> bool:
    intervals = (evaluate.every_steps, evaluate.every_s, evaluate.prefix_every_steps, evaluate.prefix_every_s)
    return any(each is not None for each in intervals)


STDLIB = being("data.source", "stdlib")
STORE = being("data.source", "store")
CONTINUATIONS = being("data.continuations", True)
TEXT = being(  # a store demands it anyway
    "data.continuations",
    False,
    met=lambda config: not config.data.continuations or config.data.source == "store",
)
SAMPLES = Needs(
    "data.greedy_share below 1",
    lambda config: config.data.greedy_share < 1,
    lambda config: "every row is greedy",
)
SPLIT = being("topology", "split", "auto", refused=False)
APART = being("topology", "split", "threads", "auto", refused=False)
THREADS = being("topology", "threads", "auto", refused=False)
EVALUATES = Needs(
    "evaluate.prompts above 0",
    lambda config: config.evaluate.prompts > 0,
    lambda config: "nothing is evaluated",
    refused=False,
)
LOOKS = Needs(
    "an interval of looks (evaluate.every_steps, every_s, prefix_every_steps or prefix_every_s)",
    lambda config: _looks(config.evaluate),
    lambda config: "there is none",
    refused=False,
)
DESCENDS = Needs(
    "schedule.constant_share below 1",
    lambda config: config.schedule.kind == "cosine" or config.schedule.constant_share < 1,
    lambda config: "the rate never descends",
)
SLIDES = Needs(
    "sliding_attention in drafter.layer_types",
    # One that is misspelt is told already.
    lambda config: not {"full_attention"}.issuperset(config.drafter.layer_types or []),
    lambda config: "no layer slides",
)
TAPS_LEFT_OUT = Needs(
    "drafter.taps left out",
    lambda config: config.drafter.taps is None,
    lambda config: "drafter.taps already says which",
)
MUON = Needs(
    "algorithm: muon in optimizer.groups",
    lambda config: any(group.algorithm == "muon" for group in config.optimizer.groups),
    lambda config: "no group has it",
)
SERVICES = Needs(
    "wandb or trackio in logging.trackers",
    lambda config: not {"wandb", "trackio"}.isdisjoint(config.logging.trackers or []),
    lambda config: "neither is there",
)

COUNTS_ONLY_WITH: dict[str, tuple[Needs, ...]] = {
    "drafter.tap_count": (TAPS_LEFT_OUT,),
    "drafter.init_from": (being("drafter.init", "drafter"),),
    "drafter.init_layers": (being("drafter.init", "target"),),
    "drafter.sliding_window": (SLIDES,),
    "data.store": (STORE,),
    "data.long": (STORE,),
    "data.rows": (STDLIB,),
    "data.states": (TEXT,),
    "data.prompt_tokens": (CONTINUATIONS,),
    "data.greedy_share": (CONTINUATIONS,),
    "data.temperature": (CONTINUATIONS, SAMPLES),
    "data.batch": (CONTINUATIONS,),
    "data.budget_s": (CONTINUATIONS,),
    "objective.gamma": (being("objective.weighting", "decay"),),
    "objective.dpace_alpha": (being("objective.weighting", "dpace"),),
    "optimizer.momentum": (MUON,),
    "schedule.constant_share": (being("schedule.kind", "constant_linear"),),
    "schedule.floor": (DESCENDS,),
    "evaluate.prompts_before": (EVALUATES,),
    "evaluate.prompt_tokens": (EVALUATES,),
    "evaluate.new_tokens": (EVALUATES,),
    "evaluate.first_tokens": (EVALUATES,),
    "evaluate.temperature": (EVALUATES,),
    "evaluate.dtype": (EVALUATES,),
    "evaluate.lookup_ngram": (EVALUATES,),
    "evaluate.every_steps": (EVALUATES,),
    "evaluate.every_s": (EVALUATES,),
    "evaluate.every_prompts": (EVALUATES, LOOKS),
    "evaluate.prefix_every_steps": (EVALUATES,),
    "evaluate.prefix_every_s": (EVALUATES,),
    "logging.project": (SERVICES,),
    "policy.mode": (THREADS,),
    "policy.tls": (THREADS, being("policy.mode", "reduce-overhead")),
    "policy.warmup": (THREADS,),
    "policy.start": (THREADS,),
    "policy.force": (THREADS,),
    "layout.ranks": (being("topology", "colocated"),),
    "layout.targets": (APART,),
    "layout.drafters": (APART,),
    "layout.queue": (APART,),
    "layout.floor_gib_s": (SPLIT,),
    "layout.shard_optimizer": (being("topology", "colocated", "auto"),),
}
"""Each key that counts only where all of these hold."""

ASK_NOTHING: tuple[object, ...] = (None, "off")
"""Values that want nothing done, so nothing is missed where nothing reads them."""


@dataclass(frozen=True)
class Unread:
    key: str
    told: str
    refused: bool


def unread(config: TrainConfig) -> Iterator[Unread]:
    """The keys that differ from their default although nothing would read them, and why."""
    usual = TrainConfig(config.target)
    for key, needs in COUNTS_ONLY_WITH.items():
        value, default = attrgetter(key)(config), attrgetter(key)(usual)
        missed = [each for each in needs if not each.met(config)]
        if not missed or value == default or value in ASK_NOTHING:
            continue
        # The first that is missed says how grave it is: the others may be meant for where it holds.
        told = (
            f"counts only with {_all(needs)}; here {missed[0].here(config)}, so nothing reads it: "
            f"leave it out, or say {shown(default)}, its default"
        )
        yield Unread(key, told, missed[0].refused)


def needs_of(key: str) -> tuple[Needs, ...]:
    """With what a key counts; empty for one that always does."""
    return COUNTS_ONLY_WITH.get(key, ())


def _all(needs: tuple[Needs, ...]) -> str:
    return " and ".join(each.told for each in needs)
