"""Read archives that were damaged under checksums that hold: only errors of ragkv, no waiting, bounded memory.

The damaged archives are read in a spawned process, which may take little more memory than it has at its start. Where
it dies or hangs, that is counted and another goes on.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import random
import resource
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import psutil
import torch

from pipelines.fault.edits import BOMBS, EDITS, bomb, make_bombs, odd_value
from pipelines.fault.mend import edit_sealed, mend, row_groups
from pipelines.fault.sample import LAYOUT, TEXTS, Prefilled
from ragkv import Archive, ArchiveCache, Catalog
from ragkv.archive.inspect import describe_archive
from ragkv.archive.verify import verify_archive
from ragkv.errors import RagkvError
from tests.archives import CODED, SMALL, loaded

CASE_S = 10
_MORE_MEMORY = 3 << 29  # bytes of address space
_MORE_RESIDENT = 1 << 30
_STARTS_S = 120
_SUBJECTS = (("llama", CODED), ("llama", SMALL), ("gemma3", CODED))
_CATALOG_SHARE = 0.15
_NOTHING_LEFT = (RecursionError, OSError, ValueError, LookupError, TypeError, MemoryError)
"""What a second edit meets where the first left nothing that it could work on."""


class EndlessError(BaseException):
    """A case took longer than it may; nothing catches it."""


def run_tamper(archives: int, *, seed: int = 0) -> Counter[str]:
    """Counts of a run: ``archives``, how many were ``refused`` or ``answered``, and what went wrong."""
    counts: Counter[str] = Counter(archives=archives, refused=0, answered=0)
    counts.update(dict.fromkeys(("untyped", "not_finite", "endless", "died", "no_memory", "disturbed"), 0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_subjects(folder)
        at = 0
        while at < archives:
            at = _watch(folder, at, archives, seed, counts)
    return counts


def make_subjects(folder: Path) -> None:
    """The archives, and the catalog of three documents, that are damaged in copies."""
    for place, (model, recipe) in enumerate(_SUBJECTS):
        Prefilled(TEXTS[0], model=model, recipe=recipe).build(folder / f"subject-{place}")
    (folder / BOMBS).mkdir()
    make_bombs(folder / BOMBS, folder / "subject-0")
    catalog = Catalog.create(folder / "catalog", loaded("llama"), layout=LAYOUT, recipe=CODED)
    for place, text in enumerate(TEXTS):
        catalog.add(text, name=f"{place}.txt")


def _watch(folder: Path, first: int, last: int, seed: int, counts: Counter[str]) -> int:
    """Let a process read cases from `first` on; returns the case to go on with."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    worker = context.Process(target=_read_cases, args=(folder, first, last, seed, theirs), daemon=True)
    worker.start()
    theirs.close()
    at, patience = first, float(_STARTS_S)
    try:
        while at < last:
            if not ours.poll(patience):
                counts["endless"] += 1
                print(f"case {at}: no answer")
                return at + 1
            kind, text = ours.recv()
            if kind == "ready":
                patience = 3 * CASE_S
                continue
            counts[kind] += 1
            if kind not in ("refused", "answered"):
                print(f"case {at}: {kind}: {text}")
            at += 1
            if kind == "no_memory":
                return at  # its peak stays, so that another process goes on
    except EOFError:
        counts["died"] += 1
        print(f"case {at}: the process died")
        return at + 1
    finally:
        worker.kill()
        worker.join()
    return at


def _read_cases(folder: Path, first: int, last: int, seed: int, answers: Connection) -> None:
    torch.set_num_threads(1)
    logging.getLogger("ragkv").setLevel(logging.ERROR)
    for place, (model, _) in enumerate(_SUBJECTS):  # what a first use takes is no fault of an archive
        _use(folder / f"subject-{place}", model)
    own = psutil.Process().memory_info()
    resource.setrlimit(resource.RLIMIT_AS, (own.vms + _MORE_MEMORY, resource.RLIM_INFINITY))
    signal.signal(signal.SIGALRM, _end_case)
    answers.send(("ready", ""))
    for case in range(first, last):
        try:
            kind, text = _one_case(folder, random.Random(f"{seed}/{case}"))
        except EndlessError:
            kind, text = "endless", ""
        if _peak() > own.rss + _MORE_RESIDENT:
            answers.send(("no_memory", f"{text} took more than 1 GiB"))
            return
        answers.send((kind, text))


