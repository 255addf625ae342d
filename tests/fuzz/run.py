"""Search one target for inputs that break it, guided by coverage: ``run.py TARGET SECONDS``.

atheris drives libFuzzer; every branch of the package counts as coverage. The corpus grows in build/fuzz/TARGET; an
input that breaks the target is written to tests/fuzz/found/TARGET, where the tests replay it from then on.
``run.py --keep TARGET`` puts the smallest part of the corpus that has all its coverage into tests/fuzz/corpus.
"""

import re
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "fuzz"
_UNIT = HERE.parent / "unit"
_MOST_KEPT_BYTES = 96 << 10  # of one archive, before compression
_MOST_WORDS = 2000
_LIMITS = ("-timeout=20", "-rss_limit_mb=2048", "-print_final_stats=1")

# Whose branches guide the search; what else a target runs would only slow it down.
UNDER_TEST = {
    "fabric_manager_log": ["fmsupervisor.fabric_manager.log_grammar", "fmsupervisor.fabric_manager.log_kinds"],
    "fabric_manager_config": ["fmsupervisor.fabric_manager.config_file", "fmsupervisor.fabric_manager.config_keys"],
    "elf": ["fmsupervisor.host.elf"],
    "module_file": ["fmsupervisor.host", "fmsupervisor.checks.symbol_versions"],
    "host_files": ["fmsupervisor.host", "fmsupervisor.fabric_manager.foreign"],
    "nvswitch_ioctl": ["fmsupervisor.host.nvswitch_ctl", "fmsupervisor.core"],
    "kernel_log": [
        "fmsupervisor.host.kernel_log",
        "fmsupervisor.host.kernel_grammar",
        "fmsupervisor.core.kernel_facts",
    ],
    "settings_file": ["fmsupervisor.config", "fmsupervisor.config_schema", "tomllib"],
    "web_yml": ["fmsupervisor.report.web_config", "fmsupervisor.report.yaml_table", "yaml"],
    "handover": ["fmsupervisor.handover", "fmsupervisor.codec", "json"],
    "http_request": ["fmsupervisor.report.http_message", "fmsupervisor.report.basic_auth"],
}


def main() -> None:
    """Run libFuzzer; it ends the process itself."""
    sys.path[:0] = [str(HERE), str(_UNIT), str(_UNIT / "core")]
    arguments = sys.argv[1:]
    if arguments[0] == "--keep":
        _keep(arguments[1])
        return
    import atheris

    name, limits = arguments[0], arguments[1:]
    with atheris.instrument_imports(include=UNDER_TEST[name], enable_loader_override=False):
        from _targets import FOUND, TARGETS
    target = TARGETS[name]
    corpus = BUILD / name
    corpus.mkdir(parents=True, exist_ok=True)
    if limits[0].startswith("-"):
        libfuzzer = [*limits, *_LIMITS]
    else:
        from _targets import kept_inputs

        for label, content in kept_inputs(name):
            (corpus / label.replace("/", "-")).write_bytes(content)
        words = BUILD / f"{name}.words"
        words.write_text(_dictionary(content for _, content in kept_inputs(name)) or '"x"')
        found = FOUND / name
        found.mkdir(parents=True, exist_ok=True)
        libfuzzer = [
            f"-max_total_time={limits[0]}",
            f"-max_len={target.most_bytes}",
            "-len_control=0",
            f"-artifact_prefix={found}/",
        ]
        libfuzzer += [f"-dict={words}", *_LIMITS, *limits[1:], str(corpus)]
    itself = f"{sys.executable} {__file__} {name}"  # what libFuzzer executes again to merge
    atheris.Setup([itself, *libfuzzer], target.check)
    atheris.Fuzz()


def _dictionary(inputs: Iterable[bytes]) -> str:
    """The words of the inputs, for libFuzzer to put in elsewhere."""
    words = {word for content in inputs for word in re.findall(rb"[ \w.:/()=\[\]-]{2,40}", content)[:_MOST_WORDS]}
    escaped = ("".join(f"\\x{byte:02x}" for byte in word) for word in sorted(words)[:_MOST_WORDS])
    return "".join(f'"{word}"\n' for word in escaped)


def _keep(name: str) -> None:
    """Put the smallest part of the corpus that has all its coverage into one archive, the same bytes each time."""
    import subprocess

    with tempfile.TemporaryDirectory() as smallest:
        merge = [sys.executable, __file__, name, "-merge=1", smallest, str(BUILD / name)]
        subprocess.run(merge, check=True, stderr=subprocess.DEVNULL)
        inputs = sorted((path.read_bytes() for path in Path(smallest).iterdir()), key=lambda one: (len(one), one))
    archive = HERE / "corpus" / f"{name}.zip"
    archive.parent.mkdir(exist_ok=True)
    sizes = list(accumulate(map(len, inputs)))
    kept = [content for content, size in zip(inputs, sizes, strict=True) if size <= _MOST_KEPT_BYTES]
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for number, content in enumerate(kept):
            file.writestr(zipfile.ZipInfo(f"{number:04}"), content, zipfile.ZIP_DEFLATED)
    sys.stdout.write(f"{name}: {len(kept)} of {len(inputs)} inputs, {archive.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
