"""What travels with one HTTP request inside the gateway."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from aiohttp import web

from decant.services.api.access import Key
from decant.services.api.generation import Generation

REQUEST_ID = web.RequestKey("request_id", str)
TRACE = web.RequestKey("trace", str)  # traceparent that our messages carry
START_S = web.RequestKey("start_s", float)
KEY = web.RequestKey("key", Key)
ENTERED: web.RequestKey[partial[None]] = web.RequestKey("entered", partial)
TENANT = web.RequestKey("tenant", str)
ERROR = web.RequestKey("error", Exception)
GENERATIONS: web.RequestKey[Sequence[Generation]] = web.RequestKey("generations", Sequence)
