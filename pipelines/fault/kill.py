"""Kill the processes that change archives and catalogs at every step that they take in the file system."""

from __future__ import annotations

import gc
import io
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from transformers import DynamicCache

from pipelines.fault.sample import LAYOUT, TEXTS, Prefilled, bytes_below, digest_of
from ragkv import Archive, Catalog
from ragkv.archive.publish import LOCK_FILE
from ragkv.build.builder import BuildRequest
from ragkv.errors import ArchiveNotFoundError
from tests.archives import CODED, loaded

_NAMES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink", "os.utime")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class KilledError(BaseException):
    """The process is dead: nothing in it runs any more, no ``except`` and no ``finally``."""


class Steps:
    """Counts the steps that change files below a folder, and lets none through from number `last` on."""

    def __init__(self, folder: Path, last: int | None = None) -> None:
        self.folder, self.last, self.taken = str(folder), last, 0

    def is_dead(self) -> bool:
        return self.last is not None and self.taken >= self.last

    def take(self) -> None:
        """One step, which does not happen if the process is dead by then."""
        self.taken += 1
        if self.is_dead():
            raise KilledError(f"killed at step {self.taken}")

    def on_event(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            written = isinstance(flags, int) and flags & _WRITING and not isinstance(path, int)
            if written and os.fsdecode(path).startswith(self.folder):
                self.take()
        elif event in _NAMES:
            inside = isinstance(args[0], int) or os.fsdecode(args[0]).startswith(self.folder)
            if inside or args[-1] not in (None, -1):  # a name in a folder that is open
                self.take()


_current: list[Steps] = []
_hooked: list[bool] = []


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _current:
        _current[-1].on_event(event, args)


class _Raw(io.FileIO):
    """A file whose every write is a step; of the write in which the process dies the first half arrives."""

    def write(self, data: Any, /) -> int:
        steps = _current[-1] if _current else None
        if steps is None:
            return super().write(data)
        view = memoryview(data).cast("B")
        if steps.is_dead():
            return len(view)  # what is flushed by clearing up in Python: a dead process writes nothing
        steps.taken += 1
        if steps.is_dead():
            super().write(view[: len(view) // 2])
            raise KilledError(f"killed at step {steps.taken}")
        return super().write(view)


@contextmanager
def watched(steps: Steps) -> Iterator[None]:
    """Let `steps` see all that the block does to files."""
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked.append(True)
    plain_open, plain_fsync = io.open, os.fsync

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode in ("wb", "rb+", "xb") and str(file).startswith(steps.folder):
            raw = _Raw(file, mode)
            return io.BufferedWriter(raw) if mode != "rb+" else io.BufferedRandom(raw)
        return plain_open(file, mode, *args, **kwargs)

    def fsync(descriptor: int) -> None:
        steps.take()
        plain_fsync(descriptor)

    _current.append(steps)
    try:
        with mock.patch("io.open", opened), mock.patch("os.fsync", fsync):
            yield
    finally:
        _current.pop()
        gc.collect()  # lets go of locks that clearing up could not release


@dataclass(frozen=True)
class Scenario:
    """What is done to the folder that `prepare` makes; `readable` says what a reader finds wrong after a kill."""

    name: str
    prepare: Callable[[Path], None]
    act: Callable[[Path], None]
    readable: Callable[[Path], list[str]]


def run_kill(steps: int, *, seed: int = 0) -> Counter[str]:
    """Counts of a run: ``kills``, ``scenarios``, and what went wrong."""
    counts: Counter[str] = Counter(kills=0, absent_or_mixed=0, other_bytes=0, leftovers=0, errors=0)
    with tempfile.TemporaryDirectory() as folder:
        trials = [_Trial(scenario, Path(folder) / scenario.name) for scenario in scenarios()]
        counts["scenarios"], counts["different_steps"] = len(trials), sum(trial.n_steps for trial in trials)
        places = [(trial, step) for trial in trials for step in range(1, trial.n_steps + 1)]
        random.Random(seed).shuffle(places)
        for turn in range(steps):
            trial, step = places[turn % len(places)]
            counts["kills"] += 1
            for kind, text in trial.kill_at(step):
                counts[kind] += 1
                print(f"{trial.scenario.name}, step {step} of {trial.n_steps}: {kind}: {text}")
    return counts


class _Trial:
    """One scenario: its folder before, the steps of an undisturbed run, and the bytes after it."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario, self._before, self._work = scenario, folder / "before", folder / "work"
        self._before.mkdir(parents=True)
        scenario.prepare(self._before)
        self._afresh()
        steps = Steps(self._work)
        with watched(steps):
            scenario.act(self._work)
        self.n_steps, self._after = steps.taken, bytes_below(self._work)
        if not self.n_steps or leftovers_below(self._work):
            raise AssertionError(f"{scenario.name}: an undisturbed run takes no step, or leaves something behind")

    def _afresh(self) -> None:
        shutil.rmtree(self._work, ignore_errors=True)
        shutil.copytree(self._before, self._work)

    def kill_at(self, step: int) -> Iterator[tuple[str, str]]:
        """What goes wrong after a kill at `step`."""
        self._afresh()
        try:
            with watched(Steps(self._work, last=step)):
                self.scenario.act(self._work)
            yield "errors", "the kill did not come"
        except KilledError:
            pass
        release_descriptors(self._work)
        try:
            for text in self.scenario.readable(self._work):
                yield "absent_or_mixed", text
            self.scenario.act(self._work)
        except Exception as error:
            yield "errors", f"{type(error).__name__}: {error}"
            return
        after = bytes_below(self._work)
        if after != self._after:
            odd = sorted(name for name in after.keys() | self._after.keys() if after.get(name) != self._after.get(name))
            yield "other_bytes", ", ".join(odd[:3])
        for name in leftovers_below(self._work):
            yield "leftovers", name


def release_descriptors(folder: Path) -> None:
    """Close what is still open for writing below `folder`: locks, as the death of their process does."""
    gc.collect()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith(str(folder)):
            os.close(int(name))


def leftovers_below(folder: Path) -> list[str]:
    """Files and folders that a dead build left."""
    found = (each for each in folder.rglob(".*") if each.name != LOCK_FILE)
    return sorted(each.relative_to(folder).as_posix() for each in found)


class _Prefill:
    """Gives every build the cache of the same prefill, so that one step costs little."""

    def __init__(self) -> None:
        self._known = {text: Prefilled(text) for text in TEXTS}

    def of(self, text: str) -> Prefilled:
        return self._known[text]

    def method(self) -> Callable[..., DynamicCache]:
        """What stands in for `BuildRequest.prefill`."""

        def prefill(request: BuildRequest, _on_progress: object = None) -> DynamicCache:
            return next(each.cache for each in self._known.values() if each.request.prompt_ids == request.prompt_ids)

        return prefill


def scenarios() -> list[Scenario]:
    """A first build, a replacement, putting back, and every change of a catalog."""
    prefill, model = _Prefill(), loaded("llama")
    old, new = prefill.of(TEXTS[0]), prefill.of(TEXTS[1])
    with tempfile.TemporaryDirectory() as folder:
        wholly = []
        for place, each in enumerate((old, new)):
            each.build(Path(folder) / str(place))
            wholly.append(digest_of(Archive.open(Path(folder) / str(place), model)))

    def nothing(_folder: Path) -> None:
        pass

    def build_old(folder: Path) -> None:
        old.build(folder / "archive")

    def build_new(folder: Path) -> None:
        new.build(folder / "archive")

    def old_or_new(folder: Path) -> list[str]:
        found = digest_of(Archive.open(folder / "archive", model))
        return [] if found in wholly else ["neither the old nor the new archive"]

    def none_or_new(folder: Path) -> list[str]:
        try:
            return old_or_new(folder)
        except ArchiveNotFoundError:
            return []

    def half_replaced(folder: Path) -> None:
        build_old(folder)
        (folder / "archive").rename(folder / ".archive.0123456789ab.old")
        shutil.copytree(folder / ".archive.0123456789ab.old", folder / ".archive.0123456789ab.tmp")
        (folder / ".archive.0123456789ab.lock").touch()

    def put_back(folder: Path) -> None:
        digest_of(Archive.open(folder / "archive", model))
        build_old(folder)  # readers put back what is gone, builders clear the rest away

    def catalog(folder: Path) -> Catalog:
        return Catalog.create(folder / "catalog", model, layout=LAYOUT, recipe=CODED)

    def add(text: str, name: str) -> Callable[[Path], None]:
        def act(folder: Path) -> None:
            with mock.patch.object(BuildRequest, "prefill", prefill.method()):
                catalog(folder).add(text, name=name)

        return act

    def filled(folder: Path) -> None:
        for place, text in enumerate(TEXTS):
            add(text, f"{place}.txt")(folder)

    def with_names(folder: Path) -> None:
        filled(folder)
        add(TEXTS[0], "another.txt")(folder)

    def removed(folder: Path) -> None:
        with_names(folder)
        remove(folder)
        documents = folder / "catalog" / "documents"
        (documents / ".dead.0123456789ab.tmp").mkdir()
        (documents / ".dead.0123456789ab.lock").touch()

    def remove(folder: Path) -> None:
        held = catalog(folder)
        document = held.document_id(TEXTS[0])
        if document in held:
            held.remove(document)

    def drop_name(folder: Path) -> None:
        held = catalog(folder)
        document = held.document_id(TEXTS[0])
        if "another.txt" in held.entry(document).names:
            held.remove(document, name="another.txt")

    def clear_up(folder: Path) -> None:
        catalog(folder).gc(0)

    def whole(*texts: str, sometimes: str = "", names: tuple[str, ...] = ()) -> Callable[[Path], list[str]]:
        def readable(folder: Path) -> list[str]:
            return list(_catalog_faults(folder / "catalog", texts, sometimes, names))

        return readable

    first = TEXTS[0]
    return [
        Scenario("build", nothing, build_new, none_or_new),
        Scenario("replace", build_old, build_new, old_or_new),
        Scenario("put_back", half_replaced, put_back, old_or_new),
        Scenario("add_first", nothing, add(first, "0.txt"), whole(sometimes=first)),
        Scenario("add_second", add(first, "0.txt"), add(TEXTS[1], "1.txt"), whole(first, sometimes=TEXTS[1])),
        Scenario("add_name", filled, add(first, "another.txt"), whole(*TEXTS, names=("0.txt",))),
        Scenario("drop_name", with_names, drop_name, whole(*TEXTS, names=("0.txt",))),
        Scenario("remove", filled, remove, whole(*TEXTS[1:], sometimes=first)),
        Scenario("gc", removed, clear_up, whole(*TEXTS[1:])),
    ]


def _catalog_faults(path: Path, texts: tuple[str, ...], sometimes: str, names: tuple[str, ...]) -> Iterator[str]:
    """What a reader misses in a catalog that must hold `texts`, may hold `sometimes`, and nothing else."""
    try:
        held = Catalog.open(path, loaded("llama"))
    except ArchiveNotFoundError:
        if texts:
            yield "the catalog is gone"
        return
    entries = {entry.id: entry for entry in held.entries()}
    wanted = {held.document_id(text): text for text in texts}
    for document in wanted.keys() - entries.keys():
        yield f"{document[:12]} is gone"
    for document in entries.keys() - wanted.keys():
        if not sometimes or document != held.document_id(sometimes):
            yield f"{document[:12]} should not be there"
    for document, entry in entries.items():
        archive = held.archive(document)
        digest_of(archive)
        if any(not name or not name.endswith(".txt") for name in entry.names):
            yield f"{document[:12]} has the names {entry.names}"
        if wanted.get(document) == TEXTS[0] and not set(names) <= set(entry.names):
            yield f"{document[:12]} lost a name: {entry.names}"
