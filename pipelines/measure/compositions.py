"""How far composed archives are from a joint prefill of the same documents, and what each repair brings.

The reference of a question is the model's own attention over prefix, documents in order and question, read in one
piece. Every variant is forced through the reference's greedy answer (KL and agreement) and gives its own (F1 and exact
match). Documents that are longer, joined, than the model's context have no reference: only answers are scored then.
What is measured is kept line by line, so that a stopped run goes on.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import Cache

from pipelines.measure.cases import FILE, Case, PoolDocument, cases_beyond, draw_cases, read_pool
from pipelines.measure.plain import PlainPrompt
from pipelines.measure.rows import (
    ALL,
    ALONE,
    BEYOND,
    JOINT,
    PLAIN,
    RECOMPUTE,
    VARIANTS,
    WEIGHTED,
    Row,
)
from ragkv.build.builder import document_sha256
from ragkv.catalog.catalog import Catalog
from ragkv.errors import ConfigError
from ragkv.evaluation.bench import environment
from ragkv.evaluation.fidelity import Decoded, agreement, decode_answer, kl_divergence
from ragkv.evaluation.metrics import METRICS
from ragkv.evaluation.results import ResultsFolder
from ragkv.evaluation.timing import Progress, drain, timed_prefill
from ragkv.model.load import LoadedModel
from ragkv.model.prefill import fork_cache
from ragkv.model.prompt import question_ids, tokenize_prompt
from ragkv.recall.archive import Archive
from ragkv.recall.cache import ArchiveCache
from ragkv.recall.composition import REUSED, Composition
from ragkv.recall.placed import Weighting
from ragkv.recall.recompute import recompute
from ragkv.recipe import RecallPolicy, Recipe, check_whole
from ragkv.text import read_text
from ragkv.version import __version__

HEADER_FILE, ARCHIVES = "header.json", "archives"


@dataclass(frozen=True)
class CompositionOptions:
    """What is measured.

    `sizes` are numbers of documents; `questions` are asked for each. `variants` are of `VARIANTS`, or
    ``recompute-K`` with K of `recompute`; empty means all. The reference is always measured where there is one.

    Raises
    ------
    ConfigError
        If a name is unknown or given twice, or a number is out of range.
    """

    data: Path
    sizes: tuple[int, ...] = (2, 4, 8)
    questions: int = 24
    pool: int = 16
    paragraphs: int = 4
    variants: tuple[str, ...] = ()
    recompute: tuple[int, ...] = (16,)
    temperature: float = 0.9
    scale: float = 0.9
    max_new_tokens: int = 16
    recipe: Recipe = field(default_factory=Recipe)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("questions", "pool", "paragraphs", "max_new_tokens"):
            check_whole(name.replace("_", "-"), getattr(self, name), 1)
        check_whole("seed", self.seed, 0)
        for count in self.recompute:
            check_whole("recompute", count, 1)
        for size in self.sizes:
            if not 2 <= size <= self.pool:
                raise ConfigError(f"documents is {size}; give numbers from 2 to the size of the pool, {self.pool}")
        for name in ("temperature", "scale"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}; give a number above 0")
        for name in self.variants:
            if name not in self.known_variants:
                raise ConfigError(f"there is no variant {name!r}; take of {', '.join(self.known_variants)}")
        for what, given in (("documents", self.sizes), ("recompute", self.recompute), ("variants", self.variants)):
            if len(set(given)) < len(given):
                raise ConfigError(f"{what} has something twice: {', '.join(map(str, given))}")
        if not self.sizes:
            raise ConfigError("documents is empty; give at least one number of documents")

    @property
    def known_variants(self) -> tuple[str, ...]:
        return (*VARIANTS, *(f"{RECOMPUTE}{count}" for count in self.recompute))

    @property
    def chosen_variants(self) -> tuple[str, ...]:
        """The reference first, then the others in their usual order."""
        chosen = {JOINT, *(self.variants or self.known_variants)}
        return tuple(name for name in self.known_variants if name in chosen)

    def settings(self, *, model: str, dtype: str | None) -> dict[str, Any]:
        """What a row depends on besides its size, question and variant, of which a later run may ask for more."""
        names = ("pool", "paragraphs", "temperature", "scale", "max_new_tokens", "seed")
        return {
            "ragkv": __version__,
            "model": model,
            "dtype": dtype,
            "data_sha256": document_sha256(read_text(self.data / FILE)),
            "recipe": self.recipe.to_dict(),
            "longest_recompute": max(self.recompute, default=0),
            **{name: getattr(self, name) for name in names},
        }


def measure_compositions(
    model: LoadedModel,
    options: CompositionOptions,
    out: Path,
    *,
    settings: dict[str, Any],
    on_progress: Progress | None = None,
) -> list[Row]:
    """Measure what the folder `out` does not hold yet; returns the rows that `options` ask for, old and new.

    Parameters
    ----------
    settings
        From `CompositionOptions.settings`.
    on_progress
        Called with a stage, what is done of it and how much that is.

    Raises
    ------
    ConfigError
        If `out` holds other results, the data cannot be used, or the documents do not fit into the model's context and
        other variants than `BEYOND` are asked for.
    """
    METRICS["squad"]("", ("",))  # a long run that could not be scored must not begin
    pool = read_pool(options.data, n_documents=options.pool, n_paragraphs=options.paragraphs, seed=options.seed)
    cases = [
        case
        for size in options.sizes
        for case in draw_cases(pool, size=size, n_questions=options.questions, seed=options.seed)
    ]
    chosen, beyond = options.chosen_variants, sizes_beyond(model, pool, cases, options)
    rows = ResultsFolder(out, settings, Row)
    header = {"model": model.name, "seed": options.seed, "environment": environment()}
    (out / HEADER_FILE).write_text(json.dumps(header, indent=1) + "\n", encoding="utf-8")
    wanted = [(case, [name for name in chosen if name != JOINT or case.size not in beyond]) for case in cases]
    # Fewer questions may all fit into the context where more did not: what lacks a reference is measured again then.
    done = {row.key for row in rows.read() if row.kl is not None or row.size in beyond}
    todo = [(case, [name for name in names if (*case.key, name) not in done]) for case, names in wanted]
    if any(missing for _, missing in todo):
        recipe = _recipe(model, options)
        archives = archive_pool(model, pool, out / ARCHIVES, recipe=recipe, on_progress=on_progress)
        for _, together in groupby(enumerate(todo), key=lambda each: each[1][0].documents):
            numbered = list(together)
            group = [each for _, each in numbered]
            if group[0][0].size in beyond:
                measured = measure_beyond(archives, group, options)
            else:
                measured = measure_together(archives, group, options, on_progress=on_progress)
            for row in measured:
                rows.add(row)
            if on_progress is not None:
                on_progress("questions", numbered[-1][0] + 1, len(todo))
    found = {row.key: row for row in rows.read()}
    return [found[*case.key, name] for case, names in wanted for name in names]


def archive_pool(
    model: LoadedModel,
    pool: Sequence[PoolDocument],
    folder: Path,
    *,
    recipe: Recipe,
    on_progress: Progress | None = None,
) -> list[Archive]:
    """An open archive of every document, kept in a catalog; those that are there already are not built again."""
    catalog = Catalog.create(folder, model, recipe=recipe, max_open=len(pool))
    archives = []
    for number, document in enumerate(pool, start=1):
        archives.append(catalog.archive(catalog.add(document.text, name=document.name).id))
        if on_progress is not None:
            on_progress("archives", number, len(pool))
    return archives


def measure_together(
    archives: Sequence[Archive],
    todo: Sequence[tuple[Case, Sequence[str]]],
    options: CompositionOptions,
    *,
    on_progress: Progress | None = None,
) -> Iterator[Row]:
    """The missing variants of cases that all have the same documents in the same order, behind one joint prefill."""
    if not any(missing for _, missing in todo):
        return
    model = archives[0].model
    joined = Composition([archives[place] for place in todo[0][0].documents])
    report = None if on_progress is None else partial(on_progress, "joint prefill")
    dense, prefill_s = timed_prefill(model.model, joined.token_ids.tolist(), on_progress=report)
    plain = PlainPrompt(model, joined.layout, [document.text for document in joined.documents])
    for case, missing in todo:
        if not missing:
            continue
        ids = question_ids(model.tokenizer, joined.layout, case.asked.item.question)
        reference = _decode(joined, ids, fork_cache(dense), options)
        for name in missing:
            if name == JOINT:
                seconds = prefill_s + reference.ttft_s
                trial = _Tried(joined.n_context, reference, reference.text, joined.n_context + len(ids), seconds)
            elif name == PLAIN:
                trial = _try_plain(plain, case.asked.item.question, reference, options)
            else:
                composed = partial(compose_variant, name, case, archives, options)
                trial = _try(composed, ids, reference, options)
            yield _row(case, name, archives[case.asked.place].name, reference, trial)


def measure_beyond(
    archives: Sequence[Archive], todo: Sequence[tuple[Case, Sequence[str]]], options: CompositionOptions
) -> Iterator[Row]:
    """The missing variants of cases whose documents are longer, joined, than the context: without a reference."""
    tokenizer, layout = archives[0].model.tokenizer, archives[0].layout
    for case, missing in todo:
        ids = question_ids(tokenizer, layout, case.asked.item.question)
        for name in missing:
            trial = _try(partial(compose_variant, name, case, archives, options), ids, None, options)
            yield _row(case, name, archives[case.asked.place].name, None, trial)


def compose_variant(
    name: str, case: Case, archives: Sequence[Archive], options: CompositionOptions
) -> tuple[Composition, RecallPolicy]:
    """The documents of a case as a variant composes them, and what it recalls."""
    documents = [archives[place] for place in case.documents]
    if name == ALONE:
        composition = Composition([archives[case.asked.place]])
    elif name == REUSED:
        composition = Composition(documents, positions=REUSED)
    elif name == WEIGHTED:
        weighting = Weighting(temperature=options.temperature, scale=options.scale)
        composition = Composition(documents, weighting=weighting)
    else:
        composition = Composition(documents)
    if name.startswith(RECOMPUTE):
        composition = recompute(composition, int(name.removeprefix(RECOMPUTE)))
    if name == ALL:
        return composition, RecallPolicy(dense_layers=tuple(range(len(composition.shape.layers))))
    return composition, composition.policy


@dataclass(frozen=True)
class _Tried:
    """What a variant made of a question: ``decoded`` along the reference's answer, or its own without one, and the
    ``text`` of its own answer.
    """

    context_tokens: int
    decoded: Decoded
    text: str
    prefilled_tokens: int
    ttft_s: float


def _try(
    compose: Callable[[], tuple[Composition, RecallPolicy]],
    ids: Sequence[int],
    reference: Decoded | None,
    options: CompositionOptions,
) -> _Tried:
    """A variant that agrees with the reference at every position would give the same answer, so only others generate;
    without a reference all do.

    The time to the first token begins with composing, which repairs do work in.
    """
    started = time.perf_counter()
    composition, policy = compose()
    cache = ArchiveCache(composition, policy=policy)
    drain(composition.model.model.device)
    composing_s = time.perf_counter() - started
    decoded = _decode(composition, ids, cache, options, forced=None if reference is None else reference.token_ids)
    text = decoded.text
    if reference is not None and tuple(decoded.logits.argmax(-1).tolist()) != reference.token_ids:
        text = _decode(composition, ids, ArchiveCache(composition, policy=policy), options).text
    repaired = composition.recomputed
    n_repaired = 0 if repaired is None else repaired.layers[0].keys.shape[1]
    return _Tried(composition.n_context, decoded, text, n_repaired + len(ids), composing_s + decoded.ttft_s)


def _try_plain(plain: PlainPrompt, question: str, reference: Decoded, options: CompositionOptions) -> _Tried:
    """As `_try`; the prompt is read for each question, though measuring shares it."""
    decoded = plain.decode(question, max_new_tokens=options.max_new_tokens, forced=reference.token_ids)
    text = reference.text
    if tuple(decoded.logits.argmax(-1).tolist()) != reference.token_ids:
        text = plain.decode(question, max_new_tokens=options.max_new_tokens).text
    n_tokens = len(plain.ids(question))
    return _Tried(n_tokens, decoded, text, n_tokens, plain.prefill_s + decoded.ttft_s)


def _decode(
    composition: Composition,
    ids: Sequence[int],
    cache: Cache,
    options: CompositionOptions,
    *,
    forced: Sequence[int] | None = None,
) -> Decoded:
    return decode_answer(
        composition.model,
        composition.pad([ids]),
        cache,
        stop=composition.layout.stop,
        max_new_tokens=options.max_new_tokens,
        forced=forced,
    )


def _row(case: Case, variant: str, document: str, reference: Decoded | None, trial: _Tried) -> Row:
    scores = METRICS["squad"](trial.text, case.asked.item.answers)
    logits = trial.decoded.logits
    return Row(
        size=case.size,
        question=case.asked.id,
        document=document,
        variant=variant,
        kl=None if reference is None else float(kl_divergence(reference.logits, logits).mean()),
        top1=None if reference is None else float(agreement(reference.logits, logits).mean()),
        n_positions=0 if reference is None else len(reference.logits),
        f1=scores["f1"],
        em=scores["em"],
        answer=trial.text,
        prefilled_tokens=trial.prefilled_tokens,
        context_tokens=trial.context_tokens,
        ttft_s=trial.ttft_s,
    )


def check_context(model: LoadedModel, pool: Sequence[PoolDocument], cases: Sequence[Case], most_new: int) -> None:
    """Refuse documents that are longer, joined, than the model's context."""
    for case in cases_beyond(model, pool, cases, most_new):
        raise ConfigError(f"{case.joined_words}; give fewer documents or paragraphs")


