"""Block drafts in plain float64 numpy: one row, one head, one channel at a time, from the formulas."""

from __future__ import annotations

import numpy as np

from lowlat.speculative.draft_files import DraftConfig

Weights = dict[str, np.ndarray]


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x) + eps) * weight


def rotated(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    half = len(x) // 2
    out = np.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
        out[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
    return out


class Reference:
    def __init__(self, config: DraftConfig, weights: Weights) -> None:
        self.config, self.w = config, weights

    def heads(self, x: np.ndarray, name: str, count: int) -> list[np.ndarray]:
        return np.split(self.w[name] @ x, count)

    def key_value(self, layer: int, x: np.ndarray, position: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        c, name = self.config, f"layers.{layer}"
        keys = self.heads(x, f"{name}.k_proj.weight", c.num_key_value_heads)
        keys = [rotated(norm(k, self.w[f"{name}.k_norm.weight"], c.rms_norm_eps), position, c.rope_theta) for k in keys]
        return keys, self.heads(x, f"{name}.v_proj.weight", c.num_key_value_heads)

    def mix(self, name: str, values: list[np.ndarray], inputs: list[np.ndarray], side: int) -> list[np.ndarray]:
        c = self.config
        groups = c.hidden_size // c.conv_group_size
        out = []
        for t, x in enumerate(inputs):
            shift = (self.w[f"{name}.proj.weight"] @ x).reshape(2, c.conv_kernel_size, groups)
            row = np.zeros(c.hidden_size)
            for tap in range(c.conv_kernel_size):
                if t - tap < 0:
                    continue
                for channel in range(c.hidden_size):
                    group = channel // c.conv_group_size
                    row[channel] += (self.w[f"{name}.base"][side, tap, channel] + shift[side, tap, group]) * values[
                        t - tap
                    ][channel]
            out.append(row)
        return out

    def block(self, features: np.ndarray, embedded: np.ndarray, length: int) -> list[np.ndarray]:
        """States before the last norm, from features of the context's rows and embeddings of the block's."""
        c = self.config
        u = [norm(self.w["fc.weight"] @ row, self.w["hidden_norm.weight"], c.rms_norm_eps) for row in features]
        x = [row.copy() for row in embedded]
        first = max(0, length - c.sliding_window) if c.sliding_window else 0
        for layer in range(c.num_hidden_layers):
            name = f"layers.{layer}"
            context = [self.key_value(layer, u[p], p) for p in range(first, length)]
            y = [norm(row, self.w[f"{name}.input_layernorm.weight"], c.rms_norm_eps) for row in x]
            given = self.mix(f"{name}.attention_mixing", y, y, 0) if c.kind == "dflash2" else y
            seen = context + [self.key_value(layer, row, length + t) for t, row in enumerate(given)]
            added = [self.attend(layer, row, length + t, seen) for t, row in enumerate(given)]
            if c.kind == "dflash2":
                added = self.mix(f"{name}.attention_mixing", added, y, 1)
            x = [row + more for row, more in zip(x, added, strict=True)]
            y = [norm(row, self.w[f"{name}.post_attention_layernorm.weight"], c.rms_norm_eps) for row in x]
            given = self.mix(f"{name}.mlp_mixing", y, y, 0) if c.kind == "dflash2" else y
            added = [self.mlp(name, row) for row in given]
            if c.kind == "dflash2":
                added = self.mix(f"{name}.mlp_mixing", added, y, 1)
            x = [row + more for row, more in zip(x, added, strict=True)]
        return x

    def attend(self, layer: int, x: np.ndarray, position: int, seen: list) -> np.ndarray:
        c, name = self.config, f"layers.{layer}"
        mixed = []
        for head, q in enumerate(self.heads(x, f"{name}.q_proj.weight", c.num_attention_heads)):
            q = rotated(norm(q, self.w[f"{name}.q_norm.weight"], c.rms_norm_eps), position, c.rope_theta)
            group = head // (c.num_attention_heads // c.num_key_value_heads)
            scores = np.array([q @ keys[group] for keys, _ in seen]) / np.sqrt(c.head_dim)
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            mixed.append(sum(w * values[group] for w, (_, values) in zip(weights, seen, strict=True)))
        return self.w[f"{name}.o_proj.weight"] @ np.concatenate(mixed)

    def mlp(self, name: str, x: np.ndarray) -> np.ndarray:
        gate = self.w[f"{name}.gate_proj.weight"] @ x
        return self.w[f"{name}.down_proj.weight"] @ (
            gate / (1 + np.exp(-gate)) * (self.w[f"{name}.up_proj.weight"] @ x)
        )

    def guesses(self, h: list[np.ndarray], head: np.ndarray, anchor: int) -> tuple[list[int], list[float]]:
        c = self.config
        tokens, confidence, previous = [], [], anchor
        for row in h if c.kind == "dspark" else h[1:]:
            normed = norm(row, self.w["norm.weight"], c.rms_norm_eps)
            logits = head @ normed * c.output_multiplier
            if c.final_logit_softcapping is not None:
                logits = c.final_logit_softcapping * np.tanh(logits / c.final_logit_softcapping)
            if c.kind == "dspark":
                before = self.w["markov_embed.weight"][previous]
                logits = logits + self.w["markov_head.weight"] @ before
                score = self.w["confidence_head.weight"][0] @ np.concatenate([row, before])
                confidence.append(1 / (1 + np.exp(-score)))
            if c.kind == "dflash2":
                best = np.argsort(-logits)[: c.selector_top_k]
                edge = self.w["selector_previous.weight"][previous] * (self.w["selector_proj.weight"] @ normed)
                scores = [logits[b] + edge @ self.w["selector_next.weight"][b] for b in best]
                previous = int(best[int(np.argmax(scores))])
            else:
                previous = int(np.argmax(logits))
            tokens.append(previous)
        return tokens, confidence
