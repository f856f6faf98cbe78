#!/usr/bin/env bash
# Install Horovod, built from source against the torch of an environment: scripts/build_horovod.sh [PYTHON]
#
# pip alone cannot: there are no wheels, Horovod asks for an older C++ standard than torch's headers need, and pip's own
# cache would hand a wheel made for one torch to another. The wheel made here is kept, so that the next time is quick.
# HOROVOD_GPU_OPERATIONS=NCCL in the environment builds for GPUs.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(command -v "${1:-python3}") || { echo "error: no Python at ${1:-python3}" >&2; exit 1; }
bin=$(cd "$(dirname "$python")" && pwd)
version=$(sed -n 's/^horovod==//p' constraints.txt)
compiler=${CXX:-g++}
pip() { "$python" -m pip --quiet --disable-pip-version-check "$@" 2> >(grep -v 'is ignored: it is neither' >&2); }
fail() { echo "error: $1" >&2; exit 1; }

made_for=$("$python" -c 'import platform, sys, torch
print(f"torch-{torch.__version__}-cp{sys.version_info.major}{sys.version_info.minor}-{platform.machine()}")' 2>/dev/null) ||
    fail "Horovod is built against torch, which $python does not have: install torch first"
cache=${XDG_CACHE_HOME:-$HOME/.cache}/distributed_training/wheels
kept=$cache/horovod-$version-$made_for${HOROVOD_GPU_OPERATIONS:+-$HOROVOD_GPU_OPERATIONS}

check_tools() {
    command -v "$compiler" >/dev/null ||
        fail "Horovod is built from C++, but there is no $compiler: apt install g++ (or set CXX)"
    echo 'int main() {}' | "$compiler" -std=c++20 -x c++ -fsyntax-only - 2>/dev/null ||
        fail "torch's headers need C++20, which $compiler does not know: install g++ 11 or newer (or set CXX)"
    [ -f "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ||
        fail "the headers of $("$python" --version) are missing: apt install python3-dev"
    pip install -c constraints.txt 'setuptools<81' wheel packaging cloudpickle psutil pyyaml 'cmake<4' ||
        fail "Horovod's build needs cmake below 4 and setuptools below 81: pip install 'cmake<4' 'setuptools<81'"
}

build() {
    check_tools
    mkdir -p "$cache"
    aside=$(mktemp -d "$cache/.building-XXXXXX")
    trap 'rm -rf "$aside"' EXIT
    # Horovod's CMake files set the C++ standard themselves, so it is exchanged where every call passes.
    printf '#!/usr/bin/env bash\nfor a; do shift; [[ $a == -std=* ]] || set -- "$@" "$a"; done\nexec %q "$@" -std=c++20\n' \
        "$(command -v "$compiler")" >"$aside/cxx"
    chmod +x "$aside/cxx"
    echo "building Horovod $version for $made_for, about 3 minutes ..."
    PATH=$bin:$PATH CXX=$aside/cxx MAKEFLAGS=-j2 TMPDIR=$aside \
        HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 \
        HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
        "$python" -m pip wheel --disable-pip-version-check --no-cache-dir --no-build-isolation --no-deps \
        --wheel-dir "$aside/wheel" "horovod==$version" >"$aside/log" 2>&1 || {
        tail -n 40 "$aside/log" >&2
        fail "Horovod did not build; the last lines of its log are above"
    }
    # One rename: whoever looks sees a whole folder or none. If another build was first, its wheel is as good.
    mv -T "$aside/wheel" "$kept" 2>/dev/null || [ -d "$kept" ] || fail "the wheel cannot be kept at $kept"
}

if [ -d "$kept" ]; then echo "Horovod $version: the wheel kept at $kept"; else build; fi
pip install --no-deps --force-reinstall "$kept"/horovod-*.whl
pip install -c constraints.txt horovod # what it needs beside itself
"$python" -c 'import horovod.torch' || fail "Horovod was installed but cannot be imported; delete $kept and try again"
