from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from grammar_kit import SETTINGS, byte_level, save_tiny, sentencepiece
from lowlat.offline import Engine

collect_ignore_glob = [] if find_spec("xgrammar") else ["test_*.py"]


@pytest.fixture(scope="session")
def byte_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("bytes"), byte_level())


@pytest.fixture(scope="session")
def piece_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("pieces"), sentencepiece())


@pytest.fixture(scope="session")
def engine(byte_folder: Path) -> Iterator[Engine]:
    with Engine(model=str(byte_folder), **SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="session")
def piece_engine(piece_folder: Path) -> Iterator[Engine]:
    with Engine(model=str(piece_folder), **SETTINGS) as engine:
        yield engine
