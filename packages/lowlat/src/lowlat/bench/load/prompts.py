"""Prompts of a wanted number of tokens without the server's tokenizer.

Text is made of common English words, each one token in most vocabularies. Two probes of one token each measure how many
tokens a word costs and how many the chat template adds, from the usage that the server reports.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Iterable
from typing import Any

import msgspec

from lowlat.bench.load.client import Client

WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city community name president team minute idea kid body
information back parent face others level office door health person art war history party result change morning
reason research girl guy moment air teacher force education
""".split()  # noqa: SIM905 - a list literal would be a page of quotes

PROBES = (32, 160)
"""Words of the two probes."""
MIN_TOKENS_PER_WORD, MAX_TOKENS_PER_WORD = 0.25, 16.0
"""What a tokenizer can make of common words, at most several words a token and a token for every few characters."""

PHRASE_WORDS = 8
PHRASES = 4096


class Scale(msgspec.Struct, frozen=True):
    """Tokens that a server counts for a prompt of n words: `overhead + n * tokens_per_word`."""

    tokens_per_word: float = 1.0
    overhead: float = 0.0
    remark: str = ""
    """Why these are not the server's numbers; empty where they are."""

    def words(self, tokens: int) -> int:
        """Words that make a prompt of about `tokens` tokens, at least one."""
        return max(1, round((tokens - self.overhead) / self.tokens_per_word))


@functools.cache
def _phrases() -> list[list[str]]:
    draw = random.Random(0)
    return [draw.choices(WORDS, k=PHRASE_WORDS) for _ in range(PHRASES)]


def filler(seed: str, count: int) -> str:
    """`count` words that depend on `seed` alone. Cheap, since the loop that makes prompts also takes times."""
    phrases = _phrases()
    whole, rest = divmod(count, PHRASE_WORDS)
    digest = hashlib.shake_128(seed.encode()).digest(2 * (whole + 1))
    chosen = [phrases[(digest[2 * i] << 8 | digest[2 * i + 1]) % PHRASES] for i in range(whole + 1)]
    chosen[-1] = chosen[-1][:rest]
    return " ".join(word for phrase in chosen for word in phrase)


_block = functools.lru_cache(maxsize=1 << 16)(filler)


def block_text(salt: str, block_ids: Iterable[int], tail: int, *, block_words: int, tail_seed: object) -> str:
    """Text whose blocks repeat where `block_ids` repeat under the same `salt`, followed by `tail` fresh words.

    The salt is its first line, so texts of different salts share no prefix.
    """
    parts = [f"[{salt}]"]
    parts += [_block(f"{salt} {block}", block_words) for block in block_ids]
    if tail:
        parts.append(filler(f"{salt} {tail_seed!r}", tail))
    return " ".join(parts)


def body_for(endpoint: str, model: str, prompt: str | list[dict[str, str]], max_tokens: int) -> dict[str, Any]:
    """Request body that makes a server generate exactly `max_tokens` tokens greedily.

    `endpoint` is `chat/completions` or `completions`. `ignore_eos` is understood by lowlat, vLLM and SGLang.
    """
    body: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    if endpoint == "completions":
        text = prompt if isinstance(prompt, str) else "\n\n".join(m["content"] for m in prompt)
        return {**body, "prompt": text}
    return {**body, "messages": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt}


async def calibrate(client: Client, endpoint: str, model: str, *, seed: int = 0) -> Scale:
    """Measure the server's tokens a word and template overhead with two one-token requests (32 and 160 words).

    Raises ConnectionError where a probe fails. Where the server's counts of the probes are missing or make no sense, a
    word is taken for a token, and `remark` says so.
    """
    counts: list[int | None] = []
    for size in PROBES:
        prompt = filler(f"calibrate {seed} {size}", size)
        record = await client.stream(endpoint, body_for(endpoint, model, prompt, 1), name="calibrate")
        if record.error is not None:
            raise ConnectionError(f"the server refused a probe of {size} words: {record.error}")
        counts.append(record.prompt_tokens)
    short, long = counts
    if short is None or long is None:
        return Scale(remark="prompts have a token a word, a guess: the server's usage counts no prompt tokens")
    slope = (long - short) / (PROBES[1] - PROBES[0])
    if not MIN_TOKENS_PER_WORD <= slope <= MAX_TOKENS_PER_WORD:
        said = f"{PROBES[0]} words as {short} tokens and {PROBES[1]} words as {long}"
        return Scale(remark=f"prompts have a token a word, a guess: the server counts {said}")
    return Scale(slope, short - PROBES[0] * slope)
