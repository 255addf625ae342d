"""Which nodes are wanted, how they are made right, and that they never lead out of /dev."""

import ctypes
import errno
import os
import stat
from pathlib import Path

import pytest

from fmsupervisor.errors import CannotObserve, ConfigError
from fmsupervisor.facts import DeviceState, DriverState, DriverView, Host, SwitchDevice, WantedNode
from fmsupervisor.host.device_nodes import ensure_nodes, parse_mode, resolve_owner, wanted_nodes
from fmsupervisor.host.kernel import NodeStatus
from fmsupervisor.host.linux_kernel import LinuxKernel
from fmsupervisor.settings import DeviceNodeSettings

MAJORS = {"nvidia": 195, "nvidiactl": 195, "nvidia-nvswitch": 234, "nvidia-nvlink": 235, "nvidia-caps": 236}
DEFAULTS = DeviceNodeSettings()


def host(majors=MAJORS, probed=("0000:83:00.0", "0000:84:00.0"), minor=0, mode=0o400):
    return Host(
        kernel_release="6.12.0",
        switches=(),
        gpus=(),
        nvlink5_bridges=(),
        module=None,
        probed_switches=probed,
        majors=majors,
        fabric_management_minor=minor,
        fabric_management_mode=mode,
    )


def view(*minors):
    return DriverView(
        tuple(
            SwitchDevice(minor, "SWX-", f"0000:{minor:02x}:00.0", DriverState.STANDBY, DeviceState.STANDBY, 0, None)
            for minor in minors
        )
    )


def wanted(host, driver=None, settings=DEFAULTS):
    return {
        node.path: (node.major, node.minor, node.mode) for node in wanted_nodes(host, driver, settings, uid=0, gid=0)
    }


class TestWanted:
    def test_a_loaded_driver_wants_all_families(self):
        assert wanted(host()) == {
            "/dev/nvidia-nvswitchctl": (234, 255, 0o666),
            "/dev/nvidia-nvswitch0": (234, 0, 0o666),
            "/dev/nvidia-nvswitch1": (234, 1, 0o666),
            "/dev/nvidia-nvlink": (235, 0, 0o666),
            "/dev/nvidiactl": (195, 255, 0o666),
            "/dev/nvidia-caps/nvidia-cap0": (236, 0, 0o400),
        }

    def test_without_a_driver_nothing_is_wanted(self):
        assert wanted(host(majors={}, probed=None, minor=None, mode=None)) == {}

    def test_the_driver_knows_the_minors_better_than_their_number(self):
        paths = wanted(host(), view(5, 0, 2))
        assert [path for path in paths if path[-1].isdecimal() and "switch" in path] == [
            "/dev/nvidia-nvswitch0",
            "/dev/nvidia-nvswitch2",
            "/dev/nvidia-nvswitch5",
        ]

    def test_a_driver_that_has_no_switch_wants_only_its_control_node(self):
        paths = wanted(host(), view())
        assert [path for path in paths if "nvswitch" in path] == ["/dev/nvidia-nvswitchctl"]

    def test_up_to_branch_535_the_major_of_nvidiactl_is_called_nvidia_frontend(self):
        assert wanted(host(majors={"nvidia-frontend": 195})) == {"/dev/nvidiactl": (195, 255, 0o666)}

    @pytest.mark.parametrize(("mode", "expected"), [(None, 0o400), (0o440, 0o440), (0, 0)])
    def test_the_capability_has_the_mode_of_its_proc_file(self, mode, expected):
        assert wanted(host(minor=7, mode=mode))["/dev/nvidia-caps/nvidia-cap7"] == (236, 7, expected)

    def test_the_settings_choose_families_mode_and_owner(self):
        settings = DeviceNodeSettings(manage=("nvidia-nvswitchctl",), mode="0660")
        assert wanted_nodes(host(), None, settings, uid=5, gid=6) == (
            WantedNode("/dev/nvidia-nvswitchctl", 234, 255, 0o660, 5, 6),
        )

    def test_an_empty_list_leaves_dev_alone(self):
        assert wanted(host(), settings=DeviceNodeSettings(manage=())) == {}


