"""Certificates of a run: made in two ways, known by their fingerprints."""

from __future__ import annotations

import ssl

import pytest
from tests.launching import need

from distributed_training.feed import tls
from distributed_training.runtime.errors import FeedError, MissingDependencyError


@pytest.mark.parametrize("make", [tls._by_library, tls._by_command], ids=["library", "command"])
def test_a_certificate_can_be_used_and_does_not_show_its_key(make: object) -> None:
    try:
        certificate = make()  # type: ignore[operator]
    except (ImportError, MissingDependencyError) as error:
        need(str(error), False)
    assert isinstance(certificate.server_context(), ssl.SSLContext)
    assert certificate.key not in repr(certificate)
    der = ssl.PEM_cert_to_DER_cert(certificate.certificate)
    assert tls.check_fingerprint(der, certificate.fingerprint, "peer") == bytes.fromhex(certificate.fingerprint)
    with pytest.raises(FeedError, match="peer shows a certificate with fingerprint"):
        tls.check_fingerprint(der, "0" * 64, "peer")


def test_without_library_and_command_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls.shutil, "which", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install"):
        tls._by_command()
