"""fabricmanager.cfg: which keys may be written, what becomes of the stock text, and what prepare does on a host."""

import os
import stat
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmsupervisor.conditions import Code
from fmsupervisor.config import load_text
from fmsupervisor.fabric_manager.config_file import (
    APPENDED_COMMENT,
    command_endpoint,
    effective_options,
    prepare,
    render,
)
from fmsupervisor.fabric_manager.config_keys import FIRST_BRANCH, FIXED_KEYS, OWNED_KEYS, driver_branch, unknown_keys
from fmsupervisor.host.root import HostRoot

STOCK = """\
# Levels: LOG_LEVEL=0 to LOG_LEVEL=4
LOG_LEVEL=4
LOG_FILE_NAME=/var/log/fabricmanager.log
LOG_FILE_MAX_SIZE=2
LOG_MAX_ROTATE_COUNT=3

#\tPossible values: 0, 1
DAEMONIZE=1
FABRIC_MODE=0
FABRIC_MODE_RESTART=0
STATE_FILE_NAME=/tmp/fabricmanager.state
FM_CMD_PORT_NUMBER=6666
FM_CMD_UNIX_SOCKET_PATH=
TOPOLOGY_FILE_PATH=/usr/share/nvidia/nvswitch
# SOMETHING_NEW=1
NOT_OURS = keep   this\t
"""

TREE = "/usr/local/nvidia"


def settings(text=""):
    return load_text(text, "f.toml").settings


def options(**values):
    lines = "".join(f'{key} = "{value}"\n' for key, value in values.items())
    return settings(f"[fabric_manager.options]\n{lines}")


class TestKeys:
    @pytest.mark.parametrize(
        ("key", "version", "stock", "is_known"),
        [
            pytest.param("LOG_LEVEL", None, (), True, id="in every version"),
            pytest.param("DATABASE_PATH", "535.104.05", (), True, id="first branch"),
            pytest.param("DATABASE_PATH", "525.60.13", (), False, id="before the first branch"),
            pytest.param("DATABASE_PATH", None, (), False, id="version not known"),
            pytest.param("DATABASE_PATH", "nonsense", (), False, id="version not readable"),
            pytest.param("DATABASE_PATH", "525.60.13", ("DATABASE_PATH",), True, id="the stock file mentions it"),
            pytest.param("PARTITION_RAIL_POLICY", "580.65.06", (), False, id="newer key"),
            pytest.param("PARTITION_RAIL_POLICY", "610.57.04", (), True, id="newer version"),
            pytest.param("GFM_WAIT_TIMEOUT", "610.57.04", (), False, id="multi-node only"),
            pytest.param("GFM_WAIT_TIMEOUT", "610.57.04", ("GFM_WAIT_TIMEOUT",), True, id="multi-node stock file"),
            pytest.param("NEVER_SEEN", "610.57.04", (), False, id="in neither table nor stock file"),
            pytest.param("NEVER_SEEN", None, ("NEVER_SEEN",), True, id="in the stock file only"),
        ],
    )
    def test_a_key_is_known_when_the_stock_file_mentions_it_or_the_table_has_it(self, key, version, stock, is_known):
        assert [unknown.key for unknown in unknown_keys([key], version, frozenset(stock))] == [key] * (not is_known)

    def test_the_reason_names_both_versions_or_what_was_probably_meant(self):
        late, typo = unknown_keys(["USE_RPC", "LOG_LEVELS"], "570.1.2", frozenset())
        assert "595" in late.reason
        assert "570.1.2" in late.reason
        assert "LOG_LEVEL?" in typo.reason

    def test_the_keys_that_are_written_always_are_known_to_every_version(self):
        written = (OWNED_KEYS.keys() | FIXED_KEYS.keys()) - {"DATABASE_PATH"}
        assert {FIRST_BRANCH[key] for key in written} == {0}

    @pytest.mark.parametrize(
        ("version", "branch"), [("570.124.06", 570), ("1000.1", 1000), ("570", None), ("", None), (None, None)]
    )
    def test_the_branch_is_the_first_number_of_a_version(self, version, branch):
        assert driver_branch(version) == branch


