"""GGUF files as Hugging Face models: names, layout, configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lowlat.models.loading.gguf import GGUFError, GGUFFile
from lowlat.models.loading.gguf_model import GGUFModel
from lowlat.models.loading.registry import embedded_path
from lowlat.models.loading.rope_scaling import llama3_factors


def test_weights_have_hugging_face_names_and_layout(tiny: Callable[..., Any]) -> None:
    path, values = tiny(tied=False, matrix_type="Q8_0")
    model = GGUFModel(GGUFFile(path))
    assert set(model.weights) == set(values)
    reordered = 0
    for name, expected in values.items():
        pieces = list(model.read(name, chunk_values=5 * 64))
        assert len(pieces) == (1 if expected.ndim == 1 else -(-expected.shape[0] // max(1, 320 // expected.shape[1])))
        read = np.concatenate(pieces)
        read = read.view(np.float32) if read.dtype == np.uint8 else read
        np.testing.assert_array_equal(read.reshape(expected.shape), expected)
        order = model.weights[name].row_order()
        if order is not None:
            assert sorted(order) == list(range(expected.shape[0])) != order.tolist()
            reordered += 1
    assert reordered == 4  # queries and keys of two layers


def test_biases_are_reordered_too(tiny: Callable[..., Any]) -> None:
    path, values = tiny(bias=True)
    model = GGUFModel(GGUFFile(path))
    assert model.config["attention_bias"]
    name = "model.layers.1.self_attn.q_proj.bias"
    read = np.concatenate(list(model.read(name))).view(np.float32).reshape(-1)
    np.testing.assert_array_equal(read, values[name])


def test_configuration(tiny: Callable[..., Any]) -> None:
    path, _ = tiny()
    config = GGUFModel(GGUFFile(path)).config
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["hidden_size"], config["head_dim"], config["num_key_value_heads"]) == (64, 16, 2)
    assert (config["rms_norm_eps"], config["rope_theta"], config["rope_scaling"]) == (1e-5, 500_000.0, None)
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    assert config["tie_word_embeddings"] is True
    assert GGUFModel(GGUFFile(tiny(tied=False)[0])).config["tie_word_embeddings"] is False


def test_configuration_of_the_embedded_model() -> None:
    config = GGUFModel(GGUFFile(embedded_path("smollm2"))).config
    expected = {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49_152, "rope_theta": 100_000.0,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    }  # fmt: skip
    assert expected.items() <= config.items()


def test_rope_scaling_of_llama_3(tiny: Callable[..., Any]) -> None:
    factors = llama3_factors(32.0, theta=500_000.0, head_dim=16)
    path, _ = tiny(rope_factors=factors)
    scaling = GGUFModel(GGUFFile(path)).config["rope_scaling"]
    assert scaling["rope_type"] == "llama3"
    assert scaling["factor"] == 32.0
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, rope_parameters=scaling | {"rope_theta": 500_000.0}
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500_000.0 ** -(np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(frequencies.numpy(), plain / factors, rtol=1e-5)


def test_other_rope_scaling(tiny: Callable[..., Any]) -> None:
    kind, factor = "llama.rope.scaling.type", "llama.rope.scaling.factor"
    path, _ = tiny(metadata={kind: "linear", factor: 4.0})
    assert GGUFModel(GGUFFile(path)).config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    path, _ = tiny(metadata={kind: "yarn", factor: 4.0})
    yarn = GGUFModel(GGUFFile(path)).config["rope_scaling"]
    assert yarn == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    path, _ = tiny(metadata={kind: "longrope", factor: 4.0})
    with pytest.raises(GGUFError, match="longrope"):
        GGUFModel(GGUFFile(path))
    path, _ = tiny(rope_factors=np.full(8, 3.0))
    with pytest.raises(GGUFError, match="rope_freqs"):
        GGUFModel(GGUFFile(path))


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"llama.expert_count": 4}, "mixture of experts"),
        ({"llama.rope.dimension_count": 8}, "part of a head"),
        ({"tokenizer.ggml.eot_token_id": 999}, "outside its vocabulary"),
    ],
)
def test_unsupported_models_are_named_errors(tiny: Callable[..., Any], metadata: dict[str, Any], words: str) -> None:
    path, _ = tiny(metadata=metadata)
    with pytest.raises(GGUFError, match=words):
        GGUFModel(GGUFFile(path)).tokenizer()


def test_unknown_tensors_are_refused(tiny: Callable[..., Any]) -> None:
    path, _ = tiny()
    data = path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight")
    path.write_bytes(data)
    with pytest.raises(GGUFError, match=r"blk\.1\.ffn_xx\.weight"):
        GGUFModel(GGUFFile(path))


def test_other_architectures_are_refused(tiny: Callable[..., Any]) -> None:
    path, _ = tiny()
    path.write_bytes(path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba"))
    with pytest.raises(GGUFError, match="'mamba'; supported in GGUF files: llama"):
        GGUFModel(GGUFFile(path))
