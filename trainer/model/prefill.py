"""How a frozen target reads whole rows fast: attention within documents, and layers that are compiled.

transformers lets a model be run with an attention function of one's own. This one is given a mask for each
window that the model's layers have, and picks by the window that the layer itself names. What it does not
understand it refuses, and before its first use it reads a short row of three documents, which must give what
the documents give one by one: else the target reads rows the plain way, slower, and says so once.

Nothing here reads a value back from the device, that first look aside.

Rows R, row tokens S.
"""

from __future__ import annotations

import copy
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask

from trainer.model.flex import flex_capped, flex_within
from trainer.model.plain_states import allowed, far, plain_states
from trainer.model.tapped_model import States, TappedModel
from trainer.model.within import dense_within, first_seen
from trainer.shortage import is_shortage
from trainer.words import first_line

Say = Callable[[str], None]
Masks = dict[int | None, BlockMask | Tensor | None]
"""By window; None as the window: a full layer. None as the mask: causal, rows of one document."""

NAME = "within_documents"  # of the attention function among transformers' own, and of its argument
PROBE = (60, 29, 167)  # lengths of the documents of the first look: two tiles of flex attention
# Arguments that come along and change nothing in attention.
IDLE = {
    *("position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states"),
    *("output_router_logits", "return_dict", "position_embeddings"),
}


class NotUnderstood(Exception):
    """A layer wants of attention what is not done here."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    within_documents: Masks | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [R, A, S, E], key and value of as many or fewer heads.

    Args:
        attention_mask: ignored; transformers makes none for functions that it does not know.
    Returns:
        [R, S, A, E] and no weights.
    Raises:
        NotUnderstood.
    """
    strange = [name for name, given in others.items() if name not in IDLE and given is not None]
    if strange:
        raise NotUnderstood(f"its attention takes {', '.join(strange)}")
    if dropout or not getattr(module, "is_causal", True) or is_causal is False:
        raise NotUnderstood("its attention is not plain causal attention")
    if within_documents is None:
        raise NotUnderstood("its layers do not pass arguments on to attention")
    if sliding_window not in within_documents:
        raise NotUnderstood(f"a layer has a window of {sliding_window}, which its config.json does not tell")
    mask = within_documents[sliding_window]
    if isinstance(mask, BlockMask):
        out = flex_capped(query, key, value, mask, scaling, softcap)
        return out.transpose(1, 2).contiguous(), None
    if softcap is not None:
        raise NotUnderstood("its attention caps scores, which only flex attention does")
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling)


def run_layer(layer: nn.Module, *inputs: Any, **named: Any) -> Any:
    return type(layer).forward(layer, *inputs, **named)


@cache
def compiled_layer() -> Callable[..., Any]:
    """One for all layers: those that are alike share what is compiled. No graphs of Inductor's own."""
    return torch.compile(run_layer, dynamic=False, fullgraph=True, options={"triton.cudagraphs": False})


def with_compiled_layers(decoder: Any) -> Any:
    """The same decoder whose layers run compiled; weights and hooks are shared, and hooks run outside."""
    made = copy.copy(decoder)
    made._modules = dict(decoder._modules)
    layers = []
    for layer in decoder.layers:
        other = copy.copy(layer)
        other.forward = partial(_call_compiled, layer)
        layers.append(other)
    made._modules["layers"] = nn.ModuleList(layers)
    return made


def _call_compiled(layer: nn.Module, *inputs: Any, **named: Any) -> Any:
    return compiled_layer()(layer, *inputs, **named)


def windows_of(config: Any, layer_types: list[str]) -> list[int | None]:
    """Each layer's window, None for a full layer, by the target's config.json."""
    window = getattr(config, "sliding_window", None)
    return [window if kind == "sliding_attention" else None for kind in layer_types]


class Asked(dict[int | None, Any]):
    """Masks that remember which of them were looked up."""

    def __init__(self, masks: Masks) -> None:
        super().__init__(masks)
        self.windows: list[int | None] = []

    def __getitem__(self, window: int | None) -> Any:
        self.windows.append(window)
        return super().__getitem__(window)


