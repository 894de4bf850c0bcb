"""Recipes side by side on one prefilled document: KL, resident and disk bytes, opening, build time.

The default recipe and the frugal one were chosen from this table, and transforms that were fitted on other texts are
measured here. A text is a file, a file in SQuAD format (its paragraphs), or "reference", the Python reference.

  python -m pipelines.recipes --model demo --tokens 8192 --grid
  python -m pipelines.recipes --model demo --recipe indexes/recipes/frugal.toml --set "value_codec=int2"
  python -m pipelines.recipes --model demo --text xquad.en.json --fit-on reference
  python -m pipelines.recipes --model demo --catalog 10 --tokens 700
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from pipelines.command import resumable
from ragkv import Archive, Catalog, LoadedModel, Recipe, load_model
from ragkv.archive.transforms import Transforms, transforms_bytes
from ragkv.build.builder import BuildRequest, fit_transforms, write_archive
from ragkv.errors import ConfigError
from ragkv.evaluation.bench import QUESTION_TOKENS, cut_text, environment
from ragkv.evaluation.data.own_questions import quotation_questions
from ragkv.evaluation.data.reference_text import default_text
from ragkv.evaluation.data.squad import parse_squad
from ragkv.evaluation.fidelity import DenseAnswer, dense_answers, fidelity_to
from ragkv.evaluation.timing import timed
from ragkv.model.prefill import kv_nbytes
from ragkv.text import read_text

REFERENCE = "reference"
GRID = (
    "",
    "tokens_per_cluster=8",
    "key_prototype_bits=8 value_prototype_bits=8",
    "value_prototype_bits=4",
    "value_prototype_bits=1",
    "key_prototype_bits=3",
    "value_codec=int3",
    "value_codec=int2",
    "key_codec=int2.5",
    "key_codec=lossless value_codec=lossless",
    "exact_codec=lossless",
    "segment_tokens=4096",
)
"""Differences from the default recipe."""

_REPEATS = 5
_COLUMNS = ("kl", "kl_error", "top1", "resident", "disk", "open", "build_s", "misfit")


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


def text_of(name: str) -> str:
    """The text that a name on the command line stands for."""
    if name == REFERENCE:
        return default_text()
    text = read_text(Path(name))
    if not name.endswith(".json"):
        return text
    try:
        return "\n\n".join(paragraph.text for article in parse_squad(text) for paragraph in article)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{name!r} is no file in SQuAD format ({error})") from error


class Subject:
    """One prefilled text and the dense answers to questions about it, which no recipe changes."""

    def __init__(self, model: LoadedModel, text: str, n_questions: int) -> None:
        self.model = model
        self.request = BuildRequest.of(model, text)
        self.dense: DynamicCache = self.request.prefill()
        self._questions = quotation_questions(text, n_questions)
        self._answers: list[DenseAnswer] = []

    @torch.no_grad()
    def measure(self, recipe: Recipe, transforms: Transforms | None, budget: int | None) -> dict[str, Any]:
        """One row of the table: an archive by `recipe` against the model's own attention to the same cache."""
        size, request = kv_nbytes(self.dense), dataclasses.replace(self.request, recipe=recipe)
        with tempfile.TemporaryDirectory() as folder:
            built = write_archive(request, self.dense, Path(folder) / "archive", transforms=transforms)
            given = None if transforms is None else (lambda _sha256: transforms)
            archive = Archive.open(built.path, self.model, transforms=given)
            if not self._answers:
                self._answers = dense_answers(archive, self.dense, self._questions)
            found = fidelity_to(self._answers, archive, budget=budget)
            return {
                "kl": found.kl,
                "kl_error": found.kl_standard_error,
                "top1": found.top1,
                "resident": archive.resident_bytes / size,
                "disk": archive.disk_bytes / size,
                "open": self._opening(built.path, given),
                "build_s": built.build_s,
                "misfit": built.misfit,
            }

    def _opening(self, path: Path, transforms: Any) -> float:
        """Median time to open the archive, over that of a question with zero context, in turn."""
        model, device = self.model.model, self.model.model.device
        ids = torch.tensor([self.request.prompt_ids[:QUESTION_TOKENS]], device=device)

        def ask() -> None:
            model(ids, cache=DynamicCache(config=model.config), use_cache=True, logits_to_keep=1)

        pairs = []
        for _ in range(_REPEATS + 1):
            opening = timed(lambda: Archive.open(path, self.model, transforms=transforms), device)
            pairs.append((opening, timed(ask, device)))
        opened, asked = (statistics.median(each) for each in zip(*pairs[1:], strict=True))
        return opened / asked


