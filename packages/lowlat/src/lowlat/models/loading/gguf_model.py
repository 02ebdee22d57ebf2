"""A GGUF file as a Hugging Face model: the same names, layout, configuration and tokenizer."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from lowlat.models.loading.ggml_types import GGMLType
from lowlat.models.loading.gguf import GGUFError, GGUFFile
from lowlat.models.loading.gguf_architectures import ARCHITECTURES
from lowlat.models.loading.rope_scaling import rope_scaling_of
from lowlat.text.gguf_tokenizer import tokenizer_from_gguf
from lowlat.text.tokenizer import Tokenizer, TokenizerError

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
_END_TOKENS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


@dataclasses.dataclass(frozen=True)
class GGUFWeight:
    """Where a weight of the Hugging Face layout lies in the file.

    `heads`: the number of attention heads whose rows the file keeps in interleaved order (see `row_order`); None
    where rows are in the usual order. `offset`: what the file's values are above those of Hugging Face.
    """

    tensor: str
    type: GGMLType
    shape: tuple[int, ...]
    heads: int | None = None
    offset: float = 0.0

    def row_order(self) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """For each row of the Hugging Face layout, the row of the file that holds it; None where they are the same.

        GGUF files of the llama architecture rotate neighbouring pairs (0, 1), (2, 3) ...; Hugging Face models rotate
        the halves of a head (0, D/2), (1, D/2 + 1) ... The file's row 2 i + half of a head is row half * D/2 + i.
        """
        if self.heads is None:
            return None
        head_dim = self.shape[0] // self.heads
        rows_HPS = np.arange(self.shape[0]).reshape(self.heads, head_dim // 2, 2)
        return rows_HPS.swapaxes(1, 2).reshape(-1)


class GGUFModel:
    """A language model in a GGUF file.

    Attributes:
        file: the open file.
        config: in the form of a Hugging Face config.json.
        weights: by Hugging Face name. `lm_head.weight` is absent where it is tied to the embedding.
    """

    def __init__(self, file: GGUFFile) -> None:
        """Raises GGUFError for architectures that are not supported, missing metadata or unknown tensors."""
        self.file = file
        name = file.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            raise GGUFError(
                f"{file.path} holds a model of the architecture {name!r}; supported in GGUF files: "
                f"{', '.join(ARCHITECTURES)}. "
                "Use the model's Hugging Face folder (safetensors) instead, if its architecture is supported there"
            )
        self._name = name
        self._architecture = ARCHITECTURES[name]
        self.weights: dict[str, GGUFWeight] = {}
        self.config = self._config()
        self._map_weights()

    def _value(self, key: str, default: Any = None) -> Any:
        """Metadata of the file's architecture; without a default it is required."""
        value = self.file.metadata.get(f"{self._name}.{key}", default)
        if value is None:
            raise GGUFError(f"{self.file.path} lacks the metadata {self._name}.{key}")
        return value

    def _count(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise GGUFError(f"{self.file.path}: {self._name}.{key} must be one positive whole number, not {value!r}")
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise GGUFError(f"{self.file.path}: {self._name}.{key} must be a number, not {value!r}")
        # The file holds float32; its shortest decimal form is what the model's authors wrote (1e-05).
        return float(str(np.float32(value)))

    def _config(self) -> dict[str, Any]:
        if self._value("expert_count", 0):
            raise GGUFError(f"{self.file.path} is a mixture of experts, which is not supported in GGUF files")
        embedding = self.file.tensors.get("token_embd.weight")
        if embedding is None:
            raise GGUFError(f"{self.file.path} lacks the tensor token_embd.weight: it is not a whole language model")
        heads, hidden = self._count("attention.head_count"), self._count("embedding_length")
        head_dim = self._count("attention.key_length", hidden // heads)
        if self._count("rope.dimension_count", head_dim) != head_dim or head_dim % 2:
            raise GGUFError(f"{self.file.path}: rotary embedding over a part of a head is not supported")
        theta = self._number("rope.freq_base", 10_000.0)
        config: dict[str, Any] = {
            "architectures": [self._architecture.hugging_face],
            "model_type": self._architecture.model_type,
            "vocab_size": embedding.shape[0],
            "hidden_size": hidden,
            "intermediate_size": self._count("feed_forward_length"),
            "num_hidden_layers": self._count("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._count("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self._count("context_length"),
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "rope_theta": theta,
            "rope_scaling": self._rope_scaling(theta, head_dim),
            "attention_bias": "blk.0.attn_q.bias" in self.file.tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in self.file.tensors,
            "tie_word_embeddings": "output.weight" not in self.file.tensors,
            "dtype": "float32",
        }
        config |= self._architecture.file_config(config, self._count)
        generation = self.generation_config()
        return config | {key: generation[key] for key in ("bos_token_id", "eos_token_id") if key in generation}

    def _rope_scaling(self, theta: float, head_dim: int) -> dict[str, Any] | None:
        factors = self.file.dequantize(_ROPE_FACTORS) if _ROPE_FACTORS in self.file.tensors else None
        return rope_scaling_of(
            {key.removeprefix(f"{self._name}."): value for key, value in self.file.metadata.items()},
            factors,
            theta=theta,
            head_dim=head_dim,
            context=self._count("context_length"),
        )

    def _map_weights(self) -> None:
        heads = {"attn_q": self.config["num_attention_heads"], "attn_k": self.config["num_key_value_heads"]}
        names, offset = self._architecture.layer_names, self._architecture.norm_offset
        if not self._architecture.interleaved:
            heads = {}
        unknown = []
        for name, info in self.file.tensors.items():
            if name == _ROPE_FACTORS:
                continue
            shift = offset if name.endswith("norm.weight") else 0.0
            if name in _TOP_NAMES:
                self.weights[_TOP_NAMES[name]] = GGUFWeight(name, info.type, info.shape, offset=shift)
                continue
            match = _LAYER_TENSOR.fullmatch(name)
            if match is None or match[2] not in names or int(match[1]) >= self.config["num_hidden_layers"]:
                unknown.append(name)
                continue
            if (count := heads.get(match[2])) and info.shape[0] % (2 * count):
                raise GGUFError(f"{self.file.path}: {name} has {info.shape[0]} rows, not {count} heads of even size")
            target = f"model.layers.{match[1]}.{names[match[2]]}.{match[3]}"
            self.weights[target] = GGUFWeight(name, info.type, info.shape, heads.get(match[2]), shift)
        if unknown:
            shown = ", ".join(unknown[:5]) + (" ..." if len(unknown) > 5 else "")
            raise GGUFError(
                f"{self.file.path} has {len(unknown)} tensors that a {self._name} model does not have: {shown}"
            )

    def read(self, name: str, chunk_values: int = 1 << 24) -> Iterator[np.ndarray[Any, Any]]:
        """A weight in the Hugging Face layout, in pieces of whole rows of about `chunk_values` values.

        Pieces of F32, F16 and BF16 tensors are uint8 [rows, bytes], exactly the file's numbers; of quantised ones
        float32 [rows, columns]. A vector is one row.
        """
        weight = self.weights[name]
        order = weight.row_order()
        raw = self.file.raw(weight.tensor)
        if len(weight.shape) == 1:
            # A vector is one row of blocks; in interleaved order (a bias) its values are what is reordered.
            values = raw.blocks
            if order is not None or weight.offset:
                if weight.type.block_values == 1 and weight.type.name != "F32":
                    raise GGUFError(f"{self.file.path}: the vector {weight.tensor} is {weight.type.name}, not F32")
                numbers = self.file.dequantize(weight.tensor)
                numbers = numbers - np.float32(weight.offset) if order is None else numbers[order]
                values = numbers.reshape(1, -1).view(np.uint8)
            yield values
            return
        step = max(1, chunk_values // weight.shape[-1])
        for start in range(0, weight.shape[0], step):
            rows = slice(start, start + step) if order is None else order[start : start + step]
            yield raw.blocks[rows] if weight.type.block_values == 1 else self.file.dequantize(weight.tensor, rows)

    def generation_config(self) -> dict[str, Any]:
        """In the form of a generation_config.json: ids that begin a sequence and end an answer."""
        metadata = self.file.metadata
        ends = dict.fromkeys(int(metadata[key]) for key in _END_TOKENS if isinstance(metadata.get(key), int))
        config: dict[str, Any] = {}
        if isinstance(metadata.get("tokenizer.ggml.bos_token_id"), int):
            config["bos_token_id"] = int(metadata["tokenizer.ggml.bos_token_id"])
        if ends:
            config["eos_token_id"] = next(iter(ends)) if len(ends) == 1 else list(ends)
        return config

    def tokenizer(self) -> Tokenizer:
        """Raises GGUFError when the file has no tokenizer or one of an unknown kind."""
        try:
            return tokenizer_from_gguf(self.file.metadata)
        except TokenizerError as error:
            raise GGUFError(f"{self.file.path}: {error}") from error

    def chat_template(self) -> str | None:
        """The chat template's source, if the file has one."""
        template = self.file.metadata.get("tokenizer.chat_template")
        return template if isinstance(template, str) and template else None
