"""``python -m fmsupervisor.mixin``: write the rules and dashboards into a directory."""

import argparse
import os
import sys

from fmsupervisor.errors import ConfigError
from fmsupervisor.mixin.alerts import NAMES
from fmsupervisor.mixin.options import Options, load
from fmsupervisor.mixin.render import files


def main() -> int:
    """The exit status: 0, 1 not written, 78 bad options."""
    parser = argparse.ArgumentParser(
        prog="python -m fmsupervisor.mixin",
        description="Write alert rules, recording rules and dashboards for Prometheus and Grafana.",
    )
    parser.add_argument("--options", metavar="FILE", help="a TOML file, see docs/alerts.md (default: all defaults)")
    parser.add_argument("directory", metavar="DIRECTORY", help="where to; it is made when it does not exist")
    arguments = parser.parse_args()
    try:
        made = files(_options(arguments.options))
        os.makedirs(arguments.directory, exist_ok=True)
        for name, text in made.items():
            with open(os.path.join(arguments.directory, name), "w", encoding="utf-8") as file:
                file.write(text)
    except ConfigError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 78
    except OSError as error:
        print(f"cannot use {error.filename}: {error.strerror}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _options(path: str | None) -> Options:
    if path is None:
        return Options()
    with open(path, encoding="utf-8") as file:
        return load(file.read(), path, NAMES)


if __name__ == "__main__":
    sys.exit(main())
