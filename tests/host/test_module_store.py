"""host.module_store: the map of modules is kept in a file, and only what can be believed comes back."""

import json

import pytest

from fmsupervisor.errors import ActionFailed
from fmsupervisor.facts import ModuleMap
from fmsupervisor.host.module_store import load, save, store_path

PATH = "/usr/local/nvidia/fmsupervisor-modules.json"
KNOWN = ModuleMap({"0000:1b:00.0": 1, "0000:43:00.0": 2}, frozenset({"0000:52:00.0"}))
MACHINE = "/sys/class/dmi/id/product_uuid"


@pytest.fixture
def host(tree):
    tree.directory("/usr/local/nvidia")
    tree.write(MACHINE, "0A1B2C3D-0000-0000-0000-000000000001\n")
    return tree


def test_it_stands_beside_the_rendered_configuration():
    assert store_path("/usr/local/nvidia/fm.cfg") == PATH


def test_what_was_saved_is_loaded(host):
    save(host.root, PATH, KNOWN)
    assert load(host.root, PATH) == KNOWN


def test_a_machine_without_a_number_keeps_it_too(host):
    host.unreadable(MACHINE)
    save(host.root, PATH, KNOWN)
    assert load(host.root, PATH) == KNOWN


def test_the_map_of_another_machine_is_not_believed(host):
    save(host.root, PATH, KNOWN)
    host.write(MACHINE, "0A1B2C3D-0000-0000-0000-000000000002\n")
    assert load(host.root, PATH) is None


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"\0\xff",
        b"[1]",
        b'{"schema": 1, "machine"',
        b"[" * 50_000,
        b'{"schema": 2, "machine": "0a1b2c3d-0000-0000-0000-000000000001", "module_ids": {}, "contradicted": []}',
        b'{"schema": 1, "machine": "0a1b2c3d-0000-0000-0000-000000000001", "module_ids": [], "contradicted": []}',
        b'{"schema": 1, "machine": "0a1b2c3d-0000-0000-0000-000000000001", "module_ids": {}, "contradicted": 1}',
        b'"' + b"x" * 200_000,
    ],
    ids=["absent", "empty", "binary", "a list", "cut", "deep", "another schema", "no table", "no list", "huge"],
)
def test_a_file_that_cannot_be_used_is_none(host, content):
    if content is not None:
        host.write(PATH, content)
    assert load(host.root, PATH) is None


def test_an_unreadable_file_is_none(host):
    host.unreadable(PATH)
    assert load(host.root, PATH) is None


def test_entries_that_are_none_are_left_out(host):
    save(host.root, PATH, KNOWN)
    record = json.loads(host.root.read_text(PATH))
    record["module_ids"] |= {"../etc": 3, "0000:61:00.0": "4", "0000:62:00.0": True}
    record["contradicted"] += [7, "nonsense"]
    host.write(PATH, json.dumps(record))
    assert load(host.root, PATH) == KNOWN


def test_a_directory_that_is_not_there_is_a_failed_action(tree):
    with pytest.raises(ActionFailed):
        save(tree.root, PATH, KNOWN)
