"""Run subjects over documents, one line of results per document and subject, so that a stopped run goes on."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ragkv.errors import ConfigError
from ragkv.evaluation.compare import Outcome, Questions, ask_dense, compare, continue_text
from ragkv.evaluation.layers import LayerFidelity, probe_layers
from ragkv.evaluation.subjects import DENSE, DenseSubject, Document, SubjectMaker, SubjectSpec
from ragkv.evaluation.timing import drain
from ragkv.model.load import LoadedModel
from ragkv.model.prefill import prefill_cache
from ragkv.model.prompt import PromptLayout, PromptTokens, document_sha256, tokenize_prompt

Progress = Callable[[str, int, int], None]

SETTINGS_FILE, RESULTS_FILE = "settings.json", "results.jsonl"


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

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "outcomes": [outcome.to_dict() for outcome in self.outcomes]}


class ResultsFolder:
    """A folder with the settings of a run and a line for each `Measured`; reopened, it knows what is done.

    Raises
    ------
    ConfigError
        If the folder holds results of other settings, or something else.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self._lines = folder, folder / RESULTS_FILE
        self.check(folder, settings)
        path = folder / SETTINGS_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                part = path.with_suffix(".part")  # a crash must not leave half of the settings under their name
                part.write_text(json.dumps(settings, indent=1, sort_keys=True) + "\n", encoding="utf-8")
                part.rename(path)
        except OSError as error:
            raise ConfigError(f"cannot keep results in {str(folder)!r}: {error}") from error

    @staticmethod
    def check(folder: Path, settings: dict[str, Any]) -> None:
        """Refuse a folder that cannot hold these results; nothing is written."""
        path = folder / SETTINGS_FILE
        try:
            kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
            inside = {found.name for found in folder.iterdir()} if folder.exists() else set()
        except OSError as error:
            raise ConfigError(f"cannot keep results in {str(folder)!r}: {error}") from error
        except ValueError as error:
            raise ConfigError(f"{str(path)!r} is damaged; choose another --out") from error
        if path.exists() and kept != json.loads(json.dumps(settings)):
            raise ConfigError(f"{str(folder)!r} holds results of other settings; choose another --out")
        if not path.exists() and inside - {path.with_suffix(".part").name}:
            raise ConfigError(f"{str(folder)!r} is not empty and holds no {SETTINGS_FILE}; choose another --out")

    def read(self) -> list[Measured]:
        """Everything measured so far; a last line that was cut short by a crash is left out.

        Raises
        ------
        ConfigError
            If a whole line is not what `add` wrote.
        """
        if not self._lines.exists():
            return []
        lines = self._lines.read_bytes().splitlines(keepends=True)
        try:
            return [Measured.from_dict(json.loads(line)) for line in lines if line.endswith(b"\n")]
        except (ValueError, TypeError, LookupError) as error:
            raise ConfigError(f"{str(self._lines)!r} is damaged; delete it to measure again") from error

    def add(self, measured: Measured) -> None:
        """Append one line, whole."""
        kept = self._lines.read_bytes() if self._lines.exists() else b""
        if kept and not kept.endswith(b"\n"):
            self._lines.write_bytes(kept[: kept.rfind(b"\n") + 1])
        with self._lines.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(measured.to_dict()) + "\n")
            handle.flush()


def run(
    model: LoadedModel,
    tasks: Sequence[Task],
    specs: Sequence[SubjectSpec],
    results: ResultsFolder,
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


def _prefilled(model: LoadedModel, task: Task, layout: PromptLayout, report: Progress) -> tuple[Document, float]:
    """The document in the model's own cache, and the seconds that took."""
    tokens = task.tokens or tokenize_prompt(model.tokenizer, layout, task.text)
    started = time.perf_counter()
    dense = prefill_cache(
        model.model,
        (*tokens.prefix_ids, *tokens.document_ids),
        on_progress=partial(report, "dense prefill"),
    )
    drain(model.model.device)
    prefill_s = time.perf_counter() - started
    return Document(tokens=tokens, layout=layout, dense=dense, sha256=document_sha256(task.text)), prefill_s


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
        following = model.tokenizer(task.continuation, add_special_tokens=False)["input_ids"]
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
