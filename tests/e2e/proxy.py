"""A proxy between clients and a prefill and a decode server: what vLLM's own example does, in few lines.

    python tests/e2e/proxy.py PORT PREFILL_URL DECODE_URL

It knows nothing of kvx, and hands `kv_transfer_params` on as they come.
"""

from __future__ import annotations

import http.server
import json
import sys
import urllib.error
import urllib.request
from typing import Any

from client import PREFILL


def forward(url: str, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    """Sends a request on."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def handler(prefill: str, decode: str) -> type[http.server.BaseHTTPRequestHandler]:
    """What answers requests."""

    class Proxy(http.server.BaseHTTPRequestHandler):
        """One request."""

        def do_POST(self) -> None:
            """First to the one, then to the other."""
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            first = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": dict(PREFILL)}
            status, answer = forward(prefill, self.path, first)
            if status == 200:
                params = json.loads(answer).get("kv_transfer_params")
                status, answer = forward(decode, self.path, body | ({"kv_transfer_params": params} if params else {}))
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Says nothing."""

    return Proxy


def serve(port: int, prefill: str, decode: str) -> http.server.ThreadingHTTPServer:
    """A proxy that listens; `serve_forever` runs it."""
    return http.server.ThreadingHTTPServer(("127.0.0.1", port), handler(prefill, decode))


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2], sys.argv[3]).serve_forever()
