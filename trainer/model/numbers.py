"""Numbers of a model's config.json, each refused by its key where it is none. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.errors import ConfigError


@dataclass(frozen=True)
class Numbers:
    """Reads values of `data`; a key that is null counts as left out where there is a default.

    All raise ConfigError: the key is missing, or something else than it should be.
    """

    data: Mapping[str, Any]
    where: str

    def __call__(self, key: str, low: int = 1, default: int | None = None) -> int:
        value = self._given(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise self._other(key, f"a number from {low}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self._given(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self._other(key, "a number above 0")
        return value

    def flag(self, key: str) -> bool:
        value = self._given(key, False)
        if not isinstance(value, bool):
            raise self._other(key, "true or false")
        return value

    def token(self, key: str) -> Any:
        """A token's id, several, or None."""
        value = self.data.get(key)
        tokens = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(each) is int for each in tokens):
            raise self._other(key, "a token's id")
        return value

    def _given(self, key: str, default: Any) -> Any:
        value = self.data.get(key)
        if value is None and default is not None:
            return default
        if key not in self.data:
            raise ConfigError(f"key {key!r} is missing", where=self.where)
        return value

    def _other(self, key: str, wanted: str) -> ConfigError:
        return ConfigError(f"{key} is {self.data[key]!r}, not {wanted}", where=self.where)
