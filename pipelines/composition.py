"""Measure composition: how far composed archives are from a joint prefill of the same documents.

Documents are paragraphs of articles (DIR/xquad.en.json, or any file in SQuAD format under that name). For each number
of documents, questions are asked whose answer stands in one of them, at a place by chance. The reference, joint, reads
all documents and the question in one piece with the model's own attention. Every variant is forced through the
reference's answer (KL divergence in nats, top-1 agreement) and gives its own (F1, exact match). All variants have the
same archives, which are built once and kept. Documents that are longer, joined, than the model's context have no
reference; of them only the answers of reused and alone are scored, which have to be named.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pipelines.command import add_last, job_parser, print_table, recipe_of, resumable, write_markdown
from pipelines.measure.compositions import CompositionOptions, measure_compositions
from pipelines.measure.rows import RECOMPUTE, VARIANTS, VariantSummary, summarise_compositions
from ragkv.cli.common import load, progress
from ragkv.evaluation.results import check_folder
from ragkv.evaluation.stats import MeanScore

HEADINGS = ("docs", "variant", "KL", "top-1", "F1", "- recall", "EM", "prefill", "TTFT s")
EXPLAINED = "\n".join(
    (
        "variants:",
        *(f"  {name:<12} {words}" for name, words in VARIANTS.items()),
        f"  {RECOMPUTE + 'K':<12} as recall, the first K tokens of each later document computed again",
        "",
        "cost: a default run on the demo model reads about 130,000 tokens densely (the pool once, and a joint prefill",
        "for every two questions of a size; 12 minutes at 180 tokens a second) and answers 504 times. A stopped run",
        "goes on: give the same command again. More variants, sizes or questions may be asked for in the same folder;",
        "only what is missing is measured.",
        "",
        "files in --out: results.jsonl (a line for each size, question and variant), settings.json, header.json",
        "(versions, threads, model, seed) and archives (a catalog; delete it when done).",
        "",
        "examples:",
        "  python -m pipelines.composition --model demo --data data --out results",
        "  python -m pipelines.composition --model demo --data data --out quick --documents 2 --questions 4 --pool 4",
        "  python -m pipelines.composition --model demo --data data --out results --variants recall recompute-16",
        "  python -m pipelines.composition --model demo --data data --out k --recompute 4 16 64 --markdown table.md",
        "  python -m pipelines.composition --model demo --data data --out far --documents 48 --pool 48 \\",
        "      --paragraphs 5 --variants reused alone",
    )
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table; an error becomes one line on stderr and exit code 2, an interrupt exit code 130."""
    given = _parser().parse_args(arguments)
    return resumable(lambda: _run(given))


def _run(given: argparse.Namespace) -> None:
    options = CompositionOptions(
        data=given.data,
        sizes=tuple(given.documents),
        questions=given.questions,
        pool=given.pool,
        paragraphs=given.paragraphs,
        variants=tuple(given.variants),
        recompute=tuple(given.recompute),
        temperature=given.temperature,
        scale=given.scale,
        max_new_tokens=given.max_new_tokens,
        recipe=recipe_of(given),
        seed=given.seed,
    )
    settings = options.settings(model=given.model, dtype=given.dtype)
    check_folder(given.out, settings)
    model = load(given.model, given.dtype, given.device)
    with progress() as report:
        rows = measure_compositions(model, options, given.out, settings=settings, on_progress=report)
    summaries = summarise_compositions(rows)
    title = f"{given.model}, {options.questions} questions a size; ± standard error"
    print_table(title, HEADINGS, [row_of(summary) for summary in summaries], words=["variant"])
    write_markdown(given, HEADINGS, [row_of(summary, errors=True) for summary in summaries], words=["variant"])


def row_of(summary: VariantSummary, *, errors: bool = False) -> list[str]:
    """The cells of one variant under `HEADINGS`; without `errors` only what comparisons rest on has one."""
    return [
        str(summary.size),
        summary.variant,
        _mean(summary.kl),
        _mean(summary.top1, error=errors),
        _mean(summary.f1, error=errors),
        _mean(summary.f1_over_recall, sign="+"),
        _mean(summary.em, error=errors),
        f"{summary.prefilled_tokens:,.0f}",
        "" if summary.ttft_s is None else f"{summary.ttft_s:.2f}",
    ]


def _mean(score: MeanScore | None, *, error: bool = True, sign: str = "") -> str:
    if score is None:
        return ""
    value = f"{score.value:{sign}.3f}"
    return f"{value}±{score.standard_error:.3f}" if error and score.standard_error is not None else value


def _parser() -> argparse.ArgumentParser:
    parser = job_parser("composition", __doc__, EXPLAINED)
    add = parser.add_argument
    add("--documents", type=int, nargs="+", default=[2, 4, 8], metavar="N", help="numbers of documents (2 4 8)")
    add("--questions", type=int, default=24, metavar="N", help="questions for each number of documents (24)")
    add("--pool", type=int, default=16, metavar="N", help="documents that all questions share (16)")
    add("--variants", nargs="+", default=[], metavar="NAME", help="variants to measure, see below (all)")
    add("--recompute", type=int, nargs="*", default=[16], metavar="K", help="numbers of tokens computed again (16)")
    add("--temperature", type=float, default=0.9, help="of weighted: divides logits of document tokens (0.9)")
    add("--scale", type=float, default=0.9, help="of weighted: power of the documents' mass (0.9)")
    add_last(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
