// SPDX-License-Identifier: MIT OR GPL-2.0
/*
 * The PCI driver nvidia-nvswitch, its device nodes (minors 0 to 63) and /proc/driver/nvidia-nvswitch.
 *
 * One mutex is held for a whole probe, so that a slow one delays opens and ioctls. A minor is the lowest free one at
 * the start of a probe: a switch that fails leaves no hole, and after remove and rescan minors may be dealt anew.
 */
#include <linux/delay.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/poll.h>
#include <linux/slab.h>

#include "fake_fm_ioctl.h"
#include "nvidia_stub.h"

#define MINORS 256
#define DEVICE_MINORS 64
#define FIRST_BUS 0x83 /* of the bed's board: gives the physical id */
#define NO_PHYSICAL_ID 0xffffffffU
#define REASON_MANUAL_IN_BAND 2

DEFINE_MUTEX(stub_switch_lock);
LIST_HEAD(stub_switches);

static dev_t first;
static struct cdev node_cdev;
static struct proc_dir_entry *root, *devices;

static bool is_lr10(u16 device)
{
	return device == 0x1ae8 || (device >= 0x1af0 && device <= 0x1aff);
}

static bool is_ls10(u16 device)
{
	return device >= 0x22a0 && device <= 0x22af;
}

struct stub_switch *stub_switch_find(unsigned int minor)
{
	struct stub_switch *nvswitch;

	list_for_each_entry(nvswitch, &stub_switches, entry)
		if (nvswitch->minor == minor)
			return nvswitch;
	return NULL;
}

static void put_switch(struct stub_switch *nvswitch)
{
	lockdep_assert_held(&stub_switch_lock);
	if (!--nvswitch->users)
		kfree(nvswitch);
}

/* ---- nodes ---- */

static int open_node(struct inode *inode, struct file *file)
{
	struct stub_switch *nvswitch;
	int error;

	pr_info("nvidia-nvswitch%u: open (major=%u)\n", iminor(inode), imajor(inode));
	error = mutex_lock_interruptible(&stub_switch_lock);
	if (error)
		return error;
	nvswitch = stub_switch_find(iminor(inode));
	if (nvswitch && !nvswitch->device_reason) {
		nvswitch->users++;
		file->private_data = nvswitch;
	} else {
		error = -ENODEV;
	}
	mutex_unlock(&stub_switch_lock);
	return error;
}

static int release_node(struct inode *inode, struct file *file)
{
	pr_info("nvidia-nvswitch%u: release (major=%u)\n", iminor(inode), imajor(inode));
	mutex_lock(&stub_switch_lock);
	put_switch(file->private_data);
	mutex_unlock(&stub_switch_lock);
	return 0;
}

/* Of the many commands of a switch the stub knows only the heartbeat: EINVAL, or ENODEV when the switch is gone. */
static long ioctl_node(struct file *file, unsigned int command, unsigned long argument)
{
	struct stub_switch *nvswitch = file->private_data;
	long result = -EINVAL;

	mutex_lock(&stub_switch_lock);
	if (nvswitch->is_gone) {
		pr_info("nvidia-nvswitch%u: a stale fd detected\n", nvswitch->minor);
		result = -ENODEV;
	} else if (nvswitch->device_reason) {
		pr_info("nvidia-nvswitch%u: ioctl attempted on blacklisted device\n", nvswitch->minor);
		result = -ENODEV;
	} else if (command == FAKE_FM_HEARTBEAT) {
		result = stub_take_heartbeat((void __user *)argument, nvswitch);
	}
	mutex_unlock(&stub_switch_lock);
	return result;
}

static __poll_t poll_node(struct file *file, poll_table *table)
{
	struct stub_switch *nvswitch = file->private_data;

	if (READ_ONCE(nvswitch->is_gone)) {
		pr_info("nvidia-nvswitch%u: a stale fd detected\n", nvswitch->minor);
		return EPOLLHUP;
	}
	pr_info("nvidia-nvswitch%u: no events registered for fd\n", nvswitch->minor);
	return EPOLLERR;
}

