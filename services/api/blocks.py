"""One choice's deltas as a row of blocks: reasoning, text and tool calls, one open at a time.

The Responses API (items) and the Messages API (content blocks) both speak so.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from decant.protocol.messages import TextDelta


class Kind(Enum):
    REASONING = auto()
    TEXT = auto()
    TOOL = auto()


@dataclass
class Block:
    index: int
    kind: Kind
    text: str = ""  # arguments of a tool call
    name: str = ""
    tool_index: int = -1
    is_complete: bool = False  # tool: the call closed


class Step(Enum):
    OPEN = auto()
    DELTA = auto()
    CLOSE = auto()


Event = tuple[Step, Block, str]  # the string is what a DELTA adds


class Blocks:
    """Feed deltas; every block that opens also closes, before the next one opens."""

    def __init__(self, is_parallel: bool = True) -> None:
        """is_parallel: more than one tool call is shown."""
        self.blocks: list[Block] = []
        self.finish_reason = ""
        self.matched_stop = ""
        self._is_parallel = is_parallel
        self._open: Block | None = None

    def feed(self, delta: TextDelta) -> list[Event]:
        events: list[Event] = []
        if delta.reasoning:
            events += self._add(Kind.REASONING, delta.reasoning)
        if delta.content:
            events += self._add(Kind.TEXT, delta.content)
        for tool in delta.tools:
            if not self._is_parallel and tool.index:
                continue
            events += self._add(Kind.TOOL, tool.arguments, tool.index, tool.name)
            if tool.is_complete and self._open is not None:
                self._open.is_complete = True
        if delta.finish_reason:
            self.finish_reason, self.matched_stop = delta.finish_reason, delta.matched_stop
            events += self._close()
        return events

    def _add(self, kind: Kind, text: str, tool_index: int = -1, name: str = "") -> list[Event]:
        events: list[Event] = []
        block = self._open
        if block is None or block.kind is not kind or block.tool_index != tool_index:
            events += self._close()
            block = Block(len(self.blocks), kind, name=name, tool_index=tool_index)
            self.blocks.append(block)
            self._open = block
            events.append((Step.OPEN, block, ""))
        if text:
            block.text += text
            events.append((Step.DELTA, block, text))
        return events

    def _close(self) -> list[Event]:
        block, self._open = self._open, None
        return [] if block is None else [(Step.CLOSE, block, "")]
