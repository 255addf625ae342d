"""Guests: processes that hold GPUs through vfio, their names, and what cannot be looked at."""

import os
import shutil
import subprocess
import sys
import time

import pytest

from fmsupervisor.clock import Clock
from fmsupervisor.errors import CannotObserve
from fmsupervisor.facts import Guest, GuestReading
from fmsupervisor.host.guests import find_guests, start_ticks
from fmsupervisor.host.root import HostRoot

GPU_A, GPU_B = "0000:1b:00.0", "0000:43:00.0"
NVME = "0000:01:00.0"
TICKS = os.sysconf("SC_CLK_TCK")
POD = "c5fd9c4f-0d6e-4e0e-8d6e-3d3b8c2b7a11"


def put_group(tree, number, *functions):
    """A vfio group with these PCI functions."""
    tree.directory(f"/sys/class/vfio/{number}")
    tree.directory(f"/sys/kernel/iommu_groups/{number}/devices")
    for function in functions:
        tree.link(f"/sys/kernel/iommu_groups/{number}/devices/{function}", f"../../../../devices/pci0000/{function}")


def put_process(tree, pid, *descriptors, ticks=100, comm="qemu-kvm", arguments=(), cgroup="0::/\n", flags=0):
    """A process with these files open."""
    tree.process(pid, comm, arguments=arguments, cgroup=cgroup, descriptors=descriptors)
    tree.write(f"/proc/{pid}/stat", f"{pid} ({comm}) S 1 2 3 0 -1 {flags} {'0 ' * 12}{ticks} 0\n")


def hide(tree, pid):
    """The descriptors of the process cannot be listed."""
    shutil.rmtree(tree.root.path(f"/proc/{pid}/fd"))
    tree.unreadable(f"/proc/{pid}/fd")


def find(tree, *gpus):
    return find_guests(tree.root, gpus or (GPU_A, GPU_B), float)


@pytest.fixture
def host(tree):
    """Two GPUs and a disk, each in a group of its own."""
    for bus_id in (GPU_A, GPU_B):
        tree.gpu(bus_id)
    put_group(tree, 12, GPU_A)
    put_group(tree, 13, GPU_B)
    put_group(tree, 14, NVME)
    return tree


class TestWhatIsHeld:
    def test_a_process_with_groups_open_holds_their_gpus(self, host):
        put_process(host, 4711, "/dev/null", "/dev/vfio/vfio", "/dev/vfio/13", "/dev/vfio/12")
        (guest,) = find(host).guests
        assert (guest.pid, guest.gpus) == (4711, (GPU_A, GPU_B))

    def test_other_devices_do_not_make_a_guest(self, host):
        put_process(host, 4711, "/dev/vfio/14", "/dev/vfio/vfio", "socket:[1]", "/home/x/vfio/12.img")
        assert find(host) == GuestReading()

    @pytest.mark.parametrize(
        "link",
        ["/dev/vfio/12", "/var/lib/kubelet/pods/x/dev/vfio/12", "/dev/vfio/noiommu-12", "/dev/vfio/12 (deleted)"],
        ids=["host", "another mount namespace", "without an IOMMU", "unlinked since"],
    )
    def test_the_end_of_the_path_tells_the_group(self, host, link):
        put_process(host, 4711, link)
        assert [guest.gpus for guest in find(host).guests] == [(GPU_A,)]

    def test_a_device_of_iommufd_is_found_by_its_name(self, tree):
        tree.gpu(GPU_A)
        tree.directory("/sys/class/vfio-dev/vfio3")
        tree.directory(f"/sys/bus/pci/devices/{GPU_A}/vfio-dev/vfio3")
        put_process(tree, 4711, "/dev/iommu", "/dev/vfio/devices/vfio3")
        put_process(tree, 4712, "/dev/vfio/devices/vfio4")
        assert [(guest.pid, guest.gpus) for guest in find(tree).guests] == [(4711, (GPU_A,))]

    def test_a_virtual_gpu_counts_as_its_function(self, tree):
        uuid = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"
        tree.directory("/sys/class/vfio/40")
        tree.link(f"/sys/kernel/iommu_groups/40/devices/{uuid}", f"../../../../devices/pci0000:1a/{GPU_A}/{uuid}")
        put_process(tree, 4711, "/dev/vfio/40")
        assert [guest.gpus for guest in find(tree).guests] == [(GPU_A,)]

    def test_all_functions_of_a_group_are_held(self, tree):
        put_group(tree, 7, GPU_A, NVME, GPU_B)
        put_process(tree, 4711, "/dev/vfio/7")
        assert [guest.gpus for guest in find(tree).guests] == [(GPU_A, GPU_B)]

    def test_without_any_vfio_group_no_process_is_looked_at(self, tree):
        put_process(tree, 4711, "/dev/vfio/12")
        hide(tree, 4711)
        assert find(tree) == GuestReading()

    def test_without_a_gpu_there_is_no_guest(self, host):
        put_process(host, 4711, "/dev/vfio/12")
        assert find_guests(host.root, (), float) == GuestReading()


