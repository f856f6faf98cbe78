"""What the documentation site has beside the files in docs/: a hook of mkdocs (mkdocs.yml names it).

- The reference: a page for each documented part of the package, from its `__all__` and docstrings, and one for the
  commands of `dtrain`, from their own help. Nothing of it is written by hand, so nothing of it can be out of date.
- Files elsewhere in the repository that pages link to (`../examples/train_mpi.py`): each gets a page under `source/`,
  and the links lead there, so that pages read the same in the repository and on the site.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "distributed_training"
REFERENCE = {
    "training": ["training"],
    "config": ["config"],
    "data": ["data"],
    "models": ["models"],
    "strategies": ["strategies"],
    "checkpoint": ["checkpoint"],
    "tracking": ["tracking"],
    "split": ["split"],
    "feed": ["feed", "feed.tunnels"],
    "huggingface": ["huggingface"],
    "launch": ["launch.spawn", "launch.ray_launch"],
    "tuning": ["tuning"],
    "bench": ["bench"],
    "verify": ["verify.audit", "verify.verification"],
    "wire": ["wire"],
    "errors": ["runtime.errors"],
}
"""Page of the reference -> the modules whose public names it shows."""
MOVED = {"CHANGELOG.md": "changes.md", "CONTRIBUTING.md": "contributing.md"}
"""Pages of the repository's root -> where they are on the site."""
LINK = re.compile(r"(?<=\]\()(?P<path>[^)\s#:]+)(?P<heading>#[^)\s]*)?(?=\))")
FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".ipynb": "json", ".toml": "toml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    from mkdocs.structure.files import File

    made = {f"reference/{name}.md": _reference(name, modules) for name, modules in REFERENCE.items()}
    made["reference/index.md"] = _names()
    made["reference/commands.md"] = _commands()
    made |= {there: _moved(here, there) for here, there in MOVED.items()}
    wanted = {path for page in (ROOT / "docs").glob("**/*.md") for path in _outside(page)}
    wanted |= {path for name in MOVED for path in _outside(ROOT / name)}
    for path in sorted(wanted):
        made |= dict(_source(path))
    for uri, text in made.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files outside of docs/ lead to their pages."""
    return _relinked(markdown, ROOT / "docs" / page.file.src_uri, page.file.src_uri)


def _relinked(markdown: str, page: Path, uri: str) -> str:
    """A page's text with the links of the site, which has it at `uri`."""

    def moved(match: re.Match[str]) -> str:
        target = _on_site((page.parent / match["path"]).resolve())
        if target is None:
            return match[0]
        return posixpath.relpath(target, posixpath.dirname(uri) or ".") + (match["heading"] or "")

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(moved, part) for part in parts)


def _on_site(path: Path) -> str | None:
    """Where a file of the repository is on the site; None if it stays where it is or is no such file."""
    if not path.exists() or not path.is_relative_to(ROOT):
        return None
    name = path.relative_to(ROOT).as_posix()
    if path.is_relative_to(ROOT / "docs"):
        return path.relative_to(ROOT / "docs").as_posix()
    if name in MOVED:
        return MOVED[name]
    if path.is_dir():
        return f"source/{name}/index.md"
    return f"source/{name}" if path.suffix == ".md" else f"source/{name}.md"


def _outside(page: Path) -> Iterator[Path]:
    """The files outside of docs/ that a page links to."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for match in LINK.finditer(text):
        path = (page.parent / match["path"]).resolve()
        if (_on_site(path) or "").startswith("source/"):
            yield path


def _source(path: Path) -> Iterator[tuple[str, str]]:
    """(address, text) of the page of a file; for a folder also of its files."""
    name, uri = path.relative_to(ROOT).as_posix(), _on_site(path)
    assert uri is not None
    if path.is_dir():
        held = sorted(p for p in path.iterdir() if p.suffix in LANGUAGES)
        listed = "\n".join(f"- [`{p.name}`]({p.name}.md){_first_line(p)}" for p in held)
        yield uri, f"# {name}/\n\n{listed}\n"
        for each in held:
            yield from _source(each)
        return
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield uri, _relinked(text, path, uri)
        return
    yield uri, f"# {name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n````\n"


def _first_line(path: Path) -> str:
    """What a program says about itself in its first line."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) if path.suffix == ".py" else None
    return f": {doc.splitlines()[0]}" if doc else ""


def _moved(here: str, there: str) -> str:
    return _relinked((ROOT / here).read_text(encoding="utf-8"), ROOT / here, there)


def _tree(module: str) -> ast.Module:
    path = ROOT / "src" / PACKAGE / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def public_names(module: str) -> list[str]:
    """`__all__` of a module of the package, or what it defines without a leading underscore; nothing is imported."""
    tree, defined = _tree(module), []
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return [name for name in ast.literal_eval(node.value) if not name.startswith("_")]
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            defined.append(node.name)
    return defined


def _reference(page: str, modules: list[str]) -> str:
    """The page of some modules: what each is for, then its public names."""
    parts = [f"# {PACKAGE}.{page}" if page != "errors" else "# Errors"]
    for module in modules:
        if len(modules) > 1:
            parts.append(f"## {PACKAGE}.{module}")
        parts.append(ast.get_docstring(_tree(module)) or "")
        parts += [f"::: {PACKAGE}.{module}.{name}" for name in public_names(module)]
    return "\n\n".join(parts) + "\n"


def _names() -> str:
    """The first page of the reference: the names of the package itself, and what else there is."""
    homes = {name: page for page, modules in REFERENCE.items() for m in modules for name in public_names(m)}
    rows = [f"| [`{name}`]({homes[name]}.md) | `{PACKAGE}.{homes[name]}` |" for name in public_names("")]
    pages = [f"- [`{PACKAGE}.{page}`]({page}.md)" for page in REFERENCE if page != "errors"]
    return "\n".join(
        [
            "# Reference",
            "",
            f"What `from {PACKAGE} import ...` gives, and where it is described:",
            "",
            "| name | part |",
            "|---|---|",
            *rows,
            "",
            "All parts with names for users; [the errors](errors.md) and [the commands](commands.md) besides:",
            "",
            *pages,
            "",
        ]
    )


def _commands() -> str:
    """The commands of `dtrain` from their own help."""
    import typer

    from distributed_training.cli.main import app

    parts = ["# Commands", "Every command shows this with `--help`."]
    for name, command in _leaves(typer.main.get_command(app), "dtrain"):
        rows = [_option(parameter) for parameter in command.params if not getattr(parameter, "hidden", False)]
        parts += [f"## {name}", (command.help or "").strip(), "| option | |\n|---|---|\n" + "\n".join(rows)]
    return "\n\n".join(parts) + "\n"


def _leaves(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """(name, command) of a command, or of all that a group of them holds."""
    held = getattr(command, "commands", {})
    if not held:
        yield name, command
    for each, inner in sorted(held.items()):
        if not inner.hidden:
            yield from _leaves(inner, f"{name} {each}")


def _option(parameter: Any) -> str:
    """A row of a command's table."""
    named = parameter.opts[0].startswith("-")
    words = ", ".join(f"`{word}`" for word in parameter.opts) if named else ""
    value = parameter.metavar or ("" if named else parameter.name.upper())
    text = " ".join((parameter.help or "").split()).replace("|", "\\|").replace("*", "\\*")
    return f"| {words}{f' `{value}`' if value else ''} | {text} |"
