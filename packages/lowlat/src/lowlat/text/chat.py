"""Chat templates: messages to the exact text and ids that a model was trained on."""

from __future__ import annotations

import datetime
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from lowlat.text.tokenizer import ControlText, Tokenizer


class ChatTemplateError(ValueError):
    """The template is broken or refuses these messages; the message says why and may be shown to a client."""


class _GenerationBlock(jinja2.ext.Extension):
    """Accepts `{% generation %} ... {% endgeneration %}`, which marks training targets and renders as its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own form

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of jinja2's own filter, as chat templates expect it."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A model's chat template (Jinja, as Hugging Face writes them), run in a sandbox.

    Templates see `messages`, `tools`, `documents`, `add_generation_prompt`, the special tokens given here (such as
    `bos_token`), and whatever else a caller passes.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Raises ChatTemplateError when the template cannot be parsed."""
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template cannot be parsed: {error}") from error

    def mentions(self, variable: str) -> bool:
        """Whether the template looks at a variable, such as `tools`."""
        return re.search(rf"\b{variable}\b", self.source) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The chat as text. Message keys whose value is None count as absent, as templates expect.

        Raises:
            ChatTemplateError: the template refuses the messages (roles in a wrong order, say) or fails on them.
        """
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        values = {
            **self._special_tokens,
            **variables,
            "messages": chat,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        values.setdefault("documents", None)
        try:
            return self._template.render(values)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template refused these messages: {error}") from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ChatTemplateError(
                f"the chat template failed on these messages ({type(error).__name__}: {error})"
            ) from error

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Ids of the chat, equal to what `transformers`' `apply_chat_template` gives for ordinary messages.

        The template writes BOS itself where the model wants one, so none is added.

        Text from messages, tools and variables never becomes a control token: where it holds one's name (or ends with
        the beginning of one, which the template's text might complete), exactly that name is encoded as plain text.
        Names of control tokens are special tokens, and added tokens written as tags (`<tool_call>`).

        Raises:
            ChatTemplateError: as `render`.
        """
        shield = _Shield(tokenizer)
        text = self.render(
            shield.cover_messages(messages), add_generation_prompt, shield.cover(tools), **shield.cover(variables)
        )
        return shield.encode(text) if shield.used else tokenizer.encode(text, add_special_tokens=False)


class _Shield:
    """Tells control tokens that a template wrote from text of the same form that a user wrote.

    User text that looks like a control token is covered by a nonce that no user can know, the template runs, and the
    result is encoded by a twin tokenizer in which control tokens have other names: the template's tokens are renamed,
    the user's text is put back as it was.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._nonce = secrets.token_hex(8)
        self._covered: list[str] = []

    @property
    def used(self) -> bool:
        """Whether anything had to be covered."""
        return bool(self._covered)

    def cover_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages with dangerous text covered.

        In the assistant's own messages tags that are not special tokens stay: templates look for `</think>` there.
        """
        return [
            {key: self.cover(value, tags=message.get("role") != "assistant") for key, value in message.items()}
            for message in messages
        ]

    def cover(self, value: Any, tags: bool = True) -> Any:
        """A copy of `value` (strings, lists, mappings) with every dangerous piece of text covered."""
        if isinstance(value, str):
            return self._cover_text(value, self._tokenizer.control_text(tags))
        if isinstance(value, Mapping):
            return {self.cover(key, tags): self.cover(item, tags) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.cover(item, tags) for item in value]
        return value

    def _cover_text(self, text: str, control: ControlText) -> str:
        text = control.whole.sub(lambda match: self._hide(match[0]), text)
        # The end of one text and the template's next word must not make a control token together.
        start, end = control.open_end(text)
        return text if start == end else text[:start] + self._hide(text[start:end]) + text[end:]

    def _hide(self, text: str) -> str:
        self._covered.append(text)
        # Letters and digits alone: trimming, splitting and JSON leave them as they are.
        return f"cover{self._nonce}n{len(self._covered) - 1}e"

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered chat whose user text was covered."""
        twin, names = self._tokenizer.renamed
        text = self._tokenizer.control_text(True).whole.sub(lambda match: names[match[0]], text)
        cover = re.compile(f"cover{self._nonce}n(\\d+)e")
        text = cover.sub(lambda match: self._covered[int(match[1])], text)
        return twin.encode(text, add_special_tokens=False)
