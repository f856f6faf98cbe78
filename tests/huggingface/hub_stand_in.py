"""The part of the Hugging Face Hub's HTTP API that pushing uses, on this machine: the real client talks to it.

Regular files come inside the commit, large ones by the LFS protocol, as on the Hub.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_" + "s3cret" * 5
READ_ONLY = "hf_" + "r3adonly" * 4


class HubStandIn:
    """Serves until it is closed."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, Any]] = {}
        """What each repository was made with."""
        self.files: dict[str, dict[str, bytes]] = {}
        """Content by path, for each repository."""
        self.commits: list[dict[str, str]] = []
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        """Method and path of all that was asked."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="hub-stand-in", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """What HF_ENDPOINT is to be."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        """Serve no longer."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: HubStandIn

    def do_POST(self) -> None:
        body = self._body()
        for pattern, answer in _POST:
            found = re.fullmatch(pattern, self.path.partition("?")[0])
            if found:
                answer(self, body, *found.groups())
                return
        self._answer(404, {"error": f"no {self.path}"})

    def do_GET(self) -> None:
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/main)?", self.path.partition("?")[0])
        self.hub.requests.append(f"GET {self.path}")
        if found and found[1] in self.hub.repos and self._allowed():
            files = self.hub.files[found[1]]
            self._answer(200, {"id": found[1], "sha": "0" * 40, "siblings": [{"rfilename": name} for name in files]})
        else:
            self._refuse("Repository Not Found", 404 if self._allowed() else 401, "RepoNotFound")

    def do_PUT(self) -> None:
        content = self._body()
        assert self.path == f"/lfs/{hashlib.sha256(content).hexdigest()}"
        self.hub.objects[self.path.removeprefix("/lfs/")] = content
        self._answer(200, {})

    def create(self, body: bytes) -> None:
        if not self._allowed():
            return
        asked = json.loads(body)
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if name in self.hub.repos:
            self._answer(409, {"url": f"{self.hub.address}/{name}", "error": "You already created this repo"})
            return
        self.hub.repos[name], self.hub.files[name] = asked, {}
        self._answer(200, {"url": f"{self.hub.address}/{name}"})

    def validate_yaml(self, body: bytes) -> None:
        import yaml

        text = json.loads(body)["content"]
        yaml.safe_load(text.split("---")[1])
        self._answer(200, {"errors": [], "warnings": []})

    def preupload(self, body: bytes, repo: str) -> None:
        if not self._allowed():
            return
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
            }
            for file in json.loads(body)["files"]
        ]
        self._answer(200, {"files": files})

    def lfs_batch(self, body: bytes, repo: str) -> None:
        asked = json.loads(body)["objects"]
        objects = [{**o, "actions": {"upload": {"href": f"{self.hub.address}/lfs/{o['oid']}"}}} for o in asked]
        self._answer(200, {"transfer": "basic", "objects": objects})

    def commit(self, body: bytes, repo: str) -> None:
        if not self._allowed():
            return
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.hub.commits.append(value)
            elif line["key"] == "file":
                self.hub.files[repo][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.hub.files[repo][value["path"]] = self.hub.objects[value["oid"]]
        oid = f"{len(self.hub.commits):040x}"
        self._answer(200, {"commitUrl": f"{self.hub.address}/{repo}/commit/{oid}", "commitOid": oid})

    def _allowed(self) -> bool:
        """Whether the token may do this; refuses otherwise."""
        given = self.headers.get("Authorization", "")
        if given == f"Bearer {TOKEN}":
            return True
        if self.command == "POST":
            read_only = given == f"Bearer {READ_ONLY}"
            message = "You don't have the rights" if read_only else "Invalid username or password."
            self._refuse(message, 403 if read_only else 401)
        return False

    def _refuse(self, message: str, status: int, code: str = "") -> None:
        self._answer(status, {"error": message}, {"X-Error-Code": code} if code else {"X-Error-Message": message})

    def _body(self) -> bytes:
        self.hub.requests.append(f"{self.command} {self.path}")
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        for name, content in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, content)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: Any) -> None:
        """Nothing."""


_POST = [
    (r"/api/repos/create", _Handler.create),
    (r"/api/validate-yaml", _Handler.validate_yaml),
    (r"/api/models/([^/]+/[^/]+)/preupload/main", _Handler.preupload),
    (r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    (r"/api/models/([^/]+/[^/]+)/commit/main", _Handler.commit),
]
