"""What calibration asks, and of which documents: archives by their tokens, questions of the user or of its own.

Everything but `make_tasks` works without a model, so that a mistake costs nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragkv.archive.manifest import Manifest, read_manifest
from ragkv.errors import ConfigError, ModelMismatchError
from ragkv.evaluation.calibrate.rule import check_questions
from ragkv.evaluation.data.own_questions import make_questions
from ragkv.evaluation.data.suite import Item
from ragkv.text import UNSPACED, read_text

if TYPE_CHECKING:
    from ragkv.evaluation.run import Task
    from ragkv.model.load import LoadedModel
    from ragkv.model.prompt import PromptTokens

TASKS = ("auto", "qa", "lookup")
N_OWN_QUESTIONS = 24
OWN_SEED = 0
_KEYS = ("question", "answers", "document")


@dataclass(frozen=True)
class Source:
    """An archive whose document is asked; ``name`` is its folder's, or the path where two folders share a name."""

    name: str
    path: Path
    manifest: Manifest


@dataclass(frozen=True)
class FileQuestion:
    """A question of the user's file: of the archive `document`, or of every one. ``line`` is its line in the file."""

    question: str
    answers: tuple[str, ...]
    document: str | None
    line: int


@dataclass(frozen=True)
class Plan:
    """What is asked of each source. ``items`` are by source name, empty for questions that are made from the document.

    ``metric`` is a key of `METRICS`, None without gold answers; ``description`` tells a reader what the questions are.
    """

    items: dict[str, tuple[Item, ...]]
    n_own: int
    metric: str | None
    max_new_tokens: int
    description: str

    def n_questions(self, n_sources: int) -> int:
        """Over all sources; of own questions the most there can be."""
        return sum(map(len, self.items.values())) if self.items else self.n_own * n_sources

    def to_dict(self) -> dict[str, Any]:
        own = {"number": self.n_own, "seed": OWN_SEED}
        asked = {name: [[item.question, *item.answers] for item in items] for name, items in self.items.items()}
        return {"questions": asked or own, "metric": self.metric, "max_new_tokens": self.max_new_tokens}


def find_sources(folders: Sequence[Path]) -> tuple[Source, ...]:
    """The archives in `folders`, which must be of one model and one layout.

    Raises
    ------
    ArchiveNotFoundError, ArchiveFormatError, ArchiveCorruptError
        If one is no archive, or its manifest is not what was written.
    ModelMismatchError
        If two were built with different models; both are named.
    ConfigError
        If there is none, one is given twice, or two have different prompt layouts.
    """
    if not folders:
        raise ConfigError("no archive is given; give --archive with the folder of one, as 'ragkv build' printed it")
    real = [folder.resolve() for folder in folders]
    twice = next((folder for folder, place in zip(folders, real, strict=True) if real.count(place) > 1), None)
    if twice is not None:
        raise ConfigError(f"archive {str(twice)!r} is given twice; give each archive once")
    names = [place.name for place in real]
    sources = tuple(
        Source(name if names.count(name) == 1 else str(folder), folder, read_manifest(folder))
        for name, folder in zip(names, folders, strict=True)
    )
    for other in sources[1:]:
        _require_same(sources[0], other)
    return sources


def _require_same(first: Source, other: Source) -> None:
    one, two = (dataclasses.replace(source.manifest.fingerprint, dtype="") for source in (first, other))
    if one != two:
        raise ModelMismatchError(
            f"archives {first.name!r} and {other.name!r} were built with different models: "
            f"{first.manifest.model_name} (weights {one.weights_sha256[:12]}...) and {other.manifest.model_name} "
            f"(weights {two.weights_sha256[:12]}...); calibrate each model by itself"
        )
    if first.manifest.layout != other.manifest.layout:
        raise ConfigError(
            f"archives {first.name!r} and {other.name!r} have different prompt layouts; calibrate each by itself"
        )


