"""What the front knows of a model: its name, tokenizer and chat template. No weights."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec

from lowlat.models.loading.checkpoint import open_checkpoint
from lowlat.models.loading.conversion import Progress
from lowlat.server.errors import ApiError, bad_field
from lowlat.text.chat import ChatTemplate, ChatTemplateError
from lowlat.text.chat_request import Chat, encode_chat
from lowlat.text.tokenizer import Tokenizer, TokenizerError
from lowlat.text.tool_calls.default_prompt import without_tools
from lowlat.text.tool_calls.formats import AnswerFormats, choose_formats
from lowlat.text.tool_calls.think import OPEN

LONG_TEXT = 16_384
"""Characters from which tokenizing goes to a thread, so that streams go on meanwhile."""


class TextModel(msgspec.Struct, kw_only=True, frozen=True):
    name: str
    """The name under which the model is served."""
    path: str
    """What `--model` was given."""
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    formats: AnswerFormats = AnswerFormats()
    """How the model writes tool calls and reasoning."""

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

    async def encode_chat(self, chat: Chat) -> list[int]:
        """Ids of a chat with the model's template.

        Raises:
            ApiError: 400; the model has no template, it refuses the messages, or it knows no tools.
        """
        template = self.chat_template
        if template is None:
            raise ApiError(
                400,
                "messages: this model has no chat template; use /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        if (chat.tools or chat.has_calls) and not template.mentions("tools"):
            chat = self._in_words(chat)
        try:
            if chat.size < LONG_TEXT:
                ids = encode_chat(template, chat, self.tokenizer)
            else:
                ids = await asyncio.to_thread(encode_chat, template, chat, self.tokenizer)
        except ChatTemplateError as error:
            raise bad_field("messages", str(error)) from None
        if not ids:
            raise bad_field("messages", "no token comes out of these messages")
        return ids

    def _in_words(self, chat: Chat) -> Chat:
        """The same chat for a template that knows no tools."""
        if self.formats.tools != "hermes":
            raise bad_field(
                "tools",
                "this model's chat template knows no tools, and this server has words of its own for the format "
                f"'hermes' only, not for {self.formats.tools!r}; start it with --tool-parser hermes",
                code="tools_unsupported",
            )
        return msgspec.structs.replace(chat, messages=without_tools(chat.messages, chat.tools), tools=[])

    def ends_in_reasoning(self, prompt_ids: list[int]) -> bool:
        """Whether the template has opened the tag of reasoning at the prompt's end."""
        return self.tokenizer.decode(prompt_ids[-8:], skip_special_tokens=False).rstrip().endswith(OPEN)


def load_text_model(
    model: str,
    served_name: str | None = None,
    progress: Progress | None = None,
    *,
    tool_parser: str = "auto",
    reasoning_parser: str = "auto",
) -> TextModel:
    """Read tokenizer and chat template of what `--model` names (a GGUF file is converted once, into the cache).

    Raises:
        CheckpointError, TokenizerError, ChatTemplateError: files are missing or damaged (all are ValueErrors).
        ValueError: the two parsers cannot read the same answer.
    """
    checkpoint = open_checkpoint(model, progress=progress)
    tokenizer = checkpoint.tokenizer()
    if not tokenizer.can_stream():
        raise TokenizerError(f"the tokenizer of {model} cannot stream text: it is neither byte-level nor SentencePiece")
    # A folder's or file's path is nobody's business but the operator's: clients see its last part.
    name = served_name or (model if os.sep not in model else Path(model).stem or model)
    chat_template = checkpoint.chat(tokenizer)
    formats = choose_formats(
        None if chat_template is None else chat_template.source,
        next(iter(checkpoint.config.get("architectures") or []), None),
        tools=tool_parser,
        reasoning=reasoning_parser,
    )
    return TextModel(name=name, path=model, tokenizer=tokenizer, chat_template=chat_template, formats=formats)
