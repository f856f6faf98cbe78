#!/usr/bin/env bash
# What the tests need of the system: an ssh server and client (launching over ssh), `ip` (several machines in one) and
# nginx (in place of a tunnel).
# Installs what is missing on Debian and its kin, as root; elsewhere it says what to install.
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin

missing=()
command -v sshd > /dev/null || missing+=(openssh-server)
command -v ssh > /dev/null || missing+=(openssh-client)
command -v ip > /dev/null || missing+=(iproute2)
command -v nginx > /dev/null || missing+=(nginx-light)
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "warning: the tests also need ${missing[*]}: install them as your system does" >&2
    exit 0
fi
echo "installing ${missing[*]} ..."
install() { DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" > /dev/null 2>&1; }
# No server is to run on this machine because of the tests: they start one of their own.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    printf '#!/bin/sh\nexit 101\n' > $policy && chmod +x $policy
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
fi
install || { apt-get update -qq > /dev/null 2>&1 && install; } ||
    echo "warning: could not install ${missing[*]}; tests that need them will fail" >&2
