"""The gateway's error tree. Each error knows its HTTP status and its OpenAI error object.

GatewayError
├── BadRequestError      400  a field is wrong; `param` names it
├── NotFoundError        404  unknown route or model
├── MethodError          405
├── SlowBodyError        408  the body did not arrive in time
├── BodyTooLargeError    413
├── InternalError        500  a worker or the gateway broke
├── UnavailableError     503  nobody can serve this now; carries Retry-After
└── DeadlineError        504  the request's time is over
"""

from __future__ import annotations

from typing import ClassVar

import orjson


class GatewayError(Exception):
    """What a client is told. `str(error)` is the message; it never holds prompt text."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """The OpenAI error object, as JSON."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    def headers(self) -> dict[str, str]:
        """Headers that go with it: Retry-After in whole seconds, at least 1."""
        if self.retry_after_s is None:
            return {}
        return {"retry-after": str(max(1, round(self.retry_after_s)))}


class BadRequestError(GatewayError):
    """The request is wrong and will stay wrong."""

    status = 400
    kind = "invalid_request_error"


class NotFoundError(GatewayError):
    """No such route or model."""

    status = 404
    kind = "invalid_request_error"


class MethodError(GatewayError):
    """The route exists, the method does not."""

    status = 405
    kind = "invalid_request_error"


class SlowBodyError(GatewayError):
    """The client did not finish its body in time."""

    status = 408
    kind = "invalid_request_error"


class BodyTooLargeError(GatewayError):
    """The body is over the limit; refused before it is read."""

    status = 413
    kind = "invalid_request_error"


class InternalError(GatewayError):
    """A worker or the gateway itself broke, and retrying did not help."""

    status = 500


class UnavailableError(GatewayError):
    """Nobody can serve this now. Asking again later may help."""

    status = 503
    kind = "service_unavailable_error"


class DeadlineError(GatewayError):
    """The request's time is over."""

    status = 504
    kind = "timeout_error"


_BY_STATUS: dict[int, type[GatewayError]] = {
    error.status: error
    for error in (NotFoundError, MethodError, SlowBodyError, BodyTooLargeError, UnavailableError, DeadlineError)
}


def from_status(status: int, message: str) -> GatewayError:
    """The error for an HTTP status that a framework chose; other 4xx become 400, other 5xx 500."""
    fallback = BadRequestError if 400 <= status < 500 else InternalError
    return _BY_STATUS.get(status, fallback)(message, code="not_found" if status == 404 else None)
