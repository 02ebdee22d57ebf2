"""`lowlat plugins new`: a kernel library that works, to be changed piece by piece."""

from __future__ import annotations

import re
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def render(name: str) -> dict[str, str]:
    """The project's files by their path in it. Raises ValueError for a name that is not a distribution's name."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no good name: use lower-case words joined by hyphens, such as my-kernels")
    module = name.replace("-", "_")
    files: dict[str, str] = {}
    for path, text in _templates(resources.files(__name__) / "template", ""):
        target = path.removesuffix(".in").replace("MODULE", module)
        files[target] = text.replace("@NAME@", name).replace("@MODULE@", module)
    return files


def write_project(name: str, folder: Path) -> list[Path]:
    """Write the project into a new or empty folder and return the paths written.

    Raises:
        ValueError: the name is no good.
        FileExistsError: the folder holds something already; nothing is written then.
    """
    files = render(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is not empty; choose another with --folder")
    written = []
    for path, text in sorted(files.items()):
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        written.append(target)
    return written


def _templates(folder: Traversable, prefix: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for entry in folder.iterdir():
        path = f"{prefix}{entry.name}"
        if entry.is_dir():
            found += _templates(entry, path + "/")
        elif entry.name.endswith(".in"):
            found.append((path, entry.read_text()))
    return found
