"""Triton kernels of the drafter's attention: a slot reads an interval of the context, and its own block.

A program of `forward` and of `query_gradients` has ROWS rows: neighbouring positions, each with PACK of the
query heads that share a key head, so that a key that was loaded serves them all and a tile's anchors are near
each other. It walks over the keys from the first that a row of it sees to the last, KEYS at a time; only at
the ends, which not all rows see, is anything compared with the rule. A program of `key_gradients` has KEYS
keys and walks over the rows that see them. So each sum is made by one program in one order, and comes out the
same to the bit each time, as sums by atomic additions would not.

Softmax is in base 2, sums are float32. `logs` is log2 of the sum of each row's exponentials: infinite where
the block is dead, so that its probabilities are zero in the backward pass.

Tensors are contiguous: queries [R, Q, A, E], keys and values [R, S or Q, G, E], logs and dots [R, Q, A]. Rows
R, context tokens S, positions Q, query heads A, key heads G, head size E.
"""

from __future__ import annotations

import triton
import triton.language as tl

FAR = tl.constexpr(-1.0e30)  # below any score, and finite: a difference of two is a number


@triton.jit
def _tile(number, ROWS: tl.constexpr, PACK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Position, and head among PACK, of a tile's rows."""
    row = tl.arange(0, ROWS)
    return number * (ROWS // PACK) + row // PACK, row % PACK


@triton.jit
def _ends(spans, at, KEYS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of [first, last), [whole, rest) is seen by all rows; all but `last` multiples of KEYS."""
    first = tl.load(spans + 4 * at) // KEYS * KEYS
    whole = tl.cdiv(tl.load(spans + 4 * at + 1), KEYS) * KEYS
    rest = tl.load(spans + 4 * at + 2) // KEYS * KEYS
    last = tl.load(spans + 4 * at + 3)
    whole, rest = tl.maximum(whole, first), tl.minimum(rest, last)
    none = whole >= rest
    return first, tl.where(none, last, whole), tl.where(none, last, rest), last


@triton.jit
def _blocks(first, last, queries, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """[first, last) widened to whole blocks."""
    return first // BLOCK * BLOCK, tl.minimum((last - 1) // BLOCK * BLOCK + BLOCK, queries)


@triton.jit
def _own(query, key, queries, BLOCK: tl.constexpr, CAUSAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether a position sees another one, as a key of its own block."""
    seen = (query // BLOCK == key // BLOCK) & (key < queries)
    if CAUSAL:
        seen = seen & (key <= query)
    return seen


@triton.jit
def _keys_values(  # type: ignore[no-untyped-def]
    k, v, base, start, count,
    KEYS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Index, keys and values [KEYS, SIZE] from `start` on; zeros from `count` on, unless all are there."""
    key = start + tl.arange(0, KEYS)
    place = base + key[:, None] * (GROUPS * SIZE) + tl.arange(0, SIZE)[None, :]
    if WHOLE:
        return key, tl.load(k + place), tl.load(v + place)
    here = (key < count)[:, None]
    return key, tl.load(k + place, mask=here, other=0.0), tl.load(v + place, mask=here, other=0.0)


@triton.jit
def _softmax_step(total, most, weight, q, k, v, seen, scale, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Online softmax: take some keys in. most [M]: the largest score so far; total [M, E], weight [M]: sums
    so far of weighted values and of weights, in multiples of 2**most.
    """
    scores = tl.dot(q, tl.trans(k))
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    larger = tl.maximum(most, tl.max(scores, 1) * scale)
    p = tl.exp2(scores * scale - larger[:, None])
    fade = tl.exp2(most - larger)
    total = tl.dot(p.to(v.dtype), v, total * fade[:, None])
    return total, larger, weight * fade + tl.sum(p, 1)


@triton.jit
def _read_context(  # type: ignore[no-untyped-def]
    total, most, weight, begin, end, q, k, v, base, lo, hi, tokens, scale,
    KEYS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take the context's tokens [begin, end) in."""
    for start in range(begin, end, KEYS):
        key, kt, vt = _keys_values(k, v, base, start, tokens, KEYS, GROUPS, SIZE, not MASKED)
        seen = (key[None, :] >= lo) & (key[None, :] < hi)
        total, most, weight = _softmax_step(total, most, weight, q, kt, vt, seen, scale, MASKED)
    return total, most, weight


@triton.jit
def forward(  # type: ignore[no-untyped-def]
    q, k, v, own_k, own_v, out, logs, low, high, spans, scale, queries, tokens,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, PACK: tl.constexpr,
    BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Attention and `logs` of one tile of rows: its own blocks OWN keys at a time, then the context.

    scale: of scores in base 2. low, high [R, Q]: the context tokens that each position sees. spans
    [R, tiles, 4]: as `Spans.forward`.
    """
    tiles = tl.num_programs(0)
    number, pack, row = tiles - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    position, head = _tile(number, ROWS, PACK)
    group = pack * PACK // (HEADS // GROUPS)
    there, e = position < queries, tl.arange(0, SIZE)
    at = (row * queries + position) * HEADS + pack * PACK + head
    q_tile = tl.load(q + at[:, None] * SIZE + e[None, :], mask=there[:, None], other=0.0)
    lo = tl.load(low + row * queries + position, mask=there, other=0)[:, None]
    hi = tl.load(high + row * queries + position, mask=there, other=-1)[:, None]

    total = tl.zeros([ROWS, SIZE], tl.float32)
    most, weight = tl.full([ROWS], FAR, tl.float32), tl.zeros([ROWS], tl.float32)
    base = (row * queries * GROUPS + group) * SIZE
    begin, end = _blocks(number * (ROWS // PACK), (number + 1) * (ROWS // PACK), queries, BLOCK)
    for start in range(begin, end, OWN):
        key, kt, vt = _keys_values(own_k, own_v, base, start, queries, OWN, GROUPS, SIZE, False)
        seen = _own(position[:, None], key[None, :], queries, BLOCK, CAUSAL)
        total, most, weight = _softmax_step(total, most, weight, q_tile, kt, vt, seen, scale, True)

    base = (row * tokens * GROUPS + group) * SIZE
    first, whole, rest, last = _ends(spans, row * tiles + number, KEYS)
    total, most, weight = _read_context(
        total, most, weight, first, whole, q_tile, k, v, base, lo, hi, tokens, scale, KEYS, GROUPS, SIZE, True
    )
    total, most, weight = _read_context(
        total, most, weight, whole, rest, q_tile, k, v, base, lo, hi, tokens, scale, KEYS, GROUPS, SIZE, False
    )
    total, most, weight = _read_context(
        total, most, weight, rest, last, q_tile, k, v, base, lo, hi, tokens, scale, KEYS, GROUPS, SIZE, True
    )

    alive = tl.reshape(hi, [ROWS]) >= 0
    weight = tl.where(alive, weight, 1.0)
    total = tl.where(alive[:, None], total / weight[:, None], 0.0)
    tl.store(out + at[:, None] * SIZE + e[None, :], total.to(out.dtype.element_ty), mask=there[:, None])
    tl.store(logs + at, tl.where(alive, most + tl.log2(weight), float("inf")), mask=there)


@triton.jit
def _query_step(d_q, q, d_out, k, v, log, dot, seen, scale, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    p = tl.exp2(tl.dot(q, tl.trans(k)) * scale - log[:, None])
    if MASKED:
        p = tl.where(seen, p, 0.0)
    d_scores = p * (tl.dot(d_out, tl.trans(v)) - dot[:, None])
    return tl.dot(d_scores.to(k.dtype), k, d_q)


@triton.jit
def _context_queries(  # type: ignore[no-untyped-def]
    d_q, begin, end, q, d_out, k, v, base, lo, hi, log, dot, tokens, scale,
    KEYS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take the context's tokens [begin, end) in."""
    for start in range(begin, end, KEYS):
        key, kt, vt = _keys_values(k, v, base, start, tokens, KEYS, GROUPS, SIZE, not MASKED)
        seen = (key[None, :] >= lo) & (key[None, :] < hi)
        d_q = _query_step(d_q, q, d_out, kt, vt, log, dot, seen, scale, MASKED)
    return d_q


@triton.jit
def query_gradients(  # type: ignore[no-untyped-def]
    q, k, v, own_k, own_v, out, d_out, logs, dots, d_q, low, high, spans, scale, factor, queries, tokens,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, PACK: tl.constexpr,
    BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of queries; and `dots`, its outputs times their gradients, for `key_gradients`.

    spans [R, tiles, 4]: as `Spans.queries`. factor: of scores before they are in base 2.
    """
    tiles = tl.num_programs(0)
    number, pack, row = tiles - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    position, head = _tile(number, ROWS, PACK)
    group = pack * PACK // (HEADS // GROUPS)
    there, e = position < queries, tl.arange(0, SIZE)
    at = (row * queries + position) * HEADS + pack * PACK + head
    mine = at[:, None] * SIZE + e[None, :]
    lo = tl.load(low + row * queries + position, mask=there, other=0)[:, None]
    hi = tl.load(high + row * queries + position, mask=there, other=-1)[:, None]
    q_tile = tl.load(q + mine, mask=there[:, None], other=0.0)
    d_tile = tl.load(d_out + mine, mask=hi >= 0, other=0.0)
    o_tile = tl.load(out + mine, mask=there[:, None], other=0.0)
    dot = tl.sum(o_tile.to(tl.float32) * d_tile.to(tl.float32), 1)
    tl.store(dots + at, dot, mask=there)
    log = tl.load(logs + at, mask=there, other=float("inf"))

    total = tl.zeros([ROWS, SIZE], tl.float32)
    base = (row * queries * GROUPS + group) * SIZE
    begin, end = _blocks(number * (ROWS // PACK), (number + 1) * (ROWS // PACK), queries, BLOCK)
    for start in range(begin, end, OWN):
        key, kt, vt = _keys_values(own_k, own_v, base, start, queries, OWN, GROUPS, SIZE, False)
        seen = _own(position[:, None], key[None, :], queries, BLOCK, CAUSAL)
        total = _query_step(total, q_tile, d_tile, kt, vt, log, dot, seen, scale, True)

    base = (row * tokens * GROUPS + group) * SIZE
    first, whole, rest, last = _ends(spans, row * tiles + number, KEYS)
    total = _context_queries(
        total, first, whole, q_tile, d_tile, k, v, base, lo, hi, log, dot, tokens, scale,
        KEYS, GROUPS, SIZE, True,
    )  # fmt: skip
    total = _context_queries(
        total, whole, rest, q_tile, d_tile, k, v, base, lo, hi, log, dot, tokens, scale,
        KEYS, GROUPS, SIZE, False,
    )  # fmt: skip
    total = _context_queries(
        total, rest, last, q_tile, d_tile, k, v, base, lo, hi, log, dot, tokens, scale,
        KEYS, GROUPS, SIZE, True,
    )  # fmt: skip
    tl.store(d_q + mine, (total * factor).to(d_q.dtype.element_ty), mask=there[:, None])


@triton.jit
def _rows(  # type: ignore[no-untyped-def]
    d_k, d_v, begin, end, kt, vt, q, d_out, logs, dots, low, high, key, heads_at, row, queries, scale,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PACK: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, MASKED: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Take the tiles of rows [begin, end) in."""
    for number in range(begin, end):
        position, head = _tile(number, ROWS, PACK)
        there = position < queries
        at = (row * queries + position) * HEADS + heads_at + head
        place = at[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        q_tile = tl.load(q + place, mask=there[:, None], other=0.0)
        d_tile = tl.load(d_out + place, mask=there[:, None], other=0.0)
        log = tl.load(logs + at, mask=there, other=float("inf"))
        dot = tl.load(dots + at, mask=there, other=0.0)
        p = tl.exp2(tl.dot(kt, tl.trans(q_tile)) * scale - log[None, :])
        if OWN:
            p = tl.where(_own(position[None, :], key[:, None], queries, BLOCK, CAUSAL), p, 0.0)
        elif MASKED:
            lo = tl.load(low + row * queries + position, mask=there, other=0)
            hi = tl.load(high + row * queries + position, mask=there, other=-1)
            p = tl.where((key[:, None] >= lo[None, :]) & (key[:, None] < hi[None, :]), p, 0.0)
        d_v = tl.dot(p.to(d_tile.dtype), d_tile, d_v)
        d_scores = p * (tl.dot(vt, tl.trans(d_tile)) - dot[None, :])
        d_k = tl.dot(d_scores.to(q_tile.dtype), q_tile, d_k)
    return d_k, d_v


@triton.jit
def key_gradients(  # type: ignore[no-untyped-def]
    q, k, v, d_out, logs, dots, d_k, d_v, low, high, spans, scale, factor, queries, keys,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, PACK: tl.constexpr,
    BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of the context's keys and values; with OWN of the blocks', which need no `spans`.

    spans [R, tiles, 4]: as `Spans.keys`. keys: how many there are. factor: as in `query_gradients`.
    """
    tile, group, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    key, e = tile * KEYS + tl.arange(0, KEYS), tl.arange(0, SIZE)
    place = (row * keys * GROUPS + group) * SIZE + key[:, None] * (GROUPS * SIZE) + e[None, :]
    here = (key < keys)[:, None]
    kt, vt = tl.load(k + place, mask=here, other=0.0), tl.load(v + place, mask=here, other=0.0)
    sum_k, sum_v = tl.zeros([KEYS, SIZE], tl.float32), tl.zeros([KEYS, SIZE], tl.float32)
    if OWN:
        begin, end = _blocks(tile * KEYS, tl.minimum((tile + 1) * KEYS, queries), queries, BLOCK)
        first, last = begin // (ROWS // PACK), tl.cdiv(end, ROWS // PACK)
        whole, rest = last, last
    else:
        at = 4 * (row * tl.num_programs(0) + tile)
        first, whole = tl.load(spans + at), tl.load(spans + at + 1)
        rest, last = tl.load(spans + at + 2), tl.load(spans + at + 3)
    for pack in range(HEADS // GROUPS // PACK):
        heads_at = group * (HEADS // GROUPS) + pack * PACK
        sum_k, sum_v = _rows(
            sum_k, sum_v, first, whole, kt, vt, q, d_out, logs, dots, low, high, key, heads_at, row, queries,
            scale, HEADS, SIZE, PACK, BLOCK, CAUSAL, ROWS, True, OWN,
        )  # fmt: skip
        sum_k, sum_v = _rows(
            sum_k, sum_v, whole, rest, kt, vt, q, d_out, logs, dots, low, high, key, heads_at, row, queries,
            scale, HEADS, SIZE, PACK, BLOCK, CAUSAL, ROWS, False, OWN,
        )  # fmt: skip
        sum_k, sum_v = _rows(
            sum_k, sum_v, rest, last, kt, vt, q, d_out, logs, dots, low, high, key, heads_at, row, queries,
            scale, HEADS, SIZE, PACK, BLOCK, CAUSAL, ROWS, True, OWN,
        )  # fmt: skip
    tl.store(d_k + place, (sum_k * factor).to(d_k.dtype.element_ty), mask=here)
    tl.store(d_v + place, sum_v.to(d_v.dtype.element_ty), mask=here)
