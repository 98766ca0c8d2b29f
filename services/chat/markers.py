"""The control tokens of the V4 chat encoding, by name.

Their ids differ between tokenizers, so nothing else in decant knows an id. A ``Marker`` in a
rendered prompt is a control token; plain ``str`` beside it is ordinary text, whoever wrote it.
"""

from __future__ import annotations


class Marker(str):
    """The text of one control token. Only template code makes these, never callers' text."""

    __slots__ = ()


BOS = Marker("<｜begin▁of▁sentence｜>")
EOS = Marker("<｜end▁of▁sentence｜>")
PAD = Marker("<｜▁pad▁｜>")
USER = Marker("<｜User｜>")
ASSISTANT = Marker("<｜Assistant｜>")
THINK = Marker("<think>")
END_THINK = Marker("</think>")
DSML = Marker("｜DSML｜")
LATEST_REMINDER = Marker("<｜latest_reminder｜>")
FIM_BEGIN = Marker("<｜fim▁begin｜>")
FIM_HOLE = Marker("<｜fim▁hole｜>")
FIM_END = Marker("<｜fim▁end｜>")

TASKS = {
    name: Marker(f"<｜{name}｜>")
    for name in ("action", "query", "authority", "domain", "title", "read_url")
}

# What a chat model needs; the fill-in-the-middle and task markers may be missing.
REQUIRED = (BOS, EOS, USER, ASSISTANT, THINK, END_THINK, DSML)
OPTIONAL = (PAD, LATEST_REMINDER, FIM_BEGIN, FIM_HOLE, FIM_END, *TASKS.values())