def read_asked(path: str | Path) -> tuple[FileQuestion, ...]:
    """Questions of a file: one a line, or JSON Lines where the first line with text begins with ``{``.

    Raises
    ------
    ConfigError
        If the file cannot be read or holds no questions, or a line is wrong (its number is named).
    """
    lines = [(number, text.strip()) for number, text in enumerate(read_text(path).split("\n"), 1) if text.strip()]
    if not lines:
        raise ConfigError(f"{str(path)!r} holds no questions; write one a line")
    if not lines[0][1].startswith("{"):
        return tuple(FileQuestion(text, (), None, number) for number, text in lines)
    return tuple(_parse(text, f"{str(path)!r}, line {number}", number) for number, text in lines)


def _parse(text: str, place: str, line: int) -> FileQuestion:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not valid JSON ({error}); write one object a line") from error
    if not isinstance(values, dict) or not set(values) <= set(_KEYS):
        odd = sorted(set(values) - set(_KEYS))[0] if isinstance(values, dict) else text[:40]
        raise ConfigError(f"{place}: {odd!r} is not known; write an object with {', '.join(_KEYS)}")
    question, answers, document = values.get("question"), values.get("answers", []), values.get("document")
    if not isinstance(question, str) or not question.strip():
        raise ConfigError(f"{place}: question is {question!r}; give some text")
    if not isinstance(answers, list) or not all(isinstance(each, str) and each.strip() for each in answers):
        raise ConfigError(f"{place}: answers is {answers!r}; give a list of texts, or leave it out")
    if document is not None and not isinstance(document, str):
        raise ConfigError(f"{place}: document is {document!r}; give the name of an archive's folder, or leave it out")
    return FileQuestion(question.strip(), tuple(answers), document, line)


