"""How fast and how punctual is the generator itself?

    python -P tests/loadgen/bench_client.py --rate 1000 --seconds 10 --chunks 8

Drives a mock that does next to nothing per request (bytes made once, one write a chunk), so that
what is measured is the generator. Prints its lateness, the processor time per request and what the
machine could have done: on a machine shared with other work the figures mean little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from typing import cast

from decant.loadgen import drive, metrics, summary
from decant.loadgen.plan import Target
from decant.loadgen.workload import Options, build

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(data: dict[str, object]) -> bytes:
    text = b"data: " + json.dumps(data).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(text), text)


class Fast(asyncio.Protocol):
    """Answers every request with the same stream: ``chunks`` events ``gap_s`` apart."""

    chunks = 8
    gap_s = 0.005

    def __init__(self) -> None:
        self.buffer = b""
        self.loop = asyncio.get_running_loop()
        self.piece = event({"choices": [{"index": 0, "delta": {"content": "word "}}]})
        usage = {"prompt_tokens": 100, "completion_tokens": self.chunks}
        self.end = (
            event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
            + event({"choices": [], "usage": usage})
            + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, found, body = self.buffer.partition(b"\r\n\r\n")
        if found and len(body) >= int(head.rpartition(b"Content-Length: ")[2]):
            self.buffer = b""
            self.transport.write(HEAD)
            self.loop.call_later(self.gap_s, self.step, self.chunks)

    def step(self, left: int) -> None:
        if left > 1:
            self.transport.write(self.piece)
            self.loop.call_later(self.gap_s, self.step, left - 1)
        else:
            self.transport.write(self.piece + self.end)


async def serve(chunks: int, gap_ms: float) -> None:
    Fast.chunks, Fast.gap_s = chunks, gap_ms / 1e3
    server = await asyncio.get_running_loop().create_server(Fast, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rate", type=float, default=1000)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--gap-ms", type=float, default=5)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--arrivals", default="poisson")
    parser.add_argument("--serve", action="store_true", help="be the mock")
    args = parser.parse_args()
    if args.serve:
        import uvloop

        uvloop.run(serve(args.chunks, args.gap_ms))
        return
    command = [sys.executable, "-P", __file__, "--serve", "--chunks", str(args.chunks)]
    with subprocess.Popen(
        [*command, "--gap-ms", str(args.gap_ms)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as mock:
        assert mock.stdout is not None and mock.stdin is not None
        url = f"http://127.0.0.1:{int(mock.stdout.readline())}"
        options = Options(
            kind=args.arrivals, rate=args.rate, duration_s=args.seconds, input_len="100"
        )
        busy = os.getloadavg()[0]
        began = time.monotonic()
        result = drive.run(Target(url, "mock"), build(options, {}, []), workers=args.workers)
        took = time.monotonic() - began
        mock.stdin.close()
    found = summary.summarise(result.records, cpu_s=result.cpu_s)
    late = [metrics.lateness_ns(r) / 1e6 for r in result.records]
    print(
        f"{found['requests']['ok']} of {found['requests']['planned']} requests ended well, "
        f"{found['request_throughput']:.0f}/s offered {found['offered_rate']:.0f}/s, "
        f"{args.chunks} chunks each, {took:.1f} s"
    )
    row = "  ".join(f"p{q} {metrics.percentile(late, q):.3f}" for q in (50, 90, 99, 99.9))
    print(f"own lateness, ms: {row}  max {max(late):.3f}")
    print(
        f"processor time: {1e6 * result.cpu_s / len(late):.0f} us a request, workers "
        f"{args.workers}, cores {os.cpu_count()}, load average before {busy:.1f}"
    )


if __name__ == "__main__":
    main()
