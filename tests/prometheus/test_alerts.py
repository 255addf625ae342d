"""Every alert fires, keeps quiet, and does with what comes and goes as docs/alerts.md says."""

import shutil
from pathlib import Path

import pytest

from fmsupervisor.conditions import REGISTRY
from fmsupervisor.mixin.alerts import ALERTS
from tests.prometheus._promtool import GONE, STALE, Firing, Story, judge, minutes

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")

SWITCH = "0000:08:00.0"
GPU = "0000:18:00.0"
NONE: tuple[Firing, ...] = ()
ONE = (Firing(),)


def condition(code: str, severity: str = "critical") -> str:
    return f'fmsupervisor_condition_active{{code="{code}", severity="{severity}"}}'


def state(name: str) -> str:
    return f'fabricmanager_state{{state="{name}"}}'


def with_code(code: str) -> tuple[Firing, ...]:
    return (Firing({"code": str(code)}),)


def by_condition(alert: str, code: str, lasts: int, severity: str = "critical") -> tuple[Story, ...]:
    """The three stories of an alert that fires when a condition has held for ``lasts`` minutes."""
    series = condition(code, severity)
    fires = with_code(code)
    return (
        Story(
            alert,
            "fires",
            {series: minutes((0, 3), (1, lasts + 5), (0, 5))},
            {2: NONE, 3 + lasts - 1: NONE, 3 + lasts: fires, 3 + lasts + 4: fires, 3 + lasts + 5: NONE},
        ),
        Story(alert, "is quiet", {series: minutes((0, 60))}, {0: NONE, 30: NONE, 59: NONE}),
        Story(
            alert,
            "is quiet while it comes and goes",
            {series: minutes(*((1, lasts), (0, 1)) * 5)},
            dict.fromkeys(range(1, 5 * (lasts + 1), lasts), NONE),
        ),
    )


NOT_CONFIGURED = (
    Story(
        "FabricNotConfigured",
        "fires whichever state it is in, and names the open conditions",
        {
            state("configured"): minutes((1, 3), (0, 20), (1, 3)),
            state("backoff"): minutes((0, 3), (1, 10), (0, 13)),
            state("starting"): minutes((0, 13), (1, 10), (0, 3)),
            condition("FMS-511"): minutes((1, 26)),
            condition("FMS-510", "warning"): minutes((1, 26)),
            condition("FMS-103"): minutes((1, 26)),
            condition("FMS-301"): minutes((0, 26)),
        },
        {
            17: NONE,
            18: (Firing(listed="FMS-103 FMS-511 "),),
            22: (Firing(listed="FMS-103 FMS-511 "),),
            23: NONE,
        },
    ),
    Story(
        "FabricNotConfigured",
        "says when there is no open condition",
        {state("configured"): minutes((0, 20)), state("starting"): minutes((1, 20))},
        {15: (Firing(listed="none "),)},
    ),
    Story(
        "FabricNotConfigured",
        "is quiet where there is no fabric",
        {state("not-applicable"): minutes((1, 30)), state("configured"): minutes((0, 30))},
        {29: NONE},
    ),
    Story(
        "FabricNotConfigured",
        "leaves the degraded ones to others",
        {state("degraded"): minutes((1, 30)), state("configured"): minutes((0, 30))},
        {29: NONE},
    ),
    Story(
        "FabricNotConfigured",
        "is quiet when it comes and goes",
        {state("configured"): minutes(*((0, 14), (1, 1)) * 3), state("starting"): minutes(*((1, 14), (0, 1)) * 3)},
        dict.fromkeys(range(0, 45, 4), NONE),
    ),
)

DEGRADED = (
    Story(
        "FabricDegraded",
        "fires without a critical condition",
        {
            state("degraded"): minutes((0, 2), (1, 15), (0, 2)),
            condition("FMS-611", "warning"): minutes((1, 19)),
            condition("FMS-601"): minutes((0, 19)),
        },
        {11: NONE, 12: ONE, 17: NONE},
    ),
    Story(
        "FabricDegraded",
        "is quiet with one, which has an alert of its own",
        {state("degraded"): minutes((1, 30)), condition("FMS-601"): minutes((1, 30))},
        {29: NONE},
    ),
    Story(
        "FabricDegraded",
        "is quiet while it comes and goes",
        {state("degraded"): minutes(*((1, 9), (0, 1)) * 4), condition("FMS-601"): minutes((0, 40))},
        dict.fromkeys(range(0, 40, 3), NONE),
    ),
)


