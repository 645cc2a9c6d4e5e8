"""A server of chat completions on the loopback: it answers by a rule, with faults where a test wants them."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# Given the request's number and its body: None to answer, else (status, headers, body), or "drop".
Fault = Callable[[int, dict[str, Any]], Any]


def said(messages: list[dict[str, Any]]) -> str:
    """The answer to these messages: always the same."""
    return "I say " + hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:12]


def completion(content: Any, reason: str = "stop", **more: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": content, **more}
    return {
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": {"completion_tokens": 5},
    }


class _Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


class ChatServer:
    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.requests: list[dict[str, Any]] = []  # bodies, in the order of their arrival
        self.headers: list[dict[str, str]] = []
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *values: Any) -> None:
                pass

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with outer._lock:
                    number = len(outer.requests)
                    outer.requests.append({**body, "path": self.path})
                    outer.headers.append({key.lower(): value for key, value in self.headers.items()})
                    outer.at_once += 1
                    outer.most_at_once = max(outer.most_at_once, outer.at_once)
                try:
                    fault = outer.fault(number, body)
                    if fault == "drop":
                        self.close_connection = True
                        return
                    status, headers, value = fault or (200, {}, completion(said(body["messages"])))
                    content = value if isinstance(value, bytes) else json.dumps(value).encode()
                    self.send_response(status)
                    for name, text in {**headers, "content-length": str(len(content))}.items():
                        self.send_header(name, text)
                    self.end_headers()
                    self.wfile.write(content)
                finally:
                    with outer._lock:
                        outer.at_once -= 1

        self._http = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    @contextmanager
    def running(self) -> Iterator[ChatServer]:
        thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._http.shutdown()
            self._http.server_close()
            thread.join()
