"""The pages on kernel libraries: the code of write-a-plugin.md is the template's, and what the pages name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lowlat.cli import plugins
from lowlat_plugin import FEATURES, Code, KernelSpec
from lowlat_plugin.capabilities import CAPABILITIES
from lowlat_plugin.conformance import CHECKS
from lowlat_plugin.scaffold import render

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"```\w+ file=(\S+)\n(.*?)```", re.DOTALL)


def test_the_pages_code_is_the_template_which_passes_every_check():
    files: dict[str, str] = {}
    for path, text in BLOCK.findall((DOCS / "write-a-plugin.md").read_text()):
        files[path] = files.get(path, "") + text
    template = render("my-kernels")
    assert {"pyproject.toml", "src/my_kernels/specs.py", "src/my_kernels/kernel.py"} <= set(files)
    for path, text in files.items():
        assert text.split() == template[path].split(), path


@pytest.mark.parametrize("page", ["plugins.md", "write-a-plugin.md", "sglang.md"])
def test_commands_and_files_that_the_pages_name_exist(page):
    text = (DOCS / page).read_text()
    known = set(CliRunner().invoke(plugins.app, ["--help"]).output.split())
    for command in re.findall(r"lowlat plugins (\w+)", text):
        assert command in known
    for path in re.findall(r"`((?:docs|tests|examples)/[\w./-]+)`", text):
        assert (DOCS.parent / path).exists() or path in render("my-kernels"), path


def test_the_tables_are_complete():
    text = (DOCS / "plugins.md").read_text()
    for field in KernelSpec.__struct_fields__:
        assert f"`{field}`" in text or field == "description", field
    for check in ("deadline", "refusals"):
        assert check in CHECKS
    for name in ("coverage.layers",):
        assert name in FEATURES
    assert all(CAPABILITIES.values())
    assert len(set(Code)) == len(Code)
    assert len(re.findall(r"^\d+\. \*", text, re.MULTILINE)) == 12
