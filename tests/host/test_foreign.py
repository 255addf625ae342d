"""Fabric Managers and listeners that are not ours, found without touching them."""

import os
import socket
import subprocess
import sys

import pytest

from fmsupervisor.errors import CannotObserve
from fmsupervisor.fabric_manager.foreign import find_foreign
from fmsupervisor.facts import ForeignFabricManager
from fmsupervisor.host.root import HostRoot

PROGRAM = "/usr/bin/nv-fabricmanager"
COMM = "nv-fabricmanage"
CONTAINER = "0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-0123abcd.scope\n"
NOBODY = frozenset()


def find(tree, own=NOBODY, port=6666, path=""):
    return find_foreign(tree.root, own, port, path)


class TestProcesses:
    def test_an_ordinary_host_has_none(self, tree):
        tree.process(1, "systemd", exe="/usr/lib/systemd/systemd", arguments=["/sbin/init"])
        tree.process(4711, "bash", exe="/bin/bash", arguments=["-bash"])
        assert find(tree) == ()

    def test_the_vendor_unit_is_named(self, tree):
        tree.process(
            4711, COMM, exe=PROGRAM, arguments=[PROGRAM], cgroup="0::/system.slice/nvidia-fabricmanager.service\n"
        )
        assert find(tree) == (ForeignFabricManager(4711, f"pid 4711 ({PROGRAM}, unit nvidia-fabricmanager.service)"),)

    @pytest.mark.parametrize(
        ("cgroup", "place"),
        [
            pytest.param(CONTAINER, f", cgroup {CONTAINER[3:-1]}", id="a container"),
            pytest.param("0::/\n", "", id="the root group"),
            pytest.param("", "", id="unreadable"),
            pytest.param(
                "9:name=systemd:/system.slice/fm.service\n8:pids:/\n0::/\n", ", unit fm.service", id="version 1"
            ),
            pytest.param("4:memory:/elsewhere\n", "", id="another hierarchy"),
            pytest.param("\x00\xff", "", id="nonsense"),
        ],
    )
    def test_the_control_group_tells_where_it_runs(self, tree, cgroup, place):
        tree.process(4711, COMM, exe=PROGRAM, arguments=[PROGRAM], cgroup=cgroup)
        assert [found.description for found in find(tree)] == [f"pid 4711 ({PROGRAM}{place})"]

    @pytest.mark.parametrize(
        ("exe", "arguments", "is_found"),
        [
            pytest.param(f"{PROGRAM} (deleted)", [PROGRAM], True, id="its package was upgraded"),
            pytest.param(None, [PROGRAM, "-c", "fm.cfg"], True, id="its program is hidden from us"),
            pytest.param("/usr/bin/python3", ["python3", "/opt/nv-fabricmanager"], True, id="run by an interpreter"),
            pytest.param(None, [], True, id="only its name can be seen"),
            pytest.param("/bin/bash", ["/bin/bash", f"{PROGRAM}-start.sh"], False, id="the vendor's start script"),
            pytest.param("/usr/bin/nv-fabricmanage", ["nv-fabricmanage"], False, id="a name cut by chance"),
        ],
    )
    def test_the_program_decides_not_the_cut_name(self, tree, exe, arguments, is_found):
        tree.process(4711, COMM, exe=exe, arguments=arguments)
        assert bool(find(tree)) is is_found

    @pytest.mark.parametrize("state", ["Z", "X"])
    def test_a_dead_process_is_none(self, tree, state):
        tree.process(4711, COMM, state=state)
        assert find(tree) == ()

    def test_our_own_is_not_foreign(self, tree):
        tree.process(4711, COMM, exe=PROGRAM, arguments=[PROGRAM])
        tree.process(4712, COMM, exe=PROGRAM, arguments=[PROGRAM])
        assert [found.pid for found in find(tree, own=frozenset({4711}))] == [4712]

    def test_a_process_that_cannot_be_looked_at_is_skipped(self, tree):
        tree.process(4711, COMM, exe=PROGRAM)
        for name in ("comm", "cmdline", "stat", "cgroup"):
            tree.unreadable(f"/proc/4711/{name}")
        tree.directory("/proc/4712")
        assert find(tree) == ()

    def test_without_proc_nothing_is_known(self, tmp_path):
        with pytest.raises(CannotObserve):
            find_foreign(HostRoot(str(tmp_path)), NOBODY, 6666, "")


TCP = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
UNIX = "Num       RefCount Protocol Flags    Type St Inode Path\n"


