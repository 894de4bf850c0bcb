"""What the measuring jobs share as commands: their options, how they end, and how they write a table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ragkv.cli.app import EXIT_ERROR, EXIT_INTERRUPTED
from ragkv.cli.output import out, print_note
from ragkv.errors import ConfigError, RagkvError
from ragkv.recipe import Recipe


def job_parser(name: str, description: str | None, epilog: str) -> argparse.ArgumentParser:
    """A parser with what comes first: model, data and results."""
    parser = argparse.ArgumentParser(
        prog=f"python -m pipelines.{name}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help="'demo', a hub id, a local folder or a .gguf file")
    add("--data", type=Path, required=True, metavar="DIR", help="folder with xquad.en.json")
    add("--out", type=Path, required=True, metavar="DIR", help="folder for results; a stopped run goes on there")
    return parser


def add_last(parser: argparse.ArgumentParser) -> None:
    """What comes last: answers, recipe, seed, device, and the table."""
    add = parser.add_argument
    add("--paragraphs", type=int, default=4, metavar="N", help="paragraphs of a document, about 175 tokens each (4)")
    add("--max-new-tokens", type=int, default=16, metavar="N", help="longest answer (16)")
    add("--recipe", type=Path, metavar="FILE", help="TOML recipe of the archives (the default one)")
    add("--seed", type=int, default=0, help="chooses documents, questions, orders and places (0)")
    add("--dtype", help="bf16, fp16 or fp32 (the checkpoint's own)")
    add("--device", help="cpu, cuda, cuda:1 ... (cuda if there is one)")
    add("--markdown", type=Path, metavar="FILE", help="also write the table as markdown")


def recipe_of(given: argparse.Namespace) -> Recipe:
    """The recipe that was asked for, once the data folder is known to be there."""
    if not given.data.is_dir():
        raise ConfigError(f"the data folder {str(given.data)!r} does not exist")
    return Recipe() if given.recipe is None else Recipe.from_toml(given.recipe)


def resumable(run: Callable[[], None]) -> int:
    """Exit code of a job: an error becomes one line on stderr and 2, an interrupt 130 and word that it goes on."""
    try:
        run()
    except RagkvError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("stopped; the same command goes on with what is missing", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], *, words: Collection[str]) -> None:
    """Print a table; columns that hold `words` are aligned to the left."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    out.print(table)


def write_markdown(
    given: argparse.Namespace, headings: Sequence[str], rows: Sequence[Sequence[str]], *, words: Collection[str]
) -> None:
    """Write a table for the documentation where one is asked for, and say where the rows are."""
    ruler = [":--" if heading in words else "--:" for heading in headings]
    text = "".join(f"| {' | '.join(row)} |\n" for row in (headings, ruler, *rows))
    if given.markdown is not None:
        try:
            given.markdown.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{str(given.markdown)!r} cannot be written: {error.strerror}") from error
    print_note(f"the rows are in {str(given.out)!r}")
