"""API keys: every path is closed unless it is on the allow-list."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.errors import AuthenticationError
from gateway.web import error_response


class ApiKeys:
    """The accepted keys. Without any, everyone is let in."""

    def __init__(self, keys: Sequence[str]) -> None:
        """Keeps digests only: comparing those takes the same time whatever the lengths."""
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @property
    def has_any(self) -> bool:
        """Whether callers need one."""
        return bool(self._digests)

    def require(self, authorization: str | None) -> bytes:
        """Checks an Authorization value ("Bearer KEY"). Raises AuthenticationError.

        Returns what stands for the caller behind the gateway: a digest of the key, not the one compared here; empty if
        everyone is let in.
        """
        if not self._digests:
            return b""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise AuthenticationError("no API key: send the header Authorization: Bearer KEY")
        digest = hashlib.sha256(key.strip().encode()).digest()
        # All are compared, so that the time does not tell which one matched.
        if sum(hmac.compare_digest(digest, known) for known in self._digests) == 0:
            raise AuthenticationError("the API key is wrong")
        return hashlib.blake2b(digest, digest_size=16, person=b"isolation").digest()


class AuthMiddleware:
    """Refuses every request without a valid key, before anything reads it."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: frozenset[str]) -> None:
        """Wraps `app`. `open_paths` are let through, compared exactly."""
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on what is allowed, with the caller's `isolation_key` in its state; answers 401 otherwise."""
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            try:
                isolation_key = self._keys.require(Headers(scope=scope).get("authorization"))
            except AuthenticationError as error:
                response = error_response(error, retry_after_s=0)
                response.headers["www-authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
            scope.setdefault("state", {})["isolation_key"] = isolation_key
        await self._app(scope, receive, send)
