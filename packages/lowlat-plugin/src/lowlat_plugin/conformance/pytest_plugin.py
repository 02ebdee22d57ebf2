"""`pytest --lowlat-kernels NAME`: every conformance check of an installed kernel library as a test.

A library's own suite gets the checks one by one by asking for the fixture:

    @pytest.fixture(scope="session")
    def lowlat_kernels():
        return "my-kernels"

    def test_conformance(lowlat_check):
        lowlat_check()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lowlat_plugin.registry import Candidate, discover


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--lowlat-kernels", metavar="NAME", help="run the lowlat conformance checks of this kernel library"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "lowlat_check" not in metafunc.fixturenames:
        return
    from lowlat_plugin.conformance.checks import CHECKS

    metafunc.parametrize("lowlat_check", list(CHECKS), indirect=True)


@pytest.fixture(scope="session")
def lowlat_kernels(pytestconfig: pytest.Config) -> str:
    """Which library `lowlat_check` checks: of `--lowlat-kernels`. A suite overrides this fixture with its own name."""
    name = pytestconfig.getoption("--lowlat-kernels")
    if not name:
        pytest.skip("give --lowlat-kernels NAME")
    return str(name)


@pytest.fixture
def lowlat_check(request: pytest.FixtureRequest, lowlat_kernels: str) -> Callable[[], None]:
    return lambda: _verdict(discover().named(lowlat_kernels)[0], request.param)


def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Add the checks to whatever else was collected, unless the suite already asks for them itself."""
    name = session.config.getoption("--lowlat-kernels")
    if not name or any("lowlat_check" in getattr(item, "fixturenames", ()) for item in items):
        return
    items.extend(_items(session, name))


def _items(session: pytest.Session, name: str) -> Iterator[pytest.Item]:
    from lowlat_plugin.conformance.checks import CHECKS

    for candidate in discover().named(name):
        for check in CHECKS:
            node = f"{candidate.key}[{check}]"
            yield ConformanceItem.from_parent(session, name=node, candidate=candidate, check=check)


class ConformanceItem(pytest.Item):
    """One check of one candidate."""

    def __init__(self, *, candidate: Candidate, check: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.candidate = candidate
        self.check = check

    def runtest(self) -> None:
        _verdict(self.candidate, self.check)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, f"lowlat conformance: {self.name}"


def _verdict(candidate: Candidate, check: str) -> None:
    from lowlat_plugin.conformance.checks import run_check

    result = run_check(candidate, check)
    if result.status == "skipped":
        pytest.skip(result.detail)
    assert result.status == "passed", f"{result.promise}\n{result.detail}"
