"""The settings file: what is accepted, how mistakes are told, and the texts made from the declarations."""

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmsupervisor.config import LoadedSettings, load, load_text, render_default, render_effective, render_reference
from fmsupervisor.config_schema import keys, value_of
from fmsupervisor.errors import ConfigError
from fmsupervisor.settings import Settings

REPOSITORY = Path(__file__).parents[2]

EVERYTHING = """\
layout = "packaged"
prefix = "/opt/nv//"

[module]
parameters = ["NVreg_A=1", 'NVreg_RegistryDwords="a=1; b=2"']

[switches]
expected = 4
deadline_seconds = 60

[device_nodes]
manage = []
mode = "660"

[fabric_manager]
config = "{prefix}/etc/fm.cfg"
log_file = ""
fabric_mode = 1
resiliency_restart = true

[fabric_manager.options]
LOG_LEVEL = 3
FM_STAY_RESIDENT_ON_FAILURES = false
UNIX_SOCKET_PATH = ""
DAEMONIZE = "0"
"""


def errors_of(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_text(text, "f.toml")
    return str(caught.value).splitlines()


def loaded_or_error(text: str) -> LoadedSettings | ConfigError:
    try:
        return load_text(text, "f.toml")
    except ConfigError as error:
        return error


class TestDefaults:
    def test_an_empty_file_gives_the_tree_layout_with_expanded_paths(self):
        loaded = load_text("", "f.toml")
        assert loaded.settings.fabric_manager.binary == "/usr/local/nvidia/usr/bin/nv-fabricmanager"
        assert loaded.settings.fabric_manager.library_paths[0] == "/usr/local/nvidia/usr/lib64"
        assert set(loaded.sources.values()) == {"default"}
        assert set(loaded.sources) == {key.path for key in keys()}

    def test_the_packaged_layout_switches_its_defaults_and_says_so(self):
        loaded = load_text('layout = "packaged"', "f.toml")
        assert loaded.settings.module.search_path == "/lib/modules"
        assert loaded.settings.fabric_manager.library_paths == ()
        assert loaded.sources["module.search_path"] == 'default for layout "packaged"'
        assert loaded.sources["module.load"] == "default"
        assert loaded.sources["layout"] == "f.toml:1"

    @pytest.mark.parametrize("layout", ["tree", "packaged"])
    def test_no_placeholder_is_left(self, layout):
        settings = load_text(f'layout = "{layout}"', "f.toml").settings
        assert not [key.path for key in keys() if "{" in str(value_of(settings, key)).strip("{}")]

    def test_settings_are_hashable_and_equal_settings_hash_alike(self):
        first, second = (load_text(EVERYTHING, "f.toml").settings for _ in range(2))
        assert first == second
        assert hash(first) == hash(second)
        assert first != load_text("", "f.toml").settings

    def test_every_number_has_a_lower_bound_which_messages_and_documentation_name(self):
        numbers = [key for key in keys() if key.type in (int, float, int | str)]
        assert [key.path for key in numbers if key.declared.metadata["minimum"] is None] == []


class TestValues:
    def test_values_of_every_kind_are_read_with_their_places(self):
        loaded = load_text(EVERYTHING, "f.toml")
        settings = loaded.settings
        assert settings.prefix == "/opt/nv"
        assert settings.module.parameters == ("NVreg_A=1", 'NVreg_RegistryDwords="a=1; b=2"')
        assert settings.switches.expected == 4
        assert settings.switches.deadline_seconds == 60.0
        assert isinstance(settings.switches.deadline_seconds, float)
        assert settings.device_nodes.manage == ()
        assert settings.fabric_manager.config == "/opt/nv/etc/fm.cfg"
        assert settings.fabric_manager.log_file == ""
        assert dict(settings.fabric_manager.options) == {
            "LOG_LEVEL": "3",
            "FM_STAY_RESIDENT_ON_FAILURES": "0",
            "UNIX_SOCKET_PATH": "",
            "DAEMONIZE": "0",
        }
        assert loaded.sources["switches.expected"] == "f.toml:8"
        assert loaded.sources["fabric_manager.options"] == "f.toml:21"
        assert loaded.sources["fabric_manager.options.LOG_LEVEL"] == "f.toml:22"

    @pytest.mark.parametrize(
        ("text", "source"),
        [
            pytest.param("switches.expected = 4", "f.toml:1", id="dotted"),
            pytest.param("\n[ \"switches\" ]\n'expected' = 4", "f.toml:3", id="quoted"),
            pytest.param("\nswitches = {expected = 4}", "f.toml:2", id="inline table"),
            pytest.param(
                'prefix = """/a"""\n[switches]\nexpected=4 # [x]', "f.toml:3", id="after a text in three quotes"
            ),
            pytest.param("[fabric_manager.options]\nA1 = '''\\\n[switches]\nexpected = 9'''", None, id="inside a text"),
        ],
    )
    def test_the_line_of_a_key_is_found(self, text, source):
        if source is None:
            assert errors_of(text)[0].startswith("f.toml:2: fabric_manager.options.A1 is ")
        else:
            assert load_text(text, "f.toml").sources["switches.expected"] == source

    @pytest.mark.parametrize("listen", ["[::]:9752", "localhost:1", "0.0.0.0:65535", "127.0.0.1:0"])
    def test_addresses(self, listen):
        assert load_text(f'metrics.listen = "{listen}"', "f.toml").settings.metrics.listen == listen

    def test_a_prefix_of_one_slash_gives_plain_paths(self):
        settings = load_text('prefix = "/"', "f.toml").settings
        assert (settings.prefix, settings.fabric_manager.config) == ("/", "/fm.cfg")


MISTAKES = [
    ("switches.expected = true", 'switches.expected is true; allowed: "auto" or an integer from 1 to 64'),
    ("switches.expected = 0", 'switches.expected is 0; allowed: "auto" or an integer from 1 to 64'),
    ("switches.expected = 4.0", 'switches.expected is 4.0; allowed: "auto" or an integer from 1 to 64'),
    ('switches.expected = "many"', 'switches.expected is "many"; allowed: "auto" or an integer from 1 to 64'),
    ("module.load = 1", "module.load is 1; allowed: true or false"),
    ('module.load = "yes"', 'module.load is "yes"; allowed: true or false'),
    ("fabric_manager.fabric_mode = 3", "fabric_manager.fabric_mode is 3; allowed: an integer from 0 to 2"),
    ("fabric_manager.fabric_mode = true", "fabric_manager.fabric_mode is true; allowed: an integer from 0 to 2"),
    ("restart.jitter_seconds = nan", "restart.jitter_seconds is nan; allowed: a number of at least 0"),
    ("restart.jitter_seconds = inf", "restart.jitter_seconds is inf; allowed: a number of at least 0"),
    ("restart.jitter_seconds = -1", "restart.jitter_seconds is -1; allowed: a number of at least 0"),
    ("restart.jitter_seconds = 1e300", "allowed: a number of at least 0 and at most 1000000000"),
    ("restart.jitter_seconds = 2026-01-01", "restart.jitter_seconds is 2026-01-01; allowed: a number of at least 0"),
    ('layout = "Tree"', 'layout is "Tree"; allowed: "tree" or "packaged"'),
    ('device_nodes.manage = ["nvidia0"]', 'device_nodes.manage is ["nvidia0"]; allowed: a list; each item "nvidia-'),
    ("device_nodes.manage = [1]", "device_nodes.manage is [1]; allowed: a list; each item"),
    ('device_nodes.manage = "nvidiactl"', 'device_nodes.manage is "nvidiactl"; allowed: a list'),
    ('device_nodes.mode = "0888"', "allowed: octal permissions"),
    ('device_nodes.mode = "4755"', "allowed: octal permissions"),
    ("device_nodes.mode = 0o660", "device_nodes.mode is 432; allowed: octal permissions"),
    ('device_nodes.owner = ""', 'device_nodes.owner is ""; allowed: text that is not empty'),
    ('device_nodes.owner = "ro\\u0000ot"', 'device_nodes.owner is "ro\\u0000ot"; allowed: text'),
    ('prefix = "usr"', 'prefix is "usr"; allowed: an absolute path'),
    ('prefix = ""', 'prefix is ""; allowed: an absolute path'),
    ('prefix = "{prefix}"', "no other placeholder than {prefix}"),
    ('fabric_manager.binary = "{HOME}/fm"', "no other placeholder than {prefix}"),
    ('fabric_manager.binary = "/a/../b"', 'allowed: an absolute path without ".."'),
    (f'fabric_manager.log_file = "/{"a" * 256}"', "at most 256 bytes"),
    ('fabric_manager.config = "{prefix}//usr/share/nvidia/nvswitch/fabricmanager.cfg"', "another file than"),
    ("fabric_manager.resiliency_restart = true", "true only with fabric_manager.fabric_mode 1 or 2"),
    ("restart.maximum_delay_seconds = 0.5", "at least restart.initial_delay_seconds"),
    ('metrics.listen = "9752"', "allowed: HOST:PORT"),
    ('metrics.listen = "a:65536"', "allowed: HOST:PORT"),
    ('metrics.listen = "::1:9752"', "allowed: HOST:PORT"),
    ('module.parameters = ["NVreg_A"]', "each item NAME=VALUE"),
    ('module.parameters = ["A=1 B=2"]', "each item NAME=VALUE"),
    ('module.parameters = ["A=1\\n"]', "without control characters"),
    ("fabric_manager.options.log_level = 1", "allowed: names of capital letters"),
    ("fabric_manager.options.LOG_LEVEL = 1.5", "allowed: one line of text"),
    ('fabric_manager.options.LOG_LEVEL = "1\\nDAEMONIZE=1"', "allowed: one line of text"),
    ('fabric_manager.options.LOG_LEVEL = " 1"', "allowed: one line of text"),
    ("fabric_manager.options.DAEMONIZE = 1", "allowed: 0 only"),
    ("fabric_manager.options.LOG_USE_SYSLOG = true", "allowed: 0 only"),
    ('fabric_manager.options.FABRIC_MODE = "1"', "allowed: the setting fabric_manager.fabric_mode"),
    ('fabric_manager.options.LOG_FILE_NAME = ""', "allowed: the setting fabric_manager.log_file"),
    (f'fabric_manager.options.FM_CMD_UNIX_SOCKET_PATH = "/{"a" * 107}"', "at most 107 bytes"),
    ("fabric_manager.options = []", "fabric_manager.options is []; allowed: a table of KEY"),
    ("switches = 3", "switches is 3; allowed: a table, [switches]"),
    ("[[switches]]", "allowed: a table, [switches]"),
    ("prefix.a = 1", "prefix is a table; allowed: an absolute path"),
    ("switches.expectd = 4", "unknown key switches.expectd; did you mean switches.expected?"),
    ("[switch]", "unknown key switch; did you mean [switches]?"),
    ("expected = 4", "unknown key expected; did you mean switches.expected?"),
    ("logging.log_file = 4", "unknown key logging.log_file; did you mean fabric_manager.log_file?"),
    ("service.zzz = 4", "unknown key service.zzz; allowed: service.ready_when, service.state_directory"),
]


class TestMistakes:
    @pytest.mark.parametrize(("text", "expected"), MISTAKES, ids=[text[:60] for text, _ in MISTAKES])
    def test_each_names_file_line_key_found_and_allowed_on_one_line(self, text, expected):
        (line,) = errors_of(text)
        assert line.startswith("f.toml:1: ")
        assert expected in line
        assert len(line) < 400

    def test_a_key_with_escapes_is_told_with_escapes_and_without_a_line(self):
        assert errors_of('"a\\nb" = 4')[0].startswith('f.toml: unknown key "a\\u000ab"; allowed: layout, prefix')

    def test_all_are_told_at_once_in_the_order_of_the_file(self):
        text = "lay = 1\n[restart]\nmaximum_delay_seconds = 0\npolicy = 'never!'\n[switches]\nexpected = 99\n"
        assert [line.split(": ")[0] for line in errors_of(text)] == ["f.toml:1", "f.toml:3", "f.toml:4", "f.toml:6"]

    def test_a_rule_between_two_keys_is_told_at_the_one_that_is_in_the_file(self):
        assert errors_of("\n[restart]\ninitial_delay_seconds = 100")[0].startswith("f.toml:3: restart.maximum_delay")

    def test_a_rule_is_not_applied_to_a_value_that_is_wrong_by_itself(self):
        assert len(errors_of("[restart]\ninitial_delay_seconds = 'a'\nmaximum_delay_seconds = 0")) == 1

    @pytest.mark.parametrize(
        ("line", "hint"),
        [
            ("mode = 0666", 'permissions are text: "0666"'),
            ("load = yes", "allowed: true or false, in lower case"),
            ("load = True  # for now", "allowed: true or false, in lower case"),
            ("policy = when-no-guests", 'text stands in double quotes: "when-no-guests"'),
            ("prefix = /usr/local/nvidia", 'text stands in double quotes: "/usr/local/nvidia"'),
            ('prefix = "/usr', ""),
            ("parameters = [1, x]", ""),
            ("expected", ""),
        ],
    )
    def test_the_usual_slips_of_syntax_get_a_hint(self, line, hint):
        with pytest.raises(ConfigError) as caught:
            load_text(f"[module]\n{line}\n", "f.toml")
        message = str(caught.value)
        assert message.startswith("f.toml:2:")
        assert message.endswith(hint)
        assert (";" in message) is bool(hint)

    @pytest.mark.parametrize(
        ("text", "start"),
        [
            pytest.param("a = 1\nb 2", "f.toml:2:3: not valid TOML: ", id="place known"),
            pytest.param("a = 1\n[b", "f.toml:2: not valid TOML: ", id="end of document"),
            pytest.param("a = 1\na = 2", "f.toml:2:", id="key twice"),
            pytest.param("a = " + "[" * 20000, "f.toml: not valid TOML: nested too deeply", id="nested"),
            pytest.param("a = " + "9" * 5000, "f.toml: not valid TOML: ", id="digits"),
            pytest.param("\0", "f.toml:1:1: not valid TOML: ", id="NUL"),
        ],
    )
    def test_syntax_errors_have_line_and_column_where_known(self, text, start):
        (line,) = errors_of(text)
        assert line.startswith(start)

    @given(st.text())
    def test_no_text_makes_it_fail_in_another_way(self, text):
        outcome = loaded_or_error(text)
        assert isinstance(outcome, LoadedSettings) or str(outcome)

    @given(
        st.sampled_from(keys()),
        st.sampled_from(
            ["true", "-1", "1", "1e9", "nan", "''", "'/a'", "'auto'", "[]", "['x']", "{}", "{A=1}", "07:32:00"]
        ),
    )
    def test_every_key_accepts_or_refuses_every_kind_of_value(self, key, value):
        outcome = loaded_or_error(f"{key.path} = {value}")
        if isinstance(outcome, LoadedSettings):
            assert outcome.sources[key.path] == "f.toml:1"
        else:
            assert key.path in str(outcome)


class TestFiles:
    def test_a_missing_file_is_all_defaults_unless_it_is_required(self, tmp_path):
        path = str(tmp_path / "none.toml")
        assert load(path, required=False) == load_text("", path)
        with pytest.raises(ConfigError, match=r"cannot read .*none\.toml"):
            load(path, required=True)

    def test_a_file_is_read_and_named_in_the_sources(self, tmp_path):
        path = tmp_path / "f.toml"
        path.write_text("[switches]\nexpected = 6\n")
        assert load(str(path), required=True).sources["switches.expected"] == f"{path}:2"

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            pytest.param(b"a = 1\nb = '\xff'\n", "f.toml:2: not UTF-8", id="not UTF-8"),
            pytest.param(b"#" * ((1 << 20) + 1), "larger than 1 MiB", id="huge"),
        ],
    )
    def test_contents_that_cannot_be_settings_are_refused(self, tmp_path, content, reason):
        path = tmp_path / "f.toml"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=re.escape(reason)):
            load(str(path), required=False)

    def test_a_directory_and_a_fifo_are_refused_without_waiting(self, tmp_path):
        os.mkfifo(tmp_path / "fifo")
        for path in (tmp_path, tmp_path / "fifo"):
            with pytest.raises(ConfigError, match="cannot read"):
                load(str(path), required=False)

    def test_a_path_through_a_file_is_an_error_and_not_a_missing_file(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match="Not a directory"):
            load(str(tmp_path / "file" / "f.toml"), required=False)

    def test_a_name_with_a_nul_is_refused(self):
        with pytest.raises(ConfigError, match="cannot read"):
            load("/a\0b", required=True)

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_an_unreadable_file_is_refused_even_at_the_default_path(self, tmp_path):
        path = tmp_path / "f.toml"
        path.write_text("")
        path.chmod(0)
        with pytest.raises(ConfigError, match="Permission denied"):
            load(str(path), required=False)


