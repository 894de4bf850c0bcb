"""A process killed at any step that changes files: what stood stays, and a rerun ends as if nothing had happened.

A kill is simulated in the process itself: from the chosen step on nothing reaches the disk any more, neither the step
nor whatever cleaning up the code would do, and its locks are let go. Some real kills of whole processes are tried, too.
"""

from __future__ import annotations

import builtins
import io
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pipelines.faults import subject
from ragkv import Archive, Catalog
from ragkv.errors import ArchiveNotFoundError, RagkvError

_CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink", "os.chmod"}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_DEADLINE_S = 120.0
_TORN = (0.5, 1.0, 0.0)  # shares of a last write that get through, one after another


class Killed(BaseException):
    """Where a process would have been gone."""


class _Steps:
    """Counts the steps of this process that change files below `folder`; from step `last` on none gets through."""

    def __init__(self, folder: Path, last: int | None, *, by_signal: bool, torn: float) -> None:
        self.folder, self.last, self.by_signal, self.torn = str(folder), last, by_signal, torn
        self.taken = 0

    @property
    def is_last(self) -> bool:
        """Whether the next step is the one that is not finished."""
        return self.last is not None and self.taken + 1 >= self.last

    def step(self) -> None:
        self.taken += 1
        if self.last is not None and self.taken >= self.last:
            if self.by_signal:
                os.kill(os.getpid(), signal.SIGKILL)
            raise Killed

    def inside(self, path: object) -> bool:
        return isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith(self.folder)


_watching: list[_Steps] = []  # one at most


def _audit(event: str, words: tuple[Any, ...]) -> None:
    if not _watching:
        return
    watch = _watching[0]
    if event == "open":
        path, _, flags = words
        if watch.inside(path) and isinstance(flags, int) and flags & _WRITING:
            watch.step()
    elif event in _CHANGES and any(watch.inside(word) or _is_folder(word) for word in words):
        watch.step()


def _is_folder(word: object) -> bool:
    """Whether it is the descriptor of a folder that a name is relative to: deleting a folder uses these."""
    return isinstance(word, int) and word > 2


class _Unbuffered(io.RawIOBase):
    """A file whose every write is a step that may reach the disk by half, and whose every byte is there at once."""

    def __init__(self, raw: Any, watch: _Steps) -> None:
        self._raw, self._watch = raw, watch

    def write(self, data: Any) -> int:
        if self._watch.is_last:
            raw = memoryview(data).cast("B")
            self._raw.write(raw[: int(len(raw) * self._watch.torn)])
        self._watch.step()
        return self._raw.write(data)

    def read(self, size: int = -1) -> bytes | None:
        return self._raw.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._raw.seek(offset, whence)

    def tell(self) -> int:
        return self._raw.tell()

    def fileno(self) -> int:
        return self._raw.fileno()

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return self._raw.readable()

    def close(self) -> None:
        self._raw.close()
        super().close()


@contextmanager
def killed_at(folder: Path, last: int | None, *, by_signal: bool = False, torn: float = _TORN[0]) -> Iterator[_Steps]:
    """Count steps below `folder`; with `last`, nothing from that step on gets through, and `Killed` is raised there.

    Of a write that is the last step the share `torn` reaches the disk.
    """
    _listen()
    watch = _Steps(folder, last, by_signal=by_signal, torn=torn)
    real_open, real_fsync = io.open, os.fsync

    def open_file(file: Any, mode: str = "r", *words: Any, **named: Any) -> Any:
        if watch.inside(file) and "b" in mode and set(mode) & set("wax+"):
            return _Unbuffered(real_open(file, mode, 0), watch)
        return real_open(file, mode, *words, **named)

    def flush(fd: Any) -> None:
        watch.step()
        real_fsync(fd)

    _watching.append(watch)
    try:
        with (
            patch.object(io, "open", open_file),
            patch.object(builtins, "open", open_file),
            patch.object(os, "fsync", flush),
        ):
            yield watch
    finally:
        _watching.clear()
        _let_go(folder)