def _peak() -> int:
    """Most bytes that this process ever held; what ``getrusage`` says begins with its parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def _end_case(_signal: int, _frame: object) -> NoReturn:
    raise EndlessError


def _one_case(folder: Path, rng: random.Random) -> tuple[str, str]:
    """What came of one damaged archive."""
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    model = "llama"
    if rng.random() < _CATALOG_SHARE:
        shutil.copytree(folder / "catalog", work)
        damaged = rng.choice(sorted((work / "documents").glob("[0-9a-f]*")))
    else:
        place = rng.randrange(len(_SUBJECTS))
        shutil.copytree(folder / f"subject-{place}", work)
        model, damaged = _SUBJECTS[place][0], work
    done = _damage(rng, work, damaged)
    signal.alarm(CASE_S)
    try:
        refusal = _use(work, model) if damaged == work else _use_catalog(work, damaged.name)
    except RagkvError as error:
        refusal = error
    except Exception as error:
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        line = "" if where is None else f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}"
        kind = {"_NotFiniteError": "not_finite", "_DisturbedError": "disturbed"}.get(type(error).__name__, "untyped")
        return kind, f"{done}: {type(error).__name__}: {error} ({line})"
    finally:
        signal.alarm(0)
    if refusal is not None and any(word in str(refusal) for word in ("no memory", "allocate")):
        return "no_memory", f"{done}: {refusal}"
    return ("answered" if refusal is None else "refused"), done


def _damage(rng: random.Random, work: Path, damaged: Path) -> str:
    """Damage one archive in one or two ways and mend its checksums; returns the names of what was done."""
    if damaged != work and rng.random() < 0.2:
        edit_sealed(damaged / "manifest.json", lambda body: odd_value(rng, body))
        return "odd value in a catalog"
    groups, done = row_groups(damaged), []
    edits = rng.choices(EDITS, k=rng.choice((1, 1, 1, 2)))
    for edit in [bomb] if bomb in edits else edits:  # what edits a bomb would unpack it here
        with contextlib.suppress(*_NOTHING_LEFT):
            groups = edit(rng, damaged, groups)
            done.append(edit.__name__)
    mend(damaged, groups)
    return " and ".join(done) or "nothing"


class _NotFiniteError(AssertionError):
    """A question got logits that are NaN or infinite."""


class _DisturbedError(AssertionError):
    """A sound document of a catalog could not be read beside a damaged one."""


def _use(path: Path, model_name: str) -> RagkvError | None:
    """Do all that is done with an archive; the first error of ragkv, None where there is none."""
    refusal: RagkvError | None = None
    for use in (verify_archive, describe_archive):
        try:
            use(path)
        except RagkvError as error:
            refusal = refusal or error
    model = loaded(model_name)
    try:
        archive = Archive.open(path, model)
    except RagkvError as error:
        return refusal or error
    for step in (_text, _ask, _whole):
        try:
            step(archive)
        except RagkvError as error:
            refusal = refusal or error
    return refusal


def _text(archive: Archive) -> None:
    if len(archive.spans) != archive.manifest.document_tokens:
        raise AssertionError("another number of spans than of tokens")


@torch.no_grad()
def _ask(archive: Archive) -> None:
    model = archive.model.model
    logits = model(**archive.questions(["Who kept the book?"]), cache=ArchiveCache(archive, budget=8)).logits
    if not bool(torch.isfinite(logits).all()):
        raise _NotFiniteError("logits are not finite")


def _whole(archive: Archive) -> None:
    for layer in archive.layers:
        archive.whole_layer(layer.index)


def _use_catalog(path: Path, damaged: str) -> RagkvError | None:
    catalog = Catalog.open(path, loaded("llama"))
    sound = [found.name for found in (path / "documents").glob("[0-9a-f]*") if found.name != damaged]
    refusal: RagkvError | None = None
    for found in _sound_faults(catalog, sound):
        raise _DisturbedError(found)
    for use in (catalog.entry, catalog.archive):
        try:
            use(damaged)
        except RagkvError as error:
            refusal = refusal or error
    if refusal is None:
        _ask(catalog.archive(damaged))
    return refusal


def _sound_faults(catalog: Catalog, sound: list[str]) -> Iterator[str]:
    listed = {entry.id for entry in catalog.entries()}
    for document in sound:
        if document not in listed:
            yield f"{document[:12]} is not listed"
        if catalog.entry(document).id != document:
            yield f"{document[:12]} is not found"
        try:
            _ask(catalog.archive(document))
        except RagkvError as error:
            yield f"{document[:12]}: {error}"
