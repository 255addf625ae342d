"""Whether Fabric Manager can resume from its state file."""

import os
from pathlib import Path

import pytest

from fmsupervisor.fabric_manager.state_file import why_unusable
from fmsupervisor.host.root import HostRoot

PATH = "/var/lib/nvidia-fabricmanager/fabricmanager.state"


@pytest.fixture
def file(tree) -> Path:
    """What Fabric Manager leaves."""
    tree.write(PATH, "partitions")
    made = Path(tree.root.path(PATH))
    made.chmod(0o644)
    return made


def link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


CHANGES = {
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_text(""),
    "a symbolic link": link,
    "a FIFO": fifo,
    "a second name": lambda file: os.link(file, file.with_name("other")),
    "writable by its group": lambda file: file.chmod(0o664),
    "writable by all": lambda file: file.chmod(0o646),
}


def test_a_plain_file_is_used(tree, file: Path) -> None:
    assert why_unusable(tree.root, PATH) == ""


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_anything_else_is_not_and_the_reason_is_told(tree, file: Path, change) -> None:
    change(file)
    assert PATH in why_unusable(tree.root, PATH)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_not_used(tree, file: Path) -> None:
    os.chown(file, 12345, 12345)
    assert "12345" in why_unusable(tree.root, PATH)


def test_what_cannot_be_looked_at_is_not_used(tree) -> None:
    tree.unreadable("/var/lib/nvidia-fabricmanager")
    assert why_unusable(HostRoot(tree.root.directory), PATH)
