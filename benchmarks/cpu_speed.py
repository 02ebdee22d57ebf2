"""Speed on a CPU: lowlat beside a compiled plain loop and transformers, SmolLM2 in float32, one thread, one run.

Batch 1: decode speed of one user (first to last token, 35-token prompt, 64 tokens) against a `torch.compile`d loop over
a static cache, which is what an expert writes by hand, and against transformers' generate. Batch 8: total tokens a
second, prompts included, of eight requests at once against transformers' own batch of 8. The arms alternate.

    python benchmarks/cpu_speed.py --json     # needs the packages of requirements/dev.txt and a C++ compiler
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable

import msgspec
import torch
import torch.nn.functional as F
import transformers

from lowlat.bench import results, stats
from lowlat.engine.request import SamplingParams
from lowlat.models.loading.checkpoint import open_checkpoint
from lowlat.offline import Engine

TOKENS = 64
PROMPTS = [[(37 * row + 11 * k) % 4000 + 100 for k in range(35)] for row in range(8)]
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)


class PlainLoop:
    """Llama's decode step in plain PyTorch over a static cache, compiled whole."""

    def __init__(self, model: transformers.LlamaForCausalLM, length: int) -> None:
        config = model.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.eps = config.hidden_size // config.num_attention_heads, config.rms_norm_eps
        self.model = model
        self.keys = [torch.zeros(1, self.kv_heads, length, self.head_dim) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros_like(keys) for keys in self.keys]
        theta = config.rope_parameters["rope_theta"]
        frequencies = theta ** -(torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = torch.outer(torch.arange(length), frequencies).repeat(1, 2)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.places = torch.arange(length)
        self.step = torch.compile(self._step)

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat((-high, low), -1) * sin

    def _step(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        x = F.embedding(token, self.model.model.embed_tokens.weight)
        cos, sin = self.cos[position], self.sin[position]
        seen = (self.places <= position)[None, None, None]
        for layer, keys, values in zip(self.model.model.layers, self.keys, self.values, strict=True):
            h = F.rms_norm(x, x.shape[-1:], layer.input_layernorm.weight, self.eps)
            attention = layer.self_attn
            q = F.linear(h, attention.q_proj.weight).view(1, self.heads, 1, self.head_dim)
            k = F.linear(h, attention.k_proj.weight).view(1, self.kv_heads, 1, self.head_dim)
            v = F.linear(h, attention.v_proj.weight).view(1, self.kv_heads, 1, self.head_dim)
            keys.index_copy_(2, position, self._rotate(k, cos, sin))
            values.index_copy_(2, position, v)
            q = self._rotate(q, cos, sin).view(1, self.kv_heads, -1, self.head_dim)
            mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
            x = x + F.linear(mixed.reshape(1, -1), attention.o_proj.weight)
            h = F.rms_norm(x, x.shape[-1:], layer.post_attention_layernorm.weight, self.eps)
            gate, up = F.linear(h, layer.mlp.gate_proj.weight), F.linear(h, layer.mlp.up_proj.weight)
            x = x + F.linear(F.silu(gate) * up, layer.mlp.down_proj.weight)
        x = F.rms_norm(x, x.shape[-1:], self.model.model.norm.weight, self.eps)
        return F.linear(x, self.model.lm_head.weight).argmax(-1)

    def tokens_a_second(self) -> float:
        """Decode speed; also the reference answer of the first prompt in `self.answer`."""
        for position, token in enumerate(PROMPTS[0]):
            next_token = self.step(torch.tensor([token]), torch.tensor([position]))
        self.answer = [int(next_token)]
        begin = time.perf_counter()
        for position in range(len(PROMPTS[0]), len(PROMPTS[0]) + TOKENS - 1):
            next_token = self.step(next_token, torch.tensor([position]))
            self.answer.append(int(next_token))
        return (TOKENS - 1) / (time.perf_counter() - begin)


class Stamps:
    """A streamer for transformers' generate: keeps the time of every token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """The prompt first, then token by token."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to flush."""


def transformers_decode(model: transformers.LlamaForCausalLM) -> float:
    """Decode speed of generate, first to last token."""
    stamps = Stamps()
    generate(model, PROMPTS[:1], streamer=stamps)
    return (TOKENS - 1) / (stamps.times[-1] - stamps.times[1])


def generate(model: transformers.LlamaForCausalLM, prompts: list[list[int]], **options: object) -> list[list[int]]:
    """transformers' greedy answers, end-of-sequence ignored."""
    ids = torch.tensor(prompts)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=TOKENS,
        min_new_tokens=TOKENS,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        **options,
    )
    return out[:, ids.shape[1] :].tolist()


def transformers_total(model: transformers.LlamaForCausalLM, prompts: list[list[int]]) -> float:
    """Tokens a second of one call for all prompts."""
    begin = time.perf_counter()
    generate(model, prompts)
    return len(prompts) * TOKENS / (time.perf_counter() - begin)


def lowlat_decode(engine: Engine) -> float:
    """Decode speed of the engine in process, scheduling and text included."""
    generation = engine.generate(PROMPTS[0], GREEDY)
    timings = generation.timings
    return 1e3 / timings.gap_mean_ms


def lowlat_total(engine: Engine, prompts: list[list[int]]) -> float:
    """Tokens a second of all prompts at once."""
    begin = time.perf_counter()
    engine.generate(prompts, GREEDY)
    return len(prompts) * TOKENS / (time.perf_counter() - begin)


@torch.inference_mode()
def main() -> None:
    """Measure, check that all arms answer alike, print, and write a result file if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--save", action="store_true", help="write it under benchmarks/results")
    arguments = parser.parse_args()
    if arguments.save:
        results.check_folder()
    torch.set_num_threads(1)
    model = transformers.LlamaForCausalLM.from_pretrained(open_checkpoint("smollm2").folder, dtype=torch.float32).eval()
    loop = PlainLoop(model, 128)
    # The prefix cache would spare lowlat the repeated prompts.
    engine = Engine(model="smollm2", dtype="float32", threads=1, kv_tokens=4096, prefix_cache=False, low_latency="off")
    loop.tokens_a_second()
    expected = generate(model, PROMPTS)
    assert loop.answer == expected[0], "the compiled loop answers otherwise: it is no fair arm"
    assert [g.token_ids for g in engine.generate(PROMPTS, GREEDY)] == expected, "the arms must do the same work"

    def say(arm: str, number: int, rounds: int) -> None:
        print(f"round {number + 1} of {rounds}: {arm}", file=sys.stderr)

    one: dict[str, Callable[[], float]] = {
        "general": lambda: lowlat_decode(engine),
        "torch-compile": loop.tokens_a_second,
        "transformers": lambda: transformers_decode(model),
    }
    eight: dict[str, Callable[[], float]] = {
        "general": functools.partial(lowlat_total, engine, PROMPTS),
        "transformers": functools.partial(transformers_total, model, PROMPTS),
    }
    result = results.new_result("cpu-speed", simulated=results.Simulated(weights=False, acceptance=False), gpus=0)
    for batch, metric, arms in ((1, "tokens_per_s_user", one), (8, "tokens_per_s_total", eight)):
        measured = stats.alternate(arms, arguments.rounds, progress=say)
        shape = {"concurrency": batch, "input_tokens": 35, "output_tokens": TOKENS, "dtype": "float32"}
        for arm in arms:
            samples = measured.samples(arm)
            result.rows.append(results.row_from_samples(samples, workload="smollm2", arm=arm, metric=metric, **shape))
        for arm in list(arms)[1:]:
            ratio = measured.ratio("general", arm)
            note = f"general over {arm}"
            result.rows.append(
                results.row_from_interval(
                    ratio, workload="smollm2", arm="general", metric="speedup", note=note, **shape
                )
            )
    engine.close()
    if arguments.save:
        print(results.save(result), file=sys.stderr)
    if arguments.json:
        print(msgspec.json.encode(result).decode())
        return
    for row in result.rows:
        name = row.note or row.arm
        print(
            f"{row.concurrency} at once, {row.metric:20} {name:28} {row.median:8.2f}  ({row.low:.2f} to {row.high:.2f})"
        )


if __name__ == "__main__":
    main()
