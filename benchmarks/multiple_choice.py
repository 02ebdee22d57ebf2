"""A small multiple-choice set that a pip package ships: development questions of MMLU, in lm-eval's prompt files.

    python benchmarks/multiple_choice.py                # how many there are, and one of them

MMLU (Hendrycks et al. 2021) and lm-eval are under the MIT licence. The questions stay in the package, pinned here: its
wheel is fetched with pip into build/peers unless lm-eval is installed. Nothing is loaded from a hub.
"""

from __future__ import annotations

import importlib.util
import pathlib
import re
import subprocess
import sys
import zipfile

import msgspec
import yaml

PACKAGE = "lm-eval==0.4.13"
ROOT = pathlib.Path(__file__).resolve().parents[1]
_FOLDER = "lm_eval/tasks/mmlu/flan_cot_fewshot/"
_CHOICES = re.compile(r"^(?P<question>.*?)\s*\(A\)\s*(.+?)\s*\(B\)\s*(.+?)\s*\(C\)\s*(.+?)\s*\(D\)\s*(.+)$", re.DOTALL)
_ANSWER = re.compile(r"answer is \(([A-D])\)")


class Item(msgspec.Struct, frozen=True):
    """One question with four choices; `answer` is the number of the right one."""

    subject: str
    question: str
    choices: list[str]
    answer: int


def load(count: int | None = None) -> list[Item]:
    """The first `count` questions, subjects in turn so that any number of them is mixed; None: all.

    Raises ValueError where the package holds fewer.
    """
    by_subject = [_items(name, text) for name, text in sorted(_files().items())]
    rounds = max(map(len, by_subject), default=0)
    items = [subject[turn] for turn in range(rounds) for subject in by_subject if turn < len(subject)]
    if count is not None and len(items) < count:
        raise ValueError(f"{PACKAGE} holds {len(items)} questions, {count} are wanted")
    return items[:count]


def _items(subject: str, text: str) -> list[Item]:
    found = []
    for sample in yaml.safe_load(text)["fewshot_config"]["samples"]:
        question, answer = _CHOICES.match(sample["question"].strip()), _ANSWER.search(sample["target"])
        if question is not None and answer is not None:
            texts = [" ".join(part.split()) for part in question.groups()]
            found.append(Item(subject, texts[0], texts[1:], "ABCD".index(answer[1])))
    return found


def _files() -> dict[str, str]:
    """The package's prompt files: subject -> text."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is not None and spec.origin is not None:
        folder = pathlib.Path(spec.origin).parents[1] / _FOLDER
        return {_subject(path.name): path.read_text() for path in folder.glob("mmlu_*.yaml")}
    with zipfile.ZipFile(_wheel()) as wheel:
        names = [name for name in wheel.namelist() if name.startswith(_FOLDER + "mmlu_")]
        return {_subject(name): wheel.read(name).decode() for name in names}


def _subject(name: str) -> str:
    return name.rsplit("/", 1)[-1].removeprefix("mmlu_").removesuffix(".yaml")


def _wheel() -> pathlib.Path:
    folder = ROOT / "build" / "peers"
    pattern = f"lm_eval-{PACKAGE.partition('==')[2]}-*.whl"
    if not list(folder.glob(pattern)):
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--dest", str(folder), PACKAGE], check=True)
    return next(folder.glob(pattern))


if __name__ == "__main__":
    everything = load()
    print(f"{len(everything)} questions in {len({item.subject for item in everything})} subjects of {PACKAGE}")
    print(everything[0])