class TestTexts:
    @pytest.mark.parametrize("text", ["", 'layout = "packaged"', EVERYTHING], ids=["default", "packaged", "everything"])
    def test_the_effective_file_loads_back_to_the_same_settings(self, text):
        loaded = load_text(text, "odd\nname.toml")
        assert load_text(render_effective(loaded), "again").settings == loaded.settings

    def test_every_line_of_the_effective_file_says_where_it_came_from(self):
        lines = render_effective(load_text(EVERYTHING, "f.toml")).splitlines()
        assert [line for line in lines if " = " in line and not re.search(r"  # (f\.toml:\d+|default.*)$", line)] == []
        assert 'LOG_LEVEL = "3"  # f.toml:22' in lines

    def test_the_default_file_loads_back_to_the_defaults(self):
        defaults = load_text("", "f.toml").settings
        assert load_text(render_default(), "f.toml").settings == defaults

    def test_the_default_file_has_every_key_and_loads_to_the_defaults_with_all_of_them_in_force(self):
        text = re.sub(r"(?m)^#(?=[a-z_]+ = )", "", render_default())
        loaded = load_text(text, "f.toml")
        assert loaded.settings == load_text("", "f.toml").settings
        assert [path for path, source in loaded.sources.items() if source == "default"] == []

    @pytest.mark.parametrize(
        ("path", "render"),
        [("tests/golden/default.toml", render_default), ("docs/settings.md", render_reference)],
        ids=["default.toml", "settings.md"],
    )
    def test_the_generated_files_are_current(self, path, render):
        if os.environ.get("RENEW_GOLDEN"):
            (REPOSITORY / path).parent.mkdir(parents=True, exist_ok=True)
            (REPOSITORY / path).write_text(render(), encoding="utf-8")
        assert (REPOSITORY / path).read_text(encoding="utf-8") == render()

    def test_the_reference_has_every_key(self):
        text = render_reference()
        assert [key.path for key in keys() if f"| `{key.name}` |" not in text] == []


def test_the_declared_dataclasses_and_the_loaded_defaults_differ_in_expanded_paths_only():
    declared, loaded = Settings(), load_text("", "f.toml").settings
    different = [key for key in keys() if value_of(declared, key) != value_of(loaded, key)]
    assert different
    assert [key.path for key in different if "{prefix}" not in str(value_of(declared, key))] == []
