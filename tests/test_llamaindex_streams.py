"""Streams end: with the answer, with the model's exception at the consumer, or because nobody listens any more."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ragkv import LoadedModel
from ragkv.catalog.catalog import Catalog
from ragkv.llamaindex import RagKVQueryEngine
from ragkv.llamaindex.streaming import async_pieces, in_thread, pieces
from tests.llamaindex_helpers import (
    QUESTION,
    TEXTS,
    BrokenError,
    archived_nodes,
    failing,
    fresh,
    hooked,
    make_catalog,
    retriever_of,
    saying,
    slow,
    text_nodes,
)

pytestmark = pytest.mark.timeout(60)
UNICODE = "caf\u00e9 \u6d77\u306e\u706f\u53f0 \U0001f600\U0001f3f4 \u043c\u043e\u0440\u0435 na\u00efve \U0001f600"
LONG = 400
"""Tokens of an answer that no test waits for."""
JOIN_S = 5.0


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return fresh()


@pytest.fixture(scope="module")
def catalog(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    return make_catalog(tmp_path_factory.mktemp("streams") / "c", model)


@pytest.fixture(scope="module")
def retriever(catalog: Catalog) -> Any:
    return retriever_of(archived_nodes(catalog))


def engine(retriever: Any, catalog: Catalog, **options: Any) -> RagKVQueryEngine:
    return RagKVQueryEngine.from_args(retriever, catalog, **options)


def answer_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ragkv-answer"]


def all_end(calls: list[int]) -> bool:
    """Whether every answering thread ends at once, and the model is left alone from then on."""
    for thread in answer_threads():
        thread.join(JOIN_S)
    if answer_threads():
        return False
    before = len(calls)
    time.sleep(0.1)
    return len(calls) == before < LONG


async def collected(response: Any) -> str:
    return "".join([piece async for piece in response.async_response_gen()])


def test_streamed_characters_are_never_halved(model: LoadedModel, catalog: Catalog, retriever: Any) -> None:
    with saying(model, UNICODE):
        assert engine(retriever, catalog).query(QUESTION).response == UNICODE
    with saying(model, UNICODE):
        streamed = list(engine(retriever, catalog, streaming=True).query(QUESTION).response_gen)
    assert "".join(streamed) == UNICODE
    assert len(streamed) > 5
    assert not any("\ufffd" in piece for piece in streamed)
    with saying(model, UNICODE):
        asked = engine(retriever, catalog, streaming=True).aquery(QUESTION)
        assert asyncio.run(_then(asked, collected)) == UNICODE


def ask_in(way: str, asked: RagKVQueryEngine) -> None:
    if way == "sync":
        asked.query(QUESTION)
    elif way == "async":
        asyncio.run(asked.aquery(QUESTION))
    elif way == "streaming":
        drain(asked.query(QUESTION).response_gen, [])
    else:
        asyncio.run(_then(asked.aquery(QUESTION), collected))


def drain(items: Any, into: list[str]) -> None:
    for item in items:
        into.append(item)


async def _then(awaited: Any, after: Callable[[Any], Any]) -> Any:
    return await after(await awaited)


def test_an_answer_without_text_is_an_empty_stream(model: LoadedModel, catalog: Catalog, retriever: Any) -> None:
    with saying(model, ""):
        assert list(engine(retriever, catalog, streaming=True).query(QUESTION).response_gen) == []


@pytest.mark.parametrize("way", ["sync", "async", "streaming", "async streaming"])
def test_a_model_that_fails_midway_fails_at_the_caller(
    model: LoadedModel, catalog: Catalog, retriever: Any, way: str, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = engine(retriever, catalog, streaming="streaming" in way)
    with failing(model, at=2) as calls, pytest.raises(BrokenError, match="call 2"):
        ask_in(way, asked)
    assert all_end(calls)
    assert capfd.readouterr() == ("", "")


def test_pieces_before_a_failure_arrive(model: LoadedModel, catalog: Catalog, retriever: Any) -> None:
    arrived: list[str] = []
    with saying(model, "one two three four"), failing(model, at=3), pytest.raises(BrokenError):
        drain(engine(retriever, catalog, streaming=True).query(QUESTION).response_gen, arrived)
    assert arrived
    assert "one two three four".startswith("".join(arrived))


@pytest.mark.parametrize("way", ["closed", "dropped"])
def test_a_stream_that_is_left_early_stops_the_model(
    model: LoadedModel, catalog: Catalog, retriever: Any, way: str
) -> None:
    asked = engine(retriever, catalog, streaming=True, max_new_tokens=LONG)
    with saying(model, "word " * LONG), slow(model, 0.01) as calls:
        response = asked.query(QUESTION)
        assert next(response.response_gen)
        if way == "closed":
            response.response_gen.close()
        else:
            del response
            gc.collect()
        assert all_end(calls)


def test_a_stream_that_is_never_read_starts_nothing(model: LoadedModel, catalog: Catalog, retriever: Any) -> None:
    with hooked(model, lambda _call: None) as calls:
        engine(retriever, catalog, streaming=True).query(QUESTION)
        assert not answer_threads()
    assert calls == []


@pytest.mark.parametrize("way", ["closed", "broken off", "loop ended"])
def test_an_async_stream_that_is_left_early_stops_the_model(
    model: LoadedModel, catalog: Catalog, retriever: Any, way: str
) -> None:
    asked = engine(retriever, catalog, streaming=True, max_new_tokens=LONG)
    held: list[Any] = []

    async def leave() -> None:
        response = await asked.aquery(QUESTION)
        async for _ in response.response_gen:
            break
        if way == "closed":
            await response.response_gen.aclose()
        elif way == "loop ended":
            held.append(response)

    with saying(model, "word " * LONG), slow(model, 0.01) as calls:
        asyncio.run(leave())
        assert all_end(calls)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_cancelled_task_stops_the_model(
    model: LoadedModel, catalog: Catalog, retriever: Any, streaming: bool
) -> None:
    asked = engine(retriever, catalog, streaming=streaming, max_new_tokens=LONG)

    async def cancel(calls: list[int]) -> None:
        work = _then(asked.aquery(QUESTION), collected) if streaming else asked.aquery(QUESTION)
        task = asyncio.create_task(work)
        while len(calls) < 3:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with saying(model, "word " * LONG), slow(model, 0.01) as calls:
        asyncio.run(cancel(calls))  # ends only when the threads of asyncio have ended
        assert all_end(calls)
        assert len(calls) < 50


def test_a_cancelled_task_stops_to_prefill(model: LoadedModel, tmp_path: Path) -> None:
    nodes = [node.model_copy(update={"text": node.text}) for node in text_nodes()]
    asked = engine(retriever_of(nodes, top_k=3), make_catalog(tmp_path / "c", model))

    async def cancel(calls: list[int]) -> None:
        task = asyncio.create_task(asked.aquery(QUESTION))
        while not calls:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with slow(model, 0.2) as calls:
        asyncio.run(cancel(calls))
        assert all_end(calls)
        assert len(calls) < len(TEXTS)


@pytest.mark.parametrize("streaming", [False, True])
def test_the_loop_goes_on_while_queries_run(
    model: LoadedModel, catalog: Catalog, retriever: Any, streaming: bool
) -> None:
    asked = engine(retriever, catalog, streaming=streaming, max_new_tokens=12)

    async def ask() -> str:
        response = await asked.aquery(QUESTION)
        return await collected(response) if streaming else response.response

    async def run() -> tuple[list[str], list[float]]:
        ticks: list[float] = []

        async def tick() -> None:
            while True:
                ticks.append(time.perf_counter())
                await asyncio.sleep(0.005)

        ticker = asyncio.create_task(tick())
        answers = await asyncio.gather(ask(), ask())
        ticker.cancel()
        return list(answers), ticks

    expected = engine(retriever, catalog, max_new_tokens=12).query(QUESTION).response
    with slow(model, 0.03) as calls:
        answers, ticks = asyncio.run(run())
    assert answers == [expected, expected]
    # Two answers one after the other on the loop would let it tick twice.
    assert len(ticks) > len(calls) / 2


def test_whatever_a_thread_raises_is_raised_at_its_consumer() -> None:
    def work(*_: object) -> str:
        raise SystemExit("no")

    async def through() -> None:
        async for _ in async_pieces(work):
            pass

    with pytest.raises(SystemExit):
        list(pieces(work))
    for waited in (through(), in_thread(work)):
        with pytest.raises(SystemExit):
            asyncio.run(waited)


def test_a_thread_whose_loop_was_closed_ends_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    go = threading.Event()
    stopped: list[bool] = []

    def work(on_text: Callable[[str], None], should_stop: Callable[[], bool]) -> None:
        on_text("first")
        go.wait(JOIN_S)
        stopped.append(should_stop())
        on_text("to nobody")

    loop = asyncio.new_event_loop()
    items = async_pieces(work)
    assert loop.run_until_complete(anext(items)) == "first"
    loop.close()
    del items
    gc.collect()
    go.set()
    for thread in answer_threads():
        thread.join(JOIN_S)
    assert stopped == [True]
    assert capfd.readouterr() == ("", "")
