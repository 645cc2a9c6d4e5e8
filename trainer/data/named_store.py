"""The prepared store that a recipe names, checked without torch: before anything is loaded."""

from __future__ import annotations

from trainer.data.lines import file_digest
from trainer.data.store import Store, find_store
from trainer.errors import ConfigError
from trainer.model.target_files import find_target
from trainer.sections import TrainConfig


def named_store(config: TrainConfig) -> Store:
    """Of a recipe with `data.source: store`.

    Raises:
        ConfigError: no finished store there, or it was made with another tokenizer than the target's.
    """
    assert config.data.store is not None
    store = Store(find_store(config.data.store))
    tokenizer = find_target(config.target.path) / "tokenizer.json"
    # A target without one is refused by who loads it.
    if tokenizer.is_file() and store.identity["tokenizer_sha256"] != file_digest(tokenizer):
        raise ConfigError(
            f"store {store.folder.name} was prepared with another tokenizer than {tokenizer}",
            where="train.data.store",
            next=f"prepare it for this target: python -m trainer prepare --target {tokenizer.parent} ...",
        )
    return store
