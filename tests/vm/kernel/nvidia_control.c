// SPDX-License-Identifier: MIT OR GPL-2.0
/*
 * /dev/nvidia-nvswitchctl (minor 255): GET_DEVICES, GET_DEVICES_V2 in the one size that the played branch knows,
 * CHECK_VERSION, the simulated Fabric Manager's heartbeat, and the watch over it, once a second.
 * Layouts: ioctl_nvswitch.h and ioctl_common_nvswitch.h of NVIDIA's open modules.
 */
#include <linux/build_bug.h>
#include <linux/capability.h>
#include <linux/fs.h>
#include <linux/jiffies.h>
#include <linux/module.h>
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/uaccess.h>
#include <linux/workqueue.h>

#include "fake_fm_ioctl.h"
#include "nvidia_stub.h"

#define CONTROL_MINOR 255
#define MAX_DEVICES 64

struct device_v1 {
	u32 instance, domain, bus, device, function;
};

struct device_v2 {
	u32 instance;
	u8 uuid[16];
	u32 domain, bus, device, function;
	u32 driver_state, device_state, device_reason, physical_id;
	u8 is_tnvl; /* from 550.78 on; with padding the entry has 56 bytes then, 52 before */
};
#define ENTRY_SIZE_OLD offsetof(struct device_v2, is_tnvl)
#define ENTRY_SIZE_NEW sizeof(struct device_v2)

struct version_check {
	char user[64];
	char kernel[64];
	u8 is_compatible;
};

#define LIST_SIZE(entry_size) (sizeof(u32) + MAX_DEVICES * (entry_size))
static_assert(LIST_SIZE(sizeof(struct device_v1)) == 1284);
static_assert(LIST_SIZE(ENTRY_SIZE_OLD) == 3332);
static_assert(LIST_SIZE(ENTRY_SIZE_NEW) == 3588);
static_assert(sizeof(struct version_check) == 129);

static struct cdev control_cdev;
static void watch_manager(struct work_struct *work);
static DECLARE_DELAYED_WORK(watch, watch_manager);

static size_t entry_size(void)
{
	if (stub_v2_size)
		return stub_v2_size;
	return stub_is_at_least(550, 78) ? ENTRY_SIZE_NEW : ENTRY_SIZE_OLD;
}

static u32 driver_state_of(const struct stub_switch *nvswitch)
{
	if (nvswitch->has_manager_error)
		return DRIVER_MANAGER_ERROR;
	if (!nvswitch->is_configured)
		return DRIVER_STANDBY;
	return nvswitch->is_timed_out ? DRIVER_MANAGER_TIMEOUT : DRIVER_CONFIGURED;
}

static u32 device_state_of(const struct stub_switch *nvswitch)
{
	if (nvswitch->device_reason)
		return DEVICE_BLACKLISTED;
	return nvswitch->is_configured ? DEVICE_CONFIGURED : DEVICE_STANDBY;
}

static void fill_v1(struct device_v1 *entry, const struct stub_switch *nvswitch)
{
	struct pci_dev *pdev = nvswitch->pdev;

	entry->instance = nvswitch->minor;
	entry->domain = pci_domain_nr(pdev->bus);
	entry->bus = pdev->bus->number;
	entry->device = PCI_SLOT(pdev->devfn);
	entry->function = PCI_FUNC(pdev->devfn);
}

static void fill_v2(struct device_v2 *entry, const struct stub_switch *nvswitch)
{
	struct device_v1 place;

	fill_v1(&place, nvswitch);
	memset(entry, 0, sizeof(*entry));
	entry->instance = place.instance;
	memcpy(entry->uuid, nvswitch->uuid, sizeof(entry->uuid));
	entry->domain = place.domain;
	entry->bus = place.bus;
	entry->device = place.device;
	entry->function = place.function;
	entry->driver_state = driver_state_of(nvswitch);
	entry->device_state = device_state_of(nvswitch);
	entry->device_reason = nvswitch->device_reason;
	entry->physical_id = nvswitch->physical_id;
}

/* A count and 64 entries, of which the first so many are filled. is_v2 tells the kind, stride the size of an entry. */
static long get_devices(void __user *buffer, size_t stride, bool is_v2)
{
	u8 *reply = kzalloc(LIST_SIZE(stride), GFP_KERNEL);
	struct stub_switch *nvswitch;
	struct device_v1 v1;
	struct device_v2 v2;
	long result;
	u32 count = 0;

	if (!reply)
		return -ENOMEM;
	list_for_each_entry(nvswitch, &stub_switches, entry) {
		if (is_v2)
			fill_v2(&v2, nvswitch);
		else
			fill_v1(&v1, nvswitch);
		memcpy(reply + sizeof(u32) + stride * count, is_v2 ? (void *)&v2 : (void *)&v1, stride);
		count++;
	}
	memcpy(reply, &count, sizeof(count));
	result = copy_to_user(buffer, reply, LIST_SIZE(stride)) ? -EFAULT : 0;
	kfree(reply);
	return result;
}

