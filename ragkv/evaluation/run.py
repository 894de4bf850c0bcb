"""Run subjects over documents, one line of results per document and subject, so that a stopped run goes on."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ragkv.errors import ConfigError
from ragkv.evaluation.compare import Outcome, Questions, ask_dense, compare, continue_text
from ragkv.evaluation.layers import LayerFidelity, probe_layers
from ragkv.evaluation.results import ResultsFolder
from ragkv.evaluation.subjects import DENSE, DenseDocument, DenseSubject, SubjectMaker, SubjectSpec
from ragkv.evaluation.timing import Progress, timed_prefill
from ragkv.model.load import LoadedModel
from ragkv.model.prompt import PromptLayout, PromptTokens, data_ids, document_sha256, tokenize_prompt


@dataclass(frozen=True)
class Task:
    """One document and what is done with it: `questions` are asked, or else `continuation` is what really follows.

    `tokens` are those of an archive whose text is not at hand, in place of `text`.
    """

    name: str
    text: str
    questions: Questions | None = None
    continuation: str = ""
    group: str = ""
    tokens: PromptTokens | None = None


@dataclass(frozen=True)
class Measured:
    """One subject on one document. ``nll`` holds the tokens of a continuation, in nats; bytes are over all layers."""

    document: str
    group: str
    subject: str
    tokens: int
    resident_bytes: int
    disk_bytes: int
    prefill_s: float
    outcomes: tuple[Outcome, ...]
    nll: tuple[float, ...]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Measured:
        outcomes = tuple(Outcome.from_dict(each) for each in values["outcomes"])
        return cls(**{**values, "outcomes": outcomes, "nll": tuple(values["nll"])})


def run(
    model: LoadedModel,
    tasks: Sequence[Task],
    specs: Sequence[SubjectSpec],
    results: ResultsFolder[Measured],
    *,
    layout: PromptLayout,
    on_progress: Progress | None = None,
) -> list[Measured]:
    """Measure dense and every subject on every task; what the folder already holds is not measured again.

    One document and one archive are in memory at a time.
    """
    done = {(each.document, each.subject) for each in results.read()}
    for number, task in enumerate(tasks, start=1):
        missing = [spec for spec in specs if (task.name, spec.name) not in done]
        if not missing and (task.name, DENSE) in done:
            continue

        def report(stage: str, n: int, total: int, label: str = f"[{number}/{len(tasks)}]") -> None:
            if on_progress is not None:
                on_progress(f"{label} {stage}", n, total)

        for measured in _measure(model, task, missing, layout, report):
            if (measured.document, measured.subject) not in done:
                results.add(measured)
    return results.read()


def measure_layers(
    model: LoadedModel,
    task: Task,
    spec: SubjectSpec,
    *,
    layout: PromptLayout,
    n_questions: int,
    on_progress: Progress | None = None,
) -> tuple[LayerFidelity, ...]:
    """Fidelity of every global layer of an archive subject on the first questions of one task.

    Raises
    ------
    ConfigError
        If `spec` is not of an archive, or the task asks nothing.
    """
    if spec.recipe is None or task.questions is None:
        raise ConfigError(f"layers are measured on questions to an archive, not on {spec.name!r} and {task.name!r}")

    def report(stage: str, n: int, total: int) -> None:
        if on_progress is not None:
            on_progress(f"layers: {stage}", n, total)

    document, _ = _prefilled(model, task, layout, report)
    with tempfile.TemporaryDirectory(prefix="ragkv-eval-") as folder:
        return probe_layers(
            SubjectMaker(model, document, Path(folder)).archive(spec.recipe),
            document.dense,
            [item.question for item in task.questions.items[:n_questions]],
            policy=spec.policy or spec.recipe.recall,
            max_new_tokens=task.questions.max_new_tokens,
            on_progress=partial(report, spec.name),
        )


def _prefilled(model: LoadedModel, task: Task, layout: PromptLayout, report: Progress) -> tuple[DenseDocument, float]:
    """The document in the model's own cache, and the seconds that took."""
    tokens = task.tokens or tokenize_prompt(model.tokenizer, layout, task.text)
    ids = (*tokens.prefix_ids, *tokens.document_ids)
    dense, prefill_s = timed_prefill(model.model, ids, on_progress=partial(report, "dense prefill"))
    return DenseDocument(tokens=tokens, layout=layout, dense=dense, sha256=document_sha256(task.text)), prefill_s


def _measure(
    model: LoadedModel, task: Task, specs: Sequence[SubjectSpec], layout: PromptLayout, report: Progress
) -> Iterator[Measured]:
    """Dense first, then each of `specs`."""
    document, prefill_s = _prefilled(model, task, layout, report)
    dense = document.dense
    questions, references = task.questions, []
    following: list[int] = []
    if questions is not None:
        references = ask_dense(model, document, questions, on_progress=partial(report, "dense answers"))
    else:
        following = data_ids(model.tokenizer, task.continuation)
    with tempfile.TemporaryDirectory(prefix="ragkv-eval-") as folder:
        maker = SubjectMaker(model, document, Path(folder))
        for spec in (None, *specs):
            name = DENSE if spec is None else spec.name
            subject = DenseSubject(dense) if spec is None else maker.make(spec)
            outcomes: list[Outcome] = []
            nll: list[float] = []
            if questions is not None:
                outcomes = compare(
                    model,
                    document,
                    questions,
                    references,
                    subject,
                    on_progress=partial(report, name),
                )
            else:
                nll = continue_text(model, document, following, subject)
            yield Measured(
                document=task.name,
                group=task.group,
                subject=name,
                tokens=dense.get_seq_length(),
                resident_bytes=subject.resident_bytes,
                disk_bytes=subject.disk_bytes,
                prefill_s=prefill_s,
                outcomes=tuple(outcomes),
                nll=tuple(nll),
            )
