"""nvidia.ko and the real kernel: each refusal told with the kernel's own words, nothing stolen, and going on by itself."""

from bed import Bed, Machine
from scenario import (
    GPUS,
    GUESTS_TAKE_GPUS,
    IDLE,
    MODULES,
    SERVICE,
    TREE_MODULES,
    behave,
    codes,
    document,
    driver_of,
    install_module,
    is_loaded,
    plug,
    settings,
    switch_list,
    tell,
    wait_for_code,
    wait_for_state,
    wait_until,
    words,
)

NOT_DECLARED = "LC_ALL=C sed s/depends=nvidia_dep/xepends=nvidia_dep/"
OTHER_VERSION = "580.159.03"


def assert_refused(machine: Machine) -> None:
    """Fabric Manager was not executed, and the kernel has no trace of the driver."""
    found = document(machine)
    assert found["state"] == "failed"
    assert found["fabric_manager"]["starts"] == 0
    assert not is_loaded(machine)
    assert machine.run("pgrep -f 'nv-fabricmanager -c'").code == 1  # "--version" may be asked for
    assert machine.run("grep nvidia /proc/devices").output == ""
    assert machine.check("find /dev -name 'nvidia*'") == ""


def install_version(machine: Machine, module: str, version: str) -> None:
    """The whole tree of one version."""
    install_module(machine, module)
    behave(machine, version=version)
    machine.check(
        f"cd /usr/local/nvidia/usr/lib64 && mv $(readlink -f libnvidia-nscq.so) libnvidia-nscq.so.{version} && "
        f"ln -sf libnvidia-nscq.so.{version} libnvidia-nscq.so && ln -sf libnvidia-nscq.so.{version} libnvidia-nscq.so.2 && "
        f"ln -sf libnvidia-nscq.so.{version} libnvidia-nscq.so.2.0"
    )


class TestRefusedFile:
    def test_is_told_in_the_kernels_words_and_the_right_file_is_loaded_as_soon_as_it_is_there(self, bed: Bed) -> None:
        with bed.restore(after=IDLE) as machine:
            settings(machine, '[module]\nparameters = ["init_errno=5"]\n', is_running=True)
            plug(machine)
            wait_for_code(machine, "FMS-214", "rm_init_rm() failed")
            assert_refused(machine)
            assert "FAILED FMS-214" in machine.check(f"systemctl show -p StatusText {SERVICE}")

            settings(machine, '[module]\nparameters = ["init_errno=16"]\n', is_running=True)
            wait_for_code(machine, "FMS-216", "EBUSY")
            wait_for_state(machine, "waiting-for-module")  # it is tried again

            install_module(machine, "nvidia-vermagic")
            settings(machine, "", is_running=True)
            wait_for_code(machine, "FMS-203", "its vermagic flags are")
            assert_refused(machine)

            own = "/usr/lib/modules/$(uname -r)/kernel"
            machine.check(f"mv {own} {own}.away")  # nothing to compare with: the kernel has to be asked
            install_module(machine, "nvidia-vermagic")
            wait_for_code(machine, "FMS-203", "version magic '5.14.21-150500.55-rt SMP preempt_rt")
            machine.check(f"mv {own}.away {own}")

            for module, edit, code, detail in (
                ("nvidia-modversions", "cat", "FMS-211", "disagrees about version of symbol module_layout"),
                ("nvidia-symbol-version", "cat", "FMS-211", "disagrees about version of symbol __pci_register_driver"),
                ("nvidia-damaged", "cat", "FMS-217", "nvidia.ko"),
                ("nvidia-badsignature", "cat", "FMS-217", "EBADMSG"),
                ("nvidia-needs-dep", NOT_DECLARED, "FMS-212", "Unknown symbol nvidia_dep_is_here (err -2)"),
                ("nvidia-needs-dep", "cat", "FMS-204", "nvidia_dep, needed by nvidia"),
            ):
                install_module(machine, module, edit)
                wait_for_code(machine, code, detail)
                assert_refused(machine)

            machine.check(f"cp {MODULES}/nvidia_dep.ko {TREE_MODULES}/")
            found = wait_for_state(machine, "configured")
            assert codes(found) == set()
            assert is_loaded(machine)
            assert is_loaded(machine, "nvidia_dep")
            assert {driver_of(machine, gpu) for gpu in GPUS} == {"vfio-pci"}