class TestSettings:
    def test_owner_and_group_are_names_or_numbers(self):
        assert resolve_owner("root", "root") == (0, 0)
        assert resolve_owner("1000", "44") == (1000, 44)

    @pytest.mark.parametrize(
        ("owner", "group"), [("no-such-user", "root"), ("root", "no-such-group"), ("4294967295", "0"), ("-1", "0")]
    )
    def test_an_owner_that_does_not_exist_is_a_configuration_error(self, owner, group):
        with pytest.raises(ConfigError, match="device_nodes"):
            resolve_owner(owner, group)

    @pytest.mark.parametrize(("text", "mode"), [("0666", 0o666), ("660", 0o660), ("0000", 0)])
    def test_a_mode_is_octal(self, text, mode):
        assert parse_mode(text) == mode

    @pytest.mark.parametrize("text", ["", "0o666", "4755", "0888", "rw", "-666", "06660"])
    def test_other_modes_are_a_configuration_error(self, text):
        with pytest.raises(ConfigError, match=r"device_nodes\.mode"):
            parse_mode(text)


class TableKernel:
    """Statuses by path; what is done is noted, not done."""

    def __init__(self, statuses=(), error=None):
        self.statuses = dict(statuses)
        self.error = error
        self.done = []

    def node_status(self, path):
        found = self.statuses.get(path)
        if isinstance(found, Exception):
            raise found
        return found

    def make_node(self, path, *rest):
        self.done.append(("make", path))
        if self.error:
            raise self.error

    def adjust_node(self, path, *rest):
        self.done.append(("adjust", path))

    def make_node_directory(self, path):
        self.done.append(("directory", path))


NODE = WantedNode("/dev/nvidia-nvswitchctl", 234, 255, 0o666, 0, 0)
RIGHT = NodeStatus("char", 234, 255, 0o666, 0, 0)


class TestOutcomes:
    @pytest.mark.parametrize(
        ("status", "outcome", "done"),
        [
            pytest.param(None, "created", ["make"], id="nothing there"),
            pytest.param(RIGHT, "kept", [], id="right"),
            pytest.param(NodeStatus("char", 233, 255, 0o666, 0, 0), "replaced", ["make"], id="wrong major"),
            pytest.param(NodeStatus("char", 234, 0, 0o666, 0, 0), "replaced", ["make"], id="wrong minor"),
            pytest.param(NodeStatus("char", 234, 255, 0o600, 0, 0), "adjusted", ["adjust"], id="wrong mode"),
            pytest.param(NodeStatus("char", 234, 255, 0o666, 1, 0), "adjusted", ["adjust"], id="wrong owner"),
            pytest.param(NodeStatus("char", 234, 255, 0o666, 0, 1), "adjusted", ["adjust"], id="wrong group"),
            pytest.param(NodeStatus("symlink", 0, 0, 0o777, 0, 0), "refused", [], id="symbolic link"),
            pytest.param(NodeStatus("file", 0, 0, 0o644, 0, 0), "refused", [], id="regular file"),
            pytest.param(NodeStatus("directory", 0, 0, 0o755, 0, 0), "refused", [], id="directory"),
            pytest.param(NodeStatus("other", 234, 255, 0o666, 0, 0), "refused", [], id="socket or block device"),
            pytest.param(CannotObserve("/dev/x", "denied"), "failed", [], id="cannot be looked at"),
        ],
    )
    def test_each_finding_has_one_outcome(self, status, outcome, done):
        kernel = TableKernel({NODE.path: status})
        (result,) = ensure_nodes(kernel, [NODE])
        assert (result.node, result.outcome) == (NODE, outcome)
        assert [verb for verb, _ in kernel.done] == done
        assert bool(result.detail) is (outcome not in ("created", "kept"))

    def test_an_error_of_the_kernel_is_a_result_and_the_next_node_is_tried(self):
        kernel = TableKernel(error=PermissionError(errno.EPERM, "Operation not permitted"))
        results = ensure_nodes(kernel, [NODE, NODE])
        assert [result.outcome for result in results] == ["failed", "failed"]
        assert "Operation not permitted" in results[0].detail

    @pytest.mark.parametrize(
        ("directory", "outcome", "done"),
        [
            (None, "created", ["directory", "make"]),
            (NodeStatus("directory", 0, 0, 0o755, 0, 0), "created", ["make"]),
            (NodeStatus("symlink", 0, 0, 0o777, 0, 0), "refused", []),
        ],
    )
    def test_a_capability_gets_its_directory_unless_something_else_is_there(self, directory, outcome, done):
        kernel = TableKernel({"/dev/nvidia-caps": directory})
        (result,) = ensure_nodes(kernel, [WantedNode("/dev/nvidia-caps/nvidia-cap0", 236, 0, 0o400, 0, 0)])
        assert result.outcome == outcome
        assert [verb for verb, _ in kernel.done] == done


