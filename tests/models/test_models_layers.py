"""Attention with windows, sinks and scales, and mixtures of experts, against plain loops over rows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowlat.layers.activation import ClampedSwiglu, gated_silu
from lowlat.layers.attention import AttentionRule, paged_attention
from lowlat.layers.moe import Experts, MixtureOfExperts, TopKRouter
from lowlat.layers.rope import Rope
from lowlat.layers.step import DecodeGroup, Segment, StepInputs
from lowlat.layers.window import within_window
from lowlat.platform import select

HEAD_DIM, SLOTS = 8, 400


class Requests:
    """Random requests: each has tokens in KV slots, and the last few of them as query rows of one step."""

    def __init__(self, lengths: list[int], rows: list[int], decodes: list[int], padding: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(SLOTS, generator=generator)
        self.slots: list[torch.Tensor] = []
        used = 0
        for number, length in enumerate([*lengths, *decodes]):
            # Every other request lies in neighbouring slots.
            taken = order[used : used + length]
            self.slots.append(taken.sort().values if number % 2 else taken)
            used += length
        self.rows: list[tuple[int, int]] = []
        """Request and position of every row."""
        segments, first = [], 0
        for number, (length, count) in enumerate(zip(lengths, rows, strict=True)):
            slots = self.slots[number]
            run = int(slots[0]) if bool((slots.diff() == 1).all()) else -1
            segments.append(Segment(first, count, length, slots, run))
            self.rows += [(number, position) for position in range(length - count, length)]
            first += count
        groups = []
        if decodes:
            longest = max(decodes)
            table = torch.stack(
                [torch.cat([slots, slots[:1].expand(longest - len(slots))]) for slots in self.slots[len(lengths) :]]
            )
            outside = torch.arange(longest) >= torch.tensor(decodes)[:, None]
            mask = torch.zeros(outside.shape).masked_fill(outside, float("-inf"))[:, None, None]
            groups = [DecodeGroup(torch.arange(first, first + len(decodes)), table, mask if outside.any() else None)]
            self.rows += [(len(lengths) + n, length - 1) for n, length in enumerate(decodes)]
        positions = torch.tensor([position for _, position in self.rows] + [0] * padding)
        empty = torch.empty(0, dtype=torch.int64)
        self.step = StepInputs(positions, positions, empty, len(self.rows), segments, groups, empty)
        self.total_rows = len(self.rows) + padding
        self.generator = generator

    def slots_seen(self, row: int, window: int) -> torch.Tensor:
        request, position = self.rows[row]
        return self.slots[request][max(0, position + 1 - window) if window else 0 : position + 1]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_attention_equals_a_loop_over_rows(data: st.DataObject):
    lengths = data.draw(st.lists(st.integers(1, 40), max_size=3), "prefills")
    rows = [data.draw(st.integers(1, length), "rows") for length in lengths]
    decodes = data.draw(st.lists(st.integers(1, 40), min_size=0 if lengths else 1, max_size=4), "decodes")
    window = data.draw(st.sampled_from([0, 1, 2, 7, 39, 50]), "window")
    kv_heads, group = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 4), (2, 3)]), "heads")
    padding = data.draw(st.integers(0, 3), "padding")
    requests = Requests(lengths, rows, decodes, padding, data.draw(st.integers(0, 1000), "seed"))
    heads = kv_heads * group
    q_RND = torch.randn(requests.total_rows, heads, HEAD_DIM, generator=requests.generator)
    keys_SKD, values_SKD = (
        torch.full((SLOTS, kv_heads, HEAD_DIM), float("nan")).index_copy(
            0,
            used := torch.cat(requests.slots),
            torch.randn(len(used), kv_heads, HEAD_DIM, generator=requests.generator),
        )
        for _ in range(2)
    )
    sinks_N = torch.randn(heads, generator=requests.generator) if data.draw(st.booleans(), "sinks") else None
    scale = data.draw(st.sampled_from([None, 0.5]), "scale")
    rule = AttentionRule(scale=scale, window=window, sinks_N=sinks_N)
    step = within_window(requests.step, window) if window else requests.step
    out_RX = paged_attention(q_RND, keys_SKD, values_SKD, step, rule)
    for row in range(requests.total_rows):
        if row >= len(requests.rows):
            assert not out_RX[row].any()
            continue
        seen = requests.slots_seen(row, window)
        for head in range(heads):
            scores = keys_SKD[seen, head // group] @ q_RND[row, head] * (scale or 1 / math.sqrt(HEAD_DIM))
            exponents = (scores - scores.max()).exp()
            total = exponents.sum() + (0 if sinks_N is None else (sinks_N[head] - scores.max()).exp())
            expected = exponents / total @ values_SKD[seen, head // group]
            actual = out_RX[row, head * HEAD_DIM : (head + 1) * HEAD_DIM]
            torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-5)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 12), padding=st.integers(0, 3), experts=st.integers(1, 9), chosen=st.integers(1, 9),
    normalised=st.booleans(), biased=st.booleans(), min_rows=st.sampled_from([1, 4]), seed=st.integers(0, 1000),
)  # fmt: skip
def test_mixtures_equal_a_loop_over_rows(
    rows: int, padding: int, experts: int, chosen: int, normalised: bool, biased: bool, min_rows: int, seed: int
):
    chosen = min(chosen, experts)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    hidden, intermediate = 8, 6
    router_EH, bias_E = random(experts, hidden), random(experts) if biased else None
    gate_up = [(random(2 * intermediate, hidden), random(2 * intermediate)) for _ in range(experts)]
    down = [(random(hidden, intermediate), random(hidden)) for _ in range(experts)]
    pack = select("cpu").pack
    touched: list[int] = []

    def counting(expert: int, linear: object) -> object:
        return lambda x: touched.append(expert) or linear(x)  # type: ignore[operator,func-returns-value]

    packed = [counting(number, pack(*weights)) for number, weights in enumerate(gate_up)]
    activation = ClampedSwiglu(1.7, 0.8) if biased else gated_silu
    mixture = MixtureOfExperts(
        TopKRouter(router_EH, bias_E, chosen, normalised=normalised),
        Experts(packed, [pack(*weights) for weights in down], activation, min_rows=min_rows),  # type: ignore[arg-type]
        lambda x: x,
    )
    x_RH = torch.cat([random(rows, hidden), torch.full((padding, hidden), float("nan"))])
    out_RH = mixture(x_RH, rows)
    assert not out_RH[rows:].any()
    expected_touched = set()
    for row in range(rows):
        probabilities = (router_EH @ x_RH[row] + (0 if bias_E is None else bias_E)).softmax(0)
        best = probabilities.topk(chosen).indices.tolist()
        total = probabilities[best].sum() if normalised else 1.0
        expected = torch.zeros(hidden)
        for expert in best:
            gate, up = (gate_up[expert][0] @ x_RH[row] + gate_up[expert][1]).chunk(2)
            if biased:
                gate = gate.clamp(max=0.8)
                inner = gate * torch.sigmoid(1.7 * gate) * (up.clamp(-0.8, 0.8) + 1)
            else:
                inner = gate * torch.sigmoid(gate) * up
            expected += probabilities[expert] / total * (down[expert][0] @ inner + down[expert][1])
        expected_touched.update(best)
        torch.testing.assert_close(out_RH[row], expected, atol=1e-4, rtol=1e-4)
    assert sorted(touched) == sorted(expected_touched), "each chosen expert is computed once, others not at all"


def test_packed_weights_add_their_bias():
    weight_OI, bias_O, x_RI = torch.randn(5, 7), torch.randn(5), torch.randn(3, 7)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.1), (torch.float64, 1e-9)):
        packed = select("cpu").pack(weight_OI.to(dtype), bias_O.to(dtype))
        expected = (x_RI @ weight_OI.T + bias_O).to(dtype)
        torch.testing.assert_close(packed(x_RI.to(dtype)), expected, atol=max(tolerance, 1e-5), rtol=0)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": False},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "attention_factor": 1.5},
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "mscale": 0.7,
            "mscale_all_dim": 1.2,
            "beta_fast": 16,
            "beta_slow": 2,
        },
    ],
)
def test_yarn_equals_transformers(scaling: dict[str, object]):
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, rope_parameters=scaling | {"rope_theta": 1e4}
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    rope = Rope(16, 1e4, 512, scaling, torch.device("cpu"))
    cos_R1D, _ = rope.rows(torch.tensor([0, 1, 200, 511]), torch.float32)
    expected = (torch.tensor([0.0, 1, 200, 511])[:, None] * frequencies).cos() * factor
    torch.testing.assert_close(cos_R1D[:, 0, :8], expected, atol=1e-5, rtol=0)
