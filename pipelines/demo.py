"""The demonstration behind `make demo`: archive this project's documentation, then answer three questions from it."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from ragkv import Archive, Recipe, ask, build_archive, load_model
from ragkv.build import is_current
from ragkv.cli.ask import summary
from ragkv.cli.common import progress
from ragkv.cli.output import err, format_bytes, out

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("README.md", "docs/how-it-works.md", "indexes/FORMAT.md", "CHANGELOG.md")
QUESTIONS = (
    "How many bytes does one token of the example model cost?",
    "Which environment variable names the cache folder?",
    "Under which licence is ragkv released?",
)


def main() -> None:
    """Build the archive (unless it is there), ask, and print what each answer cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo", help="model to use (default: the embedded demo model)")
    parser.add_argument("--out", type=Path, default=ROOT / "indexes" / "demo", help="folder of the archive")
    parser.add_argument("--budget", type=int, default=256, help="archived tokens recalled per KV head and step")
    options = parser.parse_args()

    document = "\n\n".join((ROOT / name).read_text(encoding="utf-8") for name in SOURCES)
    with err.status("loading the model") as status:
        model = load_model(options.model, progress=status.update)
    prefill_s = None
    if is_current(model, document, options.out, recipe=Recipe(), layout=model.layout):
        out.print(f"archive {options.out.name} is up to date; remove it to see it built")
    else:
        with progress() as report:
            built = build_archive(model, document, options.out, document_name="documentation", on_progress=report)
        prefill_s = built.prefill_s
        share = built.build_s / built.prefill_s
        out.print(
            f"archived {built.manifest.n_tokens:,} tokens: dense prefill {built.prefill_s:.1f} s, "
            f"clustering and writing {built.build_s:.1f} s ({share:.0%} of it)",
            soft_wrap=True,
        )
    started = time.perf_counter()
    archive = Archive.open(options.out, model)
    out.print(f"opened in {time.perf_counter() - started:.2f} s\n")
    for question in QUESTIONS:
        out.print(f"Q: {question}", style="bold", markup=False)
        answer = ask(archive, question, budget=options.budget)
        out.print(f"A: {answer.text}", markup=False)
        out.print(summary(answer), style="dim", markup=False, soft_wrap=True)
        if prefill_s is not None:
            faster = prefill_s / answer.ttft_s
            out.print(
                f"first token {answer.ttft_s:.2f} s, against {prefill_s:.1f} s for a dense prefill of the same text: "
                f"{faster:.0f}x",
                style="dim",
                soft_wrap=True,
            )
        out.print()
    out.print(
        f"KV of the document: {format_bytes(archive.dense_bytes)} dense, {format_bytes(archive.resident_bytes)} "
        f"resident, {format_bytes(archive.disk_bytes)} on disk"
    )


if __name__ == "__main__":
    sys.exit(main())