def _process(up: str, starts: str, **more: str) -> dict[str, str]:
    count = len(up.split())
    series = {
        "fabricmanager_up": up,
        "fabricmanager_starts_total": starts,
        state("not-applicable"): minutes((0, count)),
    }
    return series | more


DOWN = (
    Story(
        "FabricManagerDown",
        "fires",
        _process(minutes((1, 3), (0, 5), (1, 3)), minutes((1, 8), (2, 3))),
        {4: NONE, 5: (Firing(value=0),), 7: (Firing(value=0),), 8: NONE},
    ),
    Story(
        "FabricManagerDown",
        "is quiet before the first start",
        _process(minutes((0, 30)), minutes((0, 30))),
        {29: NONE},
    ),
    Story(
        "FabricManagerDown",
        "is quiet where there is no fabric any more",
        {
            "fabricmanager_up": minutes((1, 3), (0, 27)),
            "fabricmanager_starts_total": minutes((1, 30)),
            state("not-applicable"): minutes((0, 3), (1, 27)),
        },
        {29: NONE},
    ),
    Story(
        "FabricManagerDown",
        "leaves what comes and goes to the crash loop",
        _process(minutes(*((0, 2), (1, 1)) * 6), minutes((1, 18))),
        dict.fromkeys(range(18), NONE),
    ),
)