class TestStart:
    def test_it_is_field_22_whatever_the_name(self, host):
        put_process(host, 4711, "/dev/vfio/12", comm=") S 1 (x", ticks=12345)
        (guest,) = find(host).guests
        assert (guest.start_ticks, guest.started) == (12345, 12345 / TICKS)
        assert guest.identity == (4711, 12345)

    def test_one_that_is_gone_has_none(self, host):
        assert start_ticks(host.root, 4711) is None


class TestWhatCannotBeLookedAt:
    def test_hidden_descriptors_are_said(self, host):
        put_process(host, 4711, "/dev/vfio/12", ticks=5)
        put_process(host, 4712, "/dev/vfio/13", ticks=6)
        hide(host, 4712)
        found = find(host)
        assert [guest.pid for guest in found.guests] == [4711]
        assert found.hidden == {(4712, 6)}

    def test_kernel_threads_hide_nothing(self, host):
        put_process(host, 2, comm="kthreadd", flags=0x00208040)
        hide(host, 2)
        assert find(host) == GuestReading()

    def test_a_process_that_has_gone_is_no_matter(self, host):
        host.directory("/proc/4711")
        assert find(host) == GuestReading()

    def test_a_guest_that_hides_when_it_was_started_is_hidden(self, host):
        put_process(host, 4711, "/dev/vfio/12")
        host.unreadable("/proc/4711/stat")
        assert find(host) == GuestReading(hidden=frozenset({(4711, 0)}))

    @pytest.mark.parametrize("namespace", ["pid:[4026532281]", "pid:[1]"])
    def test_a_pid_namespace_shows_nothing_for_certain(self, host, namespace):
        put_process(host, 1)
        host.link("/proc/1/ns/pid", namespace)
        with pytest.raises(CannotObserve, match="namespace"):
            find(host)

    def test_the_initial_namespace_shows_all(self, host):
        put_process(host, 1)
        host.link("/proc/1/ns/pid", "pid:[4026531836]")
        assert find(host) == GuestReading()

    def test_hidepid_shows_nothing_for_certain(self, host):
        host.directory("/proc/self")
        with pytest.raises(CannotObserve, match="hidepid"):
            find(host)

    def test_without_proc_nothing_is_known(self, host):
        os.rmdir(host.root.path("/proc"))
        with pytest.raises(CannotObserve):
            find(host)


