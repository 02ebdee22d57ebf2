"""Prompts to train a draft on: agent sessions as chats, other text as it is, all of one length."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import torch

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
        if not self.training and self.held_out:
            raise TextError(
                f"all {len(self.held_out)} sessions are held out, and none is left to train on: give more, "
                f"or a smaller --hold-out than {hold_out}"
            )
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


Part = TypeVar("Part", bound=Sequence[object])


class ByLength(Generic[Part]):
    """Sequences that are drawn as often as they are long."""

    def __init__(self, of: list[Part]) -> None:
        self.of = of
        self._ends = list(accumulate(map(len, of)))

    def draw(self, random: random.Random) -> Part:
        """One of them."""
        return random.choices(self.of, cum_weights=self._ends)[0]


class Prompts:
    """Draws prompts from sessions and texts, for ever."""

    def __init__(
        self,
        files: Sequence[Path],
        tokenizer: Tokenizer,
        chat: ChatTemplate | None,
        longest: int,
        seed: int,
        *,
        anywhere: bool = False,
    ) -> None:
        """`longest`: most tokens of a prompt. `anywhere`: half the prompts end within a session, not at the end of a
        turn: so a model that answers the same prompt in the same way has more to say; and half of those from other text
        are put into a chat too. Raises `TextError` where no file
        is long enough."""
        self._seed = seed
        self.begin(0)
        self._anywhere = anywhere
        before, after = self._frame = _frame(tokenizer, chat)
        room = longest - len(before) - len(after)
        if chat is not None and room < 8:
            frame = longest - room
            raise TextError(
                f"prompts of {longest} tokens leave no room in the chat template, which takes {frame} itself: "
                f"use --prompt-tokens {frame + 8} or more"
            )
        sessions = [conversations(file) for file in files if file.suffix == ".jsonl" and chat is not None]
        # Conversations grow with every turn: what cannot reach into a prompt is not worth tokenizing.
        ends = [text[-_LONGEST_TOKEN * room :] for said in sessions for text in said]
        turns = iter(tokenizer.encode_many(ends, add_special_tokens=False))
        long = [[turn[-room:] for turn in islice(turns, len(said)) if len(turn) >= room] for said in sessions]
        self._sessions = ByLength([turns for turns in long if turns])
        whole = [said[-1] for said, turns in zip(sessions, long, strict=True) if turns] if anywhere else []
        self._whole = ByLength(tokenizer.encode_many(whole, add_special_tokens=False))
        """All that was said in each session."""
        others = [file for file in files if file.suffix != ".jsonl" or chat is None]
        texts = tokenizer.encode_many([file.read_text(encoding="utf-8", errors="replace") for file in others])
        self._texts = ByLength([tokens for tokens in texts if len(tokens) > longest])
        if not self._sessions.of and not self._texts.of:
            raise TextError(f"no text is as long as a prompt of {longest} tokens: use fewer --prompt-tokens")

    def begin(self, number: int) -> None:
        """What is drawn next is a matter of the seed and this number alone."""
        self._random = random.Random(f"{self._seed} {number}")

    def counts(self, vocabulary: int) -> torch.Tensor:
        """How often each token stands in the texts, [vocabulary]."""
        parts = [torch.tensor(tokens) for tokens in (*self._whole.of, *self._texts.of)]
        return torch.cat(parts).bincount(minlength=vocabulary)

    def draw(self, length: int, count: int, sessions: float = 0.7) -> list[list[int]]:
        """`count` prompts of exactly `length` tokens. `sessions`: share of those from sessions, where there is other
        text too."""
        return [self._one(length, sessions) for _ in range(count)]

    def openings(self, count: int) -> list[list[int]]:
        """What stands before a chat's first words, `count` times: a model that goes on from there asks and answers."""
        before, _ = self._frame
        return [before] * count if before else self.draw(1, count)

    def _one(self, length: int, sessions: float) -> list[int]:
        draw = self._random
        before, after = self._frame
        room = length - len(before) - len(after)
        if self._sessions.of and (not self._texts.of or draw.random() < sessions):
            if self._anywhere and draw.random() < 0.5:
                tokens = self._whole.draw(draw)
                end = draw.randint(room, len(tokens))
                return [*before, *tokens[end - room : end], *after]
            return [*before, *draw.choice(self._sessions.draw(draw))[-room:], *after]
        tokens = self._texts.draw(draw)
        if before and self._anywhere and draw.random() < 0.5:
            start = draw.randrange(len(tokens) - room)
            return [*before, *tokens[start : start + room], *after]
        start = draw.randrange(len(tokens) - length)
        return list(tokens[start : start + length])


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
