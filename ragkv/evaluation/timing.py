"""Wall times and memory peaks of a benchmark, in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import psutil
import torch
from transformers import DynamicCache, PreTrainedModel

from ragkv.evaluation.stats import Quantiles
from ragkv.model.prefill import prefill_cache

Progress = Callable[[str, int, int], None]
"""Called with a stage, what is done of it and how much that is."""

_SAMPLE_S = 0.02


@dataclass(frozen=True)
class Times(Quantiles):
    """Median and tail of `n` repeated times, in seconds."""

    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Times:
        return cls(**asdict(Quantiles.of(values)), n=len(values))


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds that `call` takes, the device's queue drained before and after."""
    drain(device)
    started = time.perf_counter()
    call()
    drain(device)
    return time.perf_counter() - started


def drain(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed_prefill(
    model: PreTrainedModel, token_ids: Sequence[int], *, on_progress: Callable[[int, int], None] | None = None
) -> tuple[DynamicCache, float]:
    """The model's own cache of some tokens, and the seconds that took."""
    started = time.perf_counter()
    cache = prefill_cache(model, token_ids, on_progress=on_progress)
    drain(model.device)
    return cache, time.perf_counter() - started


def interleaved(
    preparations: dict[str, Callable[[], Callable[[], object]]], repeats: int, device: torch.device
) -> dict[str, Times]:
    """Time several calls in turn, so that a change of the machine's speed touches all alike; one warm-up each.

    Each preparation is run untimed and returns the call to time.
    """
    seconds: dict[str, list[float]] = {name: [] for name in preparations}
    for repeat in range(repeats + 1):
        for name, prepare in preparations.items():
            elapsed = timed(prepare(), device)
            if repeat:
                seconds[name].append(elapsed)
    return {name: Times.of(values) for name, values in seconds.items()}


@dataclass
class MemoryPeak:
    """Bytes above the level at the start: device memory on CUDA, resident memory of the process elsewhere."""

    bytes: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)


@contextmanager
def memory_peak(device: torch.device) -> Iterator[MemoryPeak]:
    """Measure the memory peak of a block; read `bytes` after it."""
    peak = MemoryPeak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device) - before
        return
    process = psutil.Process()
    before = process.memory_info().rss

    def sample() -> None:
        while not peak._stop.wait(_SAMPLE_S):
            peak.bytes = max(peak.bytes, process.memory_info().rss - before)

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield peak
    finally:
        peak._stop.set()
        sampler.join()