class Prefill:
    """A target's way to read rows. `ready` says whether it is this one; it looks once."""

    def __init__(self, target: TappedModel) -> None:
        self.target = target
        self.attention = "flex" if target.device.type == "cuda" else "sdpa"
        self.compile = False
        self.say: Say = _to_stderr
        self.windows = windows_of(target.config, target.layer_types)
        self.capped = getattr(target.config, "attn_logit_softcapping", None) is not None
        self._ready: bool | None = None
        self._worked: set[tuple[object, ...]] = set()  # shapes that were read, as they were read
        self._compiled: dict[bool, Any] = {}  # decoders, by whether they are whole

    def like(self, other: Prefill) -> None:
        """The same choices for a copy of the target."""
        self.attention, self.compile, self.say, self._ready = (
            other.attention,
            other.compile,
            other.say,
            other._ready,
        )

    def masks(self, documents: Tensor, single: bool) -> Masks:
        """One for each window.

        Args:
            documents: [R, S].
            single: every row is one document.
        """
        size, made = documents.shape[1], dict[int | None, Any]()
        build = flex_within if self.attention == "flex" else dense_within
        for window in sorted(set(self.windows), key=lambda each: (each is not None, each)):
            reach = None if window is None or window >= size else window
            if single and reach is None and not self.capped:
                made[window] = None
            elif reach is None and window is not None and None in made:
                made[window] = made[None]
            else:
                made[window] = build(first_seen(documents, reach))
        return made

    @property
    def ready(self) -> bool:
        if self._ready is None:
            unfit = self._unfit()
            self._ready = unfit is None
            if unfit is not None:
                self.say(
                    f"WARNING: the target reads packed rows the plain way, document by document where it "
                    f"must, and slower: {unfit}"
                )
        return self._ready

    def _unfit(self) -> str | None:
        """Why this target cannot be read so; None: it can."""
        target = self.target
        if not target.attention_only:
            kinds = ", ".join(sorted(set(target.layer_types)))
            return f"it has layers of {kinds}, which cannot be told where a document ends"
        lengths = torch.tensor(PROBE, device=target.device)
        tokens = (7919 * torch.arange(sum(PROBE), device=target.device) + 1)[None] % target.vocabulary
        documents = torch.arange(len(PROBE), device=target.device).repeat_interleave(lengths)[None]
        positions = torch.cat([torch.arange(size, device=target.device) for size in PROBE])[None]
        masks = Asked(self.masks(documents, single=False))
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
                found = self._run(target.decoder, tokens, positions, masks, full=True)
        except NotUnderstood as error:
            return str(error)
        except Exception as error:  # of any architecture and any compiler
            if is_shortage(error):
                raise
            return self._unfit() if self._step_down(False, error) else first_line(error, kind=True)
        if masks.windows != self.windows:
            return "its layers do not ask for the windows that its config.json tells"
        wanted = target.one_document_at_a_time(tokens, positions, documents, full=True)
        assert found.final is not None and wanted.final is not None
        last = slice(len(documents[0]) - PROBE[-1], None)
        plain = plain_states(target, tokens[:, last], positions[:, last])
        tapped = torch.cat([plain[tap + 1] for tap in target.taps], dim=-1)
        most = allowed(max(far(wanted.taps[:, last], tapped), far(wanted.final[:, last], plain[-1])))
        off = max(far(found.taps, wanted.taps), far(found.final, wanted.final))
        if not off <= most:
            return f"a row of three documents is {off:.2g} off what they give one by one (at most {most:.2g})"
        return None

    def read(
        self, tokens: Tensor, positions: Tensor, documents: Tensor, full: bool, single: bool, again: bool
    ) -> States:
        """States of rows, see `Target.states`; only where this is `ready`.

        A compiler that fails costs one loud line and speed, not the run: the states are the same either way.
        """
        while True:
            compiles = self.compile and again
            shape = (*tokens.shape, full, single, compiles, self.attention)
            decoder = self.target.decoder if full else self.target.trunk
            if compiles:
                if full not in self._compiled:
                    self._compiled[full] = with_compiled_layers(decoder)
                decoder = self._compiled[full]
            before, started = counters["stats"]["unique_graphs"], time.monotonic()
            try:
                states = self._run(decoder, tokens, positions, self.masks(documents, single), full)
            except Exception as error:  # of any compiler
                if is_shortage(error) or shape in self._worked or not self._step_down(compiles, error):
                    raise
                continue
            if compiles and shape not in self._worked:
                graphs, took = counters["stats"]["unique_graphs"] - before, time.monotonic() - started
                self.say(f"target: layers compiled for {list(tokens.shape)}, {graphs} graphs, {took:.0f} s")
            self._worked.add(shape)
            return states

    def _step_down(self, compiles: bool, error: Exception) -> bool:
        """Go on with less; whether there is less."""
        if compiles:
            self.compile, told = False, "its layers cannot be compiled, and run as they are"
        elif self.attention == "flex" and not self.capped:
            self.attention, told = "sdpa", "flex attention fails here, dense masks take its place"
        else:
            return False
        self.say(f"WARNING: the target reads rows slower: {told}: {first_line(error, kind=True)}")
        return True

    @torch.no_grad()
    def _run(self, decoder: Any, tokens: Tensor, positions: Tensor, masks: Masks, full: bool) -> States:
        with self._own_attention():
            return self.target.recorded(
                decoder, full, input_ids=tokens, position_ids=positions, use_cache=False, **{NAME: masks}
            )

    @contextmanager
    def _own_attention(self) -> Iterator[None]:
        from transformers import AttentionInterface

        AttentionInterface.register(NAME, attention)
        config = self.target.config
        before, config._attn_implementation = config._attn_implementation, NAME
        try:
            yield
        finally:
            config._attn_implementation = before


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
