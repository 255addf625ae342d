"""Two budgets: the pure core imports nothing that does I/O, and the daemon imports nothing that it does not need."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import fmsupervisor

PACKAGE = Path(fmsupervisor.__file__).parent
CORE = sorted(f"fmsupervisor.core.{path.stem}" for path in (PACKAGE / "core").glob("[a-z]*.py"))
PURE = {"collections.abc", "collections", "dataclasses", "enum", "functools", "re", "types", "typing"}
# tenacity draws random numbers: imported by the one function that the shell calls to draw a pause.
ONLY_INSIDE = {"fmsupervisor.core.restart": {"backoff_seconds": {"tenacity"}}}

DAEMON_LIBRARIES = {"sdnotify", "structlog", "pyudev"}
# Not lzma: the standard library's shutil, and so tempfile, imports it. Our own modules are checked for it below.
FORBIDDEN = {
    "fmsupervisor.simulator",
    "fmsupervisor.config_text",
    "yaml",
    "bcrypt",
    "zstandard",
    "tenacity",
    "prometheus_client",
    "unittest",
    "pydoc",
    "xml",
}


@cache
def tree(module: str) -> ast.Module:
    """The parsed source of a module of the package."""
    path = PACKAGE.parent / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


def imports(node: ast.AST) -> set[str]:
    """The modules that are imported anywhere below."""
    names: set[str] = set()
    for one in ast.walk(node):
        if isinstance(one, ast.Import):
            names |= {alias.name for alias in one.names}
        elif isinstance(one, ast.ImportFrom) and one.module:
            inner = {f"{one.module}.{alias.name}" for alias in one.names}
            is_package = (
                one.module.startswith("fmsupervisor") and (PACKAGE.parent / Path(*one.module.split("."))).is_dir()
            )
            names |= inner if is_package else {one.module}
    return names


def closure(module: str) -> dict[str, set[str]]:
    """The module and all of the package that it imports, each with its imports."""
    found: dict[str, set[str]] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found[name] = imports(tree(name))
        waiting += [one for one in found[name] if one.startswith("fmsupervisor.")]
    return found


@pytest.mark.parametrize("module", CORE)
def test_the_core_imports_nothing_that_does_io(module: str) -> None:
    for name, imported in closure(module).items():
        lazy = set().union(*ONLY_INSIDE.get(name, {}).values())
        foreign = {one for one in imported if not one.startswith("fmsupervisor")} - PURE - lazy
        assert foreign == set(), name


def test_what_may_be_imported_lazily_is_imported_only_there() -> None:
    for module, functions in ONLY_INSIDE.items():
        for statement in tree(module).body:
            name = statement.name if isinstance(statement, ast.FunctionDef) else ""
            assert not imports(statement) & set().union(*functions.values()) or name in functions


@cache
def loaded_by(*modules: str) -> frozenset[str]:
    """What a fresh interpreter has in memory after these imports, and had not before."""
    program = (
        "import sys; before = set(sys.modules)\n"
        f"import {', '.join(modules)}\n"
        "print(*sorted(set(sys.modules) - before), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return frozenset(done.stdout.split())


def is_within(module: str, package: str) -> bool:
    """Whether it is the package or a part of it."""
    return module == package or module.startswith(package + ".")


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_the_daemon_does_not_import(package: str) -> None:
    found = loaded_by("fmsupervisor.daemon", "fmsupervisor.supervisor")
    assert sorted(module for module in found if is_within(module, package)) == []


def test_the_daemon_imports_exactly_these_libraries() -> None:
    found = loaded_by("fmsupervisor.daemon", "fmsupervisor.supervisor")
    libraries = {module.partition(".")[0] for module in found} - set(sys.stdlib_module_names) - {"fmsupervisor"}
    assert libraries <= DAEMON_LIBRARIES


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_what_is_heavy_is_imported_inside_the_function_that_needs_it(path: Path) -> None:
    heavy = {"lzma", "zstandard", "bcrypt", "yaml", "tenacity"}
    at_the_top = [one for one in ast.parse(path.read_text()).body if isinstance(one, ast.Import | ast.ImportFrom)]
    assert not set().union(*map(imports, at_the_top)) & heavy


def test_the_core_alone_needs_the_standard_library_only() -> None:
    libraries = {module.partition(".")[0] for module in loaded_by(*CORE)} - set(sys.stdlib_module_names)
    assert libraries == {"fmsupervisor"}