def sizes_beyond(
    model: LoadedModel, pool: Sequence[PoolDocument], cases: Sequence[Case], options: CompositionOptions
) -> frozenset[int]:
    """Sizes with a case that is longer, joined, than the model's context; only `BEYOND` is measured of them.

    Raises
    ------
    ConfigError
        If there are such sizes and other variants are asked for, or a document is too long by itself.
    """
    found = cases_beyond(model, pool, cases, options.max_new_tokens)
    for case in found:
        if case.longest > case.limit:
            raise ConfigError(f"{case.longest_words}; give fewer paragraphs")
    if found and not set(options.variants or VARIANTS) <= set(BEYOND):
        raise ConfigError(
            f"{found[0].joined_words}, beyond which only the variants {' and '.join(BEYOND)} can be measured: ask "
            "for these only, or for fewer documents or paragraphs"
        )
    return frozenset(case.size for case in found)


def _recipe(model: LoadedModel, options: CompositionOptions) -> Recipe:
    """The recipe with as many exact first tokens as are computed again; all variants have the same archives."""
    if not options.recompute:
        return options.recipe
    n_prefix = len(tokenize_prompt(model.tokenizer, model.layout, "a").prefix_ids)
    n_first = max(options.recipe.sink_tokens, n_prefix + max(options.recompute))
    return dataclasses.replace(options.recipe, sink_tokens=n_first)
