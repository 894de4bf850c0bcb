"""The console entry point: registers the commands and turns an error into one line."""

from __future__ import annotations

import io
import signal
import sys
from types import FrameType
from typing import Annotated

import typer

from ragkv.cli.ask import ask
from ragkv.cli.bench import bench
from ragkv.cli.build import build
from ragkv.cli.calibrate import calibrate
from ragkv.cli.catalog import catalog
from ragkv.cli.eval import evaluate
from ragkv.cli.fit import fit
from ragkv.cli.inspect import inspect
from ragkv.cli.ledger import ledger
from ragkv.cli.verify import verify
from ragkv.errors import RagkvError
from ragkv.version import __version__

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("ledger")(ledger)
app.command("fit")(fit)
app.command("build")(build)
app.command("ask")(ask)
app.command("inspect")(inspect)
app.command("verify")(verify)
app.add_typer(catalog, name="catalog")
app.command("bench")(bench)
app.command("calibrate")(calibrate)
app.command("eval")(evaluate)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"ragkv {__version__}")
        raise typer.Exit


@app.callback()
def describe(
    _version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Archive the KV cache of a long document once, then answer questions about it without reading it again.

    Keys are clustered per layer and KV head: one prototype per cluster (mean key, mean value, size) stays in memory,
    and the real keys and values go to disk. For each query the clusters that matter are fetched and attended exactly,
    so memory follows the number of clusters instead of the number of tokens.

    \b
    Example:
      ragkv ledger --model demo --tokens 32768     what would an archive save
      ragkv build report.txt --model demo          archive a document in indexes/report
      ragkv ask "Who wrote it?" --archive indexes/report
      ragkv ask --help                             what a command takes, each with examples
    """


def main() -> None:
    """Run the command line; a `RagkvError` becomes one line on stderr and exit code 2, an interrupt exit code 130.

    A request to terminate (exit code 143) unwinds as an interrupt does, so that temporary folders are removed.
    """
    _write_what_can_be_shown()
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        app(prog_name="ragkv")
    except RagkvError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(EXIT_ERROR) from error
    except KeyboardInterrupt as error:
        raise SystemExit(EXIT_INTERRUPTED) from error
    finally:
        signal.signal(signal.SIGTERM, before)


def _write_what_can_be_shown() -> None:
    """Replace characters that stdout has no code for, instead of ending in the middle of an answer."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _terminate(signum: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    main()
