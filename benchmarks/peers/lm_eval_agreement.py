"""lm-eval against `lowlat serve --model smollm2`: its log-likelihoods and answers beside those of transformers.

    python benchmarks/peers/lm_eval_agreement.py --lm-eval build/peers/lm-eval/bin/lm_eval

A multiple-choice task (benchmarks/multiple_choice.py) is scored twice, with prompts as token ids in batches and as text
with several requests at a time; then a generation task. Both run on the same float32 weights in transformers. Exit code
1 where a log-likelihood differs by more than 1e-3, or a greedy answer is not one of transformers' within rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import torch
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import multiple_choice

from lowlat.bench.local_server import local_server
from lowlat.models.loading.checkpoint import open_checkpoint

TOLERANCE = 1e-3
CHOICE_TASK = """task: lowlat_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""
ANSWER_TASK = """task: lowlat_answer
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "Question: Which animal meows?\\nAnswer: A cat\\nQuestion: {{{{question}}}}\\nAnswer:"
doc_to_target: answer
generation_kwargs:
  {{until: ["\\n", "Question:", "\\ndef", "\\nclass", "\\n#"], max_gen_toks: 24, temperature: 0.0, do_sample: false}}
filter_list:
  - {{name: word, filter: [{{function: remove_whitespace}}, {{function: take_first}}]}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true, ignore_punctuation: true}}
"""
QUESTIONS = {
    "What is the capital of France?": "Paris",
    "How many legs does a spider have?": "Eight",
    "Which planet is closest to the sun?": "Mercury",
    "What colour is the sky on a clear day?": "Blue",
    "What is two plus three?": "Five",
    "Which animal barks?": "A dog",
    "What do bees make?": "Honey",
    "What is frozen water called?": "Ice",
    "Which day comes after Monday?": "Tuesday",
    "What do we call a baby cat?": "A kitten",
    "Which ocean lies between Europe and America?": "The Atlantic",
    "What gas do plants take from the air?": "Carbon dioxide",
}


def write_tasks(folder: pathlib.Path, count: int) -> None:
    """The two tasks and their data, as lm-eval reads them from a folder."""
    rows: dict[str, list[dict[str, Any]]] = {
        "choice": [
            {"question": item.question, "choices": item.choices, "answer": item.answer}
            for item in multiple_choice.load(count)
        ],
        "answer": [{"question": question, "answer": answer} for question, answer in QUESTIONS.items()],
    }
    for name, task in (("choice", CHOICE_TASK), ("answer", ANSWER_TASK)):
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        (folder / f"{name}.yaml").write_text(task.format(file=file))


def run_lm_eval(
    program: str, folder: pathlib.Path, url: str, task: str, batch_size: int = 1, **options: Any
) -> list[dict[str, Any]]:
    """Run one task and return what lm-eval logged for each of its samples."""
    output = folder / f"out-{task}-{batch_size}"
    model = {"model": "smollm2", "base_url": f"{url}/v1/completions", "tokenizer_backend": "huggingface"}
    model |= {"tokenizer": str(open_checkpoint("smollm2").folder), "max_length": 2048, **options}
    settings = ",".join(f"{key}={value}" for key, value in model.items())
    command = [
        program, "--model", "local-completions", "--model_args", settings,
        "--tasks", task, "--include_path", str(folder), "--output_path", str(output), "--log_samples",
        "--batch_size", str(batch_size),
    ]  # fmt: skip
    # Nothing may come from a hub, and what datasets prepares goes with the folder.
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    logs = list(output.rglob("samples_*.jsonl"))
    if done.returncode != 0 or len(logs) != 1:
        raise SystemExit(f"lm-eval failed on {task}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    print(done.stdout[done.stdout.find("|") :].strip())
    return [json.loads(line) for line in logs[0].read_text().splitlines()]


class Reference:
    """transformers with the same weights in float32."""

    def __init__(self) -> None:
        folder = open_checkpoint("smollm2").folder
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._known: dict[tuple[str, str], float] = {}

    def log_likelihood(self, context: str, continuation: str) -> float:
        """Of a continuation, its tokens found as lm-eval finds them."""
        pair = context, continuation
        if pair not in self._known:
            self._known[pair] = self._log_likelihood(*pair)
        return self._known[pair]

    @torch.inference_mode()
    def _log_likelihood(self, context: str, continuation: str) -> float:
        before = self.tokenizer(context)["input_ids"]
        whole = self.tokenizer(context + continuation)["input_ids"]
        logprobs = self.model(torch.tensor([whole])).logits[0].log_softmax(-1)[len(before) - 1 : -1]
        targets = torch.tensor(whole[len(before) :])
        return float(logprobs.gather(1, targets[:, None]).sum())

    @torch.inference_mode()
    def shortfall(self, prompt: str, answer: str) -> float:
        """How far the logits of an answer's tokens lie below the best ones, at most; 0: the greedy answer."""
        before = self.tokenizer(prompt)["input_ids"]
        whole = [*before, *self.tokenizer(answer)["input_ids"]]
        logits = self.model(torch.tensor([whole])).logits[0, len(before) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(whole[len(before) :])[:, None])[:, 0]
        return float((logits.amax(-1) - chosen).max()) if len(whole) > len(before) else 0.0


def judge_choices(reference: Reference, name: str, samples: list[dict[str, Any]], count: int) -> float:
    """Largest difference of a log-likelihood over all samples."""
    assert len(samples) == count, f"{len(samples)} samples of {count}"
    worst, pairs = 0.0, 0
    for sample in samples:
        for arguments, (found, _) in zip(_arguments(sample), sample["filtered_resps"], strict=True):
            worst = max(worst, abs(float(found) - reference.log_likelihood(*arguments)))
            pairs += 1
    print(f"{name}: {pairs} log-likelihoods of {count} questions, largest difference from transformers {worst:.2e}")
    return worst


def _arguments(sample: dict[str, Any]) -> list[tuple[str, str]]:
    """(context, continuation) of each choice, as lm-eval logs them."""
    found = sample["arguments"]
    entries = found.values() if isinstance(found, dict) else found
    return [tuple(entry.values())[:2] if isinstance(entry, dict) else tuple(entry)[:2] for entry in entries]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm-eval", required=True, help="the lm_eval program of its own environment")
    parser.add_argument("--count", type=int, default=100, help="questions of the multiple-choice task")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lowlat-lm-eval-") as name:
        folder = pathlib.Path(name)
        write_tasks(folder, arguments.count)
        with local_server(["--model", "smollm2", "--dtype", "float32", "--max-context", "2048"]) as server:

            def run(task: str, **options: Any) -> list[dict[str, Any]]:
                return run_lm_eval(arguments.lm_eval, folder, server.url, task, **options)

            by_ids = run("lowlat_choice", batch_size=8)
            by_text = run("lowlat_choice", tokenized_requests=False, num_concurrent=4)
            answers = run("lowlat_answer", tokenized_requests=False)
        reference = Reference()
        worst = max(
            judge_choices(reference, "token ids in batches of 8", by_ids, arguments.count),
            judge_choices(reference, "text, 4 at a time", by_text, arguments.count),
        )
    shortfall = max(reference.shortfall(_arguments(one)[0][0], one["resps"][0][0]) for one in answers)
    print(f"{len(answers)} greedy answers: every token within {shortfall:.2e} of transformers' best logit")
    raise SystemExit(worst > TOLERANCE or shortfall > TOLERANCE or len(answers) != len(QUESTIONS))


if __name__ == "__main__":
    main()
