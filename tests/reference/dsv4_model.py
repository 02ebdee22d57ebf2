"""Whole models of DeepSeek-V4 and V4.1 and the DSpark draft in float64 NumPy, from docs/models/deepseek_v41.md alone.

`weights` maps published names (without an optional `model.` prefix) to dequantised float64 arrays; a linear weight is
found as `<name>.weight`. `config` is the text part of config.json.
"""

from __future__ import annotations

import dsv4_layers as L
import numpy as np

Array = np.ndarray


class Reference:
    """Runs whole sequences. `taps` collects what tests look at."""

    def __init__(
        self, config: dict, weights: dict[str, Array], *, v41: bool, quantised: bool, token_map: Array | None = None
    ) -> None:
        self.config, self.w, self.v41 = config, weights, v41
        self.store = L.Store(quantised, 32 if v41 else 128)
        self.token_map = token_map
        self.eps = config["rms_norm_eps"]
        self.image_token = config.get("image_token_id")
        self.taps: dict[str, object] = {}
        self.omega = {c: L.rope_frequencies(config, c) for c in (False, True)}

    # --- helpers ---

    def linear(self, x: Array, name: str, *, fp8: bool = True, rounded: bool = True) -> Array:
        y = (self.store.activation(x) if fp8 else x) @ self.w[f"{name}.weight"].T
        return self.store.bf16(y) if rounded else y

    def norm(self, x: Array, name: str) -> Array:
        return self.store.bf16(L.rms(x, self.w[f"{name}.weight"], self.eps))

    def source(self, ids: list[int], layer: int) -> int:
        return max(i for i in ids if i <= layer)

    # --- backbone ---

    def forward(self, tokens: list[int]) -> Array:
        """Logits [T, vocabulary]."""
        config = self.config
        x = self.store.bf16(self.w["embed.weight"][tokens])
        streams = np.repeat(x[:, None, :], config["hc_mult"], 1)
        pre = np.zeros((len(tokens), config["hc_mult"]))
        pre[:, 0] = 1
        self.published: dict[tuple[str, int], list] = {}
        self.features = []
        for layer in range(config["num_hidden_layers"]):
            if self.v41 and layer in config["engram_layer_ids"]:
                streams = self.engram(streams, tokens, layer)
            if layer in config.get("dspark_target_layer_ids", []):
                self.features.append(self.store.bf16(streams.mean(1)))
            streams, pre = self.layer(streams, pre, tokens, f"layers.{layer}", layer)
        if not self.v41:
            flat = streams.reshape(len(tokens), -1)
            m = flat @ self.w["hc_head_fn"].T / np.sqrt((flat**2).mean(-1, keepdims=True) + self.eps)
            pre = L.sigmoid(m * self.w["hc_head_scale"] + self.w["hc_head_base"]) + config["hc_eps"]
        y = self.store.bf16(L.collapse(streams, pre))
        self.taps["streams"] = streams
        return self.norm(y, "norm") @ self.w["head.weight"].T

    def layer(self, streams: Array, pre: Array, tokens: list[int], name: str, layer: int) -> tuple[Array, Array]:
        """Attention and feed-forward sublayers; returns the streams and the last pre."""
        for kind in ("attn", "ffn"):
            parts = [self.w[f"{name}.hc_{kind}_{part}"] for part in ("fn", "base", "scale")]
            own, post, comb = L.mix(streams, *parts, self.config)
            x = self.store.bf16(L.collapse(streams, pre if self.v41 else own))
            x = self.norm(x, f"{name}.{kind}_norm")
            out = self.attention(x, name, layer) if kind == "attn" else self.ffn(x, tokens, name, layer)
            self.taps[f"{name}.{kind}"] = out
            streams = self.store.bf16(L.rebuild(streams, out, post, comb))
            pre = own
        return streams, pre

    def engram(self, streams: Array, tokens: list[int], layer: int) -> Array:
        config, name = self.config, f"layers.{layer}.engram"
        primes = L.engram_primes(config)[config["engram_layer_ids"].index(layer)]
        multipliers = L.engram_multipliers(
            layer, config["engram_compressed_vocab_size"], config["engram_max_ngram_size"]
        )
        rows = L.engram_rows(tokens, self.token_map, primes, multipliers, config, self.image_token)
        self.taps[f"{name}.rows"] = rows
        e = self.w[f"{name}.embed.weight"][rows].reshape(len(tokens), -1)
        updated = L.engram_update(
            streams,
            e,
            self.w[f"{name}.wkv.weight"],
            self.w[f"{name}.q_weight"],
            self.w[f"{name}.k_weight"],
            self.eps,
            self.store,
        )
        image = np.array(tokens) == (-1 if self.image_token is None else self.image_token)
        return np.where(image[:, None, None], streams, updated)

    # --- attention ---

    def attention(self, x: Array, name: str, layer: int) -> Array:
        config, attn = self.config, f"{name}.attn"
        ratio = config["compress_ratios"][layer]
        positions = np.arange(len(x))
        omega = self.omega[ratio > 0]
        qr, q = self.query(x, attn, positions, omega)
        kv = self.window_entries(x, attn, positions, omega)
        entries, chosen = self.compressed(x, qr, attn, layer, ratio, positions)
        o = np.zeros_like(q)
        for p in range(len(x)):
            keys = kv[max(0, p - config["sliding_window"] + 1) : p + 1]
            if ratio:
                keys = np.concatenate([keys, entries[chosen[p]]])
            o[p] = L.attend(q[p], keys, self.w[f"{attn}.attn_sink"])
        return self.output(o, attn, positions, omega)

    def query(self, x: Array, attn: str, positions: Array, omega: Array) -> tuple[Array, Array]:
        qr = self.norm(self.linear(x, f"{attn}.wq_a"), f"{attn}.q_norm")
        q = self.linear(qr, f"{attn}.wq_b").reshape(len(x), self.config["num_attention_heads"], -1)
        if not self.v41:
            q = self.store.bf16(L.rms(q, 1.0, self.eps))
        return qr, self.store.bf16(L.rotate_tail(q, positions, omega))

    def window_entries(self, x: Array, attn: str, positions: Array, omega: Array) -> Array:
        kv = self.norm(self.linear(x, f"{attn}.wkv"), f"{attn}.kv_norm")
        return self.store.window_entry(self.store.bf16(L.rotate_tail(kv, positions, omega)))

    def output(self, o: Array, attn: str, positions: Array, omega: Array) -> Array:
        o = self.store.bf16(L.rotate_tail(o, -positions, omega))
        wo_a, wo_b = self.w[f"{attn}.wo_a.weight"], self.w[f"{attn}.wo_b.weight"]
        return L.grouped_output(o, wo_a, wo_b, self.config["o_groups"], self.store)

    def compressed(self, x: Array, qr: Array, attn: str, layer: int, ratio: int, positions: Array) -> tuple:
        """(entries [E, D], for each row the entries it attends to)."""
        if ratio == 0:
            return None, None
        return (self.compressed_v41 if self.v41 else self.compressed_v4)(x, qr, attn, layer, ratio, positions)

    def compressed_v4(self, x: Array, qr: Array, attn: str, layer: int, ratio: int, positions: Array) -> tuple:
        omega = self.omega[True]

        def entries(name: str) -> Array:
            c, g = x @ self.w[f"{name}.wkv.weight"].T, x @ self.w[f"{name}.wgate.weight"].T
            make = L.overlap_entries if ratio == 4 else L.plain_entries
            e = L.rms(make(c, g, self.w[f"{name}.ape"]), self.w[f"{name}.norm.weight"], self.eps)
            return L.rotate_tail(e, ratio * np.arange(len(e)), omega)

        main = entries(f"{attn}.compressor")
        if ratio != 4:
            return main, [np.arange((p + 1) // ratio) for p in positions]
        keys = entries(f"{attn}.indexer.compressor")
        scores = self.index_scores(x, qr, attn, keys, positions)
        return main, [L.best(scores[p, : (p + 1) // ratio], self.config["index_topk"]) for p in positions]

    def index_scores(self, x: Array, qr: Array, attn: str, keys: Array, positions: Array) -> Array:
        heads, dim = self.config["index_n_heads"], self.config["index_head_dim"]
        q = self.linear(qr, f"{attn}.indexer.wq_b").reshape(len(x), heads, dim)
        q = self.store.bf16(L.rotate_tail(q, positions, self.omega[True]))
        q = self.store.index_entry(q)
        weights = x @ self.w[f"{attn}.indexer.weights_proj.weight"].T * heads**-0.5 * dim**-0.5
        return np.einsum("th,the->te", weights, np.maximum(np.einsum("thd,ed->the", q, keys), 0))

    def compressed_v41(self, x: Array, qr: Array, attn: str, layer: int, ratio: int, positions: Array) -> tuple:
        config, published = self.config, self.published
        if layer in config["kv_source_layer_ids"]:
            published["main", layer], published["keys", layer] = self.source_entries(x, attn, ratio)
        kv_source = self.source(config["kv_source_layer_ids"], layer)
        index_source = self.source(config["index_source_layer_ids"], layer)
        if layer == index_source:
            scores = self.index_scores(x, qr, attn, published["keys", kv_source], positions)
            published["chosen", layer] = [self.choose(scores[p, : (p + 1) // ratio], layer, p) for p in range(len(x))]
        return published["main", kv_source], published["chosen", index_source]

    def source_entries(self, x: Array, attn: str, ratio: int) -> tuple[Array, Array]:
        name, store, omega = f"{attn}.compressor", self.store, self.omega[True]
        c = store.fp32(x @ self.w[f"{name}.wkv.weight"].T)
        if ratio == 2:
            c = L.pair_latents(c, store.fp32(x @ self.w[f"{name}.wgate.weight"].T))
        latent = self.norm(store.bf16(c), f"{name}.norm")
        at = ratio * np.arange(len(latent))
        main = store.main_entry(store.bf16(L.rotate_tail(latent, at, omega)))
        key = self.linear(latent, f"{attn}.indexer.wk", fp8=False)
        key = self.norm(key, f"{attn}.indexer.k_norm")
        return main, store.index_entry(store.bf16(L.rotate_tail(key, at, omega)))

    def choose(self, scores: Array, layer: int, p: int) -> Array:
        """One row's entries, from all visible or (late index layers) from the candidate blocks."""
        config = self.config
        origin = config["candidate_source_layer_id"]
        if layer == origin:
            size = config["candidate_block_size"]
            blocks = np.array([scores[b : b + size].max() for b in range(0, len(scores), size)])
            blocks[p // size] = np.inf
            kept = L.best(blocks, config["candidate_topk_blocks"])
            self.published.setdefault(("candidates", origin), {})[p] = kept
        if layer > origin:
            size = config["candidate_block_size"]
            kept = self.published["candidates", origin][p]
            allowed = np.isin(np.arange(len(scores)) // size, kept)
            positions = np.flatnonzero(allowed)
            return positions[L.best(scores[positions], config["index_topk"])]
        return L.best(scores, config["index_topk"])

    # --- feed-forward ---

    def ffn(self, x: Array, tokens: list[int] | None, name: str, layer: int) -> Array:
        """`tokens` None: a draft layer, which knows no image rows."""
        config, ffn = self.config, f"{name}.ffn"
        draft = name.startswith("mtp.")
        count = config["dspark_num_experts_per_tok" if draft else "num_experts_per_tok"]
        logits = x @ self.w[f"{ffn}.gate.weight"].T

        def router(t: int) -> tuple[Array, Array]:
            if not self.v41 and layer < config["num_hash_layers"]:
                return L.route(
                    logits[t],
                    None,
                    count,
                    config["routed_scaling_factor"],
                    self.w[f"{ffn}.gate.tid2eid"][tokens[t]].astype(int),
                )
            image = tokens is not None and tokens[t] == self.image_token
            bias = self.w[f"{ffn}.gate.bias_vl" if image else f"{ffn}.gate.bias"]
            return L.route(logits[t], bias, count, config["routed_scaling_factor"], None)

        def expert(key: str) -> Array:
            index, matrix = key.split(".")
            place = "shared_experts" if index == "shared" else f"experts.{index}"
            return self.w[f"{ffn}.{place}.{matrix}.weight"]

        return L.moe(x, router, expert, config["swiglu_limit"], self.store)

    # --- DSpark ---

    def draft_context(self) -> list[Array]:
        """After `forward`: window entries [T, D] of every draft layer, from the target's features."""
        u = self.linear(np.concatenate(self.features, -1), "mtp.0.main_proj")
        u = self.norm(u, "mtp.0.main_norm")
        at = np.arange(len(u))
        return [
            self.window_entries(u, f"mtp.{i}.attn", at, self.omega[False])
            for i in range(self.config["num_nextn_predict_layers"])
        ]

    def draft_block(self, context: list[Array], length: int, anchor: int) -> tuple[Array, Array]:
        """(h [block, H] before the norm, base logits [block, vocabulary]) after `length` committed tokens."""
        config = self.config
        block = [anchor] + [config["dspark_noise_token_id"]] * (config["dspark_block_size"] - 1)
        positions = length + np.arange(len(block))
        x = self.store.bf16(self.w["embed.weight"][block])
        streams = np.repeat(x[:, None, :], config["hc_mult"], 1)
        pre = np.zeros((len(block), config["hc_mult"]))
        pre[:, 0] = 1
        for i in range(config["num_nextn_predict_layers"]):
            name = f"mtp.{i}"
            for kind in ("attn", "ffn"):
                parts = [self.w[f"{name}.hc_{kind}_{part}"] for part in ("fn", "base", "scale")]
                own, post, comb = L.mix(streams, *parts, config)
                x = self.norm(self.store.bf16(L.collapse(streams, pre)), f"{name}.{kind}_norm")
                if kind == "attn":
                    past = context[i][max(0, length - config["sliding_window"]) : length]
                    out = self.draft_attention(x, f"{name}.attn", positions, past)
                else:
                    out = self.ffn(x, None, name, -1)
                streams = self.store.bf16(L.rebuild(streams, out, post, comb))
                pre = own
        h = self.store.bf16(L.collapse(streams, pre))
        last = config["num_nextn_predict_layers"] - 1
        return h, self.norm(h, f"mtp.{last}.norm") @ self.w["head.weight"].T

    def draft_attention(self, x: Array, attn: str, positions: Array, past: Array) -> Array:
        omega = self.omega[False]
        _, q = self.query(x, attn, positions, omega)
        keys = np.concatenate([past, self.window_entries(x, attn, positions, omega)])
        o = np.stack([L.attend(row, keys, self.w[f"{attn}.attn_sink"]) for row in q])
        return self.output(o, attn, positions, omega)

    def draft_tokens(self, h: Array, base: Array, anchor: int) -> tuple[list[int], Array, Array]:
        """Greedy walk of the Markov head: (proposals, their logits, confidences)."""
        name = f"mtp.{self.config['num_nextn_predict_layers'] - 1}"
        embed, head = self.w[f"{name}.markov_head.embed.weight"], self.w[f"{name}.markov_head.head.weight"]
        proj = self.w[f"{name}.confidence_head.proj.weight"][0]
        token, tokens, logits, confidences = anchor, [], [], []
        for i in range(len(h)):
            logits.append(base[i] + head @ embed[token])
            confidences.append(L.sigmoid(np.array(proj @ np.concatenate([h[i], embed[token]]))))
            token = int(np.argmax(logits[-1]))
            tokens.append(token)
        return tokens, np.array(logits), np.array(confidences)
