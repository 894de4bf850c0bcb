"""Archives altered at random under checksums that hold: whoever reads them gets an error of ragkv or an answer.

The reading is done by another process with little memory and a deadline for each archive; if it dies or hangs, that is
counted, and it is started again behind the archive that did it.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import multiprocessing
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import pyarrow as pa
import torch

from pipelines.faults import edits, subject
from pipelines.faults.mend import mend, read_json, write_json
from ragkv import Archive, ArchiveCache, Catalog
from ragkv.archive.inspect import describe_archive
from ragkv.archive.manifest import MANIFEST_FILE
from ragkv.archive.verify import verify_archive
from ragkv.errors import ArchiveReadError, RagkvError
from ragkv.recipe import RecallPolicy

ROOM = 2 << 30
"""Bytes of address space that reading may take beyond what the process has."""

_GROWTH = 1 << 29  # bytes of memory in use that one archive may cost
_DEADLINE_S = 60.0
_KINDS = ("lossless", "coded", "catalog")
_BOATS = ("barge", "canoe", "ferry")
_SHARED = 0.15  # share of cases of a catalog in which a file is altered that belongs to no document
_TWICE = 0.25  # share of cases with two changes
_EVERYTHING = 1 << 20
_ID = 64  # characters of the id of a document


@dataclass(frozen=True)
class Tampered:
    """What came of altered archives: how many were refused, how many answered, and what should not be."""

    archives: int
    refused: int
    answered: int
    hangs: int
    growth: int
    errors: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.errors and not self.hangs

    def __str__(self) -> str:
        return (
            f"tamper: {self.archives:,} altered archives, {self.refused:,} refused and {self.answered:,} answered: "
            f"{len(self.errors)} untyped errors or wrong answers, {self.hangs} endless reads, at most "
            f"{self.growth / (1 << 20):,.0f} MiB for one"
        )


def run(work: Path, archives: int, *, seed: int = 0) -> Tampered:
    """Alter and read `archives` archives; `work` is an empty folder."""
    base = work / "base"
    for name, recipe in (("lossless", subject.LOSSLESS), ("coded", subject.CODED)):
        subject.build(base / name / "a", _BOATS[0], recipe)
    catalog = Catalog.create(base / "catalog" / "c", subject.model(), layout=subject.LAYOUT, recipe=subject.CODED)
    for boat in _BOATS:
        catalog.add(subject.text(boat), name=f"{boat}.txt")
    catalog.add(subject.text(_BOATS[0]), name="copy.txt")
    done, errors, hangs = list[dict[str, object]](), list[str](), 0
    while len(done) < archives:
        log = work / "log.jsonl"
        context = multiprocessing.get_context("spawn")
        reader = context.Process(target=_read_all, args=(work, log, len(done), archives, seed))
        reader.start()
        reader.join()
        lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
        done += [line for line in lines if "fault" in line]
        log.unlink(missing_ok=True)
        if len(done) < archives:
            last = lines[-1]["case"] if lines else "before the first archive"
            hangs += reader.exitcode == 1  # the deadline ends a process so
            errors += [f"{last}: the process ended with {reader.exitcode}"]
            if not lines:
                break
            done.append({"fault": "", "answered": False, "growth": 0})
    errors += [f"{line['case']}: {line['fault']}" for line in done if line["fault"]]
    answered = sum(bool(line["answered"]) for line in done)
    growth = max((int(str(line["growth"])) for line in done), default=0)
    return Tampered(len(done), len(done) - answered, answered, hangs, growth, tuple(errors))


def _read_all(work: Path, log: Path, first: int, last: int, seed: int) -> None:
    """What the reading process does with the archives [first, last)."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # every refusal is logged, too
    for kind in _KINDS:  # all that is loaded once is loaded
        _outcome(_altered(work, Random(0), kind, altered=False)[1])
    _limit_memory()
    with log.open("w", encoding="utf-8") as out, (work / "trace.txt").open("w", encoding="utf-8") as trace:
        for number in range(first, last):
            random = Random(f"{seed}/{number}")
            how, read = _altered(work, random, random.choice(_KINDS), altered=True)
            case = f"archive {number} ({how})"
            out.write(json.dumps({"case": case}) + "\n")
            out.flush()
            faulthandler.dump_traceback_later(_DEADLINE_S, exit=True, file=trace)
            before = _begin_peak()
            fault, answered = _outcome(read)
            faulthandler.cancel_dump_traceback_later()
            growth = _memory("VmHWM") - before
            if growth > _GROWTH:
                fault = fault or f"reading it took {growth >> 20} MiB"
            out.write(json.dumps({"case": case, "fault": fault, "answered": answered, "growth": growth}) + "\n")
            out.flush()


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_memory("VmSize") + ROOM, resource.RLIM_INFINITY))


def _begin_peak() -> int:
    """Memory in use; from now on the most that was used is counted anew."""
    pa.default_memory_pool().release_unused()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _memory("VmRSS")


