// SPDX-License-Identifier: MIT OR GPL-2.0
/*
 * The character devices with a dynamic major beside the switches': nvidia-caps-imex-channels, nvidia-caps and
 * nvidia-nvlink, with /proc/driver/nvidia-caps and /proc/driver/nvidia-nvlink.
 */
#include <linux/atomic.h>
#include <linux/fs.h>
#include <linux/module.h>

#include "nvidia_stub.h"

#define CAPABILITIES 4 /* fabric-mgmt, MIG config, MIG monitor, IMEX management */

static struct stub_chrdev imex_channels, capabilities, nvlink;
static struct proc_dir_entry *caps_proc, *nvlink_proc;
static atomic_t nvlink_is_open = ATOMIC_INIT(0);

int stub_chrdev_add(struct stub_chrdev *device, const char *name, const struct file_operations *operations)
{
	int error = alloc_chrdev_region(&device->first, 0, device->count, name);

	if (error)
		goto failed;
	cdev_init(&device->cdev, operations);
	device->cdev.owner = THIS_MODULE;
	error = cdev_add(&device->cdev, device->first, device->count);
	if (!error)
		return 0;
	unregister_chrdev_region(device->first, device->count);
failed:
	device->first = 0;
	return error;
}

void stub_chrdev_remove(struct stub_chrdev *device)
{
	if (!device->first)
		return;
	cdev_del(&device->cdev);
	unregister_chrdev_region(device->first, device->count);
	device->first = 0;
}

static int open_capability(struct inode *inode, struct file *file)
{
	return iminor(inode) < CAPABILITIES ? 0 : -ENODEV;
}

static int open_channel(struct inode *inode, struct file *file)
{
	return 0;
}

/* Only one descriptor at a time, in the whole system. */
static int open_nvlink(struct inode *inode, struct file *file)
{
	return atomic_cmpxchg(&nvlink_is_open, 0, 1) ? -EBUSY : 0;
}

static int release_nvlink(struct inode *inode, struct file *file)
{
	atomic_set(&nvlink_is_open, 0);
	return 0;
}

static const struct file_operations channel_operations = { .owner = THIS_MODULE, .open = open_channel };
static const struct file_operations capability_operations = { .owner = THIS_MODULE, .open = open_capability };
static const struct file_operations nvlink_operations = {
	.owner = THIS_MODULE,
	.open = open_nvlink,
	.release = release_nvlink,
};

static int add_procfs(void)
{
	struct proc_dir_entry *directory;

	caps_proc = proc_mkdir("driver/nvidia-caps", NULL);
	nvlink_proc = proc_mkdir("driver/nvidia-nvlink", NULL);
	directory = nvlink_proc ? proc_mkdir("capabilities", nvlink_proc) : NULL;
	if (!caps_proc || !directory)
		return -ENOMEM;
	stub_proc_text("nvlink-minors", caps_proc, "fabric-mgmt 0\n");
	stub_proc_text("mig-minors", caps_proc, "config 1\nmonitor 2\n");
	if (stub_is_at_least(525, 0))
		stub_proc_text("sys-minors", caps_proc, stub_is_at_least(550, 0) ? "fabric-imex-mgmt 3\n" : "");
	stub_proc_text("permissions", nvlink_proc, "DeviceFileMode: 438\n");
	stub_proc_text("fabric-mgmt", directory, "DeviceFileMinor: 0\nDeviceFileMode: 256\nDeviceFileModify: 1\n");
	return 0;
}

int stub_links_init(void)
{
	int error = 0;

	imex_channels.count = stub_imex_channel_count;
	if (imex_channels.count && stub_is_at_least(550, 0))
		error = stub_chrdev_add(&imex_channels, "nvidia-caps-imex-channels", &channel_operations);
	if (error)
		goto failed;
	capabilities.count = 8192;
	error = stub_chrdev_add(&capabilities, "nvidia-caps", &capability_operations);
	if (error)
		goto failed;
	nvlink.count = 1;
	error = stub_chrdev_add(&nvlink, "nvidia-nvlink", &nvlink_operations);
	if (error)
		goto failed;
	pr_info("nvidia-nvlink: Nvlink Core is being initialized, major device number %u\n", MAJOR(nvlink.first));
	error = add_procfs();
	if (error)
		goto failed;
	return 0;
failed:
	stub_links_exit();
	return error;
}

void stub_links_exit(void)
{
	proc_remove(nvlink_proc);
	proc_remove(caps_proc);
	nvlink_proc = caps_proc = NULL;
	if (nvlink.first)
		pr_info("nvidia-nvlink: Unregistered Nvlink Core, major device number %u\n", MAJOR(nvlink.first));
	stub_chrdev_remove(&nvlink);
	stub_chrdev_remove(&capabilities);
	stub_chrdev_remove(&imex_channels);
}
