"""A check that schemathesis runs on every answer: errors have OpenAI's shape."""

from __future__ import annotations

import schemathesis


@schemathesis.check
def error_shape(ctx: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case) -> None:
    """Statuses from 400 on carry {"error": {"message", "type", "param", "code"}}; HEAD has no body."""
    if response.status_code >= 400 and case.method.upper() != "HEAD":
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert error["message"], error
        assert error["type"], error
