"""The NumPy reference against the golden values of docs/models/deepseek_v41.md."""

from __future__ import annotations

import dsv4_formats as formats
import dsv4_layers as layers
import numpy as np
import pytest

V41_ROPE = {
    "qk_rope_head_dim": 64,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {"factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1},
}
TINY_ENGRAM = {
    "engram_layer_ids": [1, 2],
    "engram_max_ngram_size": 4,
    "engram_n_heads": 4,
    "engram_vocab_size": 211,
}


def test_sinkhorn_golden() -> None:
    logits = np.array([[0.5, -0.2, 0.1, 0], [1, 0.3, -0.7, 0.2], [-1.1, 0.4, 0.6, 0], [0.25, -0.5, 0.75, 1.5]])
    golden = np.array(
        [
            [0.340665, 0.226332, 0.250514, 0.182488],
            [0.442157, 0.293761, 0.088614, 0.175467],
            [0.063880, 0.383025, 0.383604, 0.169489],
            [0.153296, 0.096881, 0.277267, 0.472554],
        ]
    )
    c = layers.sinkhorn(logits, 20, 1e-6)
    np.testing.assert_allclose(c, golden, atol=1e-6)
    np.testing.assert_allclose(c.sum(0), 1, atol=2e-6)
    np.testing.assert_allclose(c.sum(1), 1, atol=2e-6)


def test_rope_golden() -> None:
    omega = layers.rope_frequencies(V41_ROPE, True)
    golden = {
        0: 1,
        1: 0.687656022,
        15: 0.00363553858,
        16: 0.002265625,
        20: 2.96977778e-4,
        24: 1.953125e-5,
        25: 5.37231267e-6,
        31: 5.68052904e-7,
    }
    for i, value in golden.items():
        assert omega[i] == pytest.approx(value, rel=1e-8), i
    np.testing.assert_allclose(layers.rope_frequencies(V41_ROPE, False), 10000.0 ** (-np.arange(32) / 32), rtol=1e-12)


def test_rotation_turns_only_the_tail_and_back() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 3, 80))
    at = np.array([0, 1, 7, 100, 12345])
    omega = layers.rope_frequencies(V41_ROPE, True)
    y = layers.rotate_tail(x, at, omega)
    np.testing.assert_array_equal(y[..., :16], x[..., :16])
    np.testing.assert_allclose(layers.rotate_tail(y, -at, omega), x, atol=1e-12)
    pair = x[4, 2, 16:18]
    turned = (pair[0] + 1j * pair[1]) * np.exp(12345j)
    np.testing.assert_allclose(y[4, 2, 16:18], [turned.real, turned.imag], atol=1e-9)


def test_engram_constants_of_the_tiny_model() -> None:
    first, second = layers.engram_primes(TINY_ENGRAM)
    assert first == [211, 223, 227, 229, 233, 239, 241, 251, 257, 263, 269, 271]
    assert second == [277, 281, 283, 293, 307, 311, 313, 317, 331, 337, 347, 349]
    assert [sum(first), sum(second)] == [2914, 3746]
    assert layers.engram_multipliers(1, 200, 4) == [
        37968138307073165,
        2397965009193117,
        17816579247344819,
        36657766217135125,
    ]
    assert layers.engram_multipliers(2, 200, 4) == [
        37906390952663937,
        18380478596385575,
        11220873644911995,
        35388008504512157,
    ]


def test_engram_constants_of_the_published_model() -> None:
    config = {
        "engram_layer_ids": [1, 14],
        "engram_max_ngram_size": 4,
        "engram_n_heads": 8,
        "engram_vocab_size": 16_000_000,
    }
    first, second = layers.engram_primes(config)
    assert (len(first), first[0], first[-1], sum(first)) == (24, 16000057, 16000463, 384006168)
    assert (len(second), second[0], second[-1], sum(second)) == (24, 16000477, 16000889, 384016682)
    assert layers.engram_multipliers(1, 99092, 4) == [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    assert layers.engram_multipliers(14, 99092, 4) == [67716810739261, 51510806800915, 30921347202721, 82619226485591]


def test_formats_on_hand_made_values() -> None:
    assert formats.E4M3[0x7E] == 448
    assert formats.E4M3[1] == 2.0**-9
    assert formats.e4m3_round(np.array([1000.0, -1000.0, 2.0**-10, 3 * 2.0**-10])).tolist() == [
        448,
        -448,
        0,
        2 * 2.0**-9,
    ]
    assert formats.e2m1_round(np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 100, -5.1])).tolist() == [
        0,
        1,
        1,
        2,
        2,
        4,
        4,
        6,
        -6,
    ]
    assert formats.power_of_two_above(np.array([1.0, 1.0001, 0.75, 2.0**-20])).tolist() == [1, 2, 1, 2.0**-20]
    assert formats.bf16(np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8])).tolist() == [1, 1 + 2.0**-6]
    x = np.array([[448.0] + [1.0] * 31])
    assert formats.fp8_entry(x).tolist() == x.tolist()
    assert formats.fp4_index(np.array([[6.0, 0.3] + [0.0] * 30]))[0, :2].tolist() == [6, 0.5]
    # amax 6.4 -> scale e4m3(1.0667) = 1.125 (1.0 and 1.125 are the neighbours), 6.4 / 1.125 = 5.69 -> 6.
    assert formats.fp4_entry(np.array([[6.4] + [0.0] * 15]))[0, 0] == 6 * 1.125


def test_attention_sink_takes_weight_but_has_no_value() -> None:
    q, keys = np.ones((1, 4)), np.eye(4)[:2]
    out = layers.attend(q, keys, np.array([0.5]))
    share = np.exp(0.5)
    np.testing.assert_allclose(out[0], [share / (3 * share), share / (3 * share), 0, 0])


def test_router_uses_the_bias_for_the_choice_only() -> None:
    logits = np.array([0.0, 1.0, 2.0, 3.0])
    ids, weights = layers.route(logits, np.array([10.0, 0, 0, 0]), 2, 1.5, None)
    scores = np.sqrt(np.log1p(np.exp(logits)))
    assert ids.tolist() == [0, 3]
    np.testing.assert_allclose(weights, 1.5 * scores[[0, 3]] / scores[[0, 3]].sum())
