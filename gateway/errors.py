"""Errors of the gateway and their OpenAI-shaped bodies."""

from __future__ import annotations

from typing import Any, NamedTuple

from service_kit.errors import InvalidRequestError, ServiceError, UnavailableError


class UnknownModelError(ServiceError):
    """The request names a model that is not served."""

    status = "NOT_FOUND"
    code = "model_not_found"


class ContextLengthError(InvalidRequestError):
    """The prompt leaves no room for an answer."""

    code = "context_length_exceeded"


class AuthenticationError(ServiceError):
    """No API key, or a wrong one."""

    status = "UNAUTHENTICATED"
    code = "invalid_api_key"


class BodyTooLargeError(InvalidRequestError):
    """The request body is over the limit."""

    code = "body_too_large"


class LoadingError(UnavailableError):
    """The model is not warm yet."""

    code = "loading"


class DrainingError(UnavailableError):
    """The server is about to end."""

    code = "draining"


class TimeoutExpiredError(ServiceError):
    """The request took longer than the server lets it."""

    status = "DEADLINE_EXCEEDED"

    def __init__(self, message: str, *, code: str) -> None:
        """`code` says which deadline passed."""
        super().__init__(message)
        self.code = code


class RateLimitError(ServiceError):
    """The caller asks for more than its API key may have."""

    status = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, *, code: str, retry_after_s: int) -> None:
        """`retry_after_s`: seconds until another try can succeed."""
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class GenerationFailedError(ServiceError):
    """The engine failed this request after it was admitted."""

    code = "generation_failed"


class HttpError(NamedTuple):
    """An error as HTTP sees it."""

    status: int
    body: dict[str, Any]


_HTTP = {
    "INVALID_ARGUMENT": (400, "invalid_request_error", None),
    "NOT_FOUND": (404, "invalid_request_error", None),
    "UNAUTHENTICATED": (401, "authentication_error", None),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error", "queue_full"),
    "UNAVAILABLE": (503, "server_error", "unavailable"),
    "DEADLINE_EXCEEDED": (504, "timeout", "timeout"),
}


def error_body(message: str, error_type: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": error_type, "param": param, "code": code}}


def to_http(error: Exception) -> HttpError:
    """HTTP status and body. What is not a ServiceError is internal: its text goes to the log, not to the client."""
    if not isinstance(error, ServiceError):
        return HttpError(500, error_body("internal error; see the gateway's log", "server_error", code="internal"))
    status, error_type, code = _HTTP.get(error.status, (500, "server_error", "internal"))
    if isinstance(error, BodyTooLargeError):
        status = 413
    code = getattr(error, "code", code)
    return HttpError(status, error_body(error.message, error_type, param=error.field or None, code=code))
