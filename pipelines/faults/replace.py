"""An archive replaced in a tight loop while it is opened: each time wholly one of those that stood there."""

from __future__ import annotations

import hashlib
import multiprocessing
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path

import torch

from pipelines.faults import subject
from ragkv import Archive, ask
from ragkv.archive.publish import staging
from ragkv.archive.verify import verify_archive

BOATS = ("barge", "canoe", "ferry")
_ASK_EVERY = 20
_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Replaced:
    """How often the archive was opened and replaced, and what was found; ``errors`` holds their first lines."""

    opens: int
    replacements: int
    found: dict[str, int]
    mixed: int
    false_alarms: int
    errors: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.mixed and not self.false_alarms and not self.errors and self.replacements > 0

    def __str__(self) -> str:
        which = ", ".join(f"{count:,} {name}" for name, count in sorted(self.found.items()))
        return (
            f"replace: {self.opens:,} opens during {self.replacements:,} replacements ({which}): {self.mixed} mixed, "
            f"{self.false_alarms} false alarms, {len(self.errors)} errors"
        )


def run(work: Path, opens: int) -> Replaced:
    """Open an archive `opens` times while another process replaces it; `work` is an empty folder."""
    known = {}
    for boat in BOATS:
        subject.build(work / "known" / boat, boat, subject.CODED)
        known[_digest(work / "known" / boat)] = boat
    shutil.copytree(work / "known" / BOATS[0], work / "archive")
    context = multiprocessing.get_context("spawn")
    turns, stop = context.Value("l", 0), context.Event()
    replacer = context.Process(target=_replace, args=(work, turns, stop), daemon=True)
    replacer.start()
    try:
        _wait(lambda: turns.value > 0 or not replacer.is_alive())
        return _open_all(work / "archive", opens, known, turns)
    finally:
        stop.set()
        replacer.join(_DEADLINE_S)


def _open_all(path: Path, opens: int, known: dict[str, str], turns: Synchronized[int]) -> Replaced:
    began, found, mixed, alarms, errors = turns.value, Counter[str](), 0, 0, list[str]()
    answers = {boat: _answer(path.parent / "known" / boat) for boat in known.values()}
    for turn in range(opens):
        try:
            archive = Archive.open(path, subject.model())
            boat = known.get(_digest_of(archive))
            found[boat or "unknown"] += 1
            mixed += boat is None
            if turn % _ASK_EVERY == 0 and boat is not None:
                mixed += _answer(path, archive) != answers[boat]
            alarms += bool(verify_archive(path))
        except Exception as error:  # the count is what is asked for: every one of them is a failure
            errors.append(f"{type(error).__name__}: {error}")
    return Replaced(opens, turns.value - began, dict(found), mixed, alarms, tuple(errors))


def _answer(path: Path, archive: Archive | None = None) -> tuple[int, ...]:
    archive = archive or Archive.open(path, subject.model())
    return tuple(ask(archive, subject.QUESTION, max_new_tokens=4, budget=32).token_ids)


def _digest(path: Path) -> str:
    return _digest_of(Archive.open(path, subject.model()))


def _digest_of(archive: Archive) -> str:
    """Everything that an archive holds: tokens, exact tokens, coded prototypes, and the bytes of all rows."""
    hasher = hashlib.sha256(archive.manifest.to_json().encode())
    tensors = [archive.tokens.ids, archive.tokens.start, archive.tokens.end]
    for layer in archive.layers:
        tensors += [layer.keys, layer.values, layer.exact_positions]
        if layer.clusters is not None:
            prototypes = layer.clusters.prototypes
            tensors += [prototypes.key_codes, prototypes.value_codes, prototypes.sizes, prototypes.spreads]
            tensors += [layer.clusters.all_rows(), archive.positions(layer.index)]
    for tensor in tensors:
        hasher.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def _replace(work: Path, turns: Synchronized[int], stop: Event) -> None:
    """What the other process does: put each known archive in place, as a build does, until it is told to stop."""
    while not stop.is_set():
        for boat in BOATS:
            with staging(work / "archive") as folder:
                for file in (work / "known" / boat).iterdir():
                    shutil.copy(file, folder)
            with turns.get_lock():
                turns.value += 1


def _wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not until() and time.monotonic() < deadline:
        time.sleep(0.01)