class TestRender:
    def test_values_change_in_place_and_everything_else_stays(self):
        rendering = render(STOCK, settings(), "570.124.06")
        expected = (
            STOCK.replace("=/var/log/fabricmanager.log", f"={TREE}/fabricmanager.log")
            .replace("DAEMONIZE=1", "DAEMONIZE=0")
            .replace("=/tmp/fabricmanager.state", f"={TREE}/fabricmanager.state")
            .replace("=/usr/share/nvidia/nvswitch", f"={TREE}/usr/share/nvidia/nvswitch")
        )
        assert rendering.text == f"{expected}{APPENDED_COMMENT}\nDATABASE_PATH={TREE}/database\n"
        assert rendering.differences == (
            f"LOG_FILE_NAME: /var/log/fabricmanager.log -> {TREE}/fabricmanager.log",
            "DAEMONIZE: 1 -> 0",
            f"STATE_FILE_NAME: /tmp/fabricmanager.state -> {TREE}/fabricmanager.state",
            f"TOPOLOGY_FILE_PATH: /usr/share/nvidia/nvswitch -> {TREE}/usr/share/nvidia/nvswitch",
            f"DATABASE_PATH: (not set) -> {TREE}/database",
        )
        assert rendering.problems == ()

    def test_without_a_stock_file_only_our_keys_are_written(self):
        text = render(None, settings(), None).text
        assert list(effective_options(text)) == [
            "DAEMONIZE",
            "LOG_FILE_NAME",
            "FABRIC_MODE",
            "FABRIC_MODE_RESTART",
            "STATE_FILE_NAME",
            "TOPOLOGY_FILE_PATH",
        ]

    @pytest.mark.parametrize(
        ("stock", "expected"),
        [
            pytest.param("DAEMONIZE = 1\n", "DAEMONIZE = 0\n", id="blanks around the equals sign"),
            pytest.param("  DAEMONIZE\t=\t1  \n", "  DAEMONIZE\t=\t0\n", id="tabs, blanks at the ends"),
            pytest.param("DAEMONIZE=\n", "DAEMONIZE=0\n", id="empty value"),
            pytest.param("DAEMONIZE=0  \n", "DAEMONIZE=0  \n", id="right already"),
            pytest.param("DAEMONIZE=1\r\nX=1\r\n", "DAEMONIZE=0\r\nX=1\r\n", id="CR LF"),
            pytest.param("DAEMONIZE=1\nDAEMONIZE=2\n", "DAEMONIZE=0\nDAEMONIZE=0\n", id="key twice"),
            pytest.param("#DAEMONIZE=1\nDAEMONIZE=1\n", "#DAEMONIZE=1\nDAEMONIZE=0\n", id="commented default"),
            pytest.param("DAEMONIZE=a=b\n", "DAEMONIZE=0\n", id="value with an equals sign"),
            pytest.param("DAEMONIZE=1\x0bX\x85=2\n", "DAEMONIZE=0\n", id="other line separators"),
            pytest.param("XDAEMONIZE=1\nDAEMONIZE\n", "XDAEMONIZE=1\nDAEMONIZE\n", id="lines that only look like it"),
            pytest.param("DAEMONIZE=1\nlast", "DAEMONIZE=0\nlast\n", id="no newline at the end"),
        ],
    )
    def test_odd_lines(self, stock, expected):
        assert render(stock, settings(), "570.1").text.startswith(expected)

    def test_a_last_line_without_newline_keeps_having_none_when_nothing_is_appended(self):
        complete = render(None, settings(), "570.1").text.removesuffix("\n").replace("DAEMONIZE=0", "DAEMONIZE=1")
        assert render(complete, settings(), "570.1").text == complete.replace("DAEMONIZE=1", "DAEMONIZE=0")

    def test_appended_keys_have_the_line_ending_of_the_file(self):
        assert "\n" not in render("A=1\r\n", settings(), None).text.replace("\r\n", "")

    def test_a_key_that_is_only_commented_out_is_known_and_appended(self):
        rendering = render(STOCK, options(SOMETHING_NEW="2"), "570.124.06")
        assert rendering.problems == ()
        assert "# SOMETHING_NEW=1\n" in rendering.text
        assert effective_options(rendering.text)["SOMETHING_NEW"] == "2"

    def test_a_key_named_within_a_comment_does_not_become_known(self):
        rendering = render("# set NEVER_SEEN=1 for that\n", options(NEVER_SEEN="1"), "570.124.06")
        assert [problem.subject for problem in rendering.problems] == ["NEVER_SEEN"]

    def test_an_unknown_option_is_a_problem_and_is_not_written(self):
        rendering = render(STOCK, options(PARTITION_RAIL_POLICY="symmetric", LOG_LEVEL="3"), "570.124.06")
        (problem,) = rendering.problems
        assert (problem.code, problem.subject) == (Code.CONFIG_KEY_UNKNOWN, "PARTITION_RAIL_POLICY")
        assert "PARTITION_RAIL_POLICY" not in rendering.text
        assert "LOG_LEVEL: 4 -> 3" in rendering.differences

    def test_an_unknown_option_in_the_stock_file_stays(self):
        assert "NOT_OURS = keep   this\t\n" in render(STOCK, settings(), "570.124.06").text

    @pytest.mark.parametrize(
        ("stock", "version", "is_written"),
        [
            pytest.param("", "535.1", True, id="535"),
            pytest.param("", "525.1", False, id="525"),
            pytest.param("", None, False, id="version not known"),
            pytest.param("# DATABASE_PATH=\n", None, True, id="in the stock file"),
        ],
    )
    def test_the_database_path_is_written_where_it_is_known(self, stock, version, is_written):
        rendering = render(stock, settings(), version)
        assert ("DATABASE_PATH" in effective_options(rendering.text)) is is_written
        assert rendering.problems == ()

    def test_the_file_never_asks_for_a_resiliency_restart(self):
        wanted = settings("[fabric_manager]\nfabric_mode = 1\nresiliency_restart = true")
        written = effective_options(render("FABRIC_MODE_RESTART=1\n", wanted, "570.1").text)
        assert (written["FABRIC_MODE"], written["FABRIC_MODE_RESTART"]) == ("1", "0")

    def test_a_stock_file_that_logs_to_syslog_is_corrected_and_no_other_gets_the_key(self):
        assert "LOG_USE_SYSLOG: 1 -> 0" in render("LOG_USE_SYSLOG=1\n", settings(), None).differences
        assert "LOG_USE_SYSLOG" not in render("", settings(), None).text

    def test_differences_are_printable_and_short_whatever_the_stock_file_has(self):
        stock = f"LOG_FILE_NAME=\0\udcff\nDAEMONIZE={'x' * 100_000}\nSTATE_FILE_NAME=\n"
        differences = render(stock, settings(), None).differences
        assert all(text.isprintable() and len(text) < 300 for text in differences)
        assert any(text.startswith("STATE_FILE_NAME: (empty) -> ") for text in differences)

    @given(st.lists(st.sampled_from([*STOCK.splitlines(keepends=True), "DAEMONIZE = 2", "\r\n", "\0\x85=", "=", "#"])))
    def test_rendering_what_was_rendered_changes_nothing(self, lines):
        once = render("".join(lines), options(LOG_LEVEL="3"), "570.124.06")
        twice = render(once.text, options(LOG_LEVEL="3"), "570.124.06")
        assert twice.text == once.text
        assert twice.differences == ()
        assert effective_options(once.text)["DAEMONIZE"] == "0"

    @given(st.text())
    def test_whatever_is_not_an_assignment_stays_in_its_order(self, stock):
        text = render(stock, settings(), "570.124.06").text.partition(APPENDED_COMMENT)[0]
        before, after = ([line for line in lines.split("\n") if line and "=" not in line] for lines in (stock, text))
        assert after == before