static const struct file_operations node_operations = {
	.owner = THIS_MODULE,
	.open = open_node,
	.release = release_node,
	.unlocked_ioctl = ioctl_node,
	.poll = poll_node,
};

/* ---- /proc/driver/nvidia-nvswitch ---- */

static int show_information(struct seq_file *file, void *unused)
{
	const struct stub_switch *nvswitch = file->private;
	char uuid[48];

	seq_printf(file, "BIOS Version: %s\n", is_ls10(nvswitch->pdev->device) ? "96.10.6d.00.01" : "92.10.14.00.01");
	if (!stub_is_at_least(580, 0))
		return 0;
	stub_format_uuid(uuid, sizeof(uuid), "SWX", nvswitch->uuid);
	seq_printf(file, "UUID: %s\n", uuid);
	seq_printf(file, "Physical location ID: %04x\n", nvswitch->physical_id);
	return 0;
}

static int add_procfs(void)
{
	root = proc_mkdir("driver/nvidia-nvswitch", NULL);
	devices = root ? proc_mkdir("devices", root) : NULL;
	if (!devices || !stub_proc_text("permissions", root, "DeviceFileMode: 438\n"))
		return -ENOMEM;
	return 0;
}

static void add_to_procfs(struct stub_switch *nvswitch)
{
	nvswitch->proc = proc_mkdir(pci_name(nvswitch->pdev), devices);
	if (nvswitch->proc)
		proc_create_single_data("information", 0444, nvswitch->proc, show_information, nvswitch);
}

/* ---- probe and remove ---- */

static unsigned int lowest_free_minor(void)
{
	unsigned int minor = 0;

	while (minor < DEVICE_MINORS && stub_switch_find(minor))
		minor++;
	return minor;
}

static void identify(struct stub_switch *nvswitch)
{
	struct pci_dev *pdev = nvswitch->pdev;
	unsigned int slot = pdev->bus->number - FIRST_BUS;
	char uuid[48];

	stub_uuid_of(pdev, nvswitch->uuid);
	nvswitch->physical_id = slot < DEVICE_MINORS ? slot : NO_PHYSICAL_ID;
	stub_format_uuid(uuid, sizeof(uuid), "SWX", nvswitch->uuid);
	if (stub_is_listed(stub_blacklist, pci_name(pdev)))
		nvswitch->device_reason = stub_blacklist_reason;
	else if (stub_is_listed(stub_switch_blacklist, uuid))
		nvswitch->device_reason = REASON_MANUAL_IN_BAND;
}

/* What boots the switch in the real driver: the step that is slow and that fails. */
static int start_device(struct stub_switch *nvswitch)
{
	struct pci_dev *pdev = nvswitch->pdev;

	if (stub_probe_delay_ms && (!stub_slow_probe || stub_is_listed(stub_slow_probe, pci_name(pdev))))
		msleep(stub_probe_delay_ms);
	if (stub_is_answering(pdev) && !stub_is_listed(stub_fail_probe, pci_name(pdev)))
		return 0;
	pr_err("nvidia-nvswitch%u: Failed to initialize device : %d\n", nvswitch->minor, -1);
	pr_err("nvidia-nvswitch%u: Failed to initialize device : %d\n", nvswitch->minor, -ENODEV);
	return -ENODEV;
}

static int bring_up(struct stub_switch *nvswitch)
{
	struct pci_dev *pdev = nvswitch->pdev;
	int error = pci_enable_device(pdev);

	if (error) {
		pr_err("nvidia-nvswitch%u: Failed to enable PCI device : %d\n", nvswitch->minor, error);
		return error;
	}
	pci_set_master(pdev);
	error = start_device(nvswitch);
	if (error) {
		pci_clear_master(pdev);
		pci_disable_device(pdev);
		return error;
	}
	pr_info("nvidia-nvswitch%u: using MSI\n", nvswitch->minor);
	identify(nvswitch);
	if (nvswitch->device_reason)
		pr_err("nvidia-nvswitch%u: Blacklisted nvswitch device\n", nvswitch->minor);
	return 0;
}

