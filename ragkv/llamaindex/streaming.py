"""Work in a thread whose pieces of text reach a consumer, sync or async, and which ends when nobody listens any more.

An exception in the thread is raised at the consumer, whose event loop never waits for the model.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
ShouldStop = Callable[[], bool]
OnText = Callable[[str], None]


class Stopped(Exception):  # noqa: N818
    """Raised in a thread whose result nobody waits for any more; no caller ever sees it."""


@dataclass(frozen=True)
class Finished(Generic[T]):
    """The last item of a stream: what the work returned."""

    result: T


@dataclass(frozen=True)
class _Failed:
    error: BaseException


class _Listener:
    """Lives in the frame of the consumer only, so that the thread learns of its end however that comes about.

    A generator that is collected after its event loop was closed runs no ``finally``; its frame goes all the same.
    """

    __slots__ = ("__weakref__",)


def pieces(work: Callable[[OnText, ShouldStop], T]) -> Generator[str | Finished[T], None, None]:
    """Run ``work(on_text, should_stop)`` in a thread; yield what `on_text` received, and `Finished` in the end.

    The thread starts with the first item. Once the generator is closed or dropped, ``should_stop()`` is true.
    """
    listener = _Listener()
    items: queue.SimpleQueue[str | Finished[T] | _Failed] = queue.SimpleQueue()
    _start(work, items.put, _gone(listener))
    try:
        while True:
            item = items.get()
            if isinstance(item, _Failed):
                raise item.error
            yield item
            if isinstance(item, Finished):
                return
    finally:
        del listener


async def async_pieces(work: Callable[[OnText, ShouldStop], T]) -> AsyncGenerator[str | Finished[T], None]:
    """As `pieces`, for the running event loop, which goes on with other tasks meanwhile."""
    loop = asyncio.get_running_loop()
    listener = _Listener()
    items: asyncio.Queue[str | Finished[T] | _Failed] = asyncio.Queue()

    def put(item: str | Finished[T] | _Failed) -> None:
        with suppress(RuntimeError):  # the loop was closed: nobody can listen any more
            loop.call_soon_threadsafe(items.put_nowait, item)

    _start(work, put, _gone(listener))
    try:
        while True:
            item = await items.get()
            if isinstance(item, _Failed):
                raise item.error
            yield item
            if isinstance(item, Finished):
                return
    finally:
        del listener


async def in_thread(work: Callable[[ShouldStop], T]) -> T:
    """Await ``work(should_stop)`` in a thread; when the task is cancelled, ``should_stop()`` becomes true."""
    listener = _Listener()
    try:
        return await asyncio.to_thread(work, _gone(listener))
    finally:
        del listener


def stop_check(should_stop: ShouldStop | None) -> Callable[..., None] | None:
    """A progress callback, whatever it receives, that raises `Stopped` once nobody waits any more."""
    if should_stop is None:
        return None

    def check(*_progress: object) -> None:
        if should_stop():
            raise Stopped

    return check


def _gone(listener: _Listener) -> ShouldStop:
    alive = weakref.ref(listener)
    return lambda: alive() is None


def _start(
    work: Callable[[OnText, ShouldStop], T],
    put: Callable[[str | Finished[T] | _Failed], None],
    should_stop: ShouldStop,
) -> None:
    def run() -> None:
        try:
            put(Finished(work(put, should_stop)))
        except BaseException as error:  # whatever it is, it belongs to the consumer, who would wait for ever
            put(_Failed(error))

    threading.Thread(target=run, name="ragkv-answer").start()
