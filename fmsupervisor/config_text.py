"""The settings as texts: the effective file, the commented default file, the reference page.

All three are made from the declarations, so they cannot say anything else than the reader does.
"""

from collections.abc import Iterator, Mapping

from fmsupervisor.config_schema import Key, LoadedSettings, describe, keys, literal, tables, value_of
from fmsupervisor.settings import meaning

_WIDTH = 110


def render_effective(loaded: LoadedSettings) -> str:
    """The settings in force as TOML that loads back to them; a comment after each says where it came from."""
    lines: list[str] = []
    for table in ("", *tables()):
        lines += ["", f"[{table}]"] if table else []
        for key in _in_file_order(table):
            value = value_of(loaded.settings, key)
            if isinstance(value, Mapping):
                lines += ["", f"[{key.path}]  # {_comment(loaded.sources[key.path])}"]
                lines += (
                    f"{name} = {literal(text)}  # {_comment(loaded.sources[f'{key.path}.{name}'])}"
                    for name, text in value.items()
                )
            else:
                lines.append(f"{key.name} = {literal(value)}  # {_comment(loaded.sources[key.path])}")
    return "\n".join(lines) + "\n"


def render_default() -> str:
    """A file with every key commented out at its default, with what it means and allows. It loads as the defaults."""
    lines = [
        "# Settings of fmsupervisor. Every key can be left out: what is commented out below is the default.",
        "# Paths may use {prefix}, which stands for the key of that name.",
    ]
    for table, declaration in (("", None), *tables().items()):
        lines += ["", "", f"[{table}]  # {_purpose(declaration)}"] if declaration else []
        for key in _in_file_order(table):
            lines += ["", *_wrapped(meaning(key.declared)), *_wrapped(f"Allowed: {describe(key)}.")]
            if key.differs_by_layout():
                lines += _wrapped(f'Default when layout = "packaged": {literal(key.default("packaged"))}')
            lines.append(f"[{key.path}]" if _is_table(key) else f"#{key.name} = {literal(key.default('tree'))}")
    return "\n".join(lines) + "\n"


def render_reference() -> str:
    """docs/settings.md."""
    lines = [
        "# Settings",
        "",
        "<!-- Made from fmsupervisor/settings.py by the tests: RENEW_GOLDEN=1 pytest tests/unit/test_config.py -->",
        "",
        "One TOML file, `/etc/fmsupervisor.toml` unless `--config` names another. Every key can be left out.",
        "Paths may use `{prefix}`, which stands for the key of that name. A key that does not exist, a value of the",
        "wrong type and a value that cannot be are errors; all of them are told at once, each with its line and what",
        "is allowed. `fmsupervisor config` prints the settings in force and where each came from;",
        "`fmsupervisor config --default` prints a commented file to start from.",
    ]
    for table, declaration in (("", None), *tables().items()):
        lines += ["", f"## `[{table}]`: {_purpose(declaration)}" if declaration else "## Top of the file", ""]
        lines += ["| key | default | allowed | meaning |", "|---|---|---|---|"]
        lines += (_reference_row(key) for key in _in_file_order(table))
    return "\n".join(lines) + "\n"


def _in_file_order(table: str) -> Iterator[Key]:
    """The keys of a table; those that are tables themselves last, since what follows a header belongs to it."""
    own = [key for key in keys() if key.table == table]
    yield from (key for key in own if not _is_table(key))
    yield from (key for key in own if _is_table(key))


def _is_table(key: Key) -> bool:
    return isinstance(key.default("tree"), Mapping)


def _purpose(declaration: type) -> str:
    """What a table is for, from the docstring of its dataclass."""
    return (declaration.__doc__ or "").partition(": ")[2].partition("\n")[0]


def _wrapped(text: str) -> list[str]:
    import textwrap  # noqa: PLC0415  not for the daemon

    return [f"# {line}" for line in textwrap.wrap(text, _WIDTH, break_on_hyphens=False)]


def _comment(source: str) -> str:
    """A source in a TOML comment, where control characters are not allowed."""
    return "".join(character if character.isprintable() else "?" for character in source)


def _reference_row(key: Key) -> str:
    default = f"`{literal(key.default('tree'))}`" if not _is_table(key) else "empty"
    if key.differs_by_layout():
        default += f"; packaged: `{literal(key.default('packaged'))}`"
    cells = (f"`{key.name}`", default, describe(key), meaning(key.declared))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