static int add_switch(struct pci_dev *pdev)
{
	struct stub_switch *nvswitch;
	unsigned int minor = lowest_free_minor();
	int error;

	if (minor >= DEVICE_MINORS)
		return -ERANGE;
	nvswitch = kzalloc(sizeof(*nvswitch), GFP_KERNEL);
	if (!nvswitch)
		return -ENOMEM;
	nvswitch->pdev = pdev;
	nvswitch->minor = minor;
	nvswitch->users = 1;
	error = bring_up(nvswitch);
	if (error) {
		kfree(nvswitch);
		return error;
	}
	pci_set_drvdata(pdev, nvswitch);
	add_to_procfs(nvswitch);
	list_add_tail(&nvswitch->entry, &stub_switches);
	return 0;
}

static int probe_switch(struct pci_dev *pdev, const struct pci_device_id *id)
{
	int error;

	if (!is_lr10(pdev->device) && !(is_ls10(pdev->device) && stub_is_at_least(520, 0)))
		return -EINVAL;
	pr_info("nvidia-nvswitch: Probing device %s, Vendor Id = 0x%x, Device Id = 0x%x, Class = 0x%x \n",
		pci_name(pdev), pdev->vendor, pdev->device, pdev->class);
	mutex_lock(&stub_switch_lock);
	error = add_switch(pdev);
	mutex_unlock(&stub_switch_lock);
	return error;
}

static void remove_switch(struct pci_dev *pdev)
{
	struct stub_switch *nvswitch = pci_get_drvdata(pdev);

	mutex_lock(&stub_switch_lock);
	pr_info("nvidia-nvswitch%u: removing device %s\n", nvswitch->minor, pci_name(pdev));
	WRITE_ONCE(nvswitch->is_gone, true);
	list_del(&nvswitch->entry);
	pci_set_drvdata(pdev, NULL);
	pci_clear_master(pdev);
	pci_disable_device(pdev);
	proc_remove(nvswitch->proc);
	put_switch(nvswitch);
	mutex_unlock(&stub_switch_lock);
}

static const struct pci_device_id switch_table[] = {
	{ PCI_DEVICE(NVIDIA_VENDOR, PCI_ANY_ID), .class = PCI_CLASS_BRIDGE_OTHER << 8, .class_mask = ~0 },
	{}
};

static struct pci_driver switch_driver = {
	.name = "nvidia-nvswitch",
	.id_table = switch_table,
	.probe = probe_switch,
	.remove = remove_switch,
};

bool stub_switch_is_present(void)
{
	struct pci_dev *pdev = NULL;

	while ((pdev = pci_get_class(PCI_CLASS_BRIDGE_OTHER << 8, pdev)))
		if (pdev->vendor == NVIDIA_VENDOR)
			break;
	pci_dev_put(pdev);
	return pdev;
}

int stub_switch_init(void)
{
	int error = alloc_chrdev_region(&first, 0, MINORS, "nvidia-nvswitch");

	if (error) {
		pr_err("nvidia-nvswitch: Unable to create cdev region\n");
		return error;
	}
	pr_err("\n"); /* the real driver means to print its major here, and prints an empty line in all branches */
	cdev_init(&node_cdev, &node_operations);
	node_cdev.owner = THIS_MODULE;
	error = cdev_add(&node_cdev, first, DEVICE_MINORS);
	if (error) {
		pr_err("nvidia-nvswitch: Unable to create cdev\n");
		goto no_cdev;
	}
	error = add_procfs();
	if (error)
		goto no_procfs;
	error = pci_register_driver(&switch_driver);
	if (error) {
		pr_err("nvidia-nvswitch: Failed to register driver : %d\n", error);
		goto no_procfs;
	}
	error = stub_control_init(MAJOR(first));
	if (!error)
		return 0;

	pci_unregister_driver(&switch_driver);
no_procfs:
	proc_remove(root);
	cdev_del(&node_cdev);
no_cdev:
	unregister_chrdev_region(first, MINORS);
	return error;
}

void stub_switch_exit(void)
{
	stub_control_exit();
	pci_unregister_driver(&switch_driver);
	proc_remove(root);
	cdev_del(&node_cdev);
	unregister_chrdev_region(first, MINORS);
}
