"""The calls of every step over a Unix socket: the contract's own messages, framed.

gRPC's Python takes some ten thread wake-ups for a round trip. Here the thread that reads a request runs it and writes
the answer, and a second request, sent before the first is answered, waits in the socket: the executor goes from one to
the next without any. Everything else of an executor stays on gRPC.

Request: length (uint32, little-endian), serialised message. Answer: length, gRPC status code (one byte), serialised
message or, for a status other than OK, the reason in words. After a failed request the executor closes the connection,
so that what was sent behind it never runs.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

import grpc

from service_kit.errors import ServiceError, UnavailableError
from service_kit.rpc import status_of

log = logging.getLogger(__name__)

_REQUEST, _ANSWER = struct.Struct("<I"), struct.Struct("<IB")
_NAMES = {int(code.value[0]): code.name for code in grpc.StatusCode}
_BACKLOG = 4


def step_socket_path(run_dir: Path, service: str) -> Path:
    """Where an executor takes the calls of its steps, beside its gRPC socket."""
    return run_dir / f"{service}.step"


class RemoteError(ServiceError):
    """The executor refused or failed a request; `status` is the gRPC status it gave."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


class StepServer:
    """Serves `call` (serialised request to serialised answer) at a path, each connection on a thread of its own."""

    def __init__(self, path: Path, call: Callable[[bytes], bytes], *, max_message_bytes: int) -> None:
        """Binds and starts. A socket left at `path` by a dead process is replaced: bind the gRPC address first, which
        refuses to take a live one's place."""
        self._path, self._call, self._max_message_bytes = path, call, max_message_bytes
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(_BACKLOG)
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._is_closed = False
        threading.Thread(target=self._accept, name="step-accept", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            with self._lock:
                if self._is_closed:
                    connection.close()
                    return
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="steps", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rb") as stream:
                while self._answer(connection, stream):
                    pass
        except OSError as error:
            log.info("the caller of the steps is gone: %s", error)
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _answer(self, connection: socket.socket, stream: IO[bytes]) -> bool:
        """Serves one request; False when there is none any more or it failed."""
        if len(header := stream.read(_REQUEST.size)) < _REQUEST.size:
            return False
        (length,) = _REQUEST.unpack(header)
        status, answer = 0, b""
        if length > self._max_message_bytes:
            status = int(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
            answer = f"a message of {length} bytes is more than max_message_bytes {self._max_message_bytes}".encode()
        else:
            message = stream.read(length)
            try:
                answer = self._call(message)
            except Exception as error:
                code, words = status_of(error)
                status, answer = int(code.value[0]), words.encode()
        connection.sendall(_ANSWER.pack(len(answer), status) + answer)
        return status == 0

    def close(self) -> None:
        """Ends all connections; a request that is running ends without an answer."""
        with self._lock:
            self._is_closed = True
            connections = list(self._connections)
        for each in (self._listener, *connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._path.unlink(missing_ok=True)


class StepConnection:
    """The caller's end. Connects at the first request, and again after an error. For one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._stream: IO[bytes] | None = None

    def send(self, message: bytes, timeout_s: float) -> None:
        """Sends a request. Raises UnavailableError if nothing listens or takes it in time.

        An executor may close before it took all of it, as with a message over its bound: `receive` then tells why.
        """
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX)
                self._socket.connect(str(self._path))
                self._stream = self._socket.makefile("rb")
            self._socket.settimeout(timeout_s)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._socket.sendall(_REQUEST.pack(len(message)) + message)
        except OSError as error:
            self.close()
            raise UnavailableError(f"{self._path}: {error}") from error

    def receive(self, timeout_s: float) -> bytes:
        """The answer to the oldest request that has none. Raises RemoteError, or UnavailableError if none came.

        Either way the connection is closed: requests sent behind a failed one have failed as well.
        """
        try:
            if self._socket is None or self._stream is None:
                raise UnavailableError("the connection was lost")
            self._socket.settimeout(timeout_s)
            length, status = _ANSWER.unpack(self._read(self._stream, _ANSWER.size))
            answer = self._read(self._stream, length)
            if status:
                raise RemoteError(_NAMES[status], answer.decode())
        except TimeoutError as error:
            self.close()
            raise UnavailableError(f"no answer within {timeout_s:g} s") from error
        except OSError as error:
            self.close()
            raise UnavailableError(str(error)) from error
        except ServiceError:
            self.close()
            raise
        return answer

    def _read(self, stream: IO[bytes], count: int) -> bytes:
        data = stream.read(count)
        if len(data) < count:
            raise UnavailableError("the connection was closed")
        return data

    def close(self) -> None:
        """Ends the connection; harmless if there is none."""
        if self._stream is not None:
            self._stream.close()
        if self._socket is not None:
            self._socket.close()
        self._socket = self._stream = None
