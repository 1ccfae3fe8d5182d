"""What a client is told when its request cannot be answered."""

from typing import Any, Optional

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
         429: "rate_limit_error"}


class ApiError(Exception):
    """A request's error, in OpenAI's schema.

    Args:
        param: the field of the request that it is about.
        code: a word for programs.
        headers: further headers of the response.
    """

    def __init__(self, status: int, message: str, param: Optional[str] = None, code: Optional[str] = None,
                 headers: Optional[dict[str, str]] = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        # OpenAI's client repeats what failed on the server, and this would fail again.
        final = {"x-should-retry": "false"} if status in (500, 504) else {}
        self.headers = final | (headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The error as the client gets it."""
        kind = "server_error" if self.status >= 500 else TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}