class TestNames:
    @pytest.mark.parametrize(
        ("arguments", "name"),
        [
            (["qemu-kvm", "-name", "guest=default_vm1,debug-threads=on", "-S"], "default_vm1"),
            (["qemu-system-x86_64", "-S", "-name", "web,process=x"], "web"),
            (["qemu-kvm", "--name", "debug-threads=on,guest=a,,b"], "a,b"),
            (["qemu-kvm", "-name=one"], "one"),
            (["cloud-hypervisor", "--api-socket", "path=/run/ch/blue.sock"], "blue"),
            (["/usr/bin/cloud-hypervisor", "--api-socket", "/run/vc/vm/0a1b2c/clh-api.sock"], "0a1b2c"),
            (["firecracker", "--id", "551e7604"], "551e7604"),
            (["something", "--id", "551e7604"], "qemu-kvm"),
            (["qemu-kvm", "-name"], "qemu-kvm"),
            (["qemu-kvm", "-name", "debug-threads=on"], "qemu-kvm"),
            ([], "qemu-kvm"),
            (["qemu-kvm", "-name", "a\x1b[31mb\nc"], "a?[31mb?c"),
            (["qemu-kvm", "-name", "x" * 500], "x" * 96),
        ],
        ids=str,
    )
    def test_by_its_arguments(self, host, arguments, name):
        put_process(host, 4711, "/dev/vfio/12", arguments=arguments)
        assert [guest.name for guest in find(host).guests] == [name]

    @pytest.mark.parametrize(
        ("cgroup", "name"),
        [
            (r"0::/machine.slice/machine-qemu\x2d1\x2dmy\x2dvm.scope/libvirt/emulator", "my-vm"),
            (r"1:name=systemd:/machine.slice/machine-qemu\x2d12\x2dblue.scope", "blue"),
            (f"0::/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/cri-containerd-0a.scope", f"qemu-kvm (pod {POD})"),
            (f"0::/kubepods/burstable/pod{POD}/0a", f"qemu-kvm (pod {POD})"),
            ("0::/system.slice/some.service", "qemu-kvm"),
        ],
        ids=["libvirt", "libvirt with cgroup v1", "kubernetes with systemd", "kubernetes without", "neither"],
    )  # fmt: skip
    def test_by_its_control_group(self, host, cgroup, name):
        put_process(host, 4711, "/dev/vfio/12", cgroup=f"{cgroup}\n")
        assert [guest.name for guest in find(host).guests] == [name]

    def test_kubevirt_has_both(self, host):
        arguments = ["/usr/libexec/qemu-kvm", "-name", "guest=default_vm1,debug-threads=on"]
        cgroup = f"0::/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/cri-containerd-0a.scope\n"
        put_process(host, 4711, "/dev/vfio/12", arguments=arguments, cgroup=cgroup)
        assert [guest.name for guest in find(host).guests] == [f"default_vm1 (pod {POD})"]


class RealProcesses(HostRoot):
    """This machine, with a vfio group that a regular file stands for."""

    def list_directory(self, logical):
        if logical == "/sys/class/vfio":
            return ["12"]
        return [GPU_A] if logical == "/sys/kernel/iommu_groups/12/devices" else super().list_directory(logical)


class TestRealProcesses:
    def test_one_is_found_with_its_start(self, tmp_path):
        node = tmp_path / "vfio" / "12"
        node.parent.mkdir()
        node.touch()
        clock = Clock()
        before = clock.now().monotonic
        program = "import sys; held = open(sys.argv[1]); print(flush=True); sys.stdin.read()"
        arguments = [sys.executable, "-c", program, str(node), "-name", "guest=real"]
        with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            after = clock.now().monotonic
            found = [one for one in self.search(clock) if one.pid == process.pid]
            process.communicate()
        (guest,) = found
        assert (guest.name, guest.gpus) == ("real", (GPU_A,))
        assert before - 2 / TICKS <= guest.started <= after + 2 / TICKS
        assert process.pid not in [one.pid for one in self.search(clock)]

    def search(self, clock: Clock) -> tuple[Guest, ...]:
        try:
            return find_guests(RealProcesses(), (GPU_A,), clock.at_boot_seconds).guests
        except CannotObserve as error:
            pytest.skip(str(error))


def test_a_thousand_processes_cost_little(tree):
    """Against the cost of the least that must be done: listing the descriptors of each."""
    put_group(tree, 12, GPU_A)
    for pid in range(1000, 2000):
        put_process(tree, pid, *["socket:[1]"] * 4)

    def seconds(work) -> float:
        began = time.process_time()
        work()
        return time.process_time() - began

    def least() -> None:
        for pid in range(1000, 2000):
            directory = tree.root.path(f"/proc/{pid}/fd")
            for name in os.listdir(directory):
                os.readlink(f"{directory}/{name}")

    assert min(seconds(lambda: find(tree)) for _ in range(3)) < 10 * min(seconds(least) for _ in range(3))