def can_make_nodes(directory):
    """Whether mknod(2) works there: root, and no container that forbids it."""
    probe = directory / "probe"
    try:
        os.mknod(probe, stat.S_IFCHR, os.makedev(1, 3))
    except OSError:
        return False
    probe.unlink()
    return True


@pytest.fixture
def kernel(tree):
    return LinuxKernel(tree.root)


@pytest.fixture
def dev(tree, tmp_path):
    """The /dev of the tree, for tests that make real device nodes."""
    if not can_make_nodes(tmp_path):
        pytest.skip("mknod is not allowed here")
    return Path(tree.root.path("/dev"))


@pytest.mark.root
class TestRealNodes:
    def make(self, kernel, path="/dev/nvidia-nvswitchctl", device=(234, 255), mode=0o666, owner=(0, 0)):
        kernel.make_node(path, *device, mode, *owner)

    def test_a_node_is_made_as_wanted_whatever_the_umask(self, kernel, dev, umask_077):
        self.make(kernel, mode=0o666, owner=(7, 8))
        assert kernel.node_status("/dev/nvidia-nvswitchctl") == NodeStatus("char", 234, 255, 0o666, 7, 8)
        assert os.listdir(dev) == ["nvidia-nvswitchctl"]

    def test_an_old_device_is_replaced_in_one_step(self, kernel, dev):
        self.make(kernel, device=(233, 1))
        held = os.open(dev / "nvidia-nvswitchctl", os.O_PATH)
        self.make(kernel)
        try:
            assert os.fstat(held).st_rdev == os.makedev(233, 1)  # another inode: the old one was not changed
        finally:
            os.close(held)
        assert kernel.node_status("/dev/nvidia-nvswitchctl") == NodeStatus("char", 234, 255, 0o666, 0, 0)

    def test_mode_and_owner_are_adjusted_without_a_new_node(self, kernel, dev):
        self.make(kernel, mode=0o600)
        before = (dev / "nvidia-nvswitchctl").lstat().st_ino
        kernel.adjust_node("/dev/nvidia-nvswitchctl", 0o640, 3, 4)
        assert kernel.node_status("/dev/nvidia-nvswitchctl") == NodeStatus("char", 234, 255, 0o640, 3, 4)
        assert (dev / "nvidia-nvswitchctl").lstat().st_ino == before

    def test_a_directory_is_made_once_and_not_changed_later(self, kernel, dev, umask_077):
        kernel.make_node_directory("/dev/nvidia-caps")
        assert kernel.node_status("/dev/nvidia-caps") == NodeStatus("directory", 0, 0, 0o755, 0, 0)
        (dev / "nvidia-caps").chmod(0o711)
        kernel.make_node_directory("/dev/nvidia-caps")
        assert kernel.node_status("/dev/nvidia-caps").mode == 0o711

    def test_a_failure_leaves_nothing_temporary_behind(self, kernel, dev):
        with pytest.raises(OverflowError):
            self.make(kernel, owner=(1 << 40, 0))
        assert os.listdir(dev) == []

    def test_everything_wanted_is_made_and_then_kept(self, kernel, dev):
        nodes = wanted_nodes(host(), None, DEFAULTS, uid=0, gid=0)
        assert {result.outcome for result in ensure_nodes(kernel, nodes)} == {"created"}
        assert {result.outcome for result in ensure_nodes(kernel, nodes)} == {"kept"}
        assert sorted(str(path.relative_to(dev)) for path in dev.rglob("*") if not path.is_dir()) == [
            "nvidia-caps/nvidia-cap0",
            "nvidia-nvlink",
            "nvidia-nvswitch0",
            "nvidia-nvswitch1",
            "nvidia-nvswitchctl",
            "nvidiactl",
        ]

    def test_a_node_is_not_adjusted_through_a_symbolic_link(self, kernel, dev):
        self.make(kernel, "/dev/target")
        (dev / "link").symlink_to("target")
        with pytest.raises(OSError, match="not a character device"):
            kernel.adjust_node("/dev/link", 0o600, 1, 1)
        assert kernel.node_status("/dev/target").mode == 0o666

    def test_a_mount_inside_dev_is_not_entered(self, tree, dev):
        (dev / "nvidia-caps").mkdir()
        child = os.fork()
        if child == 0:
            os._exit(_try_in_a_mount(tree, dev))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 77:
            pytest.skip("no private mount namespace here")
        assert code == 0