class TestReading:
    def test_the_last_active_line_of_a_key_counts(self):
        assert effective_options("A=1\n#A=2\n A = 3 \r\nb=4\nC\n=5\nA B=6\n") == {"A": "3"}

    @pytest.mark.parametrize(
        ("text", "endpoint"),
        [
            ("", (6666, "")),
            ("FM_CMD_PORT_NUMBER=7000\n", (7000, "")),
            ("FM_CMD_PORT_NUMBER=\n", (6666, "")),
            ("FM_CMD_PORT_NUMBER=7000\nFM_CMD_UNIX_SOCKET_PATH=/run/s\n", (None, "/run/s")),
            ("FM_CMD_UNIX_SOCKET_PATH=\n", (6666, "")),
            ("FM_CMD_PORT_NUMBER=65536\n", (None, "")),
            ("FM_CMD_PORT_NUMBER=" + "9" * 5000, (None, "")),
            ("FM_CMD_PORT_NUMBER=\N{SUPERSCRIPT TWO}\n", (None, "")),
        ],
    )
    def test_the_command_endpoint(self, text, endpoint):
        assert command_endpoint(text) == endpoint


@pytest.fixture
def root(tmp_path):
    stock = tmp_path / "usr/local/nvidia/usr/share/nvidia/nvswitch/fabricmanager.cfg"
    stock.parent.mkdir(parents=True)
    stock.write_text(STOCK)
    return HostRoot(str(tmp_path))