/* The real check compares only as far as the kernel's own version goes. */
static long check_version(struct version_check __user *buffer)
{
	struct version_check check;

	if (copy_from_user(&check, buffer, sizeof(check)))
		return -EFAULT;
	check.user[sizeof(check.user) - 1] = 0;
	memset(check.kernel, 0, sizeof(check.kernel));
	strscpy(check.kernel, stub_version, sizeof(check.kernel));
	check.is_compatible = !strncmp(check.user, stub_version, strlen(stub_version));
	if (!check.is_compatible)
		pr_err("nvidia-nvswitch: Version mismatch, kernel version %s user version %s\n", check.kernel,
		       check.user);
	return copy_to_user(buffer, &check, sizeof(check)) ? -EFAULT : 0;
}

long stub_take_heartbeat(struct fake_fm_heartbeat __user *buffer, const struct stub_switch *only)
{
	struct fake_fm_heartbeat heartbeat;
	struct stub_switch *nvswitch;
	long result = -ENODEV;

	if (!capable(CAP_SYS_ADMIN))
		return -EPERM;
	if (copy_from_user(&heartbeat, buffer, sizeof(heartbeat)))
		return -EFAULT;
	if (heartbeat.configured > 1)
		return -EINVAL;
	list_for_each_entry(nvswitch, &stub_switches, entry) {
		if (only ? nvswitch != only :
			   heartbeat.minor != FAKE_FM_ALL_SWITCHES && heartbeat.minor != nvswitch->minor)
			continue;
		nvswitch->is_configured = heartbeat.configured;
		nvswitch->is_timed_out = false;
		nvswitch->last_heartbeat = jiffies;
		result = 0;
	}
	return result;
}

static void watch_manager(struct work_struct *work)
{
	struct stub_switch *nvswitch;

	mutex_lock(&stub_switch_lock);
	list_for_each_entry(nvswitch, &stub_switches, entry)
		if (time_after(jiffies, nvswitch->last_heartbeat + msecs_to_jiffies(READ_ONCE(stub_fm_timeout_ms))))
			nvswitch->is_timed_out = true;
	mutex_unlock(&stub_switch_lock);
	schedule_delayed_work(&watch, HZ);
}

/* The driver looks at the number, then at the size, and says EINVAL to both kinds of mistake. */
static long control(unsigned int command, void __user *buffer)
{
	switch (_IOC_NR(command)) {
	case 1:
		if (_IOC_SIZE(command) == LIST_SIZE(sizeof(struct device_v1)))
			return get_devices(buffer, sizeof(struct device_v1), false);
		return -EINVAL;
	case 2:
		return _IOC_SIZE(command) == sizeof(struct version_check) ? check_version(buffer) : -EINVAL;
	case 3:
		if (_IOC_SIZE(command) == LIST_SIZE(entry_size()))
			return get_devices(buffer, entry_size(), true);
		return -EINVAL;
	default:
		return -EINVAL;
	}
}

static long ioctl_control(struct file *file, unsigned int command, unsigned long argument)
{
	void __user *buffer = (void __user *)argument;
	long result;

	if (_IOC_TYPE(command) != 'c' && command != FAKE_FM_HEARTBEAT)
		return -EINVAL;
	result = mutex_lock_interruptible(&stub_switch_lock);
	if (result)
		return result;
	result = command == FAKE_FM_HEARTBEAT ? stub_take_heartbeat(buffer, NULL) : control(command, buffer);
	mutex_unlock(&stub_switch_lock);
	return result;
}

static const struct file_operations control_operations = {
	.owner = THIS_MODULE,
	.unlocked_ioctl = ioctl_control,
};

int stub_control_init(unsigned int major)
{
	int error;

	if (entry_size() != ENTRY_SIZE_OLD && entry_size() != ENTRY_SIZE_NEW)
		return -EINVAL;
	cdev_init(&control_cdev, &control_operations);
	control_cdev.owner = THIS_MODULE;
	error = cdev_add(&control_cdev, MKDEV(major, CONTROL_MINOR), 1);
	if (error) {
		pr_err("nvidia-nvswitch: Unable to create cdev ctl\n");
		return error;
	}
	schedule_delayed_work(&watch, HZ);
	return 0;
}

void stub_control_exit(void)
{
	cancel_delayed_work_sync(&watch);
	cdev_del(&control_cdev);
}
