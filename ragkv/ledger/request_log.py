"""A request log as a `Workload`: JSON Lines in, percentiles and shares out."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from ragkv.errors import ConfigError
from ragkv.ledger.fit import LONG_TOKENS, LOOK_BACK_TOKENS, VERY_LONG_TOKENS, Workload


@dataclass(frozen=True)
class _Request:
    """One line of the log; None where it does not say."""

    context_tokens: int
    document: str | None
    looked_back: bool | None
    ttft_s: float | None


def read_log(path: str | Path) -> Workload:
    """Sum up a request log, a UTF-8 file with one JSON object per line; blank lines are skipped.

    Every line has ``context_tokens`` (whole number of at least 1). It may have ``document`` (any text, the same for
    requests about the same document), ``ttft_s`` (seconds to the first token), and one of ``looked_back`` (true or
    false) and ``cited_position`` (token position, from 0, that the answer drew on: looked back when more than
    `LOOK_BACK_TOKENS` before the end of the context). null means not known; other keys are not read. Requests are in
    the order they came: the first of a document is the one on a fresh document.

    Raises
    ------
    ConfigError
        If the file cannot be read or holds no request; or, with the number of the line, if one is wrong.
    """
    requests = []
    try:
        with Path(path).open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    requests.append(_request(line, f"request log {str(path)!r}, line {number}"))
    except OSError as error:
        raise ConfigError(f"request log {str(path)!r} cannot be read: {error}") from error
    if not requests:
        raise ConfigError(f"request log {str(path)!r} holds no request; give one JSON object per line")
    return _summarise(requests)


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Nearest-rank percentile of values in rising order: the least that at least `percent` % do not exceed."""
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]


def _summarise(requests: Sequence[_Request]) -> Workload:
    lengths = sorted(request.context_tokens for request in requests)
    per_document: dict[str, int] = {}
    fresh_ttft = []
    for request in requests:
        if request.document is None:
            continue
        if request.document not in per_document and request.ttft_s is not None:
            fresh_ttft.append(request.ttft_s)
        per_document[request.document] = per_document.get(request.document, 0) + 1
    counts, told = list(per_document.values()), [r.looked_back for r in requests if r.looked_back is not None]
    return Workload(
        context_median=int(percentile(lengths, 50)),
        context_p90=int(percentile(lengths, 90)),
        context_p99=int(percentile(lengths, 99)),
        n_requests=len(requests),
        share_beyond_16k=sum(length > LONG_TOKENS for length in lengths) / len(lengths),
        share_beyond_32k=sum(length > VERY_LONG_TOKENS for length in lengths) / len(lengths),
        questions_per_document=sum(counts) / len(counts) if counts else None,
        share_asked_once=counts.count(1) / len(counts) if counts else None,
        look_back_share=sum(told) / len(told) if told else None,
        n_look_back=len(told) if told else None,
        fresh_ttft_p90_s=percentile(sorted(fresh_ttft), 90) if fresh_ttft else None,
    )


def _request(line: bytes, where: str) -> _Request:
    try:
        entry = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON in UTF-8 ({error})") from error
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: {_shown(entry)} is not a JSON object; give {{...}}")
    tokens, document = entry.get("context_tokens"), entry.get("document")
    if not _is_whole(tokens) or tokens < 1:
        given = f"is {_shown(tokens)}" if "context_tokens" in entry else "is missing"
        raise ConfigError(f"{where}: context_tokens {given}; give a whole number of at least 1")
    if document is not None and not isinstance(document, str):
        raise ConfigError(f"{where}: document is {_shown(document)}; give a text in quotes, or leave it out")
    return _Request(tokens, document, _looked_back(entry, tokens, where), _ttft(entry, where))


def _looked_back(entry: dict[str, Any], tokens: int, where: str) -> bool | None:
    told, position = entry.get("looked_back"), entry.get("cited_position")
    if told is not None and position is not None:
        raise ConfigError(f"{where}: both looked_back and cited_position are given; give one of them")
    if told is not None:
        if not isinstance(told, bool):
            raise ConfigError(f"{where}: looked_back is {_shown(told)}; give true or false, or leave it out")
        return told
    if position is None:
        return None
    if not _is_whole(position) or not 0 <= position < tokens:
        raise ConfigError(f"{where}: cited_position is {_shown(position)}; give a whole number from 0 to {tokens - 1}")
    return bool(tokens - position > LOOK_BACK_TOKENS)


def _ttft(entry: dict[str, Any], where: str) -> float | None:
    seconds = entry.get("ttft_s")
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise ConfigError(f"{where}: ttft_s is {_shown(seconds)}; give seconds, 0 or more, or leave it out")
    return float(seconds)


def _is_whole(value: object) -> TypeGuard[int]:
    """JSON's true and false are no numbers, though Python's are."""
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
