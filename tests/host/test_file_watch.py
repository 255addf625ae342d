"""Noticing changes of files, on a real inotify."""

import os
import select
import shutil

import pytest

from fmsupervisor.errors import CannotObserve
from fmsupervisor.host.file_watch import FileWatch
from fmsupervisor.host.root import HostRoot

CONFIG = "/etc/fms/fmsupervisor.toml"


class Host:
    """A directory tree and the watch on it."""

    def __init__(self, directory):
        self.directory = directory
        self.watch = FileWatch(HostRoot(str(directory)))

    def real(self, logical):
        return self.directory / logical.lstrip("/")

    def write(self, logical, text="x"):
        real = self.real(logical)
        real.parent.mkdir(parents=True, exist_ok=True)
        real.write_text(text)

    def changed(self):
        """What was reported; events of this process's own actions are queued before the action returns."""
        found = frozenset()
        while select.select([self.watch], [], [], 0)[0]:
            found |= self.watch.drain()
        return found


@pytest.fixture
def host(tmp_path):
    host = Host(tmp_path)
    yield host
    host.watch.close()


@pytest.fixture
def watched(host):
    """CONFIG exists and is watched."""
    host.write(CONFIG)
    host.watch.set_paths([CONFIG])
    return host


def append(host):
    with host.real(CONFIG).open("a") as file:
        file.write("y")


def replace(host):
    host.write("/etc/fms/new")
    host.real("/etc/fms/new").replace(host.real(CONFIG))


def remove(host):
    host.real(CONFIG).unlink()


def rename_away(host):
    host.real(CONFIG).rename(host.real("/etc/old"))


def change_mode(host):
    host.real(CONFIG).chmod(0o600)


def truncate(host):
    os.truncate(host.real(CONFIG), 0)


def move_directory(host):
    host.real("/etc/fms").rename(host.real("/etc/other"))


def move_directory_above(host):
    host.real("/etc").rename(host.real("/old-etc"))


def remove_directory(host):
    shutil.rmtree(host.real("/etc"))


CHANGES = [
    append,
    replace,
    remove,
    rename_away,
    change_mode,
    truncate,
    move_directory,
    move_directory_above,
    remove_directory,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_reported_and_so_is_the_next(watched, change):
    change(watched)
    assert watched.changed() == {CONFIG}
    assert watched.changed() == frozenset()
    watched.write(CONFIG, "again")
    assert watched.changed() == {CONFIG}


def test_reading_is_no_change(watched):
    watched.real(CONFIG).read_text()
    os.listdir(watched.real("/etc/fms"))
    watched.real(CONFIG).stat()
    assert watched.changed() == frozenset()


def test_other_files_are_not_reported(watched):
    watched.write("/etc/fms/other")
    watched.write("/etc/another")
    assert watched.changed() == frozenset()


def test_writing_to_a_neighbour_does_not_even_wake(watched):
    with watched.real("/etc/fms/log").open("w") as file:
        watched.changed()
        file.write("x")
        file.flush()
        assert select.select([watched.watch], [], [], 0)[0] == []


def test_a_missing_file_below_missing_directories_is_noticed_when_it_appears(host):
    host.watch.set_paths([CONFIG])
    host.real("/etc").mkdir()
    assert host.changed() == {CONFIG}
    host.real("/etc/fms").mkdir()
    assert host.changed() == {CONFIG}
    host.real(CONFIG).touch()
    assert host.changed() == {CONFIG}
    append(host)
    assert host.changed() == {CONFIG}


def test_a_whole_tree_that_appears_at_once_is_watched(host):
    host.watch.set_paths([CONFIG])
    host.write("/build/fms/fmsupervisor.toml")
    host.real("/build").rename(host.real("/etc"))
    assert host.changed() == {CONFIG}
    append(host)
    assert host.changed() == {CONFIG}


def test_directories_that_come_and_go_many_times_are_followed(host):
    host.watch.set_paths([CONFIG])
    for _ in range(20):
        host.write(CONFIG)
        assert host.changed() == {CONFIG}
        append(host)
        assert host.changed() == {CONFIG}
        shutil.rmtree(host.real("/etc"))
        assert host.changed() == {CONFIG}


def test_a_log_that_is_renamed_and_begun_anew_is_followed(host):
    log = "/var/log/fabricmanager.log"
    host.write(log)
    host.watch.set_paths([log])
    host.real(log).rename(host.real("/var/log/fabricmanager.log.1"))
    host.write(log)
    assert host.changed() == {log}
    with host.real(log).open("a") as file:
        file.write("line\n")
    assert host.changed() == {log}


def test_a_directory_is_watched_for_its_names(host):
    host.write("/lib/modules/6.12/nvidia.ko")
    host.watch.set_paths(["/lib/modules/6.12", "/lib/modules/6.12/nvidia.ko"])
    host.write("/lib/modules/6.12/other.ko")
    assert host.changed() == {"/lib/modules/6.12"}


def test_a_directory_is_watched_for_files_that_have_been_written_in_place(host):
    """A file that is copied or extracted appears empty; what matters is that it is complete."""
    host.write("/lib/modules/6.12/nvidia.ko")
    host.watch.set_paths(["/lib/modules/6.12"])
    with host.real("/lib/modules/6.12/nvidia.ko").open("w") as file:
        file.write("longer")
        file.flush()
        assert host.changed() == frozenset()
    assert host.changed() == {"/lib/modules/6.12"}


def test_several_paths_are_told_apart(host):
    paths = ["/etc/a", "/etc/b", "/run/c", "/"]
    host.write("/etc/a")
    host.watch.set_paths(paths)
    host.write("/etc/b")
    assert host.changed() == {"/etc/b"}
    host.write("/run/c")
    assert host.changed() == {"/run/c", "/"}


def test_a_path_that_is_no_longer_wanted_is_not_reported(watched):
    watched.watch.set_paths(["/etc/else"])
    append(watched)
    assert watched.changed() == frozenset()
    watched.write("/etc/else")
    assert watched.changed() == {"/etc/else"}


def test_a_file_in_place_of_a_directory_does_not_confuse(host):
    host.write("/etc")
    host.watch.set_paths([CONFIG])
    host.real("/etc").unlink()
    assert host.changed() == {CONFIG}
    host.write(CONFIG)
    assert host.changed() == {CONFIG}


def test_after_an_overflow_everything_may_have_changed(host):
    with open("/proc/sys/fs/inotify/max_queued_events", encoding="ascii") as file:
        limit = int(file.read())
    if limit > 50_000:
        pytest.skip("the queue is too long to overflow it quickly")
    host.write("/etc/a")
    host.write("/etc/b")
    host.watch.set_paths(["/etc/a", "/etc/b", "/run/c"])
    real = [os.fspath(host.real(path)) for path in ("/etc/a", "/etc/b")]
    for number in range(limit + 2):
        os.chmod(real[number % 2], 0o600 + number % 64)
    found = frozenset()
    while select.select([host.watch], [], [], 0)[0]:
        found |= host.watch.drain()
    assert found == {"/etc/a", "/etc/b", "/run/c"}
    host.write("/run/c")
    assert host.changed() == {"/run/c"}


def test_a_kernel_that_refuses_cannot_be_observed(host):
    host.watch.close()
    with pytest.raises(CannotObserve):
        host.watch.set_paths([CONFIG])
