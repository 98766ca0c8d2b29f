"""Router and RequestClient over real sockets, with scripted workers (see conftest.py)."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from decant.protocol import messages as m
from decant.services import dispatch, router_state
from decant.services.requests import RequestFailed, new_request_id

World = Any  # the fixture's class lives in conftest.py


async def test_stream_arrives_whole(world: World) -> None:
    await world.start()
    stream = await world.generate([1, 2, 3], 21)
    ids, closed = await world.collect(stream)
    assert [len(x) for x in ids] == [21]
    assert closed.num_cached_tokens == 4 and closed.num_drafted == 4 and closed.num_resumes == 0
    assert {"queue", "reserve", "prefill", "handoff", "decode"} >= set(closed.stages_ms)
    assert set(closed.stages_ms) >= {"queue", "reserve", "decode"}
    await world.assert_clean()


async def test_many_streams_and_choices(world: World) -> None:
    await world.start()
    streams = [await world.generate([i, 5], 10 + i, n=1 + i % 3) for i in range(12)]
    results = await asyncio.gather(*map(world.collect, streams))
    assert [len(ids) for ids, _ in results] == [1 + i % 3 for i in range(12)]
    assert all(len(x) == 10 + i for i, (ids, _) in enumerate(results) for x in ids)
    await world.assert_clean()


async def test_cancel_frees_everything(world: World) -> None:
    await world.start()
    for moment_s in (0.0, 0.005, 0.02, 0.1):
        stream = await world.generate([7], 100000)
        await asyncio.sleep(moment_s)
        stream.cancel()
        assert [event async for event in stream] == []
        await world.assert_clean()


async def test_encode_errors_and_detokenize(world: World) -> None:
    await world.start()
    with pytest.raises(RequestFailed) as error:
        await world.client.encode(new_request_id(), "ids", b"nonsense", m.Output())
    assert error.value.status == 400
    text = await world.client.detokenize([5, 6])
    assert text.text == " 5 6" and text.pieces == [" 5", " 6"]
    prompt = await world.client.encode(new_request_id(), "ids", b"[1,2]", m.Output())
    assert list(prompt.ids) == [1, 2] and world.client.num_streams == 1
    world.client.discard(prompt)
    assert world.client.num_streams == 0


async def test_too_large_fails_clearly(world: World) -> None:
    await world.start()
    world.workers[2].refuse = ["too_large"]
    stream = await world.generate([1], 5)
    events = [event async for event in stream]
    assert isinstance(events[-1], m.Failed)
    assert events[-1].status == 400 and "does not fit" in events[-1].message
    assert not events[-1].is_retryable
    await world.assert_clean()


async def test_busy_decode_is_asked_again(world: World) -> None:
    await world.start()
    world.workers[2].refuse = ["busy"] * 3
    await world.collect(await world.generate([1], 5))
    await world.assert_clean()


async def test_not_ready_without_a_chain(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "START_S", 0.0)
    monkeypatch.setattr(dispatch, "NO_CHAIN_S", 0.0)
    await world.start("tokenizer-0", "decode-0", is_awaited=False)
    await world.until(lambda: "prefill" in world.client.why)
    with pytest.raises(RequestFailed) as error:
        await world.generate([1], 5)
    assert error.value.status == 503 and error.value.retry_after_s > 0
    await world.assert_clean()


@pytest.mark.parametrize("service", ["decode", "prefill"])
@pytest.mark.parametrize("num_choices", [1, 3])
async def test_stream_survives_the_death_of_a_worker(
    world: World, service: str, num_choices: int
) -> None:
    await world.start()
    world.find("prefill-0").delay_s = 0.1
    streams = [await world.generate([i], 200, n=num_choices) for i in range(4)]
    readers = [asyncio.create_task(world.collect(s)) for s in streams]
    stage = {"prefill": "PREFILLING", "decode": "DECODING"}[service]
    records = world.router.dispatcher.records
    for attempt in (1, 2):
        await world.until(
            lambda a=attempt: any(
                x.stage.name == stage and x.attempt >= a for x in records.values()
            )
        )
        await world.find(f"{service}-0").die()
        worker = await world.add(f"{service}-0")
        if service == "prefill":
            worker.delay_s = 0.1
    results = await asyncio.gather(*readers)
    assert all(len(x) == 200 for ids, _ in results for x in ids)
    assert max(closed.num_resumes for _, closed in results) >= 2
    await world.assert_clean()


async def test_stream_survives_the_death_of_its_tokenizer(world: World) -> None:
    await world.start()
    streams = [await world.generate([i], 100, n=2) for i in range(4)]
    readers = [asyncio.create_task(world.collect(s)) for s in streams]
    await asyncio.sleep(0.05)
    await world.find("tokenizer-0").die()
    await asyncio.sleep(0.1)
    await world.add("tokenizer-1")
    results = await asyncio.gather(*readers)
    assert all(len(x) == 100 for ids, _ in results for x in ids)
    assert all(closed.num_resumes == 0 for _, closed in results)  # no re-prefill for that
    await world.assert_clean()


async def test_stream_survives_the_death_of_the_router(world: World) -> None:
    await world.start()
    streams = [await world.generate([i], 400, n=2) for i in range(4)]
    readers = [asyncio.create_task(world.collect(s)) for s in streams]
    await asyncio.sleep(0.05)
    await asyncio.sleep(0.15)  # the roster is written by the tick
    await world.stop_router()
    await asyncio.sleep(0.2)
    for worker in world.workers:
        worker.peers.clear()
    world.start_router()
    results = await asyncio.gather(*readers)
    # The new router never said that somebody is dead who only had not joined yet.
    assert all(len(p.peers) == 4 for worker in world.workers for p in worker.peers)
    assert all(len(x) == 400 for ids, _ in results for x in ids)
    assert all(s.attempt > 1 for s in streams)
    await world.assert_clean()


async def test_a_new_router_does_not_wait_for_the_dead(world: World) -> None:
    await world.start()
    await asyncio.sleep(0.15)
    await world.stop_router()
    await world.find("prefill-0").die()
    world.start_router()
    await world.add("prefill-0")
    began = asyncio.get_running_loop().time()
    await world.until(lambda: world.client.is_ready)
    assert asyncio.get_running_loop().time() - began < dispatch.SETTLE_S
    await world.collect(await world.generate([1], 5))


async def test_silent_decode_is_fenced_before_its_work_moves(world: World) -> None:
    await world.start("tokenizer-0", "prefill-0", "decode-0")
    stream = await world.generate([3], 400)
    reader = asyncio.create_task(world.collect(stream))
    await asyncio.sleep(0.05)
    old = world.find("decode-0")
    old.go_silent()
    await world.add("decode-1")
    await world.until(lambda: old.child.returncode == -9)
    ids, closed = await reader
    assert len(ids[0]) == 400 and closed.num_resumes == 1
    await world.assert_clean()


async def test_request_waits_for_a_worker_that_is_being_started(world: World) -> None:
    await world.start("tokenizer-0", "prefill-0", is_awaited=False)
    await world.until(lambda: "decode" in world.client.why)
    reader = asyncio.create_task(world.collect(await world.generate([1], 5)))
    await asyncio.sleep(0.1)
    await world.add("decode-0")
    await reader
    await world.assert_clean()


async def test_stalled_decode_is_fenced(world: World) -> None:
    await world.start()
    old = world.find("decode-0")
    old.is_busy, old.step_s = True, 1000.0
    stream = await world.generate([3], 40)
    reader = asyncio.create_task(world.collect(stream))
    await world.until(lambda: old.child.returncode == -9)
    await world.add("decode-0")
    ids, closed = await reader
    assert len(ids[0]) == 40 and closed.num_resumes == 1
    await world.assert_clean()


async def test_dead_gateway_frees_its_requests(world: World) -> None:
    await world.start()
    stream = await world.generate([3], 100000)
    await asyncio.sleep(0.05)
    world.router.dispatcher.leaving(world.client._sender.incarnation)
    world.router.dispatcher.ended(world.client._sender.incarnation)
    await world.until(lambda: not world.router.dispatcher.records)
    assert not world.find("decode-0").held
    stream.cancel()


async def test_canary_runs_before_ready_and_is_reported(world: World) -> None:
    world.router_config["canary"] = True
    await world.start()
    reserves = [b for b in world.find("decode-0").received if isinstance(b, m.Reserve)]
    assert [r.request_id.startswith("canary-") for r in reserves] == [True]
    assert reserves[0].tokenizer == ""
    state = router_state.state(world.router.dispatcher)
    assert state["is_ready"] and state["canary"]["is_ok"]
    await world.collect(await world.generate([1], 5))
    await world.assert_clean()


async def test_drain_gives_no_new_work_and_says_so(world: World) -> None:
    await world.start("tokenizer-0", "prefill-0", "decode-0", "decode-1")
    assert world.router.dispatcher.drain("decode-0", True)
    assert not world.router.dispatcher.drain("decode-7", True)
    draining = world.find("decode-0")
    await world.until(lambda: any(isinstance(b, m.Drain) for b in draining.received))
    for i in range(4):
        await world.collect(await world.generate([i], 5))
    assert not any(isinstance(b, m.Reserve) for b in draining.received)
    assert any(p.is_draining for p in world.client.peers.peers)
    await world.assert_clean()


async def test_client_that_does_not_read_parks_its_request(world: World) -> None:
    await world.start()
    decoder = world.find("decode-0")
    decoder.step_s = 0.0005
    stream = await world.generate([3], 1500)

    def parked() -> list[bool]:
        return [b.is_open for b in decoder.received if isinstance(b, m.StreamCredit)]

    await world.until(lambda: parked() == [False])
    ids, _ = await world.collect(stream)
    assert len(ids[0]) == 1500 and parked()[:2] == [False, True]
    await world.assert_clean()


async def test_a_worker_that_ends_by_itself_twice_over_one_request_fails_it_alone(
    world: World,
) -> None:
    await world.start()
    streams = [await world.generate([i], 150) for i in range(6)]
    readers = [asyncio.create_task(world.collect(s)) for s in streams[1:]]

    async def poison() -> None:
        """Decode ends as soon as it decodes the first stream."""
        while True:
            decoder = world.find("decode-0")
            if decoder is not None and any(
                key[0] == streams[0].request_id and held.out for key, held in decoder.held.items()
            ):
                world.own_faults.add(decoder.child.pid)
                await decoder.die()
                await world.add("decode-0")
            await asyncio.sleep(0.005)

    nemesis = asyncio.create_task(poison())
    events = [event async for event in streams[0]]
    failed = events[-1]
    assert isinstance(failed, m.Failed) and failed.code == "poison_request"
    assert failed.status == 500 and not failed.is_retryable
    results = await asyncio.gather(*readers)
    nemesis.cancel()
    assert all(len(ids[0]) == 150 for ids, _ in results)
    assert len(world.own_faults) == 2
    await world.assert_clean()


async def test_many_kills_and_nothing_is_lost(world: World) -> None:
    await world.start()
    source = random.Random(11)
    done = 0

    async def client(number: int) -> None:
        nonlocal done
        for i in range(4):
            n, length = 1 + source.randrange(2), 20 + source.randrange(100)
            stream = await world.generate([number, i], length, n=n)
            ids, _ = await world.collect(stream)
            assert [len(x) for x in ids] == [length] * n
            done += 1

    clients = [asyncio.create_task(client(number)) for number in range(8)]
    kills = 0
    while not all(c.done() for c in clients):
        await asyncio.sleep(0.25)
        victim = source.choice(["decode-0", "prefill-0", "tokenizer-0", "router"])
        if victim == "router":
            await world.stop_router()
            world.start_router()
        elif world.find(victim) is not None:
            await world.find(victim).die()
            await world.add(victim)
        kills += 1
        assert kills < 200
    await asyncio.gather(*clients)
    assert done == 32 and kills >= 3
    await world.assert_clean()


async def test_decode_is_told_of_a_choice_that_a_stop_string_ended(world: World) -> None:
    """The others go on to their ends."""
    await world.start()
    world.find("tokenizer-0").stop_at = 7
    stream = await world.generate([1, 2, 3], 40, n=3)
    ids, _ = await world.collect(stream)
    assert [len(x) for x in ids] == [7, 40, 40]
    assert world.find("decode-0").ended == [(stream.request_id, 1, 0)]
    await world.assert_clean()