def _memory(what: str) -> int:
    """Bytes of this process, as Linux counts them."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split(f"{what}:")[1].split()[0]) << 10


def _altered(work: Path, random: Random, kind: str, *, altered: bool) -> tuple[str, Callable[[], Iterator[bool]]]:
    """Alter an archive of one kind: how, and what reads it then."""
    now = work / "now"
    edits.copy(work / "base" / kind, now)
    if kind != "catalog":
        how = [edits.alter(random, now / "a") for _ in range(1 + (random.random() < _TWICE))] if altered else []
        mend(now / "a")
        return f"{kind}, {' and '.join(how)}", lambda: _read_archive(now / "a")
    ids = {entry.name: entry.id for entry in Catalog.open(now / "c").entries()}
    first = now / "c" / "documents" / ids["barge.txt"]
    if altered and random.random() < _SHARED:
        how_shared = _alter_shared(random, now / "c", ids["barge.txt"])
        return f"catalog, {how_shared}", lambda: _read_catalog(now / "c")
    how_own = edits.alter(random, first) if altered else ""
    mend(first)
    healthy = [document_id for name, document_id in ids.items() if name != "barge.txt"]
    return f"catalog, {how_own}", lambda: _read_catalog(now / "c", ids["barge.txt"], healthy)


def _alter_shared(random: Random, catalog: Path, document_id: str) -> str:
    """Alter the head, the transforms that all documents share, or a name; checksums hold again."""
    which = random.choice(("head", "transforms", "transforms", "name"))
    if which == "head":
        path = catalog / "catalog.json"
        how = edits.alter_file(random, path)
        body = read_json(path)
        if body is not None and random.random() < 0.5:
            write_json(path, body)
    elif which == "name":
        path = random.choice(sorted((catalog / "names" / document_id).iterdir()))
        how = edits.alter_file(random, path)
    else:
        (path,) = (catalog / "transforms").glob("*.parquet")
        how = edits.alter_file(random, path)
        if path.is_file():
            _rename_transforms(catalog, path)
    return f"{which}: {how}"


def _rename_transforms(catalog: Path, path: Path) -> None:
    digest = subject.tree(path.parent).get(path.name)
    if digest is None:
        return
    path.rename(path.with_name(f"{digest}.parquet"))
    for manifest in (catalog / "documents").glob(f"*/{MANIFEST_FILE}"):
        body = read_json(manifest)
        if body is not None:
            write_json(manifest, {**body, "transforms": digest})


def _outcome(read: Callable[[], Iterator[bool]]) -> tuple[str, bool]:
    """What is wrong, and whether everything answered; errors of ragkv are right, others and wrong answers are not."""
    answers = Counter[bool]()
    try:
        for answered in read():
            answers[answered] += 1
    except WrongError as wrong:
        return str(wrong), False
    except BaseException as error:  # any other error is what is looked for
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} at {_where(error)}", False
    return "", not answers[False]


def _where(error: BaseException) -> str:
    at = error.__traceback__
    places = []
    while at is not None:
        places.append(f"{Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno}")
        at = at.tb_next
    return " ".join(places[-5:])


class WrongError(Exception):
    """An answer that should not be."""


def _tried(call: Callable[[], object]) -> bool:
    """Whether a call succeeds; an error of ragkv is as good, but for one that says that there was no memory."""
    try:
        call()
    except ArchiveReadError as error:
        if "memory" in str(error):
            raise WrongError(f"asks for more than {ROOM >> 30} GiB: {error}") from error
        return False
    except RagkvError as error:
        if "\n" in str(error):
            raise WrongError(f"an error of several lines: {error}") from error
        return False
    return True


def _read_archive(path: Path) -> Iterator[bool]:
    yield _tried(lambda: verify_archive(path))
    yield _tried(lambda: describe_archive(path))
    yield _tried(lambda: _ask(Archive.open(path, subject.model())))


def _ask(archive: Archive) -> None:
    """Ask with a small budget, with everything recalled, and with all layers held."""
    inputs = archive.questions([subject.QUESTION])
    dense = tuple(range(len(archive.layers)))
    for policy in (
        RecallPolicy(budget=16),
        RecallPolicy(budget=_EVERYTHING),
        RecallPolicy(budget=16, dense_layers=dense),
    ):
        with torch.no_grad():
            logits = archive.model.model(**inputs, cache=ArchiveCache(archive, policy=policy)).logits
        if not bool(torch.isfinite(logits).all()):
            raise WrongError("logits are NaN or infinite")


def _ask_document(catalog: Catalog, word: str) -> None:
    _ask(catalog.archive(word if len(word) == _ID else catalog.entry(word).id))


def _read_catalog(path: Path, damaged: str | None = None, healthy: list[str] | None = None) -> Iterator[bool]:
    """Read a catalog one of whose documents may be damaged; the others must be there and answer."""
    made: list[Catalog] = []
    yield _tried(lambda: made.append(Catalog.open(path, subject.model())))
    if not made:
        return
    catalog, listed = made[0], set[str]()
    yield _tried(lambda: listed.update(entry.id for entry in catalog.entries()))
    for word in ("barge.txt", damaged, *(healthy or ())):
        if word is not None:
            yield _tried(partial(catalog.entry, word))
            yield _tried(partial(_ask_document, catalog, word))
    if damaged is not None:
        yield from _read_archive(path / "documents" / damaged)
    for document_id in healthy or ():
        if document_id not in listed:
            raise WrongError("a damaged document takes others from the list")
        try:
            _ask(catalog.archive(document_id))
        except RagkvError as error:
            raise WrongError(f"a damaged document keeps others from answering: {error}") from error
