"""A real nginx as a TLS-terminating reverse proxy: what an HTTP tunnel is to us."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from tests.launching import free_port, need

from distributed_training.feed.pairing import PairingLink
from distributed_training.feed.tls import make_certificate

PROGRAM = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")

_CONFIG = """
{user}
daemon off;
master_process off;
pid {folder}/pid;
error_log {folder}/errors;
events {{ worker_connections 128; }}
http {{
    access_log {folder}/access;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    client_max_body_size 1m;
    keepalive_timeout 2s;
    server {{
        listen 127.0.0.1:{port} ssl;
        ssl_certificate {folder}/both.pem;
        ssl_certificate_key {folder}/both.pem;
        location /feed {{
            proxy_pass http://127.0.0.1:{target};
            proxy_http_version 1.1;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection "upgrade";
            proxy_set_header Host $host;
            proxy_connect_timeout 2s;
            proxy_read_timeout {idle}s;
            proxy_send_timeout {idle}s;
        }}
        location / {{ return 404; }}
    }}
}}
"""


class Nginx:
    """In front of one port of this machine. To be closed; may be stopped and started again."""

    def __init__(self, folder: Path, target: int, idle: int) -> None:
        need("nginx (apt install nginx-light)", PROGRAM is not None)
        self._folder, self.port = folder, free_port()
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir()
        certificate = make_certificate()
        self.ca_file = folder / "authority.pem"
        self.ca_file.write_text(certificate.certificate)
        (folder / "both.pem").write_text(certificate.key + certificate.certificate)
        user = "user root;" if os.geteuid() == 0 else ""
        text = _CONFIG.format(folder=folder, port=self.port, target=target, idle=idle, user=user)
        (folder / "nginx.conf").write_text(text)
        self.start()

    def link(self, token: bytes | None, path: str = "/feed") -> PairingLink:
        """The way through it."""
        return PairingLink("127.0.0.1", self.port, token, carrier="ws", path=path, secure=True)

    def start(self) -> None:
        """Start it, and return when it listens."""
        command = [str(PROGRAM), "-p", str(self._folder), "-c", str(self._folder / "nginx.conf")]
        log = (self._folder / "said").open("wb")
        with log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        end = time.monotonic() + 20
        while time.monotonic() < end:
            assert self._process.poll() is None, (self._folder / "said").read_text()
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 5).close()
                return
            time.sleep(0.02)
        raise AssertionError("nginx does not listen")

    def stop(self) -> None:
        """End it, and all connections through it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)
            self._process = None

    def __enter__(self) -> Nginx:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
