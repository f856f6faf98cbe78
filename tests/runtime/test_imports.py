"""Optional libraries and users' own code: mistakes are explained, other people's errors are shown as they are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed_training.runtime.errors import ConfigError, MissingDependencyError
from distributed_training.runtime.imports import import_object, require


@pytest.fixture
def code(in_tmp: Path) -> Iterator[Path]:
    """A folder for users' modules; what was imported from it is forgotten afterwards."""
    before = set(sys.modules)
    yield in_tmp
    for name in set(sys.modules) - before:
        del sys.modules[name]


class TestRequire:
    def test_gives_the_library(self) -> None:
        assert require("json", "plots", "Drawing") is sys.modules["json"]

    @pytest.mark.parametrize("module", ["surely_not_installed", "surely_not_installed.sub.module"])
    def test_says_what_to_install(self, module: str) -> None:
        with pytest.raises(MissingDependencyError) as caught:
            require(module, "plots", "Drawing")
        assert str(caught.value) == (
            "Drawing needs surely_not_installed, which is not installed: pip install 'distributed-training[plots]'"
        )

    def test_a_broken_library_shows_its_own_error(self, code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (code / "broken_library.py").write_text("import surely_not_installed\n")
        monkeypatch.syspath_prepend(code)
        with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
            require("broken_library", "plots", "Drawing")

    def test_a_library_that_fails_to_load_shows_its_own_error(
        self, code: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (code / "failing_library.py").write_text("raise ImportError('libmissing.so')\n")
        monkeypatch.syspath_prepend(code)
        with pytest.raises(ImportError, match=r"libmissing\.so"):
            require("failing_library", "plots", "Drawing")


class TestImportObject:
    def test_finds_installed_and_local_code(self, code: Path) -> None:
        (code / "users_module.py").write_text("class Mine:\n    inner = 5\n")
        assert import_object("json:dumps", "key") is sys.modules["json"].dumps
        assert import_object("users_module:Mine", "key").__name__ == "Mine"
        assert import_object("users_module:Mine.inner", "key") == 5

    def test_finds_modules_in_packages(self, code: Path) -> None:
        (code / "users_package").mkdir()
        (code / "users_package" / "sub.py").write_text("value = 7\n")
        assert import_object("users_package.sub:value", "key") == 7

    def test_the_search_path_is_as_before(self, code: Path) -> None:
        (code / "users_module_2.py").write_text("value = 1\n")
        (code / "users_module_3.py").write_text("1 / 0\n")
        before = list(sys.path)
        import_object("users_module_2:value", "key")
        assert sys.path == before
        with pytest.raises(ConfigError):
            import_object("users_module_2:other", "key")
        with pytest.raises(ZeroDivisionError):
            import_object("users_module_3:value", "key")
        assert sys.path == before

    def test_a_search_path_that_holds_the_folder_keeps_it(self, code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (code / "users_module_4.py").write_text("value = 1\n")
        monkeypatch.syspath_prepend(str(code))
        import_object("users_module_4:value", "key")
        assert str(code) in sys.path

    @pytest.mark.parametrize("path", ["users_module", ":name", "module:", ":", "", ".relative:name", "a..b:name"])
    def test_what_is_no_import_path_is_refused(self, path: str) -> None:
        with pytest.raises(ConfigError, match=r"model.target=.* must be an import path such as my_module:MyClass"):
            import_object(path, "model.target")

    @pytest.mark.parametrize("module", ["nowhere_to_be_found", "nowhere_to_be_found.a.b", "json.nothing", "json.a.b"])
    def test_a_missing_module_is_named_with_where_it_was_looked_for(self, code: Path, module: str) -> None:
        with pytest.raises(ConfigError) as caught:
            import_object(f"{module}:Thing", "model.target")
        assert str(caught.value) == (f"model.target='{module}:Thing': no module named {module} here or in {Path.cwd()}")

    def test_a_missing_module_inside_a_package_is_named(self, code: Path) -> None:
        (code / "users_package_2").mkdir()
        (code / "users_package_2" / "__init__.py").write_text("")
        with pytest.raises(ConfigError, match=r"no module named users_package_2\.a\.b"):
            import_object("users_package_2.a.b:Thing", "model.target")

    @pytest.mark.parametrize("name", ["Other", "Mine.other"])
    def test_a_missing_name_is_named(self, code: Path, name: str) -> None:
        (code / "users_module_5.py").write_text("class Mine: ...\n")
        with pytest.raises(ConfigError, match=f"model.target=.*: users_module_5 has no {name}"):
            import_object(f"users_module_5:{name}", "model.target")

    @pytest.mark.parametrize(
        ("source", "error"),
        [
            ("import surely_not_installed", ModuleNotFoundError),
            ("import json; json.no_such_thing", AttributeError),
            ("1 / 0", ZeroDivisionError),
            ("def", SyntaxError),
        ],
    )
    def test_errors_of_the_users_own_code_are_shown_as_they_are(
        self, code: Path, source: str, error: type[Exception]
    ) -> None:
        (code / "users_module_6.py").write_text(source + "\n")
        with pytest.raises(error):
            import_object("users_module_6:Thing", "model.target")
        sys.modules.pop("users_module_6", None)
