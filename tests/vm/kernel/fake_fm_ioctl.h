/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0 */
/*
 * The private ioctl by which a simulated Fabric Manager tells the nvidia stub that it is alive. It stands for the many
 * real ones that FM issues and needs CAP_SYS_ADMIN (EPERM). It is made on /dev/nvidia-nvswitchctl, or on an open switch,
 * of which it then speaks whatever the buffer says: so one that came back under the same minor is not taken for the old.
 *
 *   number (x86-64, arm64)   0x40084601
 *   buffer                   two native u32: minor, configured
 *
 * configured=1: FM is up. driverState becomes CONFIGURED, deviceState too. To be repeated: when the last one is more
 * than fm_timeout_ms (10 s) old, driverState becomes MANAGER_TIMEOUT within a second; the next one repairs that.
 * configured=0: FM has not configured the switch yet, or ends in order: driverState and deviceState become STANDBY.
 * A blacklisted switch keeps its deviceState. A driver state MANAGER_ERROR (debugfs) stays until it is taken back.
 *
 * Errors: ENODEV no switch has that minor (for all: there is no switch), or the open one is gone or blacklisted;
 * EINVAL another value of configured.
 */
#ifndef FAKE_FM_IOCTL_H
#define FAKE_FM_IOCTL_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define FAKE_FM_ALL_SWITCHES 0xffffffffU

struct fake_fm_heartbeat {
	__u32 minor; /* N of /dev/nvidia-nvswitchN, or FAKE_FM_ALL_SWITCHES */
	__u32 configured;
};

#define FAKE_FM_HEARTBEAT _IOW('F', 1, struct fake_fm_heartbeat)

#endif
