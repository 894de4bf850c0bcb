"""Dense attention against recall on the same text in one run: times, bytes, memory and fidelity, as ratios."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, DynamicCache

from ragkv.build.builder import BuildRequest, BuildResult, write_archive
from ragkv.errors import ConfigError
from ragkv.evaluation.data.own_questions import quotation_questions
from ragkv.evaluation.fidelity import Fidelity, measure_fidelity
from ragkv.evaluation.timing import Progress, Times, interleaved, memory_peak, timed, timed_prefill
from ragkv.model.load import LoadedModel
from ragkv.model.prefill import fork_cache
from ragkv.model.prompt import PromptLayout, question_ids, tokenize_prompt
from ragkv.recall.archive import Archive
from ragkv.recall.cache import ArchiveCache
from ragkv.recall.trace import RecallTrace
from ragkv.recipe import Recipe
from ragkv.version import __version__

QUESTION_TOKENS = 32
_TTFT_REPEATS = 7


@dataclass(frozen=True)
class Run:
    """One document length. Times in seconds; ``ratios`` are what to quote, figures of this machine are not."""

    tokens: int
    n_clusters: int
    times: dict[str, Any]
    bytes: dict[str, int]
    fidelity: Fidelity
    recalled_tokens: float
    unrecalled_mass: float
    ratios: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class BenchOptions:
    """What a benchmark measures.

    Without `questions`, sentences of the text are to be continued; without `budget`, recall follows the recipe. `steps`
    decode steps are timed, dense, recall and
    zero-context in turn.
    """

    text: str
    questions: Sequence[str] = ()
    budget: int | None = None
    recipe: Recipe = field(default_factory=Recipe)
    layout: PromptLayout | None = None
    steps: int = 48
    max_new_tokens: int = 24


@torch.no_grad()
def bench(model: LoadedModel, n_tokens: int, options: BenchOptions, *, on_progress: Progress | None = None) -> Run:
    """Measure one document length: prefix and document together have `n_tokens` tokens.

    Raises
    ------
    ConfigError
        If the text is too short, or an option is out of range.
    """
    layout = options.layout or model.layout
    document = cut_text(model, layout, options.text, n_tokens)
    questions = options.questions or quotation_questions(document)
    device = model.model.device

    def report(stage: str) -> Callable[[int, int], None] | None:
        return None if on_progress is None else lambda done, total: on_progress(stage, done, total)

    request = BuildRequest.of(model, document, recipe=options.recipe, layout=layout)
    with memory_peak(device) as dense_memory:
        dense, prefill_s = timed_prefill(model.model, request.prompt_ids, on_progress=report("prefill"))
    with tempfile.TemporaryDirectory(prefix="ragkv-bench-") as folder:
        build = write_archive(request, dense, Path(folder) / "archive", on_progress=report("cluster"))
        with memory_peak(device) as archive_memory:
            archive = Archive.open(build.path, model)
        times, trace, local_bytes = _times(archive, dense, questions, options, report("time"))
        fidelity = measure_fidelity(
            archive,
            dense,
            questions,
            budget=options.budget,
            max_new_tokens=options.max_new_tokens,
            on_progress=report("fidelity"),
        )
        n_bytes = {
            "dense_bf16": archive.dense_bytes * 2 // getattr(torch, archive.manifest.fingerprint.dtype).itemsize,
            "resident": archive.resident_bytes + trace.largest_fetch + local_bytes,
            "disk": archive.disk_bytes,
            "peak_memory_dense_prefill": dense_memory.bytes,
            "peak_memory_archive_load": archive_memory.bytes,
        }
    return _run(build, prefill_s, times, n_bytes, fidelity, trace)


def cut_text(model: LoadedModel, layout: PromptLayout, text: str, n_tokens: int) -> str:
    """The beginning of `text` that makes prefix and document `n_tokens` tokens long."""
    whole = tokenize_prompt(model.tokenizer, layout, text)
    wanted = n_tokens - len(whole.prefix_ids)
    if wanted < 1:
        raise ConfigError(f"{n_tokens} tokens are asked for and the prefix alone has {len(whole.prefix_ids)}")
    if len(whole.document_ids) < wanted:
        raise ConfigError(
            f"{n_tokens} tokens are asked for and the text has {len(whole.document_ids)}; give a longer --text"
        )
    return text[: whole.offsets[wanted - 1][1]]


def environment() -> dict[str, str | int]:
    """Versions and machine, to stand beside every figure."""
    names = ("torch", "transformers", "pyarrow")
    return {
        **{name: version(name) for name in names},
        "ragkv": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "torch_threads": torch.get_num_threads(),
    }


def _times(
    archive: Archive,
    dense: DynamicCache,
    questions: Sequence[str],
    options: BenchOptions,
    on_progress: Callable[[int, int], None] | None,
) -> tuple[dict[str, Times], RecallTrace, int]:
    """Times to the first token and per further token, in turn; the trace and local bytes of an untimed question."""
    model, device = archive.model.model, archive.model.model.device
    inputs = archive.pad([_question_of(archive, questions, QUESTION_TOKENS)])
    ids, positions = inputs["input_ids"], inputs["position_ids"]
    zero_positions = positions - archive.n_tokens

    def first(cache: Cache, place: torch.Tensor) -> None:
        model(ids, position_ids=place, cache=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)

    def dense_question() -> Callable[[], object]:
        cache = fork_cache(dense)
        return lambda: first(cache, positions)

    beside = Path(shutil.copytree(archive.path, archive.path.with_name("cold")))  # nobody else has it mapped

    def cold() -> Callable[[], object]:
        _forget(beside)
        opened = Archive.open(beside, archive.model)
        return lambda: first(ArchiveCache(opened, budget=options.budget), positions)

    ttft = interleaved(
        {
            "open": lambda: lambda: Archive.open(beside, archive.model),
            "cold": cold,
            "archive": lambda: lambda: first(ArchiveCache(archive, budget=options.budget), positions),
            "zero": lambda: lambda: first(DynamicCache(config=model.config), zero_positions),
            "dense_question": dense_question,
        },
        _TTFT_REPEATS,
        device,
    )
    trace = RecallTrace(keep_steps=False)
    traced = ArchiveCache(archive, budget=options.budget, observer=trace)
    first(traced, positions)
    caches: dict[str, tuple[Cache, torch.Tensor]] = {
        "archive": (ArchiveCache(archive, budget=options.budget), positions),
        "zero": (DynamicCache(config=model.config), zero_positions),
        "dense": (fork_cache(dense), positions),
    }
    for cache, place in caches.values():
        first(cache, place)
    seconds: dict[str, list[float]] = {name: [] for name in caches}
    for step in range(options.steps):
        token = ids[:, step % ids.shape[1]].reshape(1, 1)
        for name, (cache, place) in caches.items():
            at = place[:, -1:] + 1 + step
            seconds[name].append(timed(_stepper(archive, token, at, cache), device))
        if on_progress is not None:
            on_progress(step + 1, options.steps)
    tpot = {f"tpot_{name}": Times.of(values) for name, values in seconds.items()}
    return {**{f"ttft_{name}": value for name, value in ttft.items()}, **tpot}, trace, traced.local_bytes


def _forget(folder: Path) -> None:
    """Ask the system to drop what it holds of the files of a folder, where it can be asked."""
    if hasattr(os, "posix_fadvise"):
        for found in folder.iterdir():
            with found.open("rb") as handle:
                os.fsync(handle.fileno())
                os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _stepper(archive: Archive, token: torch.Tensor, position: torch.Tensor, cache: Cache) -> Callable[[], object]:
    model = archive.model.model
    return lambda: model(token, position_ids=position, cache=cache, use_cache=True).logits.argmax(-1)


def _question_of(archive: Archive, questions: Sequence[str], n_tokens: int) -> list[int]:
    """Question token ids of exactly `n_tokens`: the questions one after another, cut."""
    ids = question_ids(archive.model.tokenizer, archive.manifest.layout, " ".join(questions))
    return (ids * -(-n_tokens // len(ids)))[:n_tokens]


def _run(
    build: BuildResult,
    prefill_s: float,
    times: dict[str, Times],
    n_bytes: dict[str, int],
    fidelity: Fidelity,
    trace: RecallTrace,
) -> Run:
    medians = {name: value.median for name, value in times.items()}
    return Run(
        tokens=build.manifest.n_tokens,
        n_clusters=build.manifest.clusters_asked,
        times={
            "prefill_s": prefill_s,
            "build_s": build.build_s,
            **{name: asdict(value) for name, value in times.items()},
        },
        bytes=n_bytes,
        fidelity=fidelity,
        recalled_tokens=trace.recalled_tokens,
        unrecalled_mass=trace.unrecalled_mass,
        ratios={
            "ttft_dense_over_archive": (prefill_s + medians["ttft_dense_question"]) / medians["ttft_archive"],
            "ttft_archive_over_zero": medians["ttft_archive"] / medians["ttft_zero"],
            "open_over_zero": medians["ttft_open"] / medians["ttft_zero"],
            "cold_over_warm": medians["ttft_cold"] / medians["ttft_archive"],
            "tpot_archive_over_zero": medians["tpot_archive"] / medians["tpot_zero"],
            "tpot_archive_over_dense": medians["tpot_archive"] / medians["tpot_dense"],
            "build_over_prefill": build.build_s / prefill_s,
            "resident_over_dense": n_bytes["resident"] / n_bytes["dense_bf16"],
            "disk_over_dense": n_bytes["disk"] / n_bytes["dense_bf16"],
        },
    )