CLONE_NEWNS = 0x00020000
MS_REC_PRIVATE = 0x4000 | 0x40000


def _try_in_a_mount(tree, dev):
    """In a child: mount a tmpfs below /dev of the tree; 0 when nodes are refused there, 77 when it cannot be mounted."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None):
        return 77
    if libc.mount(b"none", os.fsencode(dev / "nvidia-caps"), b"tmpfs", 0, None):
        return 77
    try:
        LinuxKernel(tree.root).make_node("/dev/nvidia-caps/nvidia-cap0", 236, 0, 0o400, 0, 0)
    except OSError as error:
        return 0 if error.errno == errno.EXDEV and not os.listdir(dev / "nvidia-caps") else 1
    return 2


class TestPaths:
    """What needs no device node, so no root either."""

    @pytest.mark.parametrize(
        "path",
        [
            "/dev",
            "/dev/",
            "/dev/../etc/passwd",
            "/dev/./x",
            "/dev//x",
            "/etc/passwd",
            "dev/x",
            "/devices/x",
            "/dev/a/../b",
        ],
    )
    def test_only_clean_paths_below_dev_are_accepted(self, kernel, path):
        with pytest.raises(OSError, match="not a path below /dev"):
            kernel.make_node(path, 1, 3, 0o666, 0, 0)

    def test_a_symbolic_link_does_not_lead_out_of_dev(self, kernel, tree, tmp_path):
        outside = tmp_path / "outside"
        outside.mkdir()
        tree.link("/dev/nvidia-caps", str(outside))
        with pytest.raises(OSError, match="Not a directory"):
            kernel.make_node("/dev/nvidia-caps/nvidia-cap0", 236, 0, 0o400, 0, 0)
        with pytest.raises(OSError, match="Not a directory"):
            kernel.adjust_node("/dev/nvidia-caps/nvidia-cap0", 0o400, 0, 0)
        with pytest.raises(OSError, match="Not a directory"):
            kernel.make_node_directory("/dev/nvidia-caps/inner")
        assert os.listdir(outside) == []
        with pytest.raises(CannotObserve):
            kernel.node_status("/dev/nvidia-caps/nvidia-cap0")

    def test_a_symbolic_link_for_dev_itself_is_not_followed(self, kernel, tree, tmp_path):
        Path(tree.root.path("/dev")).rmdir()
        tree.link("/dev", str(tmp_path))
        with pytest.raises(OSError, match="Not a directory"):
            kernel.make_node_directory("/dev/nvidia-caps")

    @pytest.mark.parametrize("kind", ["file", "symlink", "directory", "other"])
    def test_what_is_no_device_is_neither_replaced_nor_followed(self, kernel, tree, kind):
        path = Path(tree.root.path("/dev/nvidia-nvswitchctl"))
        match kind:
            case "file":
                path.write_text("precious")
            case "symlink":
                path.symlink_to("../../precious")
            case "directory":
                path.mkdir()
            case "other":
                os.mkfifo(path)
        before = path.lstat()
        assert kernel.node_status("/dev/nvidia-nvswitchctl").kind == kind
        with pytest.raises(FileExistsError):
            kernel.make_node("/dev/nvidia-nvswitchctl", 234, 255, 0o666, 0, 0)
        (result,) = ensure_nodes(kernel, [NODE])
        assert result.outcome == "refused"
        assert path.lstat() == before
        assert os.listdir(path.parent) == ["nvidia-nvswitchctl"]

    def test_a_file_in_place_of_the_directory_is_an_error(self, kernel, tree):
        tree.write("/dev/nvidia-caps", "")
        with pytest.raises(FileExistsError):
            kernel.make_node_directory("/dev/nvidia-caps")

    def test_nothing_there_is_none(self, kernel):
        assert kernel.node_status("/dev/nvidia-nvswitchctl") is None
        assert kernel.node_status("/dev/nvidia-caps/nvidia-cap0") is None
