"""Tries grammars in processes of their own before a request may use them.

A grammar that takes too long takes its process with it; nobody else waits for it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import structlog

from decant.protocol.errors import EngineError, InvalidRequest, QueueFull
from decant.protocol.messages import Grammar

TIME_LIMIT_S = 5.0
START_LIMIT_S = 60.0  # the process loads the vocabulary first
MAX_PROCESSES = 2
MAX_WAITING = 32
MAX_KNOWN = 1024
LINE_BYTES = 1 << 20

log = structlog.get_logger()


class Checker:
    """``check`` is safe to call from many requests at once."""

    def __init__(self, tokenizer: Path, vocab_size: int, limit_s: float = TIME_LIMIT_S) -> None:
        self._arguments = (str(tokenizer), str(vocab_size))
        self._limit_s = limit_s
        self._known: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._idle: list[asyncio.subprocess.Process] = []
        self._room = asyncio.Semaphore(MAX_PROCESSES)
        self._num_waiting = 0

    async def check(self, grammar: Grammar) -> None:
        """Raises: InvalidRequest if it cannot be used, QueueFull if too many wait."""
        key = grammar.kind, grammar.text
        if key not in self._known:
            if self._num_waiting >= MAX_WAITING:
                raise QueueFull("too many new grammars at once")
            self._num_waiting += 1
            try:
                async with self._room:
                    if key not in self._known:
                        self._known[key] = await self._try(grammar)
            finally:
                self._num_waiting -= 1
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        if self._known[key]:
            raise InvalidRequest(self._known[key])

    async def _try(self, grammar: Grammar) -> str:
        process = self._idle.pop() if self._idle else await self._start()
        assert process.stdin is not None and process.stdout is not None
        line = json.dumps({"kind": grammar.kind, "text": grammar.text}) + "\n"
        try:
            async with asyncio.timeout(self._limit_s):
                process.stdin.write(line.encode())
                await process.stdin.drain()
                answer = await process.stdout.readline()
            error = str(json.loads(answer)["error"])
        except TimeoutError:
            await self._kill(process)
            return f"the grammar takes more than {self._limit_s:g} s to compile"
        except (ValueError, ConnectionError):
            await self._kill(process)
            return "the grammar is too complex"
        except BaseException:  # cancelled in between: the next answer would not be ours
            await self._kill(process)
            raise
        self._idle.append(process)
        return error

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "decant.services.grammar_check",
            *self._arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_LIMIT_S):
                if not await process.stdout.readline():
                    raise EngineError("the grammar process did not start")
        except TimeoutError as error:
            await self._kill(process)
            raise EngineError("the grammar process did not start in time") from error
        except BaseException:
            await self._kill(process)
            raise
        log.info("grammar process", pid=process.pid)
        return process

    @staticmethod
    async def _kill(process: asyncio.subprocess.Process) -> None:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    async def close(self) -> None:
        for process in self._idle:
            await self._kill(process)
        self._idle.clear()
