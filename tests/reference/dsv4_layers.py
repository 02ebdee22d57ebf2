"""Layers of DeepSeek-V4 and V4.1 in float64 NumPy, written from docs/models/deepseek_v41.md alone.

Whole sequences at once, no caches: every row gathers its own keys. `Store` decides where values are rounded.
Legend: T rows, H hidden, n streams, N heads, D head dimension, E entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import dsv4_formats as formats
import numpy as np

Array = np.ndarray


class Store:
    """Rounding of stored values: nothing when `quantised` is false."""

    def __init__(self, quantised: bool, group: int) -> None:
        self.quantised = quantised
        self.group = group

    def bf16(self, x: Array) -> Array:
        return formats.bf16(x) if self.quantised else x

    def fp32(self, x: Array) -> Array:
        return x.astype(np.float32).astype(np.float64) if self.quantised else x

    def activation(self, x: Array) -> Array:
        return formats.fp8_activation(self.fp32(x), self.group) if self.quantised else x

    def window_entry(self, x: Array) -> Array:
        return formats.fp8_entry(x) if self.quantised else x

    def main_entry(self, x: Array) -> Array:
        return formats.fp4_entry(x) if self.quantised else x

    def index_entry(self, x: Array) -> Array:
        return formats.fp4_index(x) if self.quantised else x


def sigmoid(x: Array) -> Array:
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


def softmax(x: Array, axis: int) -> Array:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def rms(x: Array, weight: Array | float, eps: float) -> Array:
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


# --- hyper-connections -----------------------------------------------------------------------------------------------


def sinkhorn(logits: Array, iterations: int, eps: float) -> Array:
    """Rows to probabilities, then alternating column and row normalisation, ending with columns."""
    c = softmax(logits, -1) + eps
    c = c / (c.sum(-2, keepdims=True) + eps)
    for _ in range(iterations - 1):
        c = c / (c.sum(-1, keepdims=True) + eps)
        c = c / (c.sum(-2, keepdims=True) + eps)
    return c


def mix(streams: Array, fn: Array, base: Array, scale: Array, config: dict) -> tuple[Array, Array, Array]:
    """(pre [T, n], post [T, n], comb [T, n, n])."""
    n, eps = config["hc_mult"], config["hc_eps"]
    flat = streams.reshape(len(streams), -1)
    m = (flat @ fn.T) / np.sqrt((flat * flat).mean(-1, keepdims=True) + config["rms_norm_eps"])
    pre = sigmoid(m[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = (m[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)
    return pre, post, sinkhorn(logits, config["hc_sinkhorn_iters"], eps)


def rebuild(streams: Array, out: Array, post: Array, comb: Array) -> Array:
    """R'_i = post_i out + sum_j comb[j, i] R_j."""
    return post[:, :, None] * out[:, None, :] + np.einsum("tji,tjh->tih", comb, streams)


def collapse(streams: Array, weights: Array) -> Array:
    return np.einsum("tk,tkh->th", weights, streams)


# --- rotary positions ------------------------------------------------------------------------------------------------


