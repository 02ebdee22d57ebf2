"""Multiple choice through `/v1/score` and through lm-eval, on the same server: the choices must be the same.

    python benchmarks/peers/score_choices.py --lm-eval build/peers/lm-eval/bin/lm_eval

A hundred questions of benchmarks/multiple_choice.py with options labelled A to D. lm-eval, unchanged, asks for the
log-likelihood of each letter behind each question; `/v1/score` gets all questions as items of one request, in one
sequence and in one an item. Exit code 1 where a choice differs, or a log-probability by more than 1e-3.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile
from typing import Any

import httpx
from lm_eval_agreement import multiple_choice, run_lm_eval

from lowlat.bench.local_server import local_server
from lowlat.models.loading.checkpoint import open_checkpoint

TOLERANCE = 1e-3
LETTERS = "ABCD"
HEADER = "Answer each question with the letter of the right option."
"""What all prompts begin with: the query. Items begin with the line break, so that tokens do not reach across."""
TASK = """task: lowlat_letters
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: ["A", "B", "C", "D"]
doc_to_target: answer
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""


def item_of(question: multiple_choice.Item) -> str:
    """A question as text, up to where the letter stands."""
    options = "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, question.choices, strict=True))
    return f"\n\nQuestion: {question.question}\n{options}\nAnswer:"


def lm_eval_scores(program: str, folder: pathlib.Path, url: str, prompts: list[str], answers: list[int]) -> Any:
    """Log-likelihoods of the four letters behind each prompt, in the order of the prompts."""
    file = folder / "letters.jsonl"
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(prompts, answers, strict=True)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "letters.yaml").write_text(TASK.format(file=file))
    samples = run_lm_eval(program, folder, url, "lowlat_letters", batch_size=8)
    by_number = {sample["doc_id"]: [float(found) for found, _ in sample["filtered_resps"]] for sample in samples}
    return [by_number[number] for number in range(len(prompts))]


def score_scores(url: str, items: list[str], labels: list[int], mode: str) -> list[list[float]]:
    """The same from `/v1/score`, all items in one request."""
    body = {"query": HEADER, "items": items, "label_token_ids": labels, "mode": mode, "return_token_logprobs": True}
    answer = httpx.post(f"{url}/v1/score", json=body, timeout=1800)
    answer.raise_for_status()
    found = answer.json()
    assert found["mode"] == mode
    print(f"/v1/score, {mode}: {found['usage']['prompt_tokens']} tokens, {found['timings']['total_s']:.1f} s")
    return found["token_logprobs"]


def compare(name: str, found: list[list[float]], expected: list[list[float]]) -> bool:
    """Say how far two sets of log-probabilities are apart, and whether they choose alike within the tolerance."""
    pairs = list(zip(found, expected, strict=True))
    worst = max(abs(a - b) for one, two in pairs for a, b in zip(one, two, strict=True))
    alike = sum(max(range(4), key=one.__getitem__) == max(range(4), key=two.__getitem__) for one, two in pairs)
    print(f"{name}: {alike} of {len(pairs)} choices alike, largest difference of a log-probability {worst:.2e}")
    return alike == len(pairs) and worst <= TOLERANCE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm-eval", required=True, help="the lm_eval program of its own environment")
    parser.add_argument("--count", type=int, default=100, help="questions, the shortest of the set")
    arguments = parser.parse_args()
    questions = sorted(multiple_choice.load(), key=lambda item: len(item_of(item)))[: arguments.count]
    assert len(questions) == arguments.count
    items = [item_of(question) for question in questions]
    tokenizer = open_checkpoint("smollm2").tokenizer()
    labels = [tokenizer.encode(f" {letter}", False) for letter in LETTERS]
    assert all(len(ids) == 1 for ids in labels)
    head = tokenizer.encode(HEADER)
    assert all(head + tokenizer.encode(item, False) == tokenizer.encode(HEADER + item) for item in items)
    answers = [question.answer for question in questions]
    with (
        tempfile.TemporaryDirectory(prefix="lowlat-score-") as name,
        local_server(["--model", "smollm2", "--dtype", "float32", "--max-context", "2048"]) as server,
    ):
        by_mode = {mode: score_scores(server.url, items, [ids[0] for ids in labels], mode) for mode in ("mis", "sis")}
        prompts = [HEADER + item for item in items]
        expected = lm_eval_scores(arguments.lm_eval, pathlib.Path(name), server.url, prompts, answers)
    right = sum(max(range(4), key=row.__getitem__) == answer for row, answer in zip(expected, answers, strict=True))
    print(f"{right} of {len(answers)} answers are right")
    same = [compare(f"{mode} beside lm-eval", rows, expected) for mode, rows in by_mode.items()]
    raise SystemExit(not all(same))


if __name__ == "__main__":
    main()