def codes(rendered):
    return [(problem.code, problem.subject) for problem in rendered.problems]


class TestPrepare:
    def test_the_file_and_the_directories_that_it_names_are_made(self, root, tmp_path):
        wanted = settings(
            "[fabric_manager]\nlog_file = '/var/log/fm/fm.log'\nstate_file = '/var/lib/fm/state'\n"
            "options = {FM_CMD_UNIX_SOCKET_PATH = '/run/other/socket'}"
        )
        before = os.umask(0)
        try:
            rendered = prepare(root, wanted, "570.124.06")
        finally:
            os.umask(before)
        assert rendered.problems == ()
        assert rendered.path == f"{TREE}/fm.cfg"
        assert rendered.log_file == "/var/log/fm/fm.log"
        assert rendered.log_limit_bytes == 2 << 20
        assert rendered.can_log_stop is False
        for directory in (
            "var",
            "var/log/fm",
            "var/lib/fm",
            f"{TREE[1:]}/database",
            "run/nvidia-fabricmanager",
            "run/other",
        ):
            assert stat.S_IMODE((tmp_path / directory).stat().st_mode) == 0o755, directory
        assert stat.S_IMODE((tmp_path / TREE[1:] / "fm.cfg").stat().st_mode) == 0o644
        text = root.read_text(rendered.path)
        assert text == render(STOCK, wanted, "570.124.06").text
        assert str(tmp_path) not in text

    def test_a_narrow_umask_does_not_lock_clients_out_of_the_run_directory(self, root, tmp_path):
        before = os.umask(0o077)
        try:
            prepare(root, settings(), None)
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "run/nvidia-fabricmanager").stat().st_mode) == 0o755

    def test_a_directory_that_is_there_keeps_its_mode(self, root, tmp_path):
        (tmp_path / "run/nvidia-fabricmanager").mkdir(parents=True)
        (tmp_path / "run/nvidia-fabricmanager").chmod(0o700)
        prepare(root, settings(), None)
        assert stat.S_IMODE((tmp_path / "run/nvidia-fabricmanager").stat().st_mode) == 0o700

    def test_an_unchanged_file_is_not_written_again(self, root):
        first = prepare(root, settings(), "570.124.06")
        before = root.status(first.path)
        assert prepare(root, settings(), "570.124.06") == first
        assert root.status(first.path).st_ino == before.st_ino

    def test_a_changed_file_and_one_that_others_may_write_are_replaced(self, root, tmp_path):
        path = tmp_path / TREE[1:] / "fm.cfg"
        prepare(root, settings(), "570.124.06")
        good = path.read_bytes()
        path.write_bytes(good + b"LOG_LEVEL=0\n")
        prepare(root, settings(), "570.124.06")
        assert path.read_bytes() == good
        path.chmod(0o666)
        prepare(root, settings(), "570.124.06")
        assert stat.S_IMODE(path.stat().st_mode) == 0o644

    def test_bytes_that_are_not_utf_8_come_out_as_they_went_in(self, root, tmp_path):
        stock = tmp_path / settings().fabric_manager.stock_config[1:]
        stock.write_bytes(b"# caf\xe9 \xe2\x80\x93\nLOG_LEVEL=4\n")
        rendered = prepare(root, settings(), None)
        assert root.read_bytes(rendered.path).startswith(b"# caf\xe9 \xe2\x80\x93\nLOG_LEVEL=4\n")

    def test_a_missing_stock_file_is_rendered_as_an_empty_one(self, root, tmp_path):
        (tmp_path / settings().fabric_manager.stock_config[1:]).unlink()
        rendered = prepare(root, settings(), None)
        assert rendered.problems == ()
        assert rendered.log_limit_bytes == 1024 << 20
        assert effective_options(root.read_text(rendered.path))["DAEMONIZE"] == "0"

    @pytest.mark.parametrize("kind", ["directory", "huge"])
    def test_a_stock_file_that_cannot_be_read_is_a_problem_and_nothing_is_written(self, root, tmp_path, kind):
        path = settings().fabric_manager.stock_config
        (tmp_path / path[1:]).unlink()
        if kind == "directory":
            (tmp_path / path[1:]).mkdir()
        else:
            (tmp_path / path[1:]).write_bytes(b"#" * ((1 << 20) + 1))
        rendered = prepare(root, settings(), None)
        assert codes(rendered) == [(Code.CONFIG_UNWRITABLE, path)]
        assert root.status(rendered.path) is None

    @pytest.mark.parametrize("kind", ["symlink", "dangling symlink", "directory", "fifo"])
    def test_only_a_regular_file_is_replaced(self, root, tmp_path, kind):
        path = tmp_path / TREE[1:] / "fm.cfg"
        target = tmp_path / "target"
        match kind:
            case "directory":
                path.mkdir()
            case "fifo":
                os.mkfifo(path)
            case _:
                path.symlink_to(target)
        if kind == "symlink":
            target.write_text("mine")
        mode = path.lstat().st_mode
        assert codes(prepare(root, settings(), None)) == [(Code.CONFIG_UNWRITABLE, f"{TREE}/fm.cfg")]
        assert path.lstat().st_mode == mode
        assert not target.exists() or target.read_text() == "mine"

    def test_the_stock_file_is_not_replaced_by_whatever_name_it_is_reached(self, root, tmp_path):
        (tmp_path / "alias").symlink_to(tmp_path / TREE[1:] / "usr/share/nvidia/nvswitch")
        wanted = settings('fabric_manager.config = "/alias/fabricmanager.cfg"')
        assert codes(prepare(root, wanted, None)) == [(Code.CONFIG_UNWRITABLE, "/alias/fabricmanager.cfg")]
        assert root.read_text("/alias/fabricmanager.cfg") == STOCK

    def test_a_directory_that_cannot_be_made_is_named_and_the_others_are_made(self, root, tmp_path):
        (tmp_path / "blocked").write_text("a file")
        wanted = settings("[fabric_manager]\nlog_file = '/blocked/logs/fm.log'\nconfig = '/blocked/fm.cfg'")
        rendered = prepare(root, wanted, None)
        assert codes(rendered) == [
            (Code.CONFIG_UNWRITABLE, "/blocked"),
            (Code.CONFIG_UNWRITABLE, "/blocked/logs"),
            (Code.CONFIG_UNWRITABLE, "/blocked/fm.cfg"),
        ]
        assert root.is_directory("/run/nvidia-fabricmanager")

    def test_unknown_options_are_problems_of_the_whole(self, root):
        assert codes(prepare(root, options(NEVER_SEEN="1"), "570.1")) == [(Code.CONFIG_KEY_UNKNOWN, "NEVER_SEEN")]

    @pytest.mark.parametrize(
        ("values", "log_file", "can_stop", "limit_bytes"),
        [
            pytest.param({"LOG_MAX_ROTATE_COUNT": "0"}, "/l", True, 2 << 20, id="no rotation"),
            pytest.param({"LOG_MAX_ROTATE_COUNT": "1"}, "/l", False, 2 << 20, id="rotation"),
            pytest.param({"LOG_MAX_ROTATE_COUNT": "0"}, "", False, 2 << 20, id="no log file"),
            pytest.param({"LOG_FILE_MAX_SIZE": "7"}, "/l", False, 7 << 20, id="other size"),
            pytest.param({"LOG_FILE_MAX_SIZE": "much"}, "/l", False, 1024 << 20, id="no number"),
        ],
    )
    def test_what_is_said_of_the_log(self, root, values, log_file, can_stop, limit_bytes):
        wanted = options(**values)
        wanted = replace(wanted, fabric_manager=replace(wanted.fabric_manager, log_file=log_file))
        rendered = prepare(root, wanted, "570.124.06")
        assert (rendered.log_file, rendered.can_log_stop, rendered.log_limit_bytes) == (log_file, can_stop, limit_bytes)
