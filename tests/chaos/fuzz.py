"""R10: mutated frames on every bound socket of a set. Nobody dies, everything is counted, and the
requests under way do not notice.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import mix
import zmq
from stage import Result, Stage

from decant.protocol import messages as m
from decant.protocol.errors import ProtocolError
from decant.protocol.wire import Sender, parse

BATCH = 500
HTTP = ("admin.sock", "supervisord.sock")  # not ZeroMQ
SAMPLING = m.Sampling(seed=1, max_tokens=8)


def samples(victim: int) -> list[m.Message]:
    """One message of many types, as a peer might send it. victim: a pid for Hello to name."""
    rid = "f" * 32
    output = m.Output()
    return [
        m.Hello("decode", "decode-0", victim, "x", endpoint="ipc:///nowhere"),
        m.Heartbeat(3, True),
        m.Peers([]),
        m.Encode(rid, 1, "chat", b'{"messages":[]}', output),
        m.CloseStream(rid),
        m.Detokenize(rid),
        m.Generate(rid, 1, 4, SAMPLING, "tokenizer-0"),
        m.Cancel(rid, 1, "client_gone"),
        m.Cancelled(rid, 1),
        m.Emitted(rid, 1, [], "tokenizer-0"),
        m.StreamCredit(rid, 1, True),
        m.Reserve(rid, 1, 0, [0], 4, SAMPLING, "tokenizer-0", "prefill-0"),
        m.Reserved(rid, 1, 0),
        m.Prefill(rid, 1, 0, "decode-0", "x"),
        m.Decoding(rid, 1, 0),
        m.Preempted(rid, 1),
        m.Lost(rid, 1, 0, "why"),
        m.KVRelease(rid, 1, 0),
        m.Tokens(1, []),
        m.ReplayFrom(rid, 1, 0, 0),
        m.Drain(0.5),
    ]


def mutated(frames: Sequence[bytes | memoryview], rng: Random) -> list[bytes]:
    """Frames with a few of their bytes, lengths, order or number changed."""
    out = [bytearray(f) for f in frames]
    for _ in range(rng.choice([1, 1, 2, 5])):
        frame = rng.choice(out)
        kind = rng.randrange(8)
        if kind <= 2 and frame:
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        elif kind == 3 and frame:
            del frame[rng.randrange(len(frame)) :]
        elif kind == 4:
            at = rng.randrange(len(frame) + 1)
            frame[at:at] = rng.randbytes(rng.choice([1, 4, 40]))
        elif kind == 5:
            rng.shuffle(out)
        elif kind == 6:
            out = (out * 6)[: rng.randrange(1, 12)]
        else:  # a length that promises gigabytes
            at = rng.randrange(len(frame) + 1)
            frame[at:at] = rng.choice([b"\xdd", b"\xdf", b"\xc6", b"\xdb"]) + b"\x7f\xff\xff\xff"
    return [bytes(f) for f in out]


def is_meant(frames: list[bytes]) -> bool:
    """A mutation may be a good message. Two are left out: the administrator's Drain, and a Hello
    that names our own process (a new worker, then; whoever can open the sockets is trusted so far).
    """
    try:
        body = parse(frames).body
    except ProtocolError:
        return False
    return isinstance(body, m.Drain) or (isinstance(body, m.Hello) and body.pid == os.getpid())


class Fuzzer:
    """Sends to one ZeroMQ endpoint from a thread of its own."""

    def __init__(self, endpoint: str, seed: int, victim: int) -> None:
        self._bodies = samples(victim)
        self.endpoint, self.random = endpoint, Random(f"{seed}/{Path(endpoint).name}")
        self.num_sent = self.num_good = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDTIMEO, 5000)
        self._socket.connect(endpoint)

    def send(self, num: int) -> None:
        """``num`` messages. Raises: zmq.Again if the process takes none for five seconds."""
        rng = self.random
        senders = [Sender("decode-0"), Sender("gateway-0"), Sender("prefill-9", "0" * 32)]
        for _ in range(num):
            blobs = [rng.randbytes(rng.choice([0, 3, 16]))]
            frames = mutated(rng.choice(senders).frames(rng.choice(self._bodies), blobs), rng)
            if is_meant(frames):
                continue
            self._socket.send_multipart(frames)
            self.num_sent += 1
            if self.num_sent % 64 == 0:
                self._drop_answers()

    def _drop_answers(self) -> None:
        while self._socket.poll(0):
            self._socket.recv_multipart()

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def raw(path: Path, rng: Random) -> None:
    """Bytes that are neither ZeroMQ's greeting nor HTTP."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(2.0)
        try:
            connection.connect(str(path))
            good = [b"GET /metrics HTTP/1.1\r\n\r\n", b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL"]
            connection.sendall(rng.choice([rng.randbytes(64), *good]) + rng.randbytes(64))
            connection.recv(64)
        except OSError:
            return


async def frames(stage: Stage, seed: int, num: int, minutes: float) -> Result:
    """R10."""
    asks = mix.make(seed, 20, stage.real.model)
    await stage.learn(asks)
    paths = [p for p in stage.real.run_dir.iterdir() if p.is_socket()]
    bound = [p for p in paths if p.suffix == ".sock" and p.name not in HTTP]
    pids = {name: stage.real.pid(name) for name in stage.before.fds}
    # A process of our user that is no child of ours (a child we might introduce): its shell ends.
    shell = ["sh", "-c", "sleep 3000 >/dev/null 2>&1 & echo $!"]
    victim = int(subprocess.check_output(shell))
    fuzzers = [Fuzzer(f"ipc://{p}", seed, victim) for p in sorted(bound)]
    end = time.monotonic() + minutes * 60
    is_over = False
    rng = Random(seed)
    num_raw = 0
    faults: list[str] = []
    async with stage.traffic() as traffic:
        source = (rng.choice(asks) for _ in range(1 << 30))
        load = asyncio.create_task(traffic.many(source, 4, lambda: is_over))
        try:
            while sum(f.num_sent for f in fuzzers) < num and time.monotonic() < end:
                for fuzzer in fuzzers:
                    await asyncio.to_thread(fuzzer.send, min(BATCH, num))
                await asyncio.to_thread(raw, rng.choice(paths), rng)
                num_raw += 1
        except zmq.Again:
            faults.append("a process took no message for five seconds")
        finally:
            is_over = True
            await load
        answers = traffic.answers
    for fuzzer in fuzzers:
        fuzzer.close()
    try:
        os.kill(victim, signal.SIGKILL)
    except ProcessLookupError:
        faults.append("a process that a stranger's Hello named was killed")
    died = [n for n, pid in pids.items() if stage.real.pid(n) != pid]
    if died:
        faults.append(f"{', '.join(died)} did not survive")
    result: Result = {
        "frames": {Path(f.endpoint).name: f.num_sent for f in fuzzers},
        "raw": num_raw,
        **stage.compare(answers),
    }
    rest = await stage.rest(answers)
    rest["faults"] += faults
    return result | rest
