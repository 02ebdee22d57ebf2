"""The bench commands as a user calls them, and flags of a scripted server that answers at once."""

from click.testing import Result
from typer.testing import CliRunner

from lowlat.bench.cli import app

QUICK = ("--ttft-ms", 2, "--itl-ms", 1)


def lowlat(*arguments: object, code: int = 0) -> Result:
    """`lowlat bench ARGUMENTS`, which must end with `code` and without a traceback."""
    got = CliRunner().invoke(app, list(map(str, arguments)))
    assert got.exit_code == code, (got.output, got.exception)
    assert "Traceback" not in got.output
    return got
