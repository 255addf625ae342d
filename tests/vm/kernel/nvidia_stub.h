/* SPDX-License-Identifier: MIT OR GPL-2.0 */
/*
 * A stand-in for nvidia.ko that does what Fabric Manager's surroundings see of it: PCI drivers, character devices,
 * /proc files, the status ioctls and the kernel log. Written from a description of the behaviour of NVIDIA's published
 * modules (515 to 595), not from their text. There is no class device and so no node in /dev by itself.
 *
 * The order at load matters and is the real one (nvidia_main.c): /proc/driver/nvidia, the dynamic character devices,
 * the switches' PCI driver, minor 255, the GPUs' PCI driver, and last major 195.
 */
#ifndef NVIDIA_STUB_H
#define NVIDIA_STUB_H

#include <linux/cdev.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/printk.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>
#include <linux/types.h>

#define NVIDIA_VENDOR 0x10de

/* The real module prints its NVRM lines, but for Xid, without a level: the kernel's default, "warning" as a rule. */
#define nvrm(format, ...) printk(KERN_DEFAULT format, ##__VA_ARGS__)

/* What GET_DEVICES_V2 reports (ioctl_nvswitch.h). */
enum driver_state {
	DRIVER_STANDBY = 1, /* the driver is up, Fabric Manager is not */
	DRIVER_CONFIGURED = 2,
	DRIVER_MANAGER_TIMEOUT = 3,
	DRIVER_MANAGER_ERROR = 4,
};

enum device_state {
	DEVICE_STANDBY = 1,
	DEVICE_CONFIGURED = 2,
	DEVICE_BLACKLISTED = 3,
};

struct stub_switch {
	struct list_head entry; /* in probe order */
	struct pci_dev *pdev;
	struct proc_dir_entry *proc;
	unsigned int minor; /* the lowest that was free at probe */
	u8 uuid[16];
	u32 physical_id;
	u32 device_reason; /* why it is blacklisted; 0 = it is not */
	bool is_configured; /* by Fabric Manager, also when that has been silent since */
	bool has_manager_error;
	bool is_timed_out;
	bool is_gone; /* removed while descriptors are open */
	unsigned long last_heartbeat; /* jiffies */
	unsigned int users; /* open descriptors, plus one while it is bound */
};

/* Module parameters (nvidia_main.c, described there). */
extern char *stub_version;
extern char *stub_fail_probe;
extern char *stub_slow_probe;
extern char *stub_blacklist;
extern char *stub_switch_blacklist;
extern unsigned int stub_blacklist_reason;
extern unsigned int stub_probe_delay_ms;
extern unsigned int stub_fm_timeout_ms;
extern unsigned int stub_v2_size;
extern unsigned int stub_register_pci_driver;
extern unsigned int stub_imex_channel_count;

/* nvidia_main.c */
bool stub_is_at_least(unsigned int major, unsigned int minor); /* the branch that version= plays */
bool stub_is_listed(const char *list, const char *word); /* list: "word,word" or NULL */
void stub_uuid_of(struct pci_dev *pdev, u8 uuid[16]);
void stub_format_uuid(char *text, size_t size, const char *prefix, const u8 uuid[16]); /* "SWX-XXXXXXXX-..." */
bool stub_is_answering(struct pci_dev *pdev);

/* nvidia_procfs.c: the files of /proc/driver/nvidia that depend on no device */
int stub_procfs_init(void);
void stub_procfs_exit(void);
struct proc_dir_entry *stub_procfs_gpus(void);
int stub_show_text(struct seq_file *file, void *unused); /* shows the string that is the file's data */
struct proc_dir_entry *stub_proc_text(const char *name, struct proc_dir_entry *parent, const char *text);
const char *stub_module_id(void); /* "NVIDIA UNIX Open Kernel Module for x86_64  580.126.09  Release Build ..." */

/* nvidia_links.c: IMEX channels, capabilities, NVLink */
struct stub_chrdev {
	struct cdev cdev;
	dev_t first;
	unsigned int count;
};
int stub_chrdev_add(struct stub_chrdev *device, const char *name, const struct file_operations *operations);
void stub_chrdev_remove(struct stub_chrdev *device);
int stub_links_init(void);
void stub_links_exit(void);

/* nvidia_switch.c */
extern struct mutex stub_switch_lock; /* the driver mutex: held for a whole probe, so that a slow one blocks all */
extern struct list_head stub_switches;
int stub_switch_init(void);
void stub_switch_exit(void);
bool stub_switch_is_present(void); /* any PCI device of the kind, bound or not */
struct stub_switch *stub_switch_find(unsigned int minor); /* under stub_switch_lock */

/* nvidia_control.c: minor 255 and the watch over Fabric Manager */
int stub_control_init(unsigned int major);
void stub_control_exit(void);
/* Under stub_switch_lock. only: of this switch, whatever the buffer says; NULL: of those that the buffer names. */
struct fake_fm_heartbeat;
long stub_take_heartbeat(struct fake_fm_heartbeat __user *buffer, const struct stub_switch *only);

/* nvidia_gpu.c */
int stub_gpu_init(void);
void stub_gpu_exit(void);
int stub_gpu_nodes_init(void);
void stub_gpu_nodes_exit(void);

/* nvidia_debug.c */
void stub_debug_init(void);
void stub_debug_exit(void);

/* nvidia_dep.c, another module */
bool nvidia_dep_is_here(void);

#endif
