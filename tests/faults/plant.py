"""Plants the faults of planted.py, one by one, in a copy of the sources, and sees that the tests notice each.

    python tests/faults/plant.py            all of them (`make plants`)
    python tests/faults/plant.py A04 A43    some of them
    python tests/faults/plant.py --list     what there is

Before that, the tests must pass in the copy as it is. Exit code 1 when a fault was not noticed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from plant_kit import Plant
from planted import PLANTS

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300.0
PASSED, FAILED = 0, 1
"""Exit codes of pytest; others mean that it could not run the tests."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", help="which ones, for example A04; default: all")
    parser.add_argument("--list", action="store_true", help="show the faults and end")
    options = parser.parse_args()
    plants = [plant for plant in PLANTS if not options.faults or plant.fault in options.faults]
    if not plants:
        parser.error(f"no such fault; there are {', '.join(sorted({plant.fault for plant in PLANTS}))}")
    if options.list:
        for plant in plants:
            print(f"{plant.fault}  {plant.what}  ({plant.file})")
        return 0
    with tempfile.TemporaryDirectory(prefix="lowlat-plants-") as folder:
        return plant_all(plants, copy_sources(Path(folder)))


def copy_sources(folder: Path) -> Path:
    """The sources and tests alone, so that a fault can never reach the working tree."""
    ignore = shutil.ignore_patterns("__pycache__", ".hypothesis", "build", "*.egg-info")
    for package in ("lowlat", "lowlat-plugin"):
        shutil.copytree(ROOT / "packages" / package / "src", folder / "packages" / package / "src", ignore=ignore)
    for name in ("tests", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def plant_all(plants: list[Plant], copy: Path) -> int:
    begun = time.monotonic()
    tests = sorted({test for plant in plants for test in plant.tests})
    print(f"without faults: {len(tests)} tests", flush=True)
    code, text = run(copy, tests)
    if code != PASSED:
        print(text)
        print("the tests do not pass in the copy; nothing was planted")
        return 1
    missed = []
    for plant in plants:
        for test in plant.tests:
            noticed, why = try_one(copy, plant, test)
            mark = "noticed" if noticed else f"MISSED ({why})"
            print(f"{plant.fault}  {plant.what}: {mark} by {test.rpartition('::')[2]}", flush=True)
            if not noticed:
                missed.append(plant.fault)
    print(f"{len(plants)} faults planted in {time.monotonic() - begun:.0f} s, {len(missed)} missed")
    return 1 if missed else 0


def try_one(copy: Path, plant: Plant, test: str) -> tuple[bool, str]:
    """Whether `test` fails with the fault, and why not."""
    file = copy / plant.file
    whole = file.read_text()
    if whole.count(plant.old) != 1:
        return False, f"the line is {whole.count(plant.old)} times in {plant.file}"
    file.write_text(whole.replace(plant.old, plant.new))
    try:
        code, text = run(copy, [test])
    finally:
        file.write_text(whole)
    if code == FAILED:
        return True, ""
    return False, "the test passed" if code == PASSED else f"pytest ended with {code}: {text[-500:]}"


def run(copy: Path, tests: list[str]) -> tuple[int, str]:
    paths = [str(copy / "packages" / package / "src") for package in ("lowlat", "lowlat-plugin")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1"}
    # The copy's modules must be what is tested, and not those that are installed.
    where = subprocess.run(
        [sys.executable, "-c", "import lowlat, lowlat_plugin; print(lowlat.__file__, lowlat_plugin.__file__)"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert where.count(str(copy)) == 2, where
    command = [sys.executable, "-m", "pytest", "-x", "--no-header", "-p", "no:randomly", *tests]
    process = subprocess.Popen(
        command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        text, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        # A fault may make a test wait for ever: that is noticed too.
        process.kill()
        text, _ = process.communicate()
        return FAILED, text
    return process.returncode, text


if __name__ == "__main__":
    sys.exit(main())
