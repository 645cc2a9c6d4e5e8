"""What documents of --json that have a schema are built of."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    """Exactly the keys that its schema names."""

    model_config = ConfigDict(extra="forbid", frozen=True)
