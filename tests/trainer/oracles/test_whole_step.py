"""One training step against decoding: every block drafted alone, by loops, after the target has read one
token at a
time.

The slow side knows no packing, no mask and no batch. It takes a document, lets transformers' own model read
it through its own cache token by token, and drafts each block from the states of exactly the tokens before
its anchor. Loss and gradients follow from the definition of the objective.

Run: python -m pytest tests/trainer/oracles/test_whole_step.py
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from slow_drafter import draft
from slow_rules import dpace
from tiny_cases import BLOCK, LAYERS, MASK_ID, TAPS, documents, drafter, qwen3, settings, shape_of, weights_of
from torch import Tensor, nn
from transformers import DynamicCache

from trainer.data.anchors import needed_width
from trainer.data.batch import Batch
from trainer.data.packing import Document, Rows, pack
from trainer.evaluation.proposers import BatchDrafter
from trainer.model.drafter import Drafter
from trainer.model.target import Target
from trainer.sections import TrainConfig
from trainer.training.objective import draw
from trainer.training.step import DrafterStep


@dataclass(frozen=True)
class Read:
    """What the target said while it read one document token by token."""

    taps: Tensor  # [T, K * H]
    logits: Tensor  # [T, V]


@torch.no_grad()
def read_token_by_token(model: nn.Module, document: Document) -> Read:
    keyword = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    cache: dict[str, Any] = {keyword: DynamicCache(), "use_cache": True}
    taps, logits = [], []
    for token in document.tokens:
        said = model(torch.tensor([[token]]), output_hidden_states=True, **cache)
        taps.append(torch.cat([said.hidden_states[tap + 1][0, 0] for tap in TAPS]))
        logits.append(said.logits[0, 0])
    return Read(torch.stack(taps).double(), torch.stack(logits).double())


def anchors_of(document: Document) -> list[int]:
    good = document.supervised
    return [place for place in range(1, len(good) - 1) if good[place] and good[place + 1]]


def block_tokens(document: Document, anchor: int) -> list[int]:
    return [document.tokens[anchor]] + [MASK_ID] * (BLOCK - 1)


@dataclass
class Slow:
    """The slow side's answer for a set of documents."""

    loss: Tensor
    weight: float
    hidden: dict[tuple[int, int], Tensor]  # (document, anchor) -> [B, H]


def slow_step(
    made: Drafter, w: dict[str, Tensor], model: nn.Module, texts: list[Document], config: TrainConfig
) -> Slow:
    objective, shape = config.objective, shape_of(made)
    embedding = model.get_input_embeddings().weight.double()  # type: ignore[operator]
    head = model.get_output_embeddings().weight.double()  # type: ignore[operator]
    total, weight_sum, hidden = torch.zeros((), dtype=torch.float64), 0.0, {}
    for number, document in enumerate(texts):
        read = read_token_by_token(model, document)
        for anchor in anchors_of(document):
            out = draft(w, shape, read.taps[:anchor], embedding[block_tokens(document, anchor)])
            hidden[number, anchor] = out.detach()
            losses, confidences, given, decays = [], [], [], []
            for slot in range(1, BLOCK):
                place = anchor + slot
                given.append(place < len(document.tokens) and document.supervised[place])
                said = (head @ out[slot]).log_softmax(0)
                if not given[-1]:
                    losses.append(torch.zeros(()))
                    confidences.append(1.0)
                    decays.append(0.0)
                    continue
                teacher = read.logits[place - 1]
                label = document.tokens[place] if objective.labels == "data" else int(teacher.argmax())
                p = teacher.softmax(0)
                kl = (p * (p.log() - said)).sum()
                losses.append(kl if objective.labels == "kl" else -said[label])
                confidences.append(math.exp(said[label].item()))
                decays.append(math.exp(-(slot - 1) / config.gamma))
            weights = decays
            if objective.weighting == "dpace":
                weights = dpace(confidences, given, objective.dpace_alpha)
            for weight, loss in zip(weights, losses, strict=True):
                total = total + weight * loss
                weight_sum += weight
    return Slow(total, weight_sum, hidden)


def fast_rows(target: Target, texts: list[Document], row_tokens: int) -> Batch:
    rows = pack(texts, row_tokens)
    return Batch(rows, target.states(rows.tokens, rows.positions, rows.documents, full=True))


