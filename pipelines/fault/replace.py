"""Open an archive again and again while another process replaces it in a tight loop."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections import Counter
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path

from pipelines.fault.sample import TEXTS, Prefilled, digest_of
from ragkv import Archive
from ragkv.archive.publish import staging
from ragkv.archive.verify import verify_archive
from ragkv.errors import RagkvError
from tests.archives import loaded

_VERIFY_EVERY = 4
_START_S = 60


def run_replace(opens: int) -> Counter[str]:
    """Counts of a run: ``opens``, ``verified``, ``replaced``, archives ``seen``, ``mixed`` and ``false_alarms``."""
    counts: Counter[str] = Counter(opens=opens, mixed=0, false_alarms=0)
    with tempfile.TemporaryDirectory() as folder:
        place, sources = Path(folder) / "archive", [Path(folder) / f"source-{turn}" for turn in range(len(TEXTS))]
        model, known = loaded("llama"), {}
        for text, source in zip(TEXTS, sources, strict=True):
            Prefilled(text).build(source)
            known[digest_of(Archive.open(source, model))] = source.name
        if len({Archive.open(source, model).n_tokens for source in sources}) != 1:
            raise AssertionError("the texts are not of the same number of tokens")
        put_in_place(sources[0], place)
        context = multiprocessing.get_context("spawn")
        begun, ended, made = context.Event(), context.Event(), context.Value("q", 0)
        other = context.Process(target=_replace_until, args=(sources, place, begun, ended, made), daemon=True)
        other.start()
        try:
            if not begun.wait(_START_S):
                raise AssertionError("the replacing process did not start")
            seen = set()
            for turn in range(opens):
                try:
                    found = digest_of(Archive.open(place, model))
                    faults = verify_archive(place) if turn % _VERIFY_EVERY == 0 else []
                except (RagkvError, OSError) as error:
                    counts["false_alarms"] += 1
                    print(f"open {turn}: {type(error).__name__}: {error}")
                    continue
                counts["verified"] += turn % _VERIFY_EVERY == 0
                counts["false_alarms"] += bool(faults)
                counts["mixed"] += found not in known
                seen.add(found)
        finally:
            ended.set()
            other.join(_START_S)
        counts["seen"], counts["replaced"] = len(seen), made.value
    return counts


def put_in_place(source: Path, place: Path) -> None:
    """Replace the archive at `place` by a copy of `source`, in the way of a build."""
    with staging(place) as folder:
        for found in source.iterdir():
            (folder / found.name).write_bytes(found.read_bytes())


def _replace_until(sources: list[Path], place: Path, begun: Event, ended: Event, made: Synchronized[int]) -> None:
    turn = 0
    while not ended.is_set():
        turn += 1
        put_in_place(sources[turn % len(sources)], place)
        begun.set()
    made.value = turn
