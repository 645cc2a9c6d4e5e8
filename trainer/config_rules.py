"""Rules of a `train:` section that no single key shows."""

from __future__ import annotations

from trainer import schema
from trainer.sections import GAMMA_BY_BLOCK_SIZE, Budget, Data, Drafter, TrainConfig
from trainer.unread_keys import unread


def across_keys(config: TrainConfig) -> list[str]:
    """Problems that no single key shows."""
    drafter, data = config.drafter, config.data
    found = [f"{each.key}: {each.told}" for each in unread(config) if each.refused]
    if config.batch_rows < 1:
        found.append(
            f"token_budget: {config.token_budget} is less than one row (data.row_tokens {data.row_tokens})"
        )
    elif config.micro_rows is not None and config.batch_rows % config.micro_rows:
        found.append(f"micro_rows: {config.micro_rows} does not divide the batch of {config.batch_rows} rows")
    if (
        config.objective.weighting == "decay"
        and config.objective.gamma is None
        and drafter.block_size not in GAMMA_BY_BLOCK_SIZE
    ):
        known = ", ".join(str(size) for size in sorted(GAMMA_BY_BLOCK_SIZE))
        found.append(
            f"objective.gamma: needed, block size {drafter.block_size} has no usual value (only {known} do)"
        )
    if drafter.mask_token is not None and drafter.mask_token_id is not None:
        found.append("drafter.mask_token_id: given twice, drafter.mask_token is there too")
    if drafter.mask_token is None and drafter.mask_token_id is None:
        found.append("drafter.mask_token: needed (or drafter.mask_token_id)")
    if drafter.init == "drafter" and drafter.init_from is None:
        found.append("drafter.init_from: needed, the folder of the drafter to begin with")
    if drafter.init_layers is not None and len(drafter.init_layers) != drafter.layers:
        found.append(f"drafter.init_layers: {len(drafter.init_layers)} for {drafter.layers} layers")
    if drafter.head_dim is not None and drafter.head_dim % 2:
        found.append(f"drafter.head_dim: {drafter.head_dim} is odd, and RoPE turns a head's numbers in pairs")
    found += _layer_type_problems(drafter)
    found += _store_problems(data)
    if data.continuations and data.prompt_tokens + drafter.block_size > data.row_tokens:
        found.append(
            f"data.prompt_tokens: {data.prompt_tokens} leaves no block in a row of {data.row_tokens}"
        )
    ranks = config.layout.ranks
    if config.topology in ("split", "threads") and 0 < config.batch_rows < config.layout.drafters:
        found.append(
            f"layout.drafters: {config.layout.drafters} for a batch of {config.batch_rows} rows: "
            "one had nothing to do"
        )
    elif config.topology == "colocated" and ranks is not None and 0 < config.batch_rows < ranks:
        found.append(
            f"layout.ranks: {ranks} ranks for a batch of {config.batch_rows} rows: one had nothing to do"
        )
    if config.target.attention == "flex" and config.topology == "threads":
        found.append("target.attention: flex compiles, and not among threads; use sdpa")
    if config.execution != "eager" and config.topology == "threads":
        found.append("execution: of the topologies of processes; threads has policy.mode")
    if config.execution == "captured" and config.objective.input_noise:
        found.append("objective.input_noise: not with execution: captured, a graph draws no numbers")
    warmup, steps = config.schedule.warmup_steps, config.budget.steps
    if warmup is not None and steps is not None and warmup > steps:
        found.append(
            f"schedule.warmup_steps: {warmup} of a run of {steps} steps: optimizer.lr is never reached"
        )
    names = [group.name for group in config.optimizer.groups]
    found += [
        f"optimizer.groups[{number}].name: {name!r} is another group's, too"
        for number, name in enumerate(names)
        if name in names[:number]
    ]
    if config.budget == Budget():
        found.append("budget: one of steps, train_s, total_s is needed")
    return found


def _store_problems(data: Data) -> list[str]:
    if data.source != "store":
        return []
    found = []
    if data.store is None:
        found.append("data.store: needed, the folder that prepare printed")
    if data.continuations:
        found.append("data.continuations: a store's rows are read as they are; say continuations: false")
    if data.states != "online":
        found.append("data.states: a store's rows change with every epoch; say states: online")
    return found


def _layer_type_problems(drafter: Drafter) -> list[str]:
    types, found = drafter.layer_types, []
    if types is None:
        return []
    if len(types) != drafter.layers:
        found.append(f"drafter.layer_types: {len(types)} names for {drafter.layers} layers")
    for index, name in enumerate(types):
        if name not in ("full_attention", "sliding_attention"):
            path = f"drafter.layer_types[{index}]"
            found.append(schema.unknown_value(path, name, ["full_attention", "sliding_attention"]))
    if "sliding_attention" not in types:
        return found
    if drafter.sliding_window is None:
        found.append("drafter.sliding_window: needed, drafter.layer_types has sliding layers")
    elif drafter.sliding_window < drafter.block_size:
        found.append(
            f"drafter.sliding_window: {drafter.sliding_window} is less than a block ({drafter.block_size})"
        )
    return found
