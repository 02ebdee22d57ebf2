"""The tokenizer of a model: text to ids, ids to text, and the exact bytes of every id."""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from lowlat.text.token_bytes import DecoderKind, decoder_kind, strips_first_space, to_bytes


class TokenizerError(ValueError):
    """A tokenizer is missing, damaged or of a kind that is not supported; the message says which and what helps."""


class ControlText:
    """Finds control tokens, and beginnings of them, in text that must not hold any."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self.tokens = frozenset(tokens)
        longest_first = sorted(self.tokens, key=lambda token: (-len(token), token))
        self.whole = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        """Matches every control token, the longest first."""
        self._beginnings = frozenset(token[:n] for token in self.tokens for n in range(1, len(token)))
        self._longest = max(map(len, self._beginnings), default=0)

    def open_end(self, text: str) -> tuple[int, int]:
        """Where the beginning of a control token stands at the text's end, spaces aside; an empty range if nowhere."""
        end = len(text.rstrip())
        for start in range(max(0, end - self._longest), end):
            if text[start:end] in self._beginnings:
                return start, end
        return end, end


def _is_tag(text: str) -> bool:
    return len(text) > 2 and text[0] + text[-1] in ("<>", "[]")


class Tokenizer:
    """A model's tokenizer over the `tokenizers` library.

    Ids are ints in [0, vocab_size); decoding ignores ids outside (models pad their embedding beyond the vocabulary).

    Decoding has one definition, used for whole texts and streams alike: the bytes of all tokens, joined, read as UTF-8
    with U+FFFD for every malformed part (SentencePiece style: less one space at the start, where its encoder adds
    one). For well-formed UTF-8 this is what the library's own decoder gives.

    Attributes:
        bos_id: id that starts a sequence, or None.
        eos_ids: ids that end an answer, the main one first.
        special_ids: ids of control tokens; `decode` leaves them out unless asked.
        special_tokens: texts of `bos_token`, `eos_token` and the like, which chat templates may use.
    """

    def __init__(self, library_tokenizer: tokenizers.Tokenizer, *, bos_id: int | None, eos_ids: Iterable[int]) -> None:
        self._library = library_tokenizer
        self._library.no_padding()
        self._library.no_truncation()
        self.bos_id = bos_id
        self.eos_ids = tuple(dict.fromkeys(int(i) for i in eos_ids))
        self.special_tokens: dict[str, str] = {}
        self._added = self._library.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.vocab_size: int = self._library.get_vocab_size(with_added_tokens=True)
        # Ids may have gaps, so the size of the vocabulary is not always its largest id + 1.
        self._id_limit = max([self.vocab_size, *(i + 1 for i in self._added)])
        # The library gives its decoder only as JSON text; the state below is a few hundred bytes.
        decoder = json.loads(self._library.decoder.__getstate__()) if self._library.decoder is not None else None
        self._kind: DecoderKind = decoder_kind(decoder)
        self.strips_first_space = self._kind == "sentencepiece" and strips_first_space(decoder)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_json(cls, text: str, *, bos_id: int | None = None, eos_ids: Iterable[int] = ()) -> Tokenizer:
        """From the text of a tokenizer.json.

        Raises:
            TokenizerError: the text is not a tokenizer.json that the `tokenizers` library can read.
        """
        try:
            library = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"not a readable tokenizer.json: {error}") from error
        return cls(library, bos_id=bos_id, eos_ids=eos_ids)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """From a Hugging Face style folder.

        `bos_id` comes from tokenizer_config.json, else config.json. `eos_ids` come from generation_config.json, else
        config.json, else tokenizer_config.json: the order in which `transformers` looks.

        Raises:
            TokenizerError: no tokenizer.json, or one that cannot be read.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            hint = ""
            if (folder / "tokenizer.model").is_file():
                hint = (
                    "; it has a SentencePiece tokenizer.model: convert it once with "
                    "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
                )
            raise TokenizerError(f"no tokenizer.json in {folder}{hint}")
        tokenizer = cls.from_json(path.read_text(encoding="utf-8"))
        settings = _read_json(folder / "tokenizer_config.json")
        config = _read_json(folder / "config.json")
        generation = _read_json(folder / "generation_config.json")
        tokenizer.special_tokens = {
            key: text for key, value in settings.items() if key.endswith("_token") and (text := _text_of(value))
        }
        tokenizer.bos_id = _first(tokenizer._id_of(settings.get("bos_token")), _one_id(config.get("bos_token_id")))
        for value in (generation.get("eos_token_id"), config.get("eos_token_id")):
            if value is not None:
                tokenizer.eos_ids = tuple(dict.fromkeys(value if isinstance(value, list) else [value]))
                break
        else:
            eos = tokenizer._id_of(settings.get("eos_token"))
            tokenizer.eos_ids = () if eos is None else (eos,)
        return tokenizer

    def _id_of(self, token: str | dict[str, Any] | None) -> int | None:
        """Id of a token as tokenizer_config.json writes it: a string, or an object with `content`."""
        text = _text_of(token)
        return None if text is None else self._library.token_to_id(text)

    def token_id(self, text: str) -> int | None:
        """Id of the token that is written so; None when there is none."""
        found: int | None = self._library.token_to_id(text)
        return found

    def to_json(self) -> str:
        """The tokenizer.json text; `from_json` with the same `bos_id` and `eos_ids` gives an equal tokenizer."""
        text: str = self._library.to_str()
        return text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. Control tokens written in the text become control tokens: for trusted text only.

        With `add_special_tokens` the model's own frame is added (BOS for many, nothing for others), but never a
        second BOS where the text begins with one. An empty text gives the frame alone, possibly no ids at all.
        Lone surrogates, which are not characters but can come out of JSON, are read as U+FFFD.
        """
        if not text.isascii():
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids: list[int] = self._library.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self.bos_id is not None and len(ids) > 1 and ids[0] == ids[1] == self.bos_id:
            del ids[0]
        return ids

    def encode_many(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of each, on all cores."""
        clean = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts]
        found: list[list[int]] = [
            encoding.ids for encoding in self._library.encode_batch(clean, add_special_tokens=add_special_tokens)
        ]
        if add_special_tokens and self.bos_id is not None:
            found = [ids[1:] if len(ids) > 1 and ids[0] == ids[1] == self.bos_id else ids for ids in found]
        return found

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; see the class for the exact rule."""
        if self._kind == "other":
            text: str = self._library.decode(list(ids), skip_special_tokens=skip_special_tokens)
            return text
        kept = (i for i in ids if not (skip_special_tokens and i in self.special_ids))
        text = b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")
        return text[1:] if self.strips_first_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes of one token, control tokens included; b"" for ids outside the vocabulary.

        Raises:
            ValueError: the tokenizer is neither byte-level nor SentencePiece style.
        """
        found = self._bytes.get(token_id)
        if found is not None:
            return found
        token = self._library.id_to_token(token_id) if 0 <= token_id < self._id_limit else None
        found = b"" if token is None else to_bytes(token, self._kind, token_id in self._added)
        self._bytes[token_id] = found
        return found

    def token_text(self, token_id: int) -> str:
        """One token as readable text: its characters, or `bytes:\\xe4\\xb8` where it is not whole characters."""
        data = self.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def can_stream(self) -> bool:
        """Whether the exact bytes of tokens are known, so that text can be streamed."""
        return self._kind != "other"

    @functools.cached_property
    def _controls(self) -> dict[bool, ControlText]:
        special = [token.content for token in self._added.values() if token.special and token.content]
        tags = [token.content for token in self._added.values() if _is_tag(token.content)]
        return {False: ControlText(special), True: ControlText(special + tags)}

    def control_text(self, tags: bool) -> ControlText:
        """The texts of special tokens and, if asked, of added tokens written as tags, such as `<tool_call>`."""
        return self._controls[tags]

    @functools.cached_property
    def renamed(self) -> tuple[Tokenizer, dict[str, str]]:
        """A twin in which control tokens go by secret names, and the names by the usual text.

        In the twin, text that looks like a control token is only text. Used for chats whose messages hold such text;
        built on first need, since it takes as long as loading the tokenizer.
        """
        nonce = secrets.token_hex(8)
        names = {
            token.content: f"\U000fff00{nonce}.{token_id}\U000fff01"
            for token_id, token in self._added.items()
            if token.content in self.control_text(True).tokens
        }
        data = json.loads(self.to_json())
        for token in data["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        vocabulary = data["model"].get("vocab")
        if isinstance(vocabulary, dict):
            data["model"]["vocab"] = {names.get(token, token): i for token, i in vocabulary.items()}
        elif isinstance(vocabulary, list):
            data["model"]["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
        unknown = data["model"].get("unk_token")
        if unknown in names:
            data["model"]["unk_token"] = names[unknown]
        twin = Tokenizer.from_json(json.dumps(data), bos_id=self.bos_id, eos_ids=self.eos_ids)
        return twin, names


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} is not readable JSON: {error}") from error
    return data if isinstance(data, dict) else {}


def _text_of(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _one_id(value: int | list[int] | None) -> int | None:
    return value[0] if isinstance(value, list) and value else value if isinstance(value, int) else None


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
