"""Router time per request and per heartbeat, without sockets.

Run: ``python -P tests/services/router/bench_dispatch.py``. Prints medians over 5 rounds.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence

import structlog

from decant.protocol import messages as m
from decant.protocol.config import Config, RouterConfig
from decant.protocol.wire import Envelope, pack_ids
from decant.services.dispatch import Dispatcher
from decant.services.membership import Member

PROMPT = pack_ids(range(1000))


class Bench:
    def __init__(self, num_waiting: int) -> None:
        self.sent: list[tuple[Member, m.Message]] = []
        config = Config(run_dir="/nowhere", router=RouterConfig(canary=False))
        self.dispatcher = Dispatcher(config, "router", self.send, lambda member, why: None)
        for service in ("gateway", "tokenizer", "prefill", "decode"):
            hello = m.Hello(service, f"{service}-0", 5, "", limits={"num_slots": 64})
            self.receive(service, hello)
            self.receive(service, m.Heartbeat())
        for i in range(64 + num_waiting):  # decode is full, the rest waits
            self.submit(f"old{i}")
            self.answer()

    def send(self, member: Member, body: m.Message, blobs: Sequence[bytes]) -> None:
        if not isinstance(body, m.Peers | m.Welcome):
            self.sent.append((member, body))

    def receive(self, service: str, body: m.Message, *blobs: bytes) -> None:
        header = m.Header(f"{service}-0", service)
        self.dispatcher.receive(Envelope(header, body, blobs, b""))

    def submit(self, name: str) -> None:
        generate = m.Generate(name, 1, 1000, m.Sampling(), "tokenizer-0")
        self.receive("gateway", generate, PROMPT, b"")

    def answer(self) -> None:
        """Play all workers until nothing is left to answer."""
        while self.sent:
            member, body = self.sent.pop()
            match body:
                case m.Reserve():
                    self.receive("decode", m.Reserved(body.request_id, 1, body.lane))
                case m.Prefill():
                    named = body.request_id, 1, body.lane
                    self.receive("prefill", m.Prefilled(*named))
                    self.receive("decode", m.Decoding(*named))
                case m.Cancel():
                    self.receive(member.service, m.Cancelled(body.request_id, 1))

    def finish(self, name: str) -> None:
        self.receive("decode", m.Finished(name, 1, 0, "stop", 10))
        self.receive("gateway", m.Cancel(name, 1, "finished"))
        self.answer()


def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    for num_waiting in (0, 256):
        request_us, tick_us = [], []
        for _ in range(5):
            bench = Bench(num_waiting)
            records = bench.dispatcher.records
            live = [r for r, x in records.items() if x.stage.name == "DECODING"]
            begin = time.process_time()
            for i, name in enumerate(live):
                bench.submit(f"new{i}")
                bench.finish(name)
            request_us.append((time.process_time() - begin) / len(live) * 1e6)
            begin = time.process_time()
            for _ in range(50):
                bench.dispatcher.tick()
            tick_us.append((time.process_time() - begin) / 50 * 1e6)
        print(
            f"{num_waiting} waiting, 64 decoding: {statistics.median(request_us):.0f} us CPU a "
            f"request (7 messages in), {statistics.median(tick_us):.0f} us a tick"
        )


if __name__ == "__main__":
    main()
