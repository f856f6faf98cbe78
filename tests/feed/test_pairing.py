"""One string holds all that a loader needs, and is not shown by accident."""

from __future__ import annotations

import pytest

from distributed_training.feed.pairing import (
    PairingLink,
    addresses_of,
    is_loopback,
    new_token,
    parse_links,
    plain_address,
)
from distributed_training.runtime.errors import ConfigError

FINGERPRINT = "0123456789abcdef" * 4


@pytest.mark.parametrize("host", ["192.168.1.100", "gpu.example.org", "2001:db8::7"])
def test_a_link_says_again_what_was_put_in(host: str) -> None:
    link = PairingLink(host, 29500, new_token(), FINGERPRINT)
    assert PairingLink.parse(f"  {link}\n") == link
    assert str(link).startswith("dtrain://")


@pytest.mark.parametrize(
    ("link", "text"),
    [
        (PairingLink("abc.example", 443, bytes(24), carrier="ws"), "dtrain+ws://{}@abc.example:443"),
        (
            PairingLink("abc.example", 8443, bytes(24), FINGERPRINT, "ws"),
            f"dtrain+ws://{{}}@abc.example:8443?fp={FINGERPRINT}",
        ),
        (PairingLink("abc.example", 443, bytes(24), None, "ws", "/a/b"), "dtrain+ws://{}@abc.example:443/a/b"),
        (PairingLink("127.0.0.1", 8443, None, None, "ws", "/", True), "dtrain+wss://127.0.0.1:8443"),
        (PairingLink("127.0.0.1", 8080, None, carrier="ws"), "dtrain+ws://127.0.0.1:8080"),
    ],
)
def test_a_link_of_a_websocket_says_again_what_was_put_in(link: PairingLink, text: str) -> None:
    assert str(link) == text.format("A" * 32)
    assert PairingLink.parse(str(link)) == link


def test_a_websocket_is_inside_tls_unless_it_stays_here() -> None:
    away, here = (
        PairingLink("abc.example", 443, new_token(), carrier="ws"),
        PairingLink("127.0.0.1", 8080, carrier="ws"),
    )
    assert away.encrypted
    assert away.by_authorities
    assert not PairingLink("abc.example", 443, new_token(), FINGERPRINT, "ws").by_authorities
    assert not here.encrypted
    assert PairingLink.parse("wss://127.0.0.1:8443/x") == PairingLink("127.0.0.1", 8443, None, None, "ws", "/x", True)
    assert PairingLink.parse("https://abc.example/x", bytes(24)).port == 443
    with pytest.raises(ConfigError, match="has not a token"):
        PairingLink.parse("https://abc.example")
    with pytest.raises(ConfigError, match="has to be inside TLS"):
        PairingLink.parse("ws://abc.example/")
    with pytest.raises(ConfigError, match="no path of an address"):
        PairingLink("127.0.0.1", 1, carrier="ws", path="/a b")


def test_on_this_machine_an_address_is_enough() -> None:
    assert PairingLink.parse("localhost:29500") == PairingLink("localhost", 29500)
    assert str(PairingLink("127.0.0.1", 29500)) == "dtrain://127.0.0.1:29500"


def test_links_of_several_ranks_are_one_string() -> None:
    links = [PairingLink("192.168.1.100", port, new_token(), FINGERPRINT) for port in (29500, 29501)]
    assert parse_links(",".join(map(str, links))) == links
    assert parse_links("127.0.0.1:29500") == [PairingLink("127.0.0.1", 29500)]


def test_off_this_machine_the_token_alone_means_tls() -> None:
    assert PairingLink("192.168.1.100", 29500, new_token()).encrypted
    assert not PairingLink("127.0.0.1", 29500, new_token()).encrypted


def test_the_secret_is_not_shown() -> None:
    link = PairingLink("192.168.1.100", 29500, new_token(), FINGERPRINT)
    secret = str(link).split("//")[1].split("@")[0]
    assert secret not in repr(link)
    with pytest.raises(ConfigError) as error:
        PairingLink.parse(str(link).replace("?fp", "?wrong"))
    assert secret not in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("http://192.168.1.100:80", "is no pairing link"),
        ("dtrain://somewhere", "is no pairing link"),
        ("dtrain://host:99999", "is no pairing link"),
        ("", "is no pairing link"),
        (f"dtrain://abc@192.168.1.1:5?fp={FINGERPRINT}", "too short"),
        (f"dtrain://{'*' * 32}@192.168.1.1:5?fp={FINGERPRINT}", "damaged"),
        (f"dtrain://{'a' * 32}@192.168.1.1:5?fp={FINGERPRINT[:-1]}", "copy the whole link"),
        (f"dtrain://{'a' * 32}@192.168.1.1:5", "is not this machine"),
        ("192.168.1.1:29500", "is not this machine"),
    ],
)
def test_a_wrong_link_is_refused_with_a_reason(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        PairingLink.parse(text)


def test_addresses_have_one_form() -> None:
    assert plain_address("::ffff:192.0.2.1") == "192.0.2.1"
    assert plain_address("fe80::1%eth0") == "fe80::1"
    assert addresses_of("127.0.0.1") == {"127.0.0.1"}
    assert is_loopback("127.8.8.8")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    with pytest.raises(ConfigError, match="cannot be resolved"):
        addresses_of("no-such-host.invalid")
