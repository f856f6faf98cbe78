"""The part of the Hugging Face Hub's HTTP API that reading a dataset uses, on this machine: the real client asks it."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c" * 40
TOKEN = "hf_" + "d4taset" * 5


class DatasetHub:
    """Serves one private dataset to those who have the token, until it is closed."""

    def __init__(self, name: str, files: dict[str, bytes]) -> None:
        self.name, self.files, self.closed = name, files, False
        self.tokens: set[str | None] = set()
        """What those who asked said they were."""
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="dataset-hub")
        self._thread.start()

    @property
    def address(self) -> str:
        """What HF_ENDPOINT is to be."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        """Serve no longer."""
        self.closed = True
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: DatasetHub

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        path = self.path.partition("?")[0]
        self.hub.tokens.add(self.headers.get("authorization"))
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            return self._answer(401, b'{"error": "Invalid username or password."}', {"X-Error-Code": "RepoNotFound"})
        files = [
            {"type": "file", "path": name, "size": len(content), "oid": _etag(content)}
            for name, content in self.hub.files.items()
        ]
        api = f"/api/datasets/{self.hub.name}"
        if path.startswith(f"/datasets/{self.hub.name}/resolve/"):
            return self._file(path.split("/resolve/")[1].partition("/")[2])
        if path.startswith((f"{api}/tree/", f"{api}/paths-info/")):
            return self._answer(200, json.dumps(files).encode())
        if path == api or path.startswith(f"{api}/revision/"):
            siblings = [{"rfilename": name} for name in self.hub.files]
            facts = {"id": self.hub.name, "sha": COMMIT, "siblings": siblings, "tags": [], "private": True}
            return self._answer(200, json.dumps(facts).encode())
        return self._answer(404, b'{"error": "not here"}')

    do_HEAD = do_POST = do_GET

    def _file(self, name: str) -> None:
        content = self.hub.files.get(name)
        if content is None:
            return self._answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        return self._answer(200, content, {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": COMMIT})

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