class TestKernelPolicy:
    def test_is_told_apart_by_what_forbids_the_module(self, bed: Bed) -> None:
        with bed.restore(after=IDLE) as machine:
            settings(machine, "[module]\nload = false\n", is_running=True)
            plug(machine)  # the board is an unsigned module as well
            machine.check("echo integrity >/sys/kernel/security/lockdown")
            settings(machine, "", is_running=True)
            wait_for_code(machine, "FMS-208", "unsigned module loading is restricted")
            assert_refused(machine)

            machine.check("echo Y >/sys/module/module/parameters/sig_enforce")
            install_module(machine, "nvidia.ko.xz")
            wait_for_code(machine, "FMS-207", "Loading of unsigned module is rejected")
            install_module(machine, "nvidia-signed")
            wait_for_code(machine, "FMS-207", "Loading of module with unavailable key is rejected")
            assert_refused(machine)

            machine.check("sysctl -q kernel.modules_disabled=1")
            install_module(machine, "nvidia.ko.xz")
            wait_for_code(machine, "FMS-209", "modules_disabled")
            assert_refused(machine)


class TestBoard:
    def test_without_one_nothing_is_loaded_and_one_that_comes_late_is_not_robbed_of_its_gpus(self, bed: Bed) -> None:
        with bed.restore(after=IDLE) as machine:
            assert document(machine)["state"] == "not-applicable"
            assert not is_loaded(machine)
            machine.check("rmmod vfio-pci")

            settings(machine, "[switches]\nexpected = 4\n", is_running=True)
            wait_for_code(machine, "FMS-213", "ENODEV")
            assert_refused(machine)

            plug(machine)
            wait_for_code(machine, "FMS-205", GPUS[0])
            assert_refused(machine)
            assert {driver_of(machine, gpu) for gpu in GPUS} == {""}

            machine.check(GUESTS_TAKE_GPUS)
            wait_for_state(machine, "configured")
            assert {driver_of(machine, gpu) for gpu in GPUS} == {"vfio-pci"}

    def test_no_register_leaves_the_gpus_to_vfio(self, bed: Bed) -> None:
        with bed.restore(after=IDLE) as machine:
            machine.check("rmmod vfio-pci")
            settings(machine, '[module]\ngpu_guard = "no-register"\n', is_running=True)
            plug(machine)
            found = wait_for_state(machine, "configured")
            assert codes(found) == set()
            assert {driver_of(machine, gpu) for gpu in GPUS} == {""}

            machine.check(GUESTS_TAKE_GPUS)
            found = wait_until(machine, lambda found: {gpu["driver"] for gpu in found["gpus"]} == {"vfio-pci"})
            assert (found["state"], codes(found)) == ("configured", set())


class TestLoadedAlready:
    def test_by_another_and_slowly_is_waited_for(self, bed: Bed) -> None:
        with bed.restore(after=IDLE) as machine:
            machine.check(f"(insmod {MODULES}/nvidia.ko init_delay_ms=8000 >/dev/null 2>&1 &)")
            machine.wait_for("grep -q coming /sys/module/nvidia/initstate")
            plug(machine)
            wait_for_state(machine, "configured")
            assert "loading /usr" not in words(machine)

    def test_in_another_version_is_refused_until_the_versions_agree(self, bed: Bed) -> None:
        with bed.restore(after=IDLE) as machine:
            patient = "[restart]\ninitial_delay_seconds = 10\n"
            settings(machine, f"{patient}[module]\nload = false\n", is_running=True)
            plug(machine)
            machine.check(f"insmod {MODULES}/nvidia-other.ko")
            wait_for_code(machine, "FMS-103", f"install version {OTHER_VERSION} of nvidia.ko and nv-fabricmanager")
            assert document(machine)["fabric_manager"]["starts"] == 0

            install_version(machine, "nvidia-other", OTHER_VERSION)
            wait_for_state(machine, "configured")

            tell(machine, "crash 9")
            wait_for_state(machine, "backoff")
            machine.check(f"rmmod nvidia && insmod {MODULES}/nvidia.ko")
            wait_for_code(machine, "FMS-104", f"{OTHER_VERSION} is installed, 580.126.09 is loaded")
            assert document(machine)["fabric_manager"]["starts"] == 1
            settings(machine, patient, is_running=True)
            machine.check("rmmod nvidia")
            wait_for_state(machine, "configured")
            assert machine.check("cat /sys/module/nvidia/version").strip() == OTHER_VERSION
            assert {state for _, state in switch_list(machine).values()} == {2}
