"""What becomes of a result while it is measured: written as it grows, and shown at the end or at an early one.

Importing this needs msgspec and the standard library alone.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Self

import msgspec

from lowlat.bench.progress import end_progress
from lowlat.bench.report import result_section
from lowlat.bench.results import Result, ResultError, check, check_folder, problems, save

UNFINISHED = "what was written before the run had ended"


class Keeper:
    """Keeps a result that grows: each state is written, where that was asked for, in the place of the one before and
    marked incomplete, until `finish` writes the whole. So an end by force loses the last part alone.

    As a context manager it says why a run ended early, in the file, or in a table where nothing is saved. Raises
    ValueError where nothing can be written into the folder, so it is made before anything is measured.
    """

    def __init__(
        self, wanted: bool, folder: pathlib.Path | None, *, as_json: bool = False, weights_said: bool = True
    ) -> None:
        if folder is not None and not wanted:
            raise ValueError("--results names a folder that --save writes into: add --save")
        self._folder = check_folder(folder) if wanted else None
        self._as_json = as_json
        self._weights_said = weights_said
        self._growing: Result | None = None
        self.path: pathlib.Path | None = None

    def begin(self, result: Result) -> None:
        """Refuse a result that lacks, before anything is measured, what it must have to be saved or printed as JSON."""
        found = [problem for problem in problems(result) if problem.code != "no-rows"]
        if found and (self._folder is not None or self._as_json):
            raise ResultError(f"result {result.name!r}", found)

    def __call__(self, result: Result) -> None:
        """Keep the result as it is now."""
        self._growing = result
        self._write(msgspec.structs.replace(result, incomplete=UNFINISHED))

    def end(self, result: Result) -> None:
        """Keep the result as it is at the end."""
        self._growing = None
        self._write(result)

    def _write(self, result: Result) -> None:
        if self._folder is not None:
            self.path = save(result, self._folder, over=self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        if self._growing is None:
            if isinstance(error, KeyboardInterrupt | SystemExit) and self.path is None:
                end_progress()
                print(f"{_why(error)} before a first part was measured: nothing is kept", file=sys.stderr)
            return
        result = msgspec.structs.replace(self._growing, incomplete=_why(error))
        self._write(result)
        end_progress()
        if self.path is None:
            print(_shown(result, self._as_json, self._weights_said))
        else:
            print(f"{self.path} holds what was measured until then, marked incomplete", file=sys.stderr)


def _why(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, SystemExit):
        return f"ended with code {error.code}"
    return str(error).partition("\n")[0][:300] or type(error).__name__


def _shown(result: Result, as_json: bool, weights_said: bool) -> str:
    if as_json:
        return msgspec.json.format(msgspec.json.encode(check(result)), indent=1).decode()
    return result_section(result, weights_said=weights_said)


def finish(result: Result, *, as_json: bool, kept: Keeper, weights_said: bool = True) -> None:
    """Keep and show a whole result, and say where it was written; tables tell of weights what was said."""
    kept.end(result)
    end_progress()
    if kept.path is not None:
        print(f"wrote {kept.path}", file=sys.stderr)
    print(_shown(result, as_json, weights_said))