def plan_questions(
    sources: Sequence[Source],
    asked: Sequence[FileQuestion] | None,
    *,
    task: str = "auto",
    n_questions: int | None = None,
    max_new_tokens: int = 32,
) -> Plan:
    """Give each source its questions; None for `asked` plans questions made from the documents.

    `n_questions` are the most of each document, taken at even distances; all of a file, and 24 of its own, by default.

    Raises
    ------
    ConfigError
        If a number or the task is out of range, gold answers are missing where the task needs them, a question names
        an archive that is not given, an archive gets none, or there are fewer than two in all.
    """
    if task not in TASKS:
        raise ConfigError(f"task is {task!r}; give one of {', '.join(TASKS)}")
    for name, value in (("the number of questions", n_questions), ("the longest answer", max_new_tokens)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; give at least 1")
    if asked is None:
        plan = _own(task, n_questions or N_OWN_QUESTIONS, max_new_tokens)
    else:
        metric = _metric(task, asked)
        items = {source.name: _even(_items(source, asked), n_questions) for source in sources}
        _check_given(sources, asked, items)
        count = sum(map(len, items.values()))
        n_gold = sum(bool(item.answers) for each in items.values() for item in each)
        description = f"{count} questions from a file, {n_gold or 'none'} of them with gold answers."
        plan = Plan(items, 0, metric, max_new_tokens, description)
    check_questions(plan.n_questions(len(sources)))
    return plan


def _own(task: str, n_questions: int, max_new_tokens: int) -> Plan:
    if task == "qa":
        raise ConfigError("task qa needs questions with gold answers; give --questions, or task auto or lookup")
    description = (
        "No questions were given, so they were made from each document: one half ask how one of its own sentences goes "
        "on (judged by agreement with dense attention only), the other half for the six digits of an invented fact "
        f"that was planted in the document for this purpose (seed {OWN_SEED}); both are spread evenly over it. They "
        "show whether text can be found again, not whether it is understood: questions of your own are the better "
        "guide."
    )
    return Plan({}, n_questions, "contains", max_new_tokens, description)


def _metric(task: str, asked: Sequence[FileQuestion]) -> str | None:
    answers = [answer for each in asked for answer in each.answers]
    if not answers:
        if task != "auto":
            raise ConfigError(f"task {task} needs gold answers and the questions have none; add them, or use task auto")
        return None
    unspaced = any(UNSPACED.search(answer) for answer in answers)
    if task == "lookup" or (task == "auto" and not unspaced and all(len(answer.split()) == 1 for answer in answers)):
        return "contains"
    return "squad_zh" if unspaced else "squad"


def _items(source: Source, asked: Sequence[FileQuestion]) -> tuple[Item, ...]:
    own = {None, source.name, str(source.path)}
    return tuple(Item(each.question, each.answers) for each in asked if each.document in own)


def _even(items: tuple[Item, ...], n_kept: int | None) -> tuple[Item, ...]:
    if n_kept is None or len(items) <= n_kept:
        return items
    return tuple(items[place * len(items) // n_kept] for place in range(n_kept))


def _check_given(sources: Sequence[Source], asked: Sequence[FileQuestion], items: dict[str, tuple[Item, ...]]) -> None:
    known = {name for source in sources for name in (source.name, str(source.path))}
    for each in asked:
        if each.document is not None and each.document not in known:
            raise ConfigError(
                f"line {each.line} of the questions is about {each.document!r}, which is none of the archives "
                f"{', '.join(source.name for source in sources)}; give its --archive or take the line out"
            )
    for name, own in items.items():
        if not own:
            raise ConfigError(f"archive {name!r} has no questions in the file; add some or leave the archive out")


def make_tasks(model: LoadedModel, sources: Sequence[Source], plan: Plan) -> list[Task]:
    """One task per source, on the archive's own tokens; with own questions, on its text with the facts planted.

    Raises
    ------
    ConfigError
        If a document with planted facts is longer than the model's context.
    """
    from ragkv.evaluation.compare import Questions
    from ragkv.evaluation.run import Task

    tasks = []
    for source in sources:
        tokens = archived_tokens(source)
        items = plan.items.get(source.name, ())
        if not plan.items:
            tokens, items = _planted(model, source, tokens, plan.n_own)
        questions = Questions(items, plan.metric, plan.max_new_tokens)
        tasks.append(Task(name=source.name, text="", questions=questions, tokens=tokens))
    return tasks


def archived_tokens(source: Source) -> PromptTokens:
    """Prefix and document as they were archived, from the one file that holds them.

    Raises
    ------
    ArchiveCorruptError
        If the file does not match its checksum.
    """
    from ragkv.archive.files import read_checked, system_errors
    from ragkv.archive.tokens import TOKENS_FILE, read_tokens
    from ragkv.model.prompt import PromptTokens

    manifest = source.manifest
    with system_errors(f"{str(source.path)!r}: {TOKENS_FILE}"):
        raw = read_checked(source.path, TOKENS_FILE, manifest.files[TOKENS_FILE])
    table, begin = read_tokens(raw, manifest.n_tokens), manifest.prefix_tokens
    ids = tuple(table.ids.tolist())
    return PromptTokens(
        prefix_ids=ids[:begin],
        document_ids=ids[begin:],
        offsets=tuple(zip(table.start[begin:].tolist(), table.end[begin:].tolist(), strict=True)),
        prefix_seam_differs=manifest.prefix_seam_differs,
        question_seam_differs=manifest.question_seam_differs,
    )


def _planted(
    model: LoadedModel, source: Source, tokens: PromptTokens, n_questions: int
) -> tuple[PromptTokens, tuple[Item, ...]]:
    """The document with facts in it, tokenised afresh, and the questions: continuations first, then look-ups."""
    from ragkv.model.prefill import check_document_length
    from ragkv.model.prompt import tokenize_prompt

    text = model.tokenizer.decode(
        list(tokens.document_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    n_continuations = n_questions // 2
    made = make_questions(
        str(text), n_continuations=n_continuations, n_look_ups=n_questions - n_continuations, seed=OWN_SEED
    )
    planted = tokenize_prompt(model.tokenizer, source.manifest.layout, made.document)
    try:
        check_document_length(model.model, len(planted.prefix_ids) + len(planted.document_ids))
    except ConfigError as error:
        raise ConfigError(
            f"archive {source.name!r} leaves no room in the model's context for planted facts; give --questions"
        ) from error
    # What a sentence goes on with is ordinary text that dense attention does not know by heart: it has no gold answer.
    items = [Item(each.question, ()) for each in made.continuations]
    items += [Item(each.question, (each.answer,)) for each in made.look_ups]
    return planted, tuple(items)