def fitted_on(model: LoadedModel, texts: Sequence[str], recipe: Recipe) -> Transforms:
    """Transforms fitted on other texts than the one that is measured, as a catalog fits them."""
    requests = [BuildRequest.of(model, text, recipe=recipe) for text in texts]
    layers = fit_transforms(requests, [request.prefill() for request in requests])
    return Transforms(hashlib.sha256(transforms_bytes(layers)).hexdigest(), layers)


def measure_catalog(
    model: LoadedModel, text: str, recipe: Recipe, *, n_documents: int, n_tokens: int
) -> dict[str, Any]:
    """Bytes of `n_documents` archives of `n_tokens` tokens in a catalog, over those of their dense caches."""
    with tempfile.TemporaryDirectory() as folder:
        catalog, rest, dense = Catalog.create(Path(folder) / "catalog", model, recipe=recipe), text, 0
        for _ in range(n_documents):
            document = cut_text(model, model.layout, rest, n_tokens)
            rest = rest[len(document) :]
            dense += catalog.archive(catalog.add(document).id).dense_bytes
        files = [found for found in catalog.path.rglob("*") if found.is_file()]
        return {
            "documents": n_documents,
            "tokens": n_tokens,
            "resident": catalog.resident_bytes / dense,
            "disk": sum(found.stat().st_size for found in files) / dense,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", default=REFERENCE)
    parser.add_argument("--tokens", type=int, default=8192, help="prefix and document together")
    parser.add_argument("--questions", type=int, default=24, help="sentences of the text that are to be continued")
    parser.add_argument("--budget", type=int, help="tokens recalled; by default what the recipe says")
    parser.add_argument("--grid", action="store_true", help="the recipes that the default was chosen from")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE ... of a recipe; repeat for more rows")
    parser.add_argument("--recipe", type=Path, action="append", default=[], help="a recipe file; repeat for more rows")
    parser.add_argument("--fit-on", action="append", default=[], help="a text to fit shared transforms on")
    parser.add_argument("--catalog", type=int, metavar="N", help="instead: bytes of a catalog of N documents")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    options = parser.parse_args()
    recipes = {words or "default": recipe_of(words) for words in (*(GRID if options.grid else ()), *options.set)}
    recipes |= {path.name: Recipe.from_toml(path) for path in options.recipe}
    recipes = recipes or {"default": Recipe()}
    model, text = load_model(options.model), text_of(options.text)
    print(json.dumps({"model": options.model, "text": options.text, "tokens": options.tokens, **environment()}))
    rows: list[dict[str, Any]] = []
    if options.catalog:
        for name, recipe in recipes.items():
            found = measure_catalog(model, text, recipe, n_documents=options.catalog, n_tokens=options.tokens)
            rows.append({"recipe": name, **found})
            print(json.dumps(rows[-1]), flush=True)
    else:
        subject = Subject(model, cut_text(model, model.layout, text, options.tokens), options.questions)
        others = [cut_text(model, model.layout, text_of(name), options.tokens) for name in options.fit_on]
        print("  ".join(f"{name:>8}" for name in _COLUMNS), " recipe")
        for name, recipe in recipes.items():
            kinds: list[tuple[str, Transforms | None]] = [(name, None)]
            if others:
                kinds.append((f"{name}, transforms of other texts", fitted_on(model, others, recipe)))
            for kind, transforms in kinds:
                row = subject.measure(recipe, transforms, options.budget)
                rows.append({"recipe": kind, **row})
                print("  ".join(f"{row[column]:8.4f}" for column in _COLUMNS), f" {kind}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(resumable(main))
