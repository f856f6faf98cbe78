"""The HTTP proxy that the environment names: HTTPS_PROXY or ALL_PROXY, but not for the hosts in NO_PROXY."""

from __future__ import annotations

from urllib.request import getproxies_environment, proxy_bypass


def proxy_for(host: str) -> str | None:
    """The address of the proxy through which a host is reached by TLS; None where there is none."""
    proxies = getproxies_environment()
    if proxy_bypass(host):
        return None
    return proxies.get("https") or proxies.get("all") or None
