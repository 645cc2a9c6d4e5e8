"""Which release a deploy of the files here would make, worked out while the other side answers a launch."""

from __future__ import annotations

import logging
import threading

from dflashctl.config.recipe import Recipe
from dflashctl.errors import DflashError

PATIENCE_S = 2.0
"""How long a launch that knows everything else waits for it: a large tree is no reason to start late."""

log = logging.getLogger("dflashctl.launch")


class Here:
    """Reads the recipe's files in a thread of its own. For a recipe without a release, nothing is read."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._found: str | None = None
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        from dflashctl.releases.sources import take_snapshot

        deploy = self._recipe.deploy
        if deploy is None or not self._recipe.has_release:
            return
        try:
            self._found = take_snapshot(deploy, self._recipe.project_root).release
        except (DflashError, OSError) as error:
            log.debug("the files here make no release: %s", error)

    def release(self, patience_s: float = PATIENCE_S) -> str | None:
        """Its hash; None where the files make none (a launch needs none of them), or are not read yet."""
        self._thread.join(patience_s)
        return self._found