def tcp(port, inode, state="0A", address="0100007F"):
    return f"   0: {address}:{port:04X} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000     0        0 {inode} 1 0 100 0 0 10 0\n"


def unix(path, inode, flags="00010000"):
    return f"0000000000000000: 00000002 00000000 {flags} 0001 01 {inode} {path}\n"


class TestListeners:
    def test_a_stranger_on_the_command_port_is_named(self, tree):
        tree.write("/proc/net/tcp", TCP + tcp(22, 1) + tcp(6666, 900))
        tree.process(77, "nc", exe="/usr/bin/nc", descriptors=["/dev/null", "socket:[900]"])
        assert find(tree) == (ForeignFabricManager(77, "pid 77 (/usr/bin/nc) listens on TCP port 6666"),)

    @pytest.mark.parametrize(
        ("row", "port"),
        [
            pytest.param(tcp(6666, 900, state="01"), 6666, id="a connection from that port"),
            pytest.param(tcp(16666, 900), 6666, id="another port"),
            pytest.param(tcp(6666, 900), None, id="Fabric Manager has no TCP port"),
            pytest.param("   0: 0100007F:1A0A\n", 6666, id="a cut row"),
            pytest.param("\x00\xff" * 50 + "\n", 6666, id="binary"),
        ],
    )
    def test_others_are_not(self, tree, row, port):
        tree.write("/proc/net/tcp", TCP + row)
        assert find(tree, port=port) == ()

    def test_an_ipv6_listener_counts(self, tree):
        tree.write("/proc/net/tcp6", TCP + tcp(6666, 900, address="0" * 32))
        assert find(tree) == (ForeignFabricManager(None, "an unknown process listens on TCP port 6666"),)

    @pytest.mark.parametrize("path", ["/run/nvidia-fabricmanager/socket", "/var/run/nvidia-fabricmanager/socket"])
    def test_a_stranger_on_the_socket_is_named_by_either_path(self, tree, path):
        tree.write("/proc/net/unix", UNIX + unix("/run/nvidia-fabricmanager/socket", 901))
        tree.process(77, "socat", exe="/usr/bin/socat", descriptors=["socket:[901]"])
        assert [found.pid for found in find(tree, path=path)] == [77]

    @pytest.mark.parametrize(
        "row",
        [
            unix("/run/nvidia-fabricmanager/fm_sm_ipc.socket", 901),
            unix("/run/nvidia-fabricmanager/socket", 901, flags="00000000"),
            unix("", 901),
            "nonsense\n",
        ],
    )
    def test_other_sockets_are_not(self, tree, row):
        tree.write("/proc/net/unix", UNIX + row)
        assert find(tree, path="/run/nvidia-fabricmanager/socket") == ()

    def test_a_foreign_fabric_manager_is_named_once(self, tree):
        tree.write("/proc/net/tcp", TCP + tcp(6666, 900))
        tree.process(4711, COMM, exe=PROGRAM, arguments=[PROGRAM], descriptors=["socket:[900]"])
        assert [found.pid for found in find(tree)] == [4711]

    def test_our_own_listener_is_not_foreign(self, tree):
        tree.write("/proc/net/tcp", TCP + tcp(6666, 900))
        tree.process(4711, COMM, exe=PROGRAM, arguments=[PROGRAM], descriptors=["socket:[900]"])
        assert find(tree, own=frozenset({4711})) == ()


def listeners(own: frozenset[int], port: int, path: str) -> list[int | None]:
    """Only those: other tests may be running a Fabric Manager of their own on this machine."""
    found = find_foreign(HostRoot(), own, port, path)
    return [one.pid for one in found if "listens" in one.description]


class TestRealHost:
    def test_our_own_real_listeners_are_found(self, tmp_path):
        path = str(tmp_path / "s")
        with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
            local.bind(path)
            local.listen()
            port = server.getsockname()[1]
            assert listeners(NOBODY, port, path) == [os.getpid(), os.getpid()]
            assert listeners(frozenset({os.getpid()}), port, path) == []

    def test_a_real_process_of_that_name_is_found(self, tmp_path):
        program = tmp_path / "nv-fabricmanager"
        program.write_text(f"#!{sys.executable}\nprint('ready', flush=True)\ninput()\n")
        program.chmod(0o755)
        child = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert child.stdout.readline() == "ready\n"
            assert child.pid in [one.pid for one in find_foreign(HostRoot(), NOBODY, None, "")]
            assert child.pid not in [one.pid for one in find_foreign(HostRoot(), frozenset({child.pid}), None, "")]
        finally:
            child.communicate("\n")
