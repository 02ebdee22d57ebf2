"""GGUF files converted once into a cache, as Hugging Face style folders that open at once.

A folder is complete when it holds its manifest: everything is written into a temporary folder, which is renamed in
one step. A lock file lets one process convert while others wait for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lowlat.models.loading.errors import CheckpointError
from lowlat.models.loading.gguf import GGUFFile
from lowlat.models.loading.gguf_model import GGUFModel, GGUFWeight
from lowlat.models.loading.safetensors_folder import SINGLE

Progress = Callable[[int, int, str], None]
"""Called with bytes done, bytes in all (0: unknown) and what is being done."""

_FORMAT = 2
"""Part of every fingerprint: raise it when the same file would be converted differently."""
_READ_WHOLE = 256 << 20
_MANIFEST = "lowlat.json"
_STORED = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
_WIDTH = {"F32": 4, "F16": 2, "BF16": 2}


def cache_root() -> Path:
    """Folder of everything that can be made again: $LOWLAT_CACHE, else ~/.cache/lowlat."""
    return Path(os.environ.get("LOWLAT_CACHE") or Path.home() / ".cache" / "lowlat")


def fingerprint(file: GGUFFile) -> str:
    """Identifies a file's content.

    A small file is read whole, so that copies of it (an embedded model in several environments) share one conversion.
    Of a large one, which would take seconds: size, time of change, head and samples of the data.
    """
    status = file.path.stat()
    if status.st_size <= _READ_WHOLE:
        with file.path.open("rb") as data:
            digest = hashlib.file_digest(data, "sha256")
        digest.update(f"gguf {_FORMAT}".encode())
        return digest.hexdigest()[:32]
    digest = hashlib.sha256(f"gguf {_FORMAT} {status.st_size} {status.st_mtime_ns}".encode())
    digest.update(file.header_bytes())
    with file.path.open("rb") as data:
        for n in range(16):
            data.seek(status.st_size * n // 16)
            digest.update(data.read(4096))
    return digest.hexdigest()[:32]


def convert_once(path: Path, progress: Progress | None = None) -> tuple[Path, str]:
    """The folder with the converted file, made now if it is not there yet, and the file's fingerprint.

    Raises:
        CheckpointError: the file is unsound or of an unsupported kind, or the cache cannot be written.
    """
    file = GGUFFile(path)
    mark = fingerprint(file)
    parent = cache_root() / "checkpoints"
    folder = parent / mark
    if is_complete(folder):
        return folder, mark
    model = GGUFModel(file)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with _lock(parent / f".{mark}.lock", progress):
            # Another process may have finished while this one waited.
            if not is_complete(folder):
                _convert(model, folder, progress)
    except OSError as error:
        raise CheckpointError(
            f"the converted model cannot be written into {parent}: {error}. "
            "Choose another place with LOWLAT_CACHE=/path/with/space"
        ) from error
    return folder, mark


def is_complete(folder: Path) -> bool:
    """Whether every file that the manifest names is there in full."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return manifest["format"] == _FORMAT and all(
            (folder / name).stat().st_size == size for name, size in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextlib.contextmanager
def _lock(path: Path, progress: Progress | None) -> Iterator[None]:
    """Holds a lock file; the system frees it even when the process is killed."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress:
                progress(0, 0, "waiting for another process that converts this model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert(model: GGUFModel, folder: Path, progress: Progress | None) -> None:
    """Writes `folder`; the caller holds the lock, so what else bears its name was left by a killed process."""
    for left in folder.parent.glob(f"{folder.name}.*"):
        shutil.rmtree(left, ignore_errors=True)
    temporary = folder.parent / f"{folder.name}.{os.getpid()}"
    temporary.mkdir()
    try:
        for name, text in _small_files(model).items():
            (temporary / name).write_text(text, encoding="utf-8")
        write_weights(model, temporary / SINGLE, progress)
        sizes = {path.name: path.stat().st_size for path in temporary.iterdir()}
        source = str(model.file.path.resolve())
        manifest = {"format": _FORMAT, "source": source, "files": sizes}
        (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
        _forget_older(folder, source)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _forget_older(folder: Path, source: str) -> None:
    """Removes conversions of what the same file held before; nothing can reach them any more."""
    for other in folder.parent.glob("*/" + _MANIFEST):
        if other.parent == folder:
            continue
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if json.loads(other.read_text(encoding="utf-8"))["source"] == source:
                shutil.rmtree(other.parent, ignore_errors=True)


def _small_files(model: GGUFModel) -> dict[str, str]:
    """All files but the weights, by name."""
    tokenizer = model.tokenizer()
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    files = {
        "config.json": json.dumps(model.config, indent=2),
        "generation_config.json": json.dumps(model.generation_config(), indent=2),
        "tokenizer.json": tokenizer.to_json(),
        "tokenizer_config.json": json.dumps(settings | tokenizer.special_tokens, indent=2, ensure_ascii=False),
    }
    template = model.chat_template()
    return files if template is None else files | {"chat_template.jinja": template}


def write_weights(model: GGUFModel, path: Path, progress: Progress | None = None) -> None:
    """Writes all weights as one safetensors file, a piece at a time, so that memory does not grow with the model.

    Format: 8 bytes with the header's length, a JSON header padded to 8 bytes, the tensors without gaps.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    # Four-byte types first: then every tensor is aligned to its type.
    order = sorted(model.weights, key=lambda name: (_stored_type(model.weights[name]) != "F32", name))
    for name in order:
        weight, start = model.weights[name], end
        kind = _stored_type(weight)
        values = 1
        for size in weight.shape:
            values *= size
        end += values * _WIDTH[kind]
        header[name] = {"dtype": kind, "shape": list(weight.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    what = f"converting {model.file.path.name}"
    done = 0
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            for piece in model.read(name):
                file.write(np.ascontiguousarray(piece).data)
                done += piece.nbytes
                if progress:
                    progress(done, end, what)
        file.flush()
        os.fsync(file.fileno())


def _stored_type(weight: GGUFWeight) -> str:
    """Quantised weights become float32, others stay as they are."""
    return _STORED.get(weight.type.name, "F32")
