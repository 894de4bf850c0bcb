"""Measure evidence: whether the passages that an answer looked at hold the gold answer.

Documents are paragraphs of articles (DIR/xquad.en.json, or any file in SQuAD format under that name), several before
each question. Attention over composed archives and over a joint prefill of the same documents names passages while it
answers; words and sentence embeddings name passages without a model. The same four rank the documents by the question
alone. With --hard all documents of a question are paragraphs of one article.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from pipelines.command import resumable, write_table
from pipelines.measure.evidence import EvidenceOptions, measure_evidence
from pipelines.measure.hits import (
    ANSWERED,
    EMBEDDING,
    EMBEDDING_PACKAGES,
    METHODS,
    TOP,
    MethodSummary,
    Share,
    embedding_is_installed,
    summarise_evidence,
)
from ragkv.cli.common import load, progress
from ragkv.cli.output import out, print_note
from ragkv.errors import ConfigError, MissingExtraError
from ragkv.evaluation.results import check_folder
from ragkv.recipe import Recipe

HEADINGS = ("documents", "method", f"top {TOP}", "top 1", "document", "most", "rank 1", "MRR", "answered")
EXPLAINED = "\n".join(
    (
        "methods:",
        *(f"  {name:<10} {words}" for name, words in METHODS.items()),
        "",
        "columns:",
        f"  top {TOP}     one of the {TOP} best passages over all documents holds the gold answer",
        "  top 1     the best passage does",
        "  document  the best passage is of the document that holds the answer",
        "  most      that document has the largest share of all weight",
        "  rank 1    it comes first by the question alone: attention after reading it, or the best paragraph",
        "  MRR       mean reciprocal rank of it, by the question alone",
        f"  answered  as top {TOP}, of the questions answered with an F1 of {ANSWERED} or more, and their number",
        "",
        "cost: a default run on the demo model reads about 88,000 tokens densely (the documents once, and a joint",
        "prefill for every two questions; 8 minutes at 180 tokens a second), gives 96 answers of at most 16 tokens and",
        "reads their questions once more. With --hard the dense part is 35,000 tokens, 3 minutes. A stopped run goes",
        "on: give the same command again. More methods or questions, and --hard, may be asked for in the same folder;",
        "only what is missing is measured.",
        "",
        "files in --out: results.jsonl (a line for each question and method), settings.json, header.json (versions,",
        "threads, model, seed) and archives (a catalog; delete it when done).",
        "",
        "examples:",
        "  python -m pipelines.evidence --model demo --data data --out results --markdown table.md",
        "  python -m pipelines.evidence --model demo --data data --out results --hard",
        "  python -m pipelines.evidence --model demo --data data --out quick --questions 4 --pool 4 --methods recall",
    )
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table; an error becomes one line on stderr and exit code 2, an interrupt exit code 130."""
    given = _parser().parse_args(arguments)
    return resumable(lambda: _run(given))


def _run(given: argparse.Namespace) -> None:
    if not given.data.is_dir():
        raise ConfigError(f"the data folder {str(given.data)!r} does not exist")
    options = EvidenceOptions(
        data=given.data,
        documents=given.documents,
        questions=given.questions,
        pool=given.pool,
        paragraphs=given.paragraphs,
        skip_articles=given.skip_articles,
        hard=given.hard,
        methods=tuple(given.methods),
        max_new_tokens=given.max_new_tokens,
        recipe=Recipe() if given.recipe is None else Recipe.from_toml(given.recipe),
        seed=given.seed,
    )
    _check_embedding(options)
    settings = options.settings(model=given.model, dtype=given.dtype)
    _, cases = options.draw()
    check_folder(given.out, settings)
    model = load(given.model, given.dtype, given.device)
    with progress() as report:
        rows = measure_evidence(model, options, given.out, settings=settings, on_progress=report)
    summaries = summarise_evidence(rows, {case.asked.id: case.asked.item.answers for case in cases})
    title = f"{given.model}, {options.questions} questions, {_documents(summaries[0])}"
    out.print(_table(title, summaries))
    if given.markdown is not None:
        write_table(given.markdown, markdown(summaries))
    print_note(f"the rows are in {str(given.out)!r}")


def _check_embedding(options: EvidenceOptions) -> None:
    """Say that the embedding is left out, or refuse to begin where it was asked for by name."""
    if embedding_is_installed():
        return
    needed = f"pip install {' '.join(EMBEDDING_PACKAGES)}"
    if EMBEDDING in options.methods:
        raise MissingExtraError(f"the method {EMBEDDING!r} needs packages that are not installed: {needed}")
    if not options.methods:
        print_note(f"the method {EMBEDDING!r} is left out; to have it: {needed}")


def row_of(summary: MethodSummary, *, errors: bool) -> list[str]:
    """The cells of one method under `HEADINGS`, with or without standard errors."""
    shares = (summary.hit, summary.first, summary.right, summary.largest, summary.ranked_first, summary.mrr)
    answered = summary.hit_if_answered
    return [
        _documents(summary),
        summary.method,
        *("" if share is None else _share(share, error=errors) for share in shares),
        "" if answered is None else f"{_share(answered, error=errors)} of {summary.n_answered}",
    ]


def markdown(summaries: Sequence[MethodSummary]) -> str:
    """A table for the documentation."""
    ruler = [":--" if heading in HEADINGS[:2] else "--:" for heading in HEADINGS]
    rows = (HEADINGS, ruler, *(row_of(summary, errors=True) for summary in summaries))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _documents(summary: MethodSummary) -> str:
    return f"{summary.size} {summary.setting}"


def _share(share: Share, *, error: bool) -> str:
    return f"{share.value:.2f}±{share.standard_error:.2f}" if error else f"{share.value:.2f}"


def _table(title: str, summaries: Sequence[MethodSummary]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0)
    for heading in HEADINGS[1:]:
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for summary in summaries:
        table.add_row(*row_of(summary, errors=False)[1:])
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pipelines.evidence",
        description=__doc__,
        epilog=EXPLAINED,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help="'demo', a hub id, a local folder or a .gguf file")
    add("--data", type=Path, required=True, metavar="DIR", help="folder with xquad.en.json")
    add("--out", type=Path, required=True, metavar="DIR", help="folder for results; a stopped run goes on there")
    add("--documents", type=int, default=4, metavar="N", help="documents before each question (4)")
    add("--questions", type=int, default=48, metavar="N", help="questions (48)")
    add("--pool", type=int, default=24, metavar="N", help="articles that all questions share (24)")
    add("--paragraphs", type=int, default=4, metavar="N", help="paragraphs of a document, about 175 tokens each (4)")
    add(
        "--skip-articles",
        type=int,
        default=12,
        metavar="N",
        help="leave out the first N of the file, on which the layers that count were chosen (12)",
    )
    add("--hard", action="store_true", help="all documents of a question are paragraphs of one article")
    add("--methods", nargs="+", default=[], metavar="NAME", help="methods to measure, see below (all)")
    add("--max-new-tokens", type=int, default=16, metavar="N", help="longest answer (16)")
    add("--recipe", type=Path, metavar="FILE", help="TOML recipe of the archives (the default one)")
    add("--seed", type=int, default=0, help="chooses documents, questions, orders and places (0)")
    add("--dtype", help="bf16, fp16 or fp32 (the checkpoint's own)")
    add("--device", help="cpu, cuda, cuda:1 ... (cuda if there is one)")
    add("--markdown", type=Path, metavar="FILE", help="also write the table as markdown")
    return parser


if __name__ == "__main__":
    sys.exit(main())
