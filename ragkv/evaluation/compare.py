"""Questions to one document: the dense answers first, then each subject on the same tokens and on its own."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ragkv.evaluation.data.suite import Item
from ragkv.evaluation.fidelity import Decoded, agreement, decode_answer, kl_divergence
from ragkv.evaluation.metrics import METRICS
from ragkv.evaluation.subjects import DenseDocument, DenseSubject, Subject
from ragkv.model.load import LoadedModel, question_inputs

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Outcome:
    """What one subject made of one question.

    ``kl`` and ``agrees`` hold one number per answer position of the dense model, teacher-forced; ``scores`` are of the
    subject's own greedy answer ``text``. Seconds are those of the forced pass (for dense: of its only pass).
    ``bytes_read`` is the mean per answer token, None for answers of one token. ``answer_distance`` is the number of
    document tokens behind the gold answer (the last one, of several), None where nobody knows where it stands.
    """

    item: int
    question: str
    text: str
    scores: dict[str, float]
    kl: tuple[float, ...]
    agrees: tuple[float, ...]
    same_answer: bool
    ttft_s: float
    step_s: tuple[float, ...]
    bytes_read: float | None
    answer_distance: int | None = None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Outcome:
        lists = {name: tuple(values[name]) for name in ("kl", "agrees", "step_s")}
        return cls(**{**values, **lists})


@dataclass(frozen=True)
class Questions:
    """What is asked of a document, how answers are scored (None without gold answers), and how long they may get."""

    items: Sequence[Item]
    metric: str | None
    max_new_tokens: int


@dataclass(frozen=True)
class Reference:
    """A question's inputs, and the dense model's own greedy answer."""

    item: Item
    inputs: dict[str, torch.Tensor]
    decoded: Decoded


def ask_dense(
    model: LoadedModel, document: DenseDocument, questions: Questions, *, on_progress: OnProgress | None = None
) -> list[Reference]:
    """The dense answers that all subjects are measured against; logits are kept in the model's dtype."""
    dense, start = DenseSubject(document.dense), document.dense.get_seq_length()
    references: list[Reference] = []
    for item in questions.items:
        inputs = question_inputs(model, document.layout, [item.question], first_position=start)
        references.append(Reference(item, inputs, _decode(model, document, questions, dense, inputs)[0]))
        if on_progress is not None:
            on_progress(len(references), len(questions.items))
    return references


def compare(
    model: LoadedModel,
    document: DenseDocument,
    questions: Questions,
    references: Sequence[Reference],
    subject: Subject,
    *,
    on_progress: OnProgress | None = None,
) -> list[Outcome]:
    """Ask `subject` every question.

    A subject that agrees with dense at every position would give the same greedy answer, so only others generate.
    """
    outcomes: list[Outcome] = []
    for number, reference in enumerate(references):
        wanted, bytes_read = reference.decoded, None
        if isinstance(subject, DenseSubject):
            decoded, bytes_read = wanted, float(subject.resident_bytes)
        else:
            decoded, bytes_read = _decode(
                model, document, questions, subject, reference.inputs, forced=wanted.token_ids
            )
        text = wanted.text
        if tuple(decoded.logits.argmax(-1).tolist()) != wanted.token_ids:
            text = _decode(model, document, questions, subject, reference.inputs)[0].text
        outcomes.append(
            Outcome(
                item=number,
                question=reference.item.question,
                text=text,
                scores=_scores(questions.metric, text, reference.item),
                kl=tuple(kl_divergence(wanted.logits, decoded.logits).tolist()),
                agrees=tuple(agreement(wanted.logits, decoded.logits).tolist()),
                same_answer=text == wanted.text,
                ttft_s=decoded.ttft_s,
                step_s=decoded.step_s,
                bytes_read=bytes_read,
                answer_distance=answer_distance(document, reference.item),
            )
        )
        if on_progress is not None:
            on_progress(len(outcomes), len(references))
    return outcomes


@torch.no_grad()
def continue_text(
    model: LoadedModel, document: DenseDocument, token_ids: Sequence[int], subject: Subject
) -> list[float]:
    """Negative log-likelihood in nats of each of `token_ids` but the first, which follow the document directly."""
    start, device = document.dense.get_seq_length(), model.model.device
    ids = torch.tensor([list(token_ids)], device=device)
    positions = torch.arange(start, start + ids.shape[1], device=device).unsqueeze(0)
    logits = model.model(ids, position_ids=positions, cache=subject.trial().cache, use_cache=True).logits[0, :-1]
    return (-logits.float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]).tolist()


def answer_distance(document: DenseDocument, item: Item) -> int | None:
    """Document tokens behind the last gold answer of `item`; None if it has no spans."""
    if not item.spans:
        return None
    starts = [start for start, _ in document.tokens.offsets]
    return len(starts) - bisect_left(starts, max(end for _, end in item.spans))


def _scores(metric: str | None, text: str, item: Item) -> dict[str, float]:
    return METRICS[metric](text, item.answers) if metric is not None and item.answers else {}


def _decode(
    model: LoadedModel,
    document: DenseDocument,
    questions: Questions,
    subject: Subject,
    inputs: dict[str, torch.Tensor],
    *,
    forced: Sequence[int] | None = None,
) -> tuple[Decoded, float | None]:
    trial = subject.trial()
    stop, limit = document.layout.stop, questions.max_new_tokens
    decoded = decode_answer(model, inputs, trial.cache, stop=stop, max_new_tokens=limit, forced=forced)
    return decoded, trial.bytes_read()
