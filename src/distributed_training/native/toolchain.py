"""What an extension is built with: the MPI compiler found here, the MPI behind it, and torch's own flags."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from distributed_training.runtime.errors import BuildError, ConfigError, MissingDependencyError

INSTALL_MPI = "pip install 'distributed-training[mpi]', or `apt install libopenmpi-dev openmpi-bin`"
_NAMES = ("mpicxx", "mpic++", "mpicxx.openmpi", "mpicxx.mpich", "mpiicpx")
_ASKING = 60.0  # seconds that a compiler has to say what it is
_MACROS = re.compile(r'^#define (OMPI_(?:MAJOR|MINOR|RELEASE)_VERSION|MPICH_VERSION) "?([^"\s]+)"?$', re.MULTILINE)


def beside_python(program: str) -> Path | None:
    """A program of the environment that this Python belongs to: wheels put theirs there, also where PATH does not."""
    for folder in (Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))):
        if found := shutil.which(program, path=str(folder)):
            return Path(found)
    return None


def find_mpicxx() -> Path | None:
    """$MPICXX, or the first MPI compiler beside this Python, then on PATH; None if there is none."""
    asked = os.environ.get("MPICXX")
    if asked:
        found = shutil.which(asked)
        if found is None:
            raise ConfigError(f"MPICXX={asked} is no program: give the path of an mpicxx, or leave it out")
        return Path(found)
    candidates = [beside_python(name) for name in _NAMES] + [_on_path(name) for name in _NAMES]
    return next((path for path in candidates if path is not None), None)


def find_mpirun() -> Path | None:
    """The launcher of the MPI that extensions are built against, else any; None if there is none."""
    mpicxx = find_mpicxx()
    if mpicxx is not None:
        for name in ("mpirun", mpicxx.name.replace("mpicxx", "mpirun"), "mpiexec"):
            if found := shutil.which(name, path=str(mpicxx.parent)):
                return Path(found)
    return beside_python("mpirun") or _on_path("mpirun") or _on_path("mpiexec")


def _on_path(name: str) -> Path | None:
    found = shutil.which(name)
    return Path(found) if found else None


@dataclass(frozen=True)
class Toolchain:
    """An MPI compiler and what it stands for."""

    mpicxx: Path
    """The wrapper that knows where MPI lies."""
    compiler: str
    """The C++ compiler behind it, as it calls itself."""
    mpi: str
    """The MPI: `openmpi-5.0.11`, `mpich-4.3.0`."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that make the wrapper use another compiler than it would."""

    @cached_property
    def flags(self) -> list[str]:
        """What every source is compiled with."""
        folder = Path(torch.__file__).parent / "include"
        includes = [folder, folder / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_path("include"))]
        return [
            "-O3",
            "-fPIC",
            "-pthread",
            f"-std={cpp_standard()}",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            "-DTORCH_API_INCLUDE_EXTENSION_H",
            *[word for path in includes for word in ("-isystem", str(path))],
        ]

    @cached_property
    def link_flags(self) -> list[str]:
        """What the objects are linked with. MPI's own libraries are the wrapper's to add."""
        folder = Path(torch.__file__).parent / "lib"
        libraries = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", "-lrt"]
        return ["-shared", "-pthread", f"-L{folder}", f"-Wl,-rpath,{folder}", *libraries]


def cpp_standard() -> str:
    """The C++ standard that torch's headers are written in, as torch builds extensions itself.

    Read from the text of torch's module, not imported: that needs setuptools, which need not be installed.
    """
    text = (Path(torch.__file__).parent / "utils" / "cpp_extension.py").read_text(encoding="utf-8")
    found = re.search(r"-std=(c\+\+\d+)", text)
    return found[1] if found else "c++17"


def python_tag() -> str:
    """`torch-2.13.0-cp311-x86_64`: what a compiled extension is bound to beside its MPI."""
    major, minor = sys.version_info[:2]
    return f"torch-{torch.__version__}-cp{major}{minor}-{platform.machine()}"


def identify(mpicxx: Path) -> Toolchain:
    """Ask an MPI compiler what it is. What it lacks is said with what to install."""
    environment = _usable_compiler(mpicxx)
    own = dict(environment)
    macros = _ask([str(mpicxx), "-E", "-dM", "-x", "c++", "-include", "mpi.h", os.devnull], own)
    if macros is None:
        raise MissingDependencyError(f"{mpicxx} does not find mpi.h, the header of its MPI: {INSTALL_MPI}")
    mpi = _name_of_mpi(dict(_MACROS.findall(macros)))
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        raise MissingDependencyError(
            f"the headers of Python {platform.python_version()} are missing, which C++ extensions need: "
            f"apt install python3-dev (Python.h is looked for in {sysconfig.get_path('include')})"
        )
    said = _ask([str(mpicxx), "--version"], own) or "unknown"
    return Toolchain(mpicxx, said.splitlines()[0].strip(), mpi, environment)


def _name_of_mpi(macros: dict[str, str]) -> str:
    if "MPICH_VERSION" in macros:
        return f"mpich-{macros['MPICH_VERSION']}"
    parts = [macros.get(f"OMPI_{part}_VERSION") for part in ("MAJOR", "MINOR", "RELEASE")]
    return f"openmpi-{'.'.join(part for part in parts if part)}" if parts[0] else "mpi"


def _usable_compiler(mpicxx: Path) -> tuple[tuple[str, str], ...]:
    """Variables under which the wrapper finds a C++ compiler: the one that it was made with may not be here."""
    shown = _ask([str(mpicxx), "-show"], {})
    if not shown or not shown.split():
        raise BuildError(f"{mpicxx} is no MPI compiler: `{mpicxx} -show` fails; set MPICXX to one that works")
    wanted, asked = shown.split()[0], os.environ.get("CXX")
    if asked is None and shutil.which(wanted):
        return ()
    for name in (asked, "g++", "c++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return (("OMPI_CXX", found), ("MPICH_CXX", found))
    raise MissingDependencyError(
        f"{mpicxx} needs a C++ compiler, and neither {asked or wanted} nor g++ is here: apt install g++ (or set CXX)"
    )


def _ask(command: list[str], environment: dict[str, str]) -> str | None:
    """What a command prints; None where it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_ASKING, env={**os.environ, **environment}, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
