"""Questions that a model answers with one token: their prompts, the tokens that stand for the answers, and scores.

A question goes to the model as a chat where it has a template, else as plain text that ends with "Answer:". Prompts of
one request begin alike, and what they have in common is the query of a scoring request.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from itertools import takewhile

from lowlat.engine.scoring import ScoreInput, score_of
from lowlat.server.errors import bad_field
from lowlat.server.state import ReadyModel
from lowlat.text.chat_request import Chat

_CLOSE_REASONING = "</think>\n\n"


async def prompt_ids(model: ReadyModel, context: str, question: str) -> list[int]:
    """Token ids of a prompt after which the answer's label is the next token.

    Raises:
        ApiError: 400; the template refuses it.
    """
    await asyncio.sleep(0)  # thousands of prompts must not hold up the streams of others
    text = model.text
    if text.chat_template is None:
        return await text.encode(f"{context}\n\n{question}\nAnswer:")
    message = {"role": "user", "content": f"{context}\n\n{question}"}
    ids = await text.encode_chat(Chat(messages=[message], variables={"enable_thinking": False}))
    if text.ends_in_reasoning(ids):
        # The answer is wanted at once, without thoughts.
        ids = ids + text.tokenizer.encode(_CLOSE_REASONING, False)
    return ids


def label_ids(model: ReadyModel, labels: Sequence[str], where: str) -> list[int]:
    """The token that stands for each label at the beginning of an answer.

    Raises:
        ApiError: 400; the tokenizer has no single token for a label, or the same one for two.
    """
    encode = model.text.tokenizer.encode
    forms = ("{}", " {}") if model.text.chat_template is not None else (" {}", "{}")
    ids = []
    for label in labels:
        found = [encoded[0] for form in forms if len(encoded := encode(form.format(label), False)) == 1]
        if not found:
            raise bad_field(where, f"this model's tokenizer has no single token for {label!r}", code="unsupported")
        ids.append(found[0])
    if len(set(ids)) < len(ids):
        raise bad_field(where, "this model's tokenizer cannot tell the labels apart", code="unsupported")
    return ids


def shared_input(prompts: list[list[int]], labels: list[list[int]], where: str, max_context: int) -> ScoreInput:
    """Prompts as items behind what all of them begin with. `where`: the field with one entry for each.

    Raises:
        ApiError: 400; a prompt is longer than the context.
    """
    for number, prompt in enumerate(prompts):
        if len(prompt) > max_context:
            raise bad_field(
                f"{where}[{number}]",
                f"with its question it has {len(prompt)} tokens; this model's context is {max_context}",
                code="context_length_exceeded",
            )
    shortest = min(map(len, prompts), default=1)
    alike = takewhile(lambda column: len(set(column)) == 1, zip(*(prompt[: shortest - 1] for prompt in prompts)))
    common = sum(1 for _ in alike)
    return ScoreInput(
        query=prompts[0][:common] if prompts else [], items=[prompt[common:] for prompt in prompts], labels=labels
    )


def shares_and_mass(logprobs: Sequence[float]) -> tuple[list[float], float]:
    """The labels' shares among each other, and their probability together in the whole vocabulary."""
    return score_of(logprobs, True, 1.0), min(1.0, sum(map(math.exp, logprobs)))
