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

from pipelines.command import add_last, job_parser, print_table, recipe_of, resumable, write_markdown
from pipelines.measure.evidence import EvidenceOptions, measure_evidence
from pipelines.measure.hits import ANSWERED, MethodSummary, Share, summarise_evidence
from pipelines.measure.looks import EMBEDDING, EMBEDDING_PACKAGES, METHODS, TOP, embedding_is_installed
from ragkv.cli.common import load, progress
from ragkv.cli.output import print_note
from ragkv.errors import MissingExtraError
from ragkv.evaluation.results import check_folder

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
        recipe=recipe_of(given),
        seed=given.seed,
    )
    _check_embedding(options)
    settings = options.settings(model=given.model, dtype=given.dtype)
    _, cases = options.draw()
    check_folder(given.out, settings)
    model = load(given.model, given.dtype, given.device)
    with progress() as report:
        found = measure_evidence(model, options, given.out, settings=settings, on_progress=report)
    summaries = summarise_evidence(found, {case.asked.id: case.asked.item.answers for case in cases})
    title = f"{given.model}, {options.questions} questions, {_documents(summaries[0])}"
    rows = [row_of(summary, errors=False)[1:] for summary in summaries]
    print_table(title, HEADINGS[1:], rows, words=["method"])
    write_markdown(given, HEADINGS, [row_of(summary, errors=True) for summary in summaries], words=HEADINGS[:2])


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


def _documents(summary: MethodSummary) -> str:
    return f"{summary.size} {summary.setting}"


def _share(share: Share, *, error: bool) -> str:
    return f"{share.value:.2f}±{share.standard_error:.2f}" if error else f"{share.value:.2f}"


def _parser() -> argparse.ArgumentParser:
    parser = job_parser("evidence", __doc__, EXPLAINED)
    add = parser.add_argument
    add("--documents", type=int, default=4, metavar="N", help="documents before each question (4)")
    add("--questions", type=int, default=48, metavar="N", help="questions (48)")
    add("--pool", type=int, default=24, metavar="N", help="articles that all questions share (24)")
    add(
        "--skip-articles",
        type=int,
        default=12,
        metavar="N",
        help="leave out the first N of the file, on which the layers that count were chosen (12)",
    )
    add("--hard", action="store_true", help="all documents of a question are paragraphs of one article")
    add("--methods", nargs="+", default=[], metavar="NAME", help="methods to measure, see below (all)")
    add_last(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
