"""Prompts to train a draft on: agent sessions as chats, other text as it is, all of one length."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from lowlat.text.chat import ChatTemplate
from lowlat.text.tokenizer import Tokenizer

_TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".json")
_MARK = "draftpromptgoeshere"
_LONGEST_TOKEN = 16
"""Characters; longer ones are rare, and a prompt is then skipped."""


class TextError(Exception):
    """There is nothing to train on; the text says why."""


class _Turn(msgspec.Struct):
    input: str
    output: str = ""


class Texts:
    """Files of training and held-out text."""

    def __init__(self, paths: Sequence[Path], hold_out: int) -> None:
        """`paths`: files, or folders of them. Of the sessions (.jsonl) of each folder, in the order of their names, the
        last `hold_out` are kept from training. Raises `TextError`."""
        self.training: list[Path] = []
        self.held_out: list[Path] = []
        for path in paths:
            if not path.exists():
                raise TextError(f"{path} does not exist")
            files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
            folders: dict[Path, list[Path]] = {}
            for file in files:
                if file.suffix == ".jsonl":
                    folders.setdefault(file.parent, []).append(file)
                elif file.suffix in _TEXT_SUFFIXES or not path.is_dir():
                    self.training.append(file)
            for sessions in folders.values():
                cut = max(0, len(sessions) - hold_out) if len(sessions) > 1 else len(sessions)
                self.training += sessions[:cut]
                self.held_out += sessions[cut:]
        if not self.training:
            raise TextError(f"no .jsonl sessions or text files ({', '.join(_TEXT_SUFFIXES)}) to train on")


def conversations(file: Path) -> list[str]:
    """What the model was asked at each turn of a session: all that was said so far."""
    said, found = "", []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            turn = msgspec.json.decode(line, type=_Turn)
        except msgspec.DecodeError as error:
            raise TextError(f"{file}:{number}: no turn of a session (input, output): {error}") from None
        said = turn.input if turn.input.startswith(said) else said + turn.input
        if turn.input:
            found.append(said)
        said += turn.output
    return found


class Prompts:
    """Draws prompts of exactly `length` tokens, for ever."""

    def __init__(
        self, files: Sequence[Path], tokenizer: Tokenizer, chat: ChatTemplate | None, length: int, seed: int
    ) -> None:
        """Raises `TextError` where no file is long enough."""
        self._random = random.Random(seed)
        self._length = length
        before, after = _frame(tokenizer, chat)
        self._chat_room = length - len(before) - len(after)
        if chat is not None and self._chat_room < 8:
            frame = length - self._chat_room
            raise TextError(
                f"prompts of {length} tokens leave no room in the chat template, which takes {frame} itself: "
                f"use --prompt-tokens {frame + 8} or more"
            )
        self._frame = (before, after)
        self._sessions: list[list[list[int]]] = []
        self._texts: list[list[int]] = []
        for file in files:
            if file.suffix == ".jsonl" and chat is not None:
                # Conversations grow with every turn: what cannot reach into a prompt is not worth tokenizing.
                ends = [text[-_LONGEST_TOKEN * self._chat_room :] for text in conversations(file)]
                turns = [tokenizer.encode(text, add_special_tokens=False) for text in ends]
                turns = [turn[-self._chat_room :] for turn in turns if len(turn) >= self._chat_room]
                if turns:
                    self._sessions.append(turns)
            else:
                tokens = tokenizer.encode(file.read_text(encoding="utf-8", errors="replace"))
                if len(tokens) > length:
                    self._texts.append(tokens)
        if not self._sessions and not self._texts:
            raise TextError(f"no text is as long as a prompt of {length} tokens: use fewer --prompt-tokens")
        self._weights = [len(turns) for turns in self._sessions], [len(tokens) // length for tokens in self._texts]

    def __iter__(self) -> Iterator[list[int]]:
        draw = self._random
        before, after = self._frame
        while True:
            if self._sessions and (not self._texts or draw.random() < 0.7):
                turns = draw.choices(self._sessions, self._weights[0])[0]
                yield [*before, *draw.choice(turns), *after]
            else:
                tokens = draw.choices(self._texts, self._weights[1])[0]
                start = draw.randrange(len(tokens) - self._length)
                yield tokens[start : start + self._length]


def _frame(tokenizer: Tokenizer, chat: ChatTemplate | None) -> tuple[list[int], list[int]]:
    """Tokens of a chat before and after what its user says."""
    if chat is None:
        return [], []
    mark = tokenizer.encode(_MARK, add_special_tokens=False)
    tokens = chat.encode([{"role": "user", "content": _MARK}], tokenizer)
    for start in range(len(tokens)):
        if tokens[start : start + len(mark)] == mark:
            return tokens[:start], tokens[start + len(mark) :]
    raise TextError("the chat template changes what users say: sessions cannot be put into it")