def rope_frequencies(config: dict, compressed: bool) -> Array:
    dim = config["qk_rope_head_dim"]
    i = np.arange(dim // 2)
    if not compressed:
        return config["rope_theta"] ** (-2.0 * i / dim)
    theta, scaling = config["compress_rope_theta"], config["rope_scaling"]
    omega = theta ** (-2.0 * i / dim)
    if scaling is None:
        return omega
    original = scaling["original_max_position_embeddings"]

    def where(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(0, math.floor(where(scaling["beta_fast"])))
    high = min(dim - 1, math.ceil(where(scaling["beta_slow"])))
    ramp = np.clip((i - low) / max(high - low, 0.001), 0, 1)
    return omega * (1 - ramp) + omega / scaling["factor"] * ramp


def rotate_tail(x: Array, positions: Array, omega: Array) -> Array:
    """Rotate interleaved pairs of the last 2 len(omega) dimensions; `x` is [T, ..., D], positions [T]."""
    dim = 2 * len(omega)
    angle = np.asarray(positions, dtype=np.float64).reshape(-1, *([1] * (x.ndim - 1))) * omega
    even, odd = x[..., -dim::2], x[..., -dim + 1 :: 2]
    out = x.copy()
    out[..., -dim::2] = even * np.cos(angle) - odd * np.sin(angle)
    out[..., -dim + 1 :: 2] = even * np.sin(angle) + odd * np.cos(angle)
    return out


# --- attention -------------------------------------------------------------------------------------------------------


def attend(q: Array, keys: Array, sinks: Array) -> Array:
    """One row: q [N, D] over keys [K, D] that are also values, with a sink logit a head."""
    scores = q @ keys.T / math.sqrt(q.shape[-1])
    top = np.maximum(scores.max(-1, keepdims=True), sinks[:, None])
    e = np.exp(scores - top)
    return (e @ keys) / (e.sum(-1, keepdims=True) + np.exp(sinks[:, None] - top))


def grouped_output(o: Array, wo_a: Array, wo_b: Array, groups: int, store: Store) -> Array:
    """o [T, N, D] -> [T, H]."""
    rows = len(o)
    o_groups = o.reshape(rows, groups, -1)
    wo_a = wo_a.reshape(groups, -1, o_groups.shape[-1])
    z = np.einsum("tgk,grk->tgr", store.activation(o_groups), wo_a)
    z = store.bf16(z).reshape(rows, -1)
    return store.bf16(store.activation(z) @ wo_b.T)


def best(scores: Array, count: int) -> Array:
    """Indexes of the `count` largest, ties to the lower index."""
    return np.sort(np.argsort(-scores, kind="stable")[:count])


def pair_latents(c: Array, g: Array) -> Array:
    """Ratio 2: softmax over the two tokens of each complete pair, per channel; [T, D] -> [T // 2, D]."""
    pairs = len(c) // 2
    c, g = (x[: 2 * pairs].reshape(pairs, 2, x.shape[-1]) for x in (c, g))
    return (softmax(g, 1) * c).sum(1)


def overlap_entries(c: Array, g: Array, ape: Array) -> Array:
    """V4, ratio 4: [T, 2 D] contents and gates -> [T // 4, D]; window w takes the A halves of window w - 1."""
    ratio, width = ape.shape[0], ape.shape[1] // 2
    windows = len(c) // ratio
    out = np.zeros((windows, width))
    for w in range(windows):
        parts, gates = [], []
        for t in range(ratio * (w - 1), ratio * (w + 1)):
            if t < 0:
                continue
            half = slice(0, width) if t < ratio * w else slice(width, 2 * width)
            parts.append(c[t, half])
            gates.append(g[t, half] + ape[t % ratio, half])
        out[w] = (softmax(np.array(gates), 0) * np.array(parts)).sum(0)
    return out


def plain_entries(c: Array, g: Array, ape: Array) -> Array:
    """V4, other ratios: [T, D] -> [T // ratio, D], no overlap."""
    ratio = ape.shape[0]
    windows = len(c) // ratio
    c, g = (x[: ratio * windows].reshape(windows, ratio, x.shape[-1]) for x in (c, g))
    return (softmax(g + ape, 1) * c).sum(1)


# --- mixture of experts ----------------------------------------------------------------------------------------------


def swiglu(x: Array, w1: Array, w3: Array, limit: float, store: Store) -> Array:
    """The hidden activation of an expert, before quantisation."""
    x = store.activation(x)
    a = np.minimum(store.bf16(x @ w1.T), limit)
    b = np.clip(store.bf16(x @ w3.T), -limit, limit)
    return a * sigmoid(a) * b


def route(logits: Array, bias: Array | None, count: int, scale: float, chosen: Array | None) -> tuple[Array, Array]:
    """One row: (expert ids, weights). `chosen` fixes the ids (hash layers)."""
    scores = np.sqrt(np.logaddexp(0, logits))
    ids = best(scores + bias, count) if chosen is None else chosen
    return ids, scores[ids] / (scores[ids].sum() + 1e-20) * scale


def moe(
    x: Array, router: Callable[[int], tuple[Array, Array]], expert: Callable[[str], Array], limit: float, store: Store
) -> Array:
    """Routed experts and the shared one; `expert("E.w1")` and `expert("shared.w1")` give weights."""
    out = np.zeros_like(x)
    for t in range(len(x)):
        for e, weight in zip(*router(t), strict=True):
            hidden = weight * swiglu(x[t], expert(f"{e}.w1"), expert(f"{e}.w3"), limit, store)
            out[t] += store.activation(hidden) @ expert(f"{e}.w2").T
        hidden = swiglu(x[t], expert("shared.w1"), expert("shared.w3"), limit, store)
        out[t] += store.activation(hidden) @ expert("shared.w2").T
    return store.bf16(out)


# --- engram ----------------------------------------------------------------------------------------------------------


def is_prime(value: int) -> bool:
    return value > 1 and all(value % d for d in range(2, math.isqrt(value) + 1))


def engram_primes(config: dict) -> list[list[int]]:
    """For each engram layer, one modulus a column: n-gram sizes 2, 3, ... times heads; no prime is used twice."""
    used: set[int] = set()
    result = []
    for _ in config["engram_layer_ids"]:
        primes = []
        for _ in range(2, config["engram_max_ngram_size"] + 1):
            candidate = config["engram_vocab_size"] - 1
            for _ in range(config["engram_n_heads"]):
                candidate += 1
                while candidate in used or not is_prime(candidate):
                    candidate += 1
                used.add(candidate)
                primes.append(candidate)
        result.append(primes)
    return result


def engram_multipliers(layer: int, vocabulary: int, count: int) -> list[int]:
    high = (2**63 - 1) // vocabulary // 2
    return [2 * int(v) + 1 for v in np.random.default_rng(10007 * layer).integers(0, high, count, dtype=np.int64)]


def engram_rows(
    tokens: list[int],
    token_map: Array,
    primes: list[int],
    multipliers: list[int],
    config: dict,
    image_token: int | None,
) -> Array:
    """Row ids [T, columns] of the layer's table."""
    sizes = config["engram_max_ngram_size"]
    heads = config["engram_n_heads"]
    pad = int(token_map[config["engram_pad_token_id"]])
    offsets = np.concatenate([[0], np.cumsum(primes)[:-1]])
    out = np.zeros((len(tokens), len(primes)), dtype=np.int64)
    for p in range(len(tokens)):
        ids = []
        blocked = False
        for s in range(sizes):
            blocked = blocked or p - s < 0 or tokens[p - s] == image_token
            ids.append(pad if blocked else int(token_map[tokens[p - s]]))
        for size in range(2, sizes + 1):
            h = 0
            for s in range(size):
                h ^= ids[s] * multipliers[s]
            for head in range(heads):
                column = (size - 2) * heads + head
                out[p, column] = h % primes[column] + offsets[column]
    return out


def engram_update(
    streams: Array, e: Array, wkv: Array, q_weight: Array, k_weight: Array, eps: float, store: Store
) -> Array:
    """R_i + gate_i v for every stream; e [T, columns * D]."""
    n, hidden = streams.shape[1:]
    kv = store.bf16(store.activation(e) @ wkv.T).reshape(len(e), n + 1, hidden)
    k, v = kv[:, :n], kv[:, n]
    d = (streams * q_weight * k_weight * k).sum(-1)
    d = d / np.sqrt((streams**2).mean(-1) + eps) / np.sqrt((k**2).mean(-1) + eps) / math.sqrt(hidden)
    gate = sigmoid(np.sign(d) * np.sqrt(np.maximum(np.abs(d), 1e-6)))
    return store.bf16(streams + gate[:, :, None] * v[:, None, :])
