"""What ran where: the machine with its versions, the commit, a hash of the sources, the command line.

`python -m lowlat.bench.stamp` prints LOWLAT_COMMIT and LOWLAT_TREE for a machine that holds no git.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import shlex
import subprocess
import sys

import msgspec

SOURCE_SUFFIXES = frozenset({".py", ".cu", ".cuh", ".h", ".hpp", ".hip", ".toml"})


class Machine(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A machine as a reader needs it to judge a figure. `gpus` is how many the run used; 0 means a CPU run."""

    gpu: str
    gpus: int
    driver: str
    cpu: str
    torch: str
    python: str
    cores: int | None = None
    threads: int | None = None
    triton: str = ""


class SourceStamp(msgspec.Struct, frozen=True):
    """Commit, hash of the sources, and whether tracked files differ from the commit."""

    commit: str
    tree: str
    dirty: bool


def _output(*command: str, cwd: pathlib.Path | None = None) -> str:
    """Standard output of a command, or nothing where it is absent, fails or hangs."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def repository_root() -> pathlib.Path | None:
    """The checkout that this package runs from, or None for an installed wheel."""
    for folder in pathlib.Path(__file__).resolve().parents:
        if (folder / "packages" / "lowlat" / "pyproject.toml").is_file():
            return folder
    return None


def source_hash(root: pathlib.Path | None = None) -> str:
    """SHA-256 (first 16 hex digits) over paths and contents of the sources under `packages` and `benchmarks`.

    The same on a machine with git and on one that was sent a copy. Outside a checkout, over this package's folder.
    """
    root = root or repository_root()
    if root is None:
        root = pathlib.Path(__file__).resolve().parents[1]
        folders = [root]
    else:
        folders = [root / "packages", root / "benchmarks"]
    files = sorted(
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.suffix in SOURCE_SUFFIXES and path.is_file() and "build" not in path.relative_to(root).parts
    )
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def source_stamp() -> SourceStamp:
    """Commit and tree hash of what runs now; LOWLAT_COMMIT and LOWLAT_TREE stand in where there is no git."""
    root = repository_root()
    commit = os.environ.get("LOWLAT_COMMIT", "")
    tree = os.environ.get("LOWLAT_TREE", "") or source_hash(root)
    if commit or root is None:
        return SourceStamp(commit, tree, False)
    commit = _output("git", "rev-parse", "HEAD", cwd=root)
    changed = _output("git", "status", "--porcelain", "--", "packages", "benchmarks", cwd=root)
    dirty = any(pathlib.PurePath(line[3:].strip('"')).suffix in SOURCE_SUFFIXES for line in changed.splitlines())
    return SourceStamp(commit, tree, dirty)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cpu_name() -> str:
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@functools.cache
def _gpus() -> tuple[str, int, str]:
    """(name, count, driver) of the machine's GPUs; ("", 0, "") without any. Asks the driver's tool, not torch."""
    lines = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    if lines:
        name, _, driver = lines[0].partition(",")
        return name.strip(), len(lines), driver.strip()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        driver = getattr(torch.version, "hip", None) or "unknown"
        return torch.cuda.get_device_name(0), torch.cuda.device_count(), driver
    return "", 0, ""


def this_machine(gpus: int | None = None) -> Machine:
    """Describe this machine. `gpus`: how many the run uses; None means one where there is any, 0 a CPU run."""
    name, count, driver = _gpus()
    used = min(count, 1) if gpus is None else gpus
    if used > count:
        raise ValueError(f"the run claims {used} GPUs but this machine has {count}")
    torch = sys.modules.get("torch")
    return Machine(
        gpu=name if used else "",
        gpus=used,
        driver=driver if used else "",
        cpu=_cpu_name(),
        torch=str(getattr(torch, "__version__", "") or _version("torch")),
        python=platform.python_version(),
        cores=os.cpu_count(),
        threads=torch.get_num_threads() if torch is not None and not used else None,
        triton=_version("triton"),
    )


OUTPUT_OPTIONS = frozenset({"--results", "--perfetto", "--timeline", "--plots"})
"""Options that say where output goes: no part of what was measured."""
SECRET_OPTIONS = frozenset({"--api-key"})
"""Options whose value is nobody else's business."""


def _measured_options(arguments: list[str]) -> list[str]:
    """`arguments` without those that only say where output goes, and without secrets."""
    left_out = OUTPUT_OPTIONS | SECRET_OPTIONS
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if not skip and argument.partition("=")[0] not in left_out:
            kept.append(argument)
        skip = not skip and argument in left_out
    return kept


def command_line() -> str:
    """The command that started this process, as one would type it: `lowlat ...` or `python script ...`."""
    program = pathlib.Path(sys.argv[0])
    if program.parts[-3:] == ("lowlat", "cli", "main.py"):  # `python -m lowlat.cli.main`
        first = ["lowlat"]
    elif program.name in ("lowlat", "__main__.py"):
        first = ["lowlat"] if program.name == "lowlat" else ["python", "-m", program.parent.name]
    else:
        root = repository_root()
        path = program.resolve()
        shown = path.relative_to(root) if root is not None and path.is_relative_to(root) else pathlib.Path(path.name)
        first = ["python", str(shown)]
    return shlex.join([*first, *_measured_options(sys.argv[1:])])


def main() -> None:
    """Print the two variables that stamp a run on a machine without git."""
    stamp = source_stamp()
    print(f"LOWLAT_COMMIT={stamp.commit} LOWLAT_TREE={stamp.tree}")


if __name__ == "__main__":
    main()
