"""The error tree: every failure that crosses a room's border is one of these.

    DecantError
      RequestError     the caller's fault, 4xx:  InvalidRequest  ContextTooLong  DeadlineExceeded
      NotServed
      OverloadError    try later, 429/503:       QueueFull  OutOfPages  NotReady
      EngineError      our fault, 5xx:           KVPageError  HandoffError  KernelError
      CheckpointError
      ProtocolError    a bad frame or version
      ConfigError      at start only, exit code 2

``code`` is the machine-readable name that the gateway puts into an error body; ``status`` is the
HTTP status that it maps to.
"""

from __future__ import annotations


class DecantError(Exception):
    """Base of every error that decant raises on purpose."""

    code = "internal_error"
    status = 500

    def __init__(self, message: str, **values: object) -> None:
        super().__init__(message)
        self.message = message
        self.values = values


class RequestError(DecantError):
    """The caller's fault."""

    code = "invalid_request"
    status = 400


class InvalidRequest(RequestError):
    """A field has a wrong type or value. ``param`` names it, as in OpenAI's error bodies."""

    def __init__(self, message: str, param: str | None = None, **values: object) -> None:
        super().__init__(message, **values)
        self.param = param


class ContextTooLong(RequestError):
    """Prompt plus requested tokens exceed the context."""

    code = "context_length_exceeded"


class DeadlineExceeded(RequestError):
    """The request's deadline passed before it finished."""

    code = "deadline_exceeded"
    status = 504


class NotServed(RequestError):
    """Something that this set cannot do, such as scores of a prompt."""

    code = "unsupported_parameter"


class OverloadError(DecantError):
    """Try later. ``retry_after_s`` goes into the Retry-After header."""

    code = "overloaded"
    status = 503

    def __init__(self, message: str, retry_after_s: float = 1.0, **values: object) -> None:
        super().__init__(message, **values)
        self.retry_after_s = retry_after_s


class QueueFull(OverloadError):
    code = "queue_full"
    status = 429


class OutOfPages(OverloadError):
    code = "out_of_pages"


class NotReady(OverloadError):
    code = "not_ready"


class EngineError(DecantError):
    """Our fault."""

    code = "engine_error"


class KVPageError(EngineError):
    """A page is not in the state that the caller believes."""

    code = "kv_page_error"


class HandoffError(EngineError):
    """Pages or rows of a peer could not be copied or did not match their checksum."""

    code = "handoff_error"


class KernelError(EngineError):
    code = "kernel_error"


class CheckpointError(EngineError):
    """A checkpoint is missing a tensor, has a wrong shape or dtype, or is not a model that decant
    serves.
    """

    code = "checkpoint_error"


class ProtocolError(DecantError):
    """A frame that cannot be decoded, an unknown tag, or an incompatible peer."""

    code = "protocol_error"


class ConfigError(DecantError):
    """Raised at start only; the command line prints the message and exits with 2."""

    code = "config_error"