@lru_cache(maxsize=1)
def _listen() -> None:
    """Be told of all changes of files: once, because whoever listens does so for ever."""
    sys.addaudithook(_audit)


def _let_go(folder: Path) -> None:
    """Close what is still open for writing below `folder`, above all locks: the system does it when a process ends."""
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{entry}")
            if target.startswith(str(folder)) and target.endswith(".lock"):
                os.close(int(entry))


@dataclass(frozen=True)
class Change:
    """One change: `prepare` makes what stands before, `act` changes it, and can be repeated.

    ``stands`` are the boats whose archives a reader must find afterwards, whenever it was killed.
    """

    name: str
    prepare: Callable[[Path], None]
    act: Callable[[Path], None]
    stands: tuple[str, ...] = ()


def _filled(*boats: str) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        catalog = _catalog(folder)
        for boat in boats:
            catalog.add(subject.text(boat), name=f"{boat}.txt")

    return prepare


def _catalog(folder: Path) -> Catalog:
    return Catalog.create(folder / "c", subject.model(), layout=subject.LAYOUT, recipe=subject.CODED)


def _add(boat: str, name: str) -> Callable[[Path], None]:
    return lambda folder: _ignore(_catalog(folder).add(subject.text(boat), name=name))


def _ignore(_: object) -> None:
    """So that functions that give something can stand where nothing is asked for."""


def _once(act: Callable[[Catalog, str], None], boat: str) -> Callable[[Path], None]:
    """A change that says that there is no such document any more when it was finished before."""

    def call(folder: Path) -> None:
        catalog = _catalog(folder)
        with suppress(ArchiveNotFoundError):
            act(catalog, catalog.document_id(subject.text(boat)))

    return call


def _removed(folder: Path) -> None:
    _filled("barge", "canoe")(folder)
    catalog = _catalog(folder)
    catalog.remove(catalog.document_id(subject.text("barge")))


def _damaged(folder: Path) -> None:
    _filled("barge", "canoe")(folder)
    catalog = _catalog(folder)
    rows = catalog.entry("barge.txt").path / "rows.parquet"
    rows.write_bytes(rows.read_bytes()[:-1])


def _two_names(folder: Path) -> None:
    _filled("barge", "canoe")(folder)
    _add("barge", "copy.txt")(folder)


CHANGES = (
    Change("build", lambda _: None, lambda folder: subject.build(folder / "a", "barge", subject.CODED)),
    Change(
        "replace",
        lambda folder: subject.build(folder / "a", "barge", subject.CODED),
        lambda folder: subject.build(folder / "a", "canoe", subject.CODED),
        ("a",),
    ),
    Change("create", lambda _: None, lambda folder: _ignore(_catalog(folder))),
    Change("first add", lambda folder: _ignore(_catalog(folder)), _add("barge", "barge.txt")),
    Change("add", _filled("barge"), _add("canoe", "canoe.txt"), ("barge",)),
    Change("add a name", _filled("barge"), _add("barge", "copy.txt"), ("barge",)),
    Change("mend", _damaged, _add("barge", "barge.txt"), ("canoe",)),
    Change("revive", _removed, _add("barge", "barge.txt"), ("canoe",)),
    Change("remove", _filled("barge", "canoe"), _once(lambda c, i: c.remove(i), "barge"), ("canoe",)),
    Change("remove a name", _two_names, _once(lambda c, i: c.remove(i, name="copy.txt"), "barge"), ("barge", "canoe")),
    Change("gc", _removed, lambda folder: _ignore(_catalog(folder).gc(0)), ("canoe",)),
    Change(
        "fit transforms",
        lambda folder: _ignore(_catalog(folder)),
        lambda folder: _catalog(folder).fit_transforms([subject.text("barge"), subject.text("canoe")]),
    ),
)


@dataclass(frozen=True)
class Kills:
    """How often and where processes were killed; ``errors`` are what was wrong afterwards."""

    steps: int
    processes: int
    changes: dict[str, int]
    errors: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.errors

    def __str__(self) -> str:
        every = ", ".join(f"{name} {count}" for name, count in self.changes.items())
        return (
            f"kill: {self.steps:,} kills at steps of {len(self.changes)} changes ({every}) and {self.processes} "
            f"processes killed: {len(self.errors)} reruns, archives or leftovers wrong"
        )


