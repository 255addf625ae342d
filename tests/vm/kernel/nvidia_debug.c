// SPDX-License-Identifier: MIT OR GPL-2.0
/*
 * Faults at run time: /sys/kernel/debug/nvidia_stub/, root only. Write one line to a file:
 *
 *   sxid            MINOR NUMBER SEVERITY LINK TEXT...   the lines that the switch driver logs for an error;
 *                   SEVERITY fatal, non-fatal, correctable (three lines each) or plain (one line, text as it is);
 *                   LINK a number or "-"
 *                   e.g.  0 20034 fatal 48 LTSSM Fault Up
 *   xid             BDF NUMBER TEXT...                   the GPU's error line,
 *                   e.g.  0000:91:00.0 79 GPU has fallen off the bus.
 *   blacklist       MINOR REASON                         deviceState BLACKLISTED for REASON (1 to 9), 0 takes it back
 *   manager_error   MINOR 0|1                            driverState MANAGER_ERROR
 *   fm_timeout_ms   readable, too
 */
#include <linux/debugfs.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/uaccess.h>

#include "nvidia_stub.h"

#define LONGEST_COMMAND 512

struct command {
	const char *name;
	int (*run)(const char *line); /* 0 or a negative errno; under stub_switch_lock */
};

static struct dentry *root;

static const struct {
	const char *name;
	const char *prefix;
	unsigned int severity;
} severities[] = {
	{ "fatal", "Fatal, ", 1 },
	{ "non-fatal", "Non-fatal, ", 0 },
	{ "correctable", "Correctable, ", 0 },
};

static void log_error(const struct stub_switch *nvswitch, unsigned int number, const char *text)
{
	pr_err("nvidia-nvswitch%u: SXid (PCI:%s): %05u, %s\n", nvswitch->minor, pci_name(nvswitch->pdev), number, text);
}

static void log_event(const struct stub_switch *nvswitch, unsigned int number, unsigned int which, int link,
		      const char *text)
{
	char line[LONGEST_COMMAND];

	if (link < 0)
		scnprintf(line, sizeof(line), "%s%s", severities[which].prefix, text);
	else
		scnprintf(line, sizeof(line), "%sLink %02d %s", severities[which].prefix, link, text);
	log_error(nvswitch, number, line);
	scnprintf(line, sizeof(line), "Severity %u Engine instance %02d Sub-engine instance %02d",
		  severities[which].severity, max(link, 0), 0);
	log_error(nvswitch, number, line);
	log_error(nvswitch, number,
		  "Data {0x10000000, 0x10000000, 0x00000000, 0x10000000, 0x00000000, 0x00000000, 0x00000000, "
		  "0x00000000, 0x00000000}");
}

static int inject_sxid(const char *line)
{
	char severity[16], link_word[16];
	struct stub_switch *nvswitch;
	unsigned int minor, number, i;
	int consumed = 0, link = -1;

	if (sscanf(line, "%u %u %15s %15s %n", &minor, &number, severity, link_word, &consumed) != 4 || !consumed)
		return -EINVAL;
	if (strcmp(link_word, "-") && kstrtoint(link_word, 10, &link))
		return -EINVAL;
	nvswitch = stub_switch_find(minor);
	if (!nvswitch)
		return -ENODEV;
	if (!strcmp(severity, "plain")) {
		log_error(nvswitch, number, line + consumed);
		return 0;
	}
	for (i = 0; i < ARRAY_SIZE(severities); i++)
		if (!strcmp(severity, severities[i].name)) {
			log_event(nvswitch, number, i, link, line + consumed);
			return 0;
		}
	return -EINVAL;
}

/* 570 and later have NVLink errors (144 to 150) without process. */
static int inject_xid(const char *line)
{
	unsigned int domain, bus, device, function, number;
	int consumed = 0;

	if (sscanf(line, "%x:%x:%x.%u %u %n", &domain, &bus, &device, &function, &number, &consumed) != 5 || !consumed)
		return -EINVAL;
	pr_err("NVRM: Xid (PCI:%04x:%02x:%02x): %u, %s%s\n", domain, bus, device, number,
	       number >= 144 && number <= 150 ? "" : "pid='<unknown>', name=<unknown>, ", line + consumed);
	return 0;
}

static int set_blacklist(const char *line)
{
	struct stub_switch *nvswitch;
	unsigned int minor, reason;

	if (sscanf(line, "%u %u", &minor, &reason) != 2 || reason > 9)
		return -EINVAL;
	nvswitch = stub_switch_find(minor);
	if (!nvswitch)
		return -ENODEV;
	nvswitch->device_reason = reason;
	return 0;
}

static int set_manager_error(const char *line)
{
	struct stub_switch *nvswitch;
	unsigned int minor, has_error;

	if (sscanf(line, "%u %u", &minor, &has_error) != 2 || has_error > 1)
		return -EINVAL;
	nvswitch = stub_switch_find(minor);
	if (!nvswitch)
		return -ENODEV;
	nvswitch->has_manager_error = has_error;
	return 0;
}

static const struct command commands[] = {
	{ "sxid", inject_sxid },
	{ "xid", inject_xid },
	{ "blacklist", set_blacklist },
	{ "manager_error", set_manager_error },
};

static ssize_t write_command(struct file *file, const char __user *text, size_t size, loff_t *position)
{
	const struct command *command = file_inode(file)->i_private;
	char *line;
	int error;

	if (size >= LONGEST_COMMAND)
		return -EINVAL;
	line = memdup_user_nul(text, size);
	if (IS_ERR(line))
		return PTR_ERR(line);
	mutex_lock(&stub_switch_lock);
	error = command->run(strim(line));
	mutex_unlock(&stub_switch_lock);
	kfree(line);
	return error ?: size;
}

static const struct file_operations command_operations = {
	.owner = THIS_MODULE,
	.write = write_command,
};

/* debugfs answers errors with errors to its own functions: nothing to check here. */
void stub_debug_init(void)
{
	unsigned int i;

	root = debugfs_create_dir("nvidia_stub", NULL);
	for (i = 0; i < ARRAY_SIZE(commands); i++)
		debugfs_create_file(commands[i].name, 0200, root, (void *)&commands[i], &command_operations);
	debugfs_create_u32("fm_timeout_ms", 0600, root, &stub_fm_timeout_ms);
}

void stub_debug_exit(void)
{
	debugfs_remove_recursive(root);
}
