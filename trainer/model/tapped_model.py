"""A frozen language model with its taps, its embedding and its head, as transformers runs it.

Any decoder that transformers loads as a causal language model. Rows R, tokens S, hidden H, taps K, vocabulary
V.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.model.architectures import decoder_of, layer_types_of
from trainer.model.taps import check_taps

PLAIN_LAYERS = {"full_attention", "sliding_attention"}
# Keys by which some decoders scale or bend what embedding or head give, and the value that does nothing.
BENT = {
    "embedding_multiplier": 1,
    "final_logit_softcapping": None,
    "lm_head_multiplier": 1,
    "logit_scale": 1,
    "logits_scaling": 1,
}


@dataclass(frozen=True)
class States:
    """What the target computed for rows of tokens."""

    taps: Tensor  # [R, S, K * H], side by side in the order of the taps
    # [R, S, H], what the head reads; None when the target stopped at its last tap
    final: Tensor | None = None


class TappedModel:
    """A frozen model that gives hidden states at its taps.

    `trunk` is the same decoder cut after its last tap (modules shared, nothing copied), so what no tap and no
    label needs is not computed.
    """

    def __init__(self, model: nn.Module, taps: Sequence[int]) -> None:
        self.model = model.eval().requires_grad_(False)
        self.decoder: Any = decoder_of(model)
        self.config = self.decoder.config
        # Extra layers past num_hidden_layers (multi-token prediction) belong to no forward pass, so to no
        # tap.
        self.layer_count = int(self.config.num_hidden_layers)
        self.taps = check_taps(taps, self.layer_count)
        for key, plain in BENT.items():
            if getattr(self.config, key, None) not in (None, plain):
                raise ConfigError(
                    f"{key} is {getattr(self.config, key)}: drafters use embedding and head as they are",
                    where="the target's config.json",
                )
        self.embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        if getattr(head, "bias", None) is not None:
            raise ConfigError("the target's head has a bias; drafters use its weight alone", where="target")
        self.head_weight: Tensor = head.weight
        self.trunk = self._cut(self.taps[-1] + 1)
        self.layer_types = layer_types_of(self.config)
        self._recorded: dict[int, Tensor] | None = None
        for tap in self.taps:
            self.decoder.layers[tap].register_forward_hook(self._recorder(tap))
        parameters = inspect.signature(type(self.decoder).forward).parameters
        self.cache_keyword = "cache" if "cache" in parameters else "past_key_values"

    @property
    def device(self) -> torch.device:
        return self.head_weight.device

    @property
    def hidden_size(self) -> int:
        return int(self.head_weight.shape[1])

    @property
    def dtype(self) -> torch.dtype:
        return self.head_weight.dtype

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding; a token id must be less."""
        return int(self.head_weight.shape[0])

    @property
    def attention_only(self) -> bool:
        """False when some layers carry a recurrent state that cannot be cropped or masked by document."""
        return set(self.layer_types) <= PLAIN_LAYERS

    def _cut(self, layers: int) -> Any:
        trunk = copy.copy(self.decoder)
        # copy.copy shares the module table; a table of its own lets `layers` differ.
        trunk._modules = dict(self.decoder._modules)
        trunk._modules["layers"] = nn.ModuleList(list(self.decoder.layers)[:layers])
        return trunk

    def _recorder(self, tap: int) -> Any:
        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._recorded is not None:
                self._recorded[tap] = output[0] if isinstance(output, tuple) else output

        return keep

    @contextmanager
    def recording(self) -> Iterator[dict[int, Tensor]]:
        """Collect the taps' outputs of the forward passes inside."""
        self._recorded = {}
        try:
            yield self._recorded
        finally:
            self._recorded = None

    @contextmanager
    def widened(self, wish: bool) -> Iterator[None]:
        """All weights in float32 inside, when wished; bfloat16 weights come back unchanged.

        Weights only: `Module.to` would also round the buffers, among them RoPE's frequencies.
        """
        narrow = [weight for weight in self.model.parameters() if wish and weight.dtype != torch.float32]
        dtypes = [weight.dtype for weight in narrow]
        for weight in narrow:
            weight.data = weight.data.float()
        try:
            yield
        finally:
            for weight, dtype in zip(narrow, dtypes, strict=True):
                weight.data = weight.data.to(dtype)

    def join(self, recorded: dict[int, Tensor]) -> Tensor:
        return torch.cat([recorded[tap] for tap in self.taps], dim=-1)

    @torch.no_grad()
    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        cache: Any = None,
        full: bool = False,
    ) -> States:
        """One forward pass.

        Args:
            tokens, positions: [R, S].
            mask: [R, 1, S, cached + S] bool, true where seen; None: the model's own causal mask.
            cache: a transformers Cache that already holds earlier tokens, and gets these.
            full: run every layer and the final norm, for labels or for decoding.
        """
        decoder = self.decoder if full else self.trunk
        arguments: dict[str, Any] = {"use_cache": cache is not None}
        if cache is not None:
            arguments[self.cache_keyword] = cache
        return self.recorded(
            decoder, full, input_ids=tokens, position_ids=positions, attention_mask=mask, **arguments
        )

    def recorded(self, decoder: Any, full: bool, **arguments: Any) -> States:
        """States of one call of a decoder that has this model's layers."""
        with self.recording() as recorded:
            output = decoder(**arguments)
            return States(self.join(recorded), output.last_hidden_state if full else None)

    def one_document_at_a_time(
        self, tokens: Tensor, positions: Tensor, documents: Tensor, full: bool
    ) -> States:
        """The definition of `Target.states`: right for every architecture, and slow."""
        taps = torch.zeros(
            *tokens.shape, len(self.taps) * self.hidden_size, dtype=self.dtype, device=self.device
        )
        final = (
            torch.zeros(*tokens.shape, self.hidden_size, dtype=self.dtype, device=self.device)
            if full
            else None
        )
        for row in range(tokens.shape[0]):
            _, lengths = documents[row].unique_consecutive(return_counts=True)
            start = 0
            for length in lengths.tolist():
                part = slice(start, start + length)
                got = self.run(tokens[row : row + 1, part], positions[row : row + 1, part], full=full)
                taps[row, part] = got.taps[0]
                if final is not None and got.final is not None:
                    final[row, part] = got.final[0]
                start += length
        return States(taps, final)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.linear(hidden, self.head_weight)
