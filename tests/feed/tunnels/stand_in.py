"""Stands for the programs `cloudflared` and `ngrok`: says what they say, and passes connections on to a local port.

Copied into a folder under one of the two names, and run from there. Needs nothing but Python.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def pass_on(port: int) -> int:
    """Open a public port that leads to a local one; its number, another one at every start."""
    listening = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            one, _ = listening.accept()
            threading.Thread(target=connect, args=(one,), daemon=True).start()

    def connect(one: socket.socket) -> None:
        try:
            with one, socket.create_connection(("127.0.0.1", port), 10) as other:
                while True:
                    ready, _, _ = select.select([one, other], [], [])
                    for end in ready:
                        data = end.recv(1 << 16)
                        if not data:
                            return
                        (other if end is one else one).sendall(data)
        except OSError:
            return

    threading.Thread(target=accept, daemon=True).start()
    return int(listening.getsockname()[1])


def cloudflared(words: list[str]) -> None:
    """`cloudflared tunnel --no-autoupdate --url http://127.0.0.1:PORT`."""
    assert words[0] == "tunnel", words
    local = words[words.index("--url") + 1]
    assert local.startswith("http://127.0.0.1:"), local
    address = f"http://127.0.0.1:{pass_on(int(local.rpartition(':')[2]))}"
    frame = "+" + "-" * 92 + "+"
    for text in (
        "Requesting new quick Tunnel on trycloudflare.com...",
        frame,
        f"|  {'Your quick Tunnel has been created! Visit it at (it may take some time to be reachable):':90}|",
        f"|  {address:90}|",
        frame,
        "Version 2025.8.1 (Checksum 0000)",
        "Registered tunnel connection connIndex=0 connection=5b3c event=0 ip=198.41.192.7 location=fra08 protocol=quic",
    ):
        sys.stderr.write(f"2026-11-15T08:32:58Z INF {text}\n")
        sys.stderr.flush()
    signal.pause()


def ngrok(words: list[str]) -> None:
    """`ngrok start --none --log=stdout`, and the agent's local API."""
    assert words[:2] == ["start", "--none"], words

    def say(text: str, level: str = "info") -> None:
        sys.stdout.write(f"t=2026-11-15T08:32:58+0000 lvl={level} {text}\n")
        sys.stdout.flush()

    given = [after for word, after in itertools.pairwise(words) if word == "--authtoken"]
    if not given:
        failed = "authentication failed: Usage of ngrok requires a verified account and authtoken. ERR_NGROK_4018"
        say(f'msg="command failed" err="{failed}"', "eror")
        sys.exit(1)
    if given[0].startswith("bad"):
        failed = f"authentication failed: The authtoken is not a proper one. Your authtoken: {given[0]} ERR_NGROK_105"
        say(f'msg="command failed" err="{failed}"', "eror")
        sys.exit(1)
    api = ThreadingHTTPServer(("127.0.0.1", 0), _Api)
    say(f'msg="starting web service" obj=web addr=127.0.0.1:{api.server_port} allow_hosts=[]')
    say('msg="client session established" obj=tunnels.session')
    say('msg="tunnel session started" obj=tunnels.session')
    api.serve_forever()


class _Api(BaseHTTPRequestHandler):
    """What pyngrok asks of the agent."""

    def do_GET(self) -> None:
        self._answer(200, {"tunnels": [], "endpoints": [], "uri": self.path})

    def do_POST(self) -> None:
        assert self.path == "/api/endpoints", self.path
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        scheme, _, local = asked["upstream"]["url"].partition("://")
        assert asked["inspect"] is False, asked
        assert (asked.get("url") == "tcp://") == (scheme == "tcp"), asked
        public = pass_on(int(local.removeprefix("127.0.0.1:")))
        self._answer(
            201, {"name": asked["name"], "url": f"{scheme}://127.0.0.1:{public}", "upstream": asked["upstream"]}
        )

    def _answer(self, status: int, answer: dict) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


if __name__ == "__main__":
    {"cloudflared": cloudflared, "ngrok": ngrok}[os.path.basename(sys.argv[0])](sys.argv[1:])
