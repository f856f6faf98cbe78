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
