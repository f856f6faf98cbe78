"""Building extensions: once, one at a time, again where something changed, and with errors that say what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launching import environment, need_mpi

from distributed_training.native import build as builder
from distributed_training.native import toolchain
from distributed_training.native.build import build, cache_folder, find_built, load_extension
from distributed_training.native.toolchain import find_mpicxx, identify
from distributed_training.runtime.errors import BuildError, ConfigError, MissingDependencyError

# Small: without torch's headers a file compiles in a second.
MODULE = """
#include <Python.h>
#include <mpi.h>
#include "answer.h"
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)
static PyObject* ask(PyObject*, PyObject*) {
  char text[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(text, &length);
  return Py_BuildValue("is", answer(), text);
}
static PyMethodDef methods[] = {{"ask", ask, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, TEXT(TORCH_EXTENSION_NAME), "", -1, methods};
PyMODINIT_FUNC JOIN(PyInit_, TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""
SOURCES = {
    "module.cpp": MODULE,
    "answer.h": "int answer();\n",
    "answer.cpp": '#include "answer.h"\nint answer() { return 42; }\n',
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MPICXX", raising=False)
    return cache_folder()


@pytest.fixture
def source(tmp_path: Path, cache: Path) -> Path:
    """The folder of a small extension. Loaded modules are told apart by its path."""
    need_mpi()
    folder = tmp_path / "small"
    folder.mkdir()
    for name, text in SOURCES.items():
        (folder / name).write_text(text)
    return folder


def counting(tmp_path: Path) -> tuple[Path, Path]:
    """An mpicxx that notes what it is asked before it does it, and its notes."""
    script, notes = tmp_path / "mpicxx", tmp_path / "notes"
    script.write_text(f'#!/bin/sh\necho "$@" >> {notes}\nexec {find_mpicxx()} "$@"\n')
    script.chmod(0o755)
    return script, notes


def compiled(notes: Path) -> list[str]:
    """The files that were compiled."""
    lines = [line.split() for line in notes.read_text().splitlines()]
    return sorted(Path(words[words.index("-c") + 1]).name for words in lines if "-c" in words)


def test_it_is_built_once_and_only_what_changed_is_compiled_again(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, notes = counting(tmp_path)
    monkeypatch.setenv("MPICXX", str(script))
    assert find_built(source) is None
    number, library = load_extension(source).ask()
    assert number == 42
    assert "MPI" in library
    assert compiled(notes) == ["answer.cpp", "module.cpp"]
    first = build(source)
    assert find_built(source) == first
    assert compiled(notes) == ["answer.cpp", "module.cpp"]

    (source / "answer.cpp").write_text(SOURCES["answer.cpp"].replace("42", "43"))
    second = build(source)
    assert second != first
    assert compiled(notes) == ["answer.cpp", "answer.cpp", "module.cpp"]
    (source / "answer.h").write_text("// changed\nint answer();\n")
    build(source)
    assert compiled(notes) == ["answer.cpp"] * 3 + ["module.cpp"] * 2
    (source / "answer.h").write_text(SOURCES["answer.h"])
    (source / "answer.cpp").write_text(SOURCES["answer.cpp"])
    assert build(source) == first  # older builds stay
    assert len(compiled(notes)) == 5
    assert not list(cache.glob(".building-*"))


def test_one_that_was_built_elsewhere_serves_a_machine_without_a_compiler(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build(source)
    monkeypatch.setattr(builder, "find_mpicxx", lambda: None)
    assert find_built(source) == library
    (source / "answer.cpp").write_text("int answer() { return 1; }")
    assert find_built(source) is None


def test_two_processes_build_it_once(source: Path, tmp_path: Path) -> None:
    script, notes = counting(tmp_path)
    program = "import sys, pathlib; from distributed_training.native.build import load_extension; "
    program += "print(load_extension(pathlib.Path(sys.argv[1])).ask()[0])"
    own = environment(MPICXX=str(script))
    both = [
        subprocess.Popen([sys.executable, "-c", program, str(source)], stdout=subprocess.PIPE, text=True, env=own)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=120)[0].strip() for process in both] == ["42", "42"]
    assert compiled(notes) == ["answer.cpp", "module.cpp"]


def test_a_builder_that_never_ends_is_named(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lock = cache / f".lock-{os.uname().nodename}"
    program = "import fcntl, sys, os, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
    program += "f.write(str(os.getpid())); f.flush(); print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program, str(lock)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        monkeypatch.setattr(builder, "DEADLINE", 0.3)
        with pytest.raises(BuildError, match=f"process {holder.pid} has been building for more than 0.3 s"):
            build(source)
        holder.kill()


class TestTrouble:
    def test_an_error_of_the_compiler_is_shown(self, source: Path, cache: Path) -> None:
        (source / "answer.cpp").write_text("int answer() { return forty_two; }\n")
        with pytest.raises(BuildError, match=r"does not compile with .*\n.*answer\.cpp.*error: .*forty_two") as caught:
            build(source)
        assert str(cache / "failed.log") in str(caught.value)
        assert "forty_two" in (cache / "failed.log").read_text()
        assert find_built(source) is None
        assert not list(cache.glob(".building-*"))

    def test_an_error_of_the_linker_is_shown(self, source: Path) -> None:
        (source / "answer.cpp").write_text("int other() { return 42; }\n")
        with pytest.raises(BuildError, match=r"cannot be loaded: .*undefined symbol: .*answer"):
            load_extension(source)

    def test_a_source_that_changes_while_it_is_compiled_is_not_kept(
        self, source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        script, _ = counting(tmp_path)
        change = f'case "$*" in *"-c "*answer.cpp*) echo >> {source}/answer.cpp;; esac'
        script.write_text(script.read_text().replace("exec", f"{change}\nexec"))
        monkeypatch.setenv("MPICXX", str(script))
        with pytest.raises(BuildError, match=r"answer\.cpp was changed while it was compiled"):
            build(source)
        assert not list((cache / "objects").glob("answer-*"))

    def test_without_mpi_it_says_what_to_install(self, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(toolchain, "beside_python", lambda program: None)
        monkeypatch.setenv("PATH", "/nowhere")
        with pytest.raises(MissingDependencyError, match=r"no mpicxx .* pip install 'distributed-training\[mpi\]'"):
            build(source)
        assert find_built(source) is None

    def test_an_mpicxx_that_is_not_there(self, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MPICXX", "/nowhere/mpicxx")
        with pytest.raises(ConfigError, match=r"MPICXX=/nowhere/mpicxx is no program"):
            build(source)

    @pytest.mark.parametrize(
        ("script", "path", "said"),
        [
            ("exit 1", os.environ["PATH"], "is no MPI compiler"),
            ('[ "$1" = -show ] && echo no-such-compiler -lmpi', "/nowhere", "neither no-such-compiler nor g.. is here"),
            ('[ "$1" = -show ] && echo sh -lmpi || exit 1', os.environ["PATH"], r"does not find mpi\.h"),
        ],
        ids=["no wrapper", "no compiler", "no header"],
    )
    def test_an_mpicxx_that_lacks_something(
        self, script: str, path: str, said: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fake = tmp_path / "mpicxx"
        fake.write_text(f"#!/bin/sh\n{script}\n")
        fake.chmod(0o755)
        monkeypatch.setenv("PATH", path)
        monkeypatch.delenv("CXX", raising=False)
        with pytest.raises((BuildError, MissingDependencyError), match=said):
            identify(fake)

    def test_a_cache_that_cannot_be_written(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        with pytest.raises(BuildError, match="XDG_CACHE_HOME"):
            cache_folder()

    def test_an_empty_folder_is_no_extension(self, cache: Path, tmp_path: Path) -> None:
        need_mpi()
        (tmp_path / "empty").mkdir()
        with pytest.raises(BuildError, match=r"no C\+\+ files"):
            build(tmp_path / "empty")


def test_the_source_is_part_of_the_package() -> None:
    """What setuptools puts into a wheel must be all that is compiled."""
    import tomllib

    settings = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["distributed_training"]
    assert {"native/mpi/*.cpp", "native/mpi/*.h"} <= set(patterns)
    assert {path.suffix for path in builder._files(builder.MPI_SOURCE)} == {".cpp", ".h"}