EXITS = 'fabricmanager_exits_total{class="unexpected"}'
CRASH_LOOP = (
    Story(
        "FabricManagerCrashLooping",
        "fires at once when the daemon says so",
        {condition("FMS-511"): minutes((0, 3), (1, 5), (0, 2)), EXITS: minutes((0, 10))},
        {2: NONE, 3: ONE, 7: ONE, 8: NONE},
    ),
    Story(
        "FabricManagerCrashLooping",
        "fires at the third death within an hour",
        {condition("FMS-511"): minutes((0, 90)), EXITS: minutes((0, 5), (1, 5), (2, 5), (3, 75))},
        {14: NONE, 15: (Firing(value=3),), 60: (Firing(value=3),), 70: NONE},
    ),
    Story(
        "FabricManagerCrashLooping",
        "is quiet with two, with other ends, and when the daemon begins to count anew",
        {
            condition("FMS-511"): minutes((0, 90)),
            EXITS: minutes((7, 10), (8, 10), (9, 10), (0, 20), (1, 10), (2, 30)),
            'fabricmanager_exits_total{class="requested"}': minutes((0, 10), (9, 80)),
        },
        dict.fromkeys(range(0, 90, 5), NONE),
    ),
    Story(
        "FabricManagerCrashLooping",
        "is one alert while it comes and goes",
        {
            condition("FMS-511"): minutes((0, 20), *((1, 2), (0, 2)) * 10),
            EXITS: " ".join(str(number // 4) for number in range(60)),
        },
        {minute: (Firing(value=minute // 4 if minute % 4 > 1 or minute < 20 else 1),) for minute in range(12, 60, 3)},
    ),
)

HEARD = 'nvswitch_driver_state{pci_bus_id="%s", state="MANAGER_TIMEOUT"}'
CONFIGURED_AT = "fabricmanager_configured_timestamp_seconds"
HUNG = (
    Story(
        "FabricManagerTimeout",
        "fires once for all switches",
        {
            HEARD % "0000:05:00.0": minutes((0, 2), (1, 8)),
            HEARD % SWITCH: minutes((0, 2), (1, 3), (0, 5)),
            "fabricmanager_up": minutes((1, 10)),
            CONFIGURED_AT: minutes((1_700_000_000, 10)),
        },
        {2: NONE, 3: (Firing(value=2),), 9: ONE},
    ),
    Story(
        "FabricManagerTimeout",
        "is quiet while Fabric Manager is down or not done yet",
        {
            HEARD % SWITCH: minutes((1, 20)),
            "fabricmanager_up": minutes((0, 10), (1, 10)),
            CONFIGURED_AT: minutes((GONE, 20)),
        },
        {5: NONE, 19: NONE},
    ),
    Story(
        "FabricManagerTimeout",
        "is quiet while it comes and goes",
        {
            HEARD % SWITCH: minutes(*((1, 1), (0, 1)) * 10),
            "fabricmanager_up": minutes((1, 20)),
            CONFIGURED_AT: minutes((1_700_000_000, 20)),
        },
        dict.fromkeys(range(20), NONE),
    ),
)

LOST = (
    Story(
        "NVSwitchLost",
        "fires at once and for some minutes after",
        {condition("FMS-305"): minutes((0, 3), (1, 1), (0, 20))},
        {2: NONE, 3: with_code("FMS-305"), 8: with_code("FMS-305"), 9: NONE},
    ),
    Story(
        "NVSwitchLost",
        "is one alert while it comes and goes",
        {condition("FMS-306"): minutes((0, 3), *((1, 1), (0, 3)) * 10)},
        {2: NONE, **{minute: with_code("FMS-306") for minute in range(3, 43, 2)}},
    ),
    Story(
        "NVSwitchLost",
        "is quiet",
        {condition("FMS-305"): minutes((0, 30)), condition("FMS-307"): minutes((1, 30))},
        {29: NONE},
    ),
)

FATAL = f'nvswitch_sxid_total{{pci_bus_id="{SWITCH}", sxid="20034", severity="fatal"}}'
NON_FATAL = f'nvswitch_sxid_total{{pci_bus_id="{SWITCH}", sxid="12028", severity="non-fatal"}}'
SXID = (
    Story(
        "NVSwitchFatalSXid",
        "fires at the first one, until the condition is over",
        {
            FATAL: minutes((GONE, 3), (1, 17)),
            NON_FATAL: minutes((5, 20)),
            condition("FMS-601"): minutes((0, 3), (1, 10), (0, 7)),
        },
        {
            2: NONE,
            3: (Firing({"pci_bus_id": SWITCH, "sxid": "20034"}),),
            12: (Firing({"pci_bus_id": SWITCH, "sxid": "20034"}),),
            13: NONE,
        },
    ),
    Story(
        "NVSwitchFatalSXid",
        "is quiet with non-fatal ones",
        {NON_FATAL: minutes((5, 20)), condition("FMS-601"): minutes((0, 20))},
        {19: NONE},
    ),
    Story(
        "NVSwitchFatalSXid",
        "goes on without the number when the supervisor has begun to count anew",
        {FATAL: minutes((2, 5), (STALE, 1), (GONE, 9)), condition("FMS-601"): minutes((1, 15))},
        {4: (Firing({"pci_bus_id": SWITCH, "sxid": "20034"}, value=2),), 5: ONE, 14: ONE},
    ),
    Story(
        "NVSwitchFatalSXid",
        "is one alert however often it comes",
        {FATAL: " ".join(str(1 + number) for number in range(20)), condition("FMS-601"): minutes((1, 20))},
        {minute: (Firing({"pci_bus_id": SWITCH, "sxid": "20034"}, value=minute + 1),) for minute in range(0, 20, 3)},
    ),
)

LINK = f'{{pci_bus_id="{SWITCH}", port="33"}}'
LINK_FIRING = {"pci_bus_id": SWITCH, "port": "33"}


def _link(hour: str, day: str) -> dict[str, str]:
    return {f"nvswitch_link_sxids_last_hour{LINK}": hour, f"nvswitch_link_sxids_last_day{LINK}": day}


LINKS = (
    Story(
        "NVLinkErrorsRising",
        "fires when the last hour was worse than the day",
        _link(minutes((0, 5), (12, 20), (3, 5)), minutes((40, 5), (52, 20), (52, 5))),
        {14: NONE, 15: (Firing(LINK_FIRING, value=12),), 24: (Firing(LINK_FIRING, value=12),), 25: NONE},
    ),
    Story(
        "NVLinkErrorsRising",
        "fires when it was bad all day",
        _link(minutes((11, 20)), minutes((260, 20))),
        {9: NONE, 10: (Firing(LINK_FIRING, value=260),)},
    ),
    Story(
        "NVLinkErrorsRising",
        "is quiet with few errors, and with as many as ever",
        {
            **_link(minutes((9, 30)), minutes((9, 30))),
            'nvswitch_link_sxids_last_hour{pci_bus_id="0000:05:00.0", port="1"}': minutes((10, 30)),
            'nvswitch_link_sxids_last_day{pci_bus_id="0000:05:00.0", port="1"}': minutes((200, 30)),
        },
        {29: NONE},
    ),
    Story(
        "NVLinkErrorsRising",
        "is quiet while it comes and goes",
        _link(minutes(*((12, 9), (9, 1)) * 4), minutes((20, 40))),
        dict.fromkeys(range(0, 40, 3), NONE),
    ),
)

GPU_INFO = f'fabric_gpu_info{{pci_bus_id="{GPU}", driver="%s", module_id="%s"}}'
WRONG_DRIVER = (
    Story(
        "GPUOnWrongDriver",
        "fires, also when its module id becomes known meanwhile",
        {
            GPU_INFO % ("vfio-pci", ""): minutes((1, 2), (GONE, 8)),
            GPU_INFO % ("nvidia", ""): minutes((GONE, 2), (1, 1), (GONE, 7)),
            GPU_INFO % ("nvidia", "3"): minutes((GONE, 3), (1, 7)),
            condition("FMS-206"): minutes((0, 2), (1, 8)),
        },
        {
            3: NONE,
            4: (Firing({"pci_bus_id": GPU, "driver": "nvidia"}),),
            9: (Firing({"pci_bus_id": GPU, "driver": "nvidia"}),),
        },
    ),
    Story(
        "GPUOnWrongDriver",
        "is quiet where GPUs belong to the host",
        {GPU_INFO % ("nvidia", "3"): minutes((1, 20)), condition("FMS-206"): minutes((0, 20))},
        {19: NONE},
    ),
    Story(
        "GPUOnWrongDriver",
        "is quiet while it comes and goes",
        {GPU_INFO % ("nvidia", "3"): minutes((1, 20)), condition("FMS-206"): minutes(*((1, 2), (0, 1)) * 6, (0, 2))},
        dict.fromkeys(range(20), NONE),
    ),
)

REGISTERED = f'fabric_gpu_registered{{pci_bus_id="{GPU}"}}'
IN_GUEST = f'fmsupervisor_gpu_in_guest{{pci_bus_id="{GPU}"}}'
NOT_REGISTERED = (
    Story(
        "GPUNotRegistered",
        "fires for a GPU of a guest",
        {
            REGISTERED: minutes((0, 30), (1, 5)),
            IN_GUEST: minutes((0, 2), (1, 33)),
            'fabric_gpu_registered{pci_bus_id="0000:2a:00.0"}': minutes((0, 35)),
            'fmsupervisor_gpu_in_guest{pci_bus_id="0000:2a:00.0"}': minutes((0, 35)),
        },
        {16: NONE, 17: (Firing({"pci_bus_id": GPU}, value=0),), 30: NONE},
    ),
    Story(
        "GPUNotRegistered",
        "leaves guests that must be power-cycled to their own alert",
        {
            REGISTERED: minutes((0, 30)),
            IN_GUEST: minutes((1, 30)),
            f'fmsupervisor_guest_restart_required{{pci_bus_id="{GPU}"}}': minutes((1, 30)),
        },
        {29: NONE},
    ),
    Story(
        "GPUNotRegistered",
        "is quiet while it is not known whether there is a guest",
        {REGISTERED: minutes((0, 30)), IN_GUEST: minutes((GONE, 30))},
        {29: NONE},
    ),
    Story(
        "GPUNotRegistered",
        "is quiet while it comes and goes",
        {REGISTERED: minutes(*((0, 15), (1, 1)) * 3), IN_GUEST: minutes((1, 48))},
        dict.fromkeys(range(0, 48, 5), NONE),
    ),
)

RESTART = 'fmsupervisor_guest_restart_required{pci_bus_id="%s"}'
GUESTS = (
    Story(
        "GuestRestartRequired",
        "is one alert until the last guest was restarted, and names the GPUs",
        {
            RESTART % GPU: minutes((0, 2), (1, 10), (0, 3)),
            RESTART % "0000:2a:00.0": minutes((0, 2), (1, 5), (0, 8)),
            RESTART % "0000:3a:00.0": minutes((0, 15)),
        },
        {
            2: NONE,
            3: (Firing(value=2, listed=f"{GPU} 0000:2a:00.0 "),),
            9: (Firing(value=1, listed=f"{GPU} "),),
            12: NONE,
        },
    ),
    Story("GuestRestartRequired", "is quiet", {RESTART % GPU: minutes((0, 20))}, {19: NONE}),
    Story(
        "GuestRestartRequired",
        "is quiet while it comes and goes",
        {RESTART % GPU: minutes(*((1, 1), (0, 1)) * 5)},
        dict.fromkeys(range(10), NONE),
    ),
)

ITSELF = (
    Story(
        "FmsupervisorDown", "fires", {"up": minutes((1, 3), (0, 8), (1, 2))}, {7: NONE, 8: (Firing(value=0),), 11: NONE}
    ),
    Story("FmsupervisorDown", "is quiet", {"up": minutes((1, 20))}, {19: NONE}),
    Story(
        "FmsupervisorDown",
        "is quiet while it comes and goes",
        {"up": minutes(*((0, 5), (1, 1)) * 4)},
        dict.fromkeys(range(24), NONE),
    ),
    Story(
        "FmsupervisorAbsent",
        "fires without a target",
        {"up": minutes((1, 3), (STALE, 1), (GONE, 29))},
        {3: NONE, 12: NONE, 13: (Firing(is_of_target=False),)},
    ),
    Story("FmsupervisorAbsent", "is quiet with one that is down", {"up": minutes((0, 30))}, {29: NONE}),
    Story(
        "FmsupervisorAbsent",
        "is quiet while it comes and goes",
        {"up": minutes(*((GONE, 9), (1, 1)) * 4)},
        dict.fromkeys(range(0, 40, 3), NONE),
    ),
)

COLLECTOR = 'fmsupervisor_collector_success{collector="sxids"}'
INCOMPLETE = (
    Story(
        "FmsupervisorMetricsIncomplete",
        "fires",
        {COLLECTOR: minutes((1, 2), (0, 8), (1, 2))},
        {6: NONE, 7: (Firing({"collector": "sxids"}, value=0),), 10: NONE},
    ),
    Story("FmsupervisorMetricsIncomplete", "is quiet", {COLLECTOR: minutes((1, 20))}, {19: NONE}),
    Story(
        "FmsupervisorMetricsIncomplete",
        "is quiet while it comes and goes",
        {COLLECTOR: minutes(*((0, 5), (1, 1)) * 4)},
        dict.fromkeys(range(24), NONE),
    ),
)

OTHERS = (
    Story(
        "FabricConditionCritical",
        "knows conditions that are not invented yet, and leaves those with an alert of their own",
        {condition("FMS-999"): minutes((1, 20)), condition("FMS-601"): minutes((1, 20))},
        {5: with_code("FMS-999")},
    ),
    Story(
        "FabricConditionWarning",
        "leaves what only explains",
        {condition("FMS-609", "info"): minutes((1, 30))},
        {29: NONE},
    ),
)

# Every condition at once: each comes through the alert that stands for it, and through no other.
ALL = tuple(
    Story(
        alert.name,
        "fires for each of its conditions alone",
        {condition(one.code, one.severity): minutes((1, 20)) for one in REGISTRY.values()},
        {19: tuple(firing for code in alert.codes for firing in with_code(code))},
    )
    for alert in ALERTS
    if alert.has_code
)

STORIES = (
    *ALL,
    *NOT_CONFIGURED,
    *DEGRADED,
    *DOWN,
    *CRASH_LOOP,
    *HUNG,
    *by_condition("FabricManagerLogFull", "FMS-604", 5, "warning"),
    *by_condition("FabricVersionMismatch", "FMS-103", 2),
    *by_condition("NVSwitchMissing", "FMS-301", 5),
    *LOST,
    *SXID,
    *LINKS,
    *WRONG_DRIVER,
    *NOT_REGISTERED,
    *GUESTS,
    *by_condition("FabricConditionCritical", "FMS-203", 2),
    *by_condition("FabricConditionWarning", "FMS-616", 15, "warning"),
    *OTHERS,
    *ITSELF,
    *INCOMPLETE,
)


@pytest.fixture(scope="module")
def are_all_true(tmp_path_factory: pytest.TempPathFactory) -> bool:
    """One promtool for all of them; when it has something to say, each is asked about by itself."""
    return judge(STORIES, tmp_path_factory.mktemp("stories")) == ""


@needs_promtool
@pytest.mark.parametrize("story", STORIES, ids=str)
def test_an_alert(story: Story, are_all_true: bool, tmp_path: Path) -> None:
    assert are_all_true or judge([story], tmp_path) == ""


@pytest.mark.parametrize("alert", [alert.name for alert in ALERTS])
def test_every_alert_has_its_stories(alert: str) -> None:
    """It fires, it keeps quiet, and what comes and goes is told."""
    stories = [story for story in STORIES if story.alert == alert]
    assert any(firings for story in stories for firings in story.expected.values())
    assert any(not any(story.expected.values()) for story in stories)
    assert any("comes" in story.name for story in stories)


@needs_promtool
def test_a_story_can_be_false(tmp_path: Path) -> None:
    story = Story("FmsupervisorDown", "fires", {"up": minutes((0, 9))}, {8: NONE})
    assert "FmsupervisorDown" in judge([story], tmp_path)
