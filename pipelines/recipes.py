"""Recipes side by side on one prefilled document: KL, resident and disk bytes, build time. The default was chosen here.

Examples:

  python -m pipelines.recipes --model demo --tokens 8192 --grid
  python -m pipelines.recipes --model demo --set tokens_per_cluster=8 --set "key_codec=int2 value_codec=int2"
  python -m pipelines.recipes --model demo --tokens 8192 --fit-on other.txt
  python -m pipelines.recipes --model demo --text a.txt --fit-on b.txt
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from pipelines.command import resumable
from ragkv import Archive, LoadedModel, Recipe, load_model
from ragkv.archive.transforms import Transforms, transforms_bytes
from ragkv.build.builder import BuildRequest, fit_transforms, write_archive
from ragkv.errors import ConfigError
from ragkv.evaluation.bench import cut_text, environment
from ragkv.evaluation.data.own_questions import quotation_questions
from ragkv.evaluation.data.reference_text import default_text
from ragkv.evaluation.fidelity import DenseAnswer, dense_answers, fidelity_to
from ragkv.model.prefill import kv_nbytes

GRID = (
    "",
    "tokens_per_cluster=8",
    "tokens_per_cluster=8 value_prototype_bits=4",
    "value_prototype_bits=1",
    "value_prototype_bits=3",
    "value_prototype_bits=4",
    "key_prototype_bits=3",
    "key_prototype_bits=8 value_prototype_bits=8",
    "value_codec=int2.5",
    "value_codec=int2",
    "key_codec=int2.5 value_codec=int2.5",
    "key_codec=int2.5 value_codec=int2",
    "key_codec=int2 value_codec=int2",
    "key_codec=int4 value_codec=int4",
    "exact_codec=lossless",
    "window_tokens=32",
    "segment_tokens=4096",
)
"""Differences from the default recipe."""

_COLUMNS = ("kl", "kl_error", "top1", "resident", "disk", "build_s", "misfit")


def recipe_of(words: str) -> Recipe:
    """The default recipe with some keys changed: ``key=value`` separated by blanks."""
    known = {each.name for each in dataclasses.fields(Recipe)}
    changes: dict[str, Any] = {}
    for word in words.split():
        name, _, value = word.partition("=")
        if name not in known or not value:
            raise ConfigError(f"{word!r} is not KEY=VALUE with a key of a recipe; known are {', '.join(sorted(known))}")
        changes[name] = int(value) if value.isdecimal() else value
    return dataclasses.replace(Recipe(), **changes)


class Reference:
    """The dense answers to some questions, worked out once: recipes do not change them."""

    def __init__(self, questions: Sequence[str]) -> None:
        self._questions = questions
        self._answers: list[DenseAnswer] = []

    def answers(self, archive: Archive, dense: DynamicCache) -> list[DenseAnswer]:
        if not self._answers:
            self._answers = dense_answers(archive, dense, self._questions)
        return self._answers


@torch.no_grad()
def measure(
    request: BuildRequest, dense: DynamicCache, reference: Reference, transforms: Transforms | None, budget: int
) -> dict[str, Any]:
    """One row of the table: an archive of what is prefilled, against the model's own attention to it."""
    size = kv_nbytes(dense)
    with tempfile.TemporaryDirectory() as folder:
        built = write_archive(request, dense, Path(folder) / "archive", transforms=transforms)
        given = None if transforms is None else (lambda _sha256: transforms)
        archive = Archive.open(built.path, request.model, transforms=given)
        found = fidelity_to(reference.answers(archive, dense), archive, budget=budget)
        return {
            "kl": found.kl,
            "kl_error": found.kl_standard_error,
            "top1": found.top1,
            "resident": archive.resident_bytes / size,
            "disk": archive.disk_bytes / size,
            "build_s": built.build_s,
            "misfit": built.misfit,
        }


def shared_transforms(model: LoadedModel, texts: Sequence[str], recipe: Recipe) -> Transforms:
    """Transforms fitted on other texts than the one that is measured, as a catalog fits them."""
    requests = [BuildRequest.of(model, text, recipe=recipe) for text in texts]
    layers = fit_transforms(requests, [request.prefill() for request in requests])
    return Transforms("shared", layers if transforms_bytes(layers) else {})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", type=Path, help="a text file; by default the Python reference")
    parser.add_argument("--tokens", type=int, default=8192, help="prefix and document together")
    parser.add_argument("--questions", type=int, default=24, help="sentences of the text that are to be continued")
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--grid", action="store_true", help="the recipes that the default was chosen from")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE ... of a recipe; repeat for more rows")
    parser.add_argument("--fit-on", type=Path, action="append", default=[], help="a text to fit shared transforms on")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    options = parser.parse_args(arguments)
    model = load_model(options.model)
    source = options.text.read_text(encoding="utf-8") if options.text else default_text()
    text = cut_text(model, model.layout, source, options.tokens)
    reference = Reference(quotation_questions(text, options.questions))
    first = BuildRequest.of(model, text)
    dense = first.prefill()
    rows: list[dict[str, Any]] = []
    words = [*(GRID if options.grid else ()), *options.set] or [""]
    print(
        json.dumps({"model": options.model, "tokens": len(first.prompt_ids), "budget": options.budget, **environment()})
    )
    print("  ".join(f"{name:>8}" for name in _COLUMNS), " recipe")
    for word in words:
        recipe = recipe_of(word)
        request = dataclasses.replace(first, recipe=recipe)
        kinds: list[tuple[str, Transforms | None]] = [("", None)]
        if options.fit_on:
            others = [
                cut_text(model, model.layout, each.read_text(encoding="utf-8"), options.tokens)
                for each in options.fit_on
            ]
            kinds.append((" (transforms of other texts)", shared_transforms(model, others, recipe)))
        for kind, transforms in kinds:
            row = measure(request, dense, reference, transforms, options.budget)
            rows.append({"recipe": (word or "default") + kind, **row})
            print("  ".join(f"{row[name]:8.4f}" for name in _COLUMNS), f" {rows[-1]['recipe']}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(resumable(main))