@dataclass(frozen=True)
class _Ready:
    """A change, what stands before it, what stands after it, and how many steps lie between the two."""

    change: Change
    before: Path
    after: dict[str, str]
    n_steps: int


def run(work: Path, steps: int, *, processes: int = 0) -> Kills:
    """Kill each change at its steps, `steps` kills in all, spread evenly; `work` is an empty folder.

    Where there are fewer steps, some are tried again with writes that are torn elsewhere.
    """
    ready = [_make_ready(work / "before", change) for change in CHANGES]
    every = [(each, step) for each in ready for step in range(1, each.n_steps + 1)]
    spread = range(steps) if steps >= len(every) else (place * len(every) // steps for place in range(steps))
    errors, counts = list[str](), dict.fromkeys((change.name for change in CHANGES), 0)
    for place in spread:
        each, step = every[place % len(every)]
        counts[each.change.name] += 1
        errors += _kill_one(work, each, step, torn=_TORN[place // len(every) % len(_TORN)])
    for place in range(processes):
        each, step = every[(2 * place + 1) * len(every) // (2 * processes)]
        errors += _kill_one(work, each, step, torn=_TORN[0], by_signal=True)
    return Kills(steps, processes, counts, tuple(errors))


def _make_ready(work: Path, change: Change) -> _Ready:
    before, after = work / change.name, work / f"{change.name} done"
    before.mkdir(parents=True)
    change.prepare(before)
    shutil.copytree(before, after)
    with killed_at(after, None) as watch:
        change.act(after)
    return _Ready(change, before, subject.tree(after), watch.taken)


def _kill_one(work: Path, ready: _Ready, step: int, *, torn: float, by_signal: bool = False) -> list[str]:
    """What is wrong after a kill at one step of a change."""
    folder, seen, change = work / "now", work / "seen", ready.change
    for left in (folder, seen):
        shutil.rmtree(left, ignore_errors=True)
    shutil.copytree(ready.before, folder)
    where = f"{change.name}, step {step} of {ready.n_steps}"
    if by_signal:
        process = multiprocessing.get_context("spawn").Process(target=_die, args=(change.name, folder, step))
        process.start()
        process.join(_DEADLINE_S)
        if process.exitcode != -signal.SIGKILL:
            return [f"{where}: the process ended with {process.exitcode} and was not killed"]
    else:
        with suppress(Killed), killed_at(folder, step, torn=torn):
            change.act(folder)
            return [f"{where}: was not reached"]
    shutil.copytree(folder, seen)
    return [f"{where}: {fault}" for fault in (*_reader_faults(change, seen), *_rerun_faults(ready, folder))]


def _die(name: str, folder: Path, step: int) -> None:
    change = next(change for change in CHANGES if change.name == name)
    with killed_at(folder, step, by_signal=True):
        change.act(folder)


def _reader_faults(change: Change, folder: Path) -> Iterator[str]:
    """What a reader misses who comes next."""
    try:
        if change.stands == ("a",):
            Archive.open(folder / "a", subject.model())
            return
        if change.stands:
            catalog = Catalog.open(folder / "c", subject.model())
            for boat in change.stands:
                catalog.archive(catalog.entry(f"{boat}.txt").id)
    except (RagkvError, OSError) as error:
        yield f"a reader finds no archive ({type(error).__name__}: {error})"


def _rerun_faults(ready: _Ready, folder: Path) -> Iterator[str]:
    try:
        ready.change.act(folder)
    except (RagkvError, OSError) as error:
        yield f"the rerun fails ({type(error).__name__}: {error})"
        return
    found = subject.tree(folder)
    if found != ready.after:
        differ = sorted(name for name in {*found, *ready.after} if found.get(name) != ready.after.get(name))
        yield f"the rerun ends with other bytes in {', '.join(differ[:3])}"
    if left := subject.leftovers(folder):
        yield f"{', '.join(left[:3])} left"
