"""What the front knows of a model: its name, tokenizer and chat template. No weights."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec

from lowlat.models.loading.checkpoint import open_checkpoint
from lowlat.models.loading.conversion import Progress
from lowlat.server.errors import ApiError, bad_field
from lowlat.server.requests import Message
from lowlat.text.chat import ChatTemplate, ChatTemplateError
from lowlat.text.tokenizer import Tokenizer, TokenizerError

LONG_TEXT = 16_384
"""Characters from which tokenizing goes to a thread, so that streams go on meanwhile."""


class TextModel(msgspec.Struct, kw_only=True, frozen=True):
    name: str
    """The name under which the model is served."""
    path: str
    """What `--model` was given."""
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a raw text, in a thread if it is long; possibly none."""
        if len(text) < LONG_TEXT:
            return self.tokenizer.encode(text, add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens)

    async def encode_text(self, text: str, where: str) -> list[int]:
        """Ids of a raw prompt, BOS included where the model wants one.

        Raises:
            ApiError: 400; no ids come out.
        """
        ids = await self.encode(text)
        if not ids:
            raise bad_field(where, "no token comes out of this text")
        return ids

    async def encode_chat(self, messages: list[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Ids of a chat with the model's template; with `add_generation_prompt` ready for the assistant's answer.

        Raises:
            ApiError: 400; the model has no template, or it refuses the messages.
        """
        template = self.chat_template
        if template is None:
            raise ApiError(
                400,
                "messages: this model has no chat template; use /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        plain = [_plain(message) for message in messages]
        try:
            if sum(len(message["content"]) for message in plain) < LONG_TEXT:
                ids = template.encode(plain, self.tokenizer, add_generation_prompt)
            else:
                ids = await asyncio.to_thread(template.encode, plain, self.tokenizer, add_generation_prompt)
        except ChatTemplateError as error:
            raise bad_field("messages", str(error)) from None
        if not ids:
            raise bad_field("messages", "no token comes out of these messages")
        return ids


def _plain(message: Message) -> dict[str, str]:
    content = message.content
    if not isinstance(content, str):
        content = "".join(part.text for part in content)
    plain = {"role": message.role, "content": content}
    if message.name is not None:
        plain["name"] = message.name
    return plain


def load_text_model(model: str, served_name: str | None = None, progress: Progress | None = None) -> TextModel:
    """Read tokenizer and chat template of what `--model` names (a GGUF file is converted once, into the cache).

    Raises:
        CheckpointError, TokenizerError, ChatTemplateError: files are missing or damaged (all are ValueErrors).
    """
    checkpoint = open_checkpoint(model, progress=progress)
    tokenizer = checkpoint.tokenizer()
    if not tokenizer.can_stream():
        raise TokenizerError(f"the tokenizer of {model} cannot stream text: it is neither byte-level nor SentencePiece")
    # A folder's or file's path is nobody's business but the operator's: clients see its last part.
    name = served_name or (model if os.sep not in model else Path(model).stem or model)
    return TextModel(name=name, path=model, tokenizer=tokenizer, chat_template=checkpoint.chat(tokenizer))
