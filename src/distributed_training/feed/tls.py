"""TLS without an authority: a certificate made for the run, known to the other side by its fingerprint."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import shutil
import ssl
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from distributed_training.runtime.errors import FeedError, MissingDependencyError

_NAME = "distributed-training feed"
_DAYS = 398


@dataclass(frozen=True)
class Certificate:
    """A certificate and its key, both as PEM text. The key stays in this process."""

    certificate: str
    key: str

    def __repr__(self) -> str:
        return f"Certificate({self.fingerprint})"

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate, as hexadecimal digits."""
        return fingerprint_of(ssl.PEM_cert_to_DER_cert(self.certificate))

    def server_context(self) -> ssl.SSLContext:
        """For the side that shows the certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        with tempfile.TemporaryDirectory(prefix="dtrain-tls-") as folder:  # Python reads keys from files only
            path = Path(folder, "both.pem")
            path.touch(mode=0o600)
            path.write_text(self.key + self.certificate, encoding="ascii")
            context.load_cert_chain(path)
        return context


def client_context() -> ssl.SSLContext:
    """For the side that checks the fingerprint itself: there is no authority to ask."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def fingerprint_of(certificate: bytes) -> str:
    """SHA-256 of a certificate in binary form, as hexadecimal digits."""
    return hashlib.sha256(certificate).hexdigest()


def check_fingerprint(certificate: bytes, expected: str | None, peer: str) -> bytes:
    """Refuse a peer with another certificate than the link says; the binding for `wire` where it is the right one.

    Where only the token is known, the proof of it tells: it covers the certificate as each side sees it.
    """
    seen = fingerprint_of(certificate)
    if expected is not None and seen != expected:
        raise FeedError(
            f"{peer} shows a certificate with fingerprint {seen[:16]}..., the link says {expected[:16]}...: "
            "it is another server, or somebody stands between; take the link that the GPU side prints now"
        )
    return bytes.fromhex(seen)


def make_certificate() -> Certificate:
    """A new self-signed certificate, made by the `cryptography` library or by the `openssl` command."""
    try:
        return _by_library()
    except ImportError:
        return _by_command()


def _by_library() -> Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(names, critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Certificate(certificate.public_bytes(serialization.Encoding.PEM).decode(), private.decode())


def _by_command() -> Certificate:
    program = shutil.which("openssl")
    if program is None:
        raise MissingDependencyError(
            "a TLS certificate needs the library cryptography or the command openssl, and neither is there: "
            "pip install 'distributed-training[feed]'"
        )
    with tempfile.TemporaryDirectory(prefix="dtrain-tls-") as folder:
        key, certificate = Path(folder, "key.pem"), Path(folder, "certificate.pem")
        command = [program, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-days", str(_DAYS), "-subj", f"/CN={_NAME}", "-keyout", str(key), "-out", str(certificate)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise FeedError(f"{program} cannot make a certificate: {done.stderr.strip()[-300:]}")
        return Certificate(certificate.read_text(encoding="ascii"), key.read_text(encoding="ascii"))