def which(rows: Rows, texts: list[Document], row: int, place: int) -> tuple[int, int]:
    """(document, token) of a place in the packed rows; the documents are told apart by their tokens."""
    number = int(rows.documents[row, place])
    own = rows.tokens[row][rows.documents[row] == number].tolist()
    found = [index for index, document in enumerate(texts) if document.tokens == own]
    assert len(found) == 1
    return found[0], int(rows.positions[row, place])


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize(
    ("labels", "weighting", "cuts"),
    [
        ("data", "decay", [slice(0, 2)]),
        ("kl", "decay", [slice(0, 1), slice(1, 2)]),  # micro-batches
        ("target", "dpace", [slice(0, 1), slice(1, 2)]),
    ],
)
def test_loss_and_gradients_of_a_packed_step(
    layers: str, labels: str, weighting: str, cuts: list[slice]
) -> None:
    model, made, texts = qwen3(), drafter(layers), documents()
    config = settings(labels=labels, weighting=weighting)
    w = weights_of(made, gradients=True)
    slow = slow_step(made, w, model, texts, config)
    slow.loss.backward()

    target = Target(model, TAPS)
    batch = fast_rows(target, texts, 24)  # two rows, one of them with two documents and padding
    assert len(batch.rows) == 2
    width = needed_width(batch.rows, 100) + 3  # dead blocks, which the slow side does not have
    step = DrafterStep(made, target, config, width)
    uniform = draw((2, 24), 0, 0, 0)
    loss = weight = 0.0
    for cut in cuts:
        sums = step.sums(batch.part(cut), uniform[cut])
        sums.loss.backward()
        loss, weight = loss + sums.loss.item(), weight + sums.weight.item()

    assert len(slow.hidden) > 10
    assert weight == pytest.approx(slow.weight, rel=1e-5)
    assert loss == pytest.approx(slow.loss.item(), rel=1e-5)
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None and w[name].grad is not None
        error = (parameter.grad.double() - w[name].grad).norm() / w[name].grad.norm()
        assert error < 1e-4, (name, error)


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 2e-5), ("bfloat16", 0.05)])
@torch.no_grad()
def test_every_block_of_a_packed_forward(layers: str, precision: str, tolerance: float) -> None:
    """Errors are relative to the block's largest number; bfloat16 keeps 8 bits, some 0.4 % a rounding."""
    model, made, texts = qwen3(), drafter(layers), documents()
    config = settings(precision)
    slow = slow_step(made, weights_of(made), model, texts, config)
    target = Target(model, TAPS)
    batch = fast_rows(target, texts, 30)
    step = DrafterStep(made, target, config, needed_width(batch.rows, 100) + 3)  # three dead blocks at least
    blocks = step.blocks(batch.rows, draw((len(batch.rows), 30), 0, 0, 0))
    hidden = step.hidden(batch, blocks).view(*blocks.anchors.shape, BLOCK - 1, -1)
    seen, errors = set(), []
    for row, column in blocks.keep.nonzero().tolist():
        where = which(batch.rows, texts, row, int(blocks.anchors[row, column]))
        seen.add(where)
        wanted = slow.hidden[where][1:]
        errors.append(((hidden[row, column].double() - wanted).abs().max() / wanted.abs().max()).item())
    assert seen == set(slow.hidden)
    assert max(errors) < tolerance, max(errors)


@pytest.mark.parametrize("layers", LAYERS)
@torch.no_grad()
def test_the_decoders_cached_drafting(layers: str) -> None:
    """The drafter that decodes, two prompts of a batch at different lengths, rejected tokens left in its
    cache.
    """
    model, made, texts = qwen3(), drafter(layers), documents((12, 12))
    w, shape, target = weights_of(made), shape_of(made), Target(model, TAPS)
    embedding, head = target.embedding.weight.double(), target.head_weight.double()
    reads = [read_token_by_token(model, document) for document in texts]
    taps = torch.stack([read.taps for read in reads]).float()
    cached = BatchDrafter(made, target)
    cached.read(taps[:, :5], torch.arange(5).expand(2, 5), torch.ones(2, 5, dtype=torch.bool))
    # Row 0 accepts 4 of the next 4 tokens, row 1 only 2; what row 1 rejected is garbage, never to be seen.
    after = taps[:, 5:9].clone()
    after[1, 2:] = 100.0
    kept = torch.tensor([[True] * 4, [True, True, False, False]])
    cached.read(after, torch.arange(5, 9).expand(2, 4), kept)
    # The next pass brings row 1 the true tokens 7 and 8; the garbage beside them has the same positions.
    true = torch.stack((taps[0, 9:11], taps[1, 7:9]))
    cached.read(true, torch.tensor([[9, 10], [7, 8]]), torch.ones(2, 2, dtype=torch.bool))
    starts = torch.tensor([11, 9])
    anchors = torch.tensor([texts[0].tokens[11], texts[1].tokens[9]])
    logits = cached.logits(anchors, starts)
    for row, start in enumerate(starts.tolist()):
        out = draft(w, shape, reads[row].taps[:start], embedding[block_tokens(texts[row], start)])
        wanted = out[1:] @ head.T
        assert ((logits[row].double() - wanted).abs().max() / wanted.abs().max()) < 2e-5
