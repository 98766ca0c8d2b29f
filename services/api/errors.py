"""Error bodies: one way from an exception to what an OpenAI or Anthropic client expects."""

from __future__ import annotations

from typing import Any

from decant.protocol.errors import DecantError, InvalidRequest, RequestError
from decant.protocol.messages import Failed
from decant.services.requests import RequestFailed

_TYPES = {  # HTTP status -> OpenAI's type, Anthropic's type
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("invalid_request_error", "not_found_error"),
    408: ("timeout_error", "timeout_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    503: ("server_error", "overloaded_error"),
    504: ("timeout_error", "timeout_error"),
}


class ApiError(DecantError):
    """An error that only HTTP knows: routes, methods, keys, bodies."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


def model_not_found(name: str) -> ApiError:
    return ApiError(404, "model_not_found", f"The model {name!r} does not exist.", "model")


def unsupported(message: str, param: str | None = None) -> InvalidRequest:
    """A field that we know and do not serve; saying so is better than to ignore it."""
    error = InvalidRequest(message, param)
    error.code = "unsupported_parameter"
    return error


def failed(event: Failed) -> RequestFailed:
    """The exception for a request that failed underway."""
    return RequestFailed(event)


def body(error: Exception) -> dict[str, Any]:
    """``{"error": {...}}`` as OpenAI writes it."""
    status = getattr(error, "status", 500)
    kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
    return {
        "error": {
            "message": _message(error),
            "type": _TYPES.get(status, (kind, ""))[0],
            "param": getattr(error, "param", None) or None,
            "code": getattr(error, "code", "internal_error"),
        }
    }


def anthropic_body(error: Exception) -> dict[str, Any]:
    """``{"type": "error", ...}`` as Anthropic writes it."""
    status = getattr(error, "status", 500)
    kind = "invalid_request_error" if 400 <= status < 500 else "api_error"
    kind = _TYPES.get(status, ("", kind))[1]
    return {"type": "error", "error": {"type": kind, "message": _message(error)}}


def headers(error: Exception) -> dict[str, str]:
    """Retry-After where waiting helps; where it cannot help, a word against retries."""
    status = getattr(error, "status", 500)
    wait_s = getattr(error, "retry_after_s", 0.0)
    found: dict[str, str] = {}
    if status in (429, 503):
        found["Retry-After"] = str(max(1, round(wait_s or 1.0)))
    elif status >= 500 and not getattr(error, "is_retryable", False):
        found["x-should-retry"] = "false"
    return found


def _message(error: Exception) -> str:
    """What a client may read. An unexpected exception's text stays in the log."""
    if isinstance(error, DecantError):
        return error.message
    return "Internal error."


def is_callers_fault(error: Exception) -> bool:
    return isinstance(error, RequestError) or 400 <= getattr(error, "status", 500) < 500
