// SPDX-License-Identifier: MIT OR GPL-2.0
/* The stub's parameters, its way up and its way down. What it is for: nvidia_stub.h. */
#include <linux/ctype.h>
#include <linux/delay.h>
#include <linux/module.h>
#include <linux/moduleparam.h>
#include <linux/string.h>

#include "nvidia_stub.h"

#ifndef STUB_VERSION
#error "build_modules.sh names the version"
#endif
#define VERSION_TEXT __stringify(STUB_VERSION)

/* Permission 0 throughout, like the real ones: /sys/module/nvidia/parameters does not exist. */
char *stub_version = VERSION_TEXT;
module_param_named(version, stub_version, charp, 0);
MODULE_PARM_DESC(version, "play this release in /proc and in CHECK_VERSION, with the files that its branch has");
char *stub_fail_probe;
module_param_named(fail_probe, stub_fail_probe, charp, 0);
MODULE_PARM_DESC(fail_probe, "comma separated PCI addresses whose probe fails");
char *stub_slow_probe;
module_param_named(slow_probe, stub_slow_probe, charp, 0);
MODULE_PARM_DESC(slow_probe, "PCI addresses whose probe takes probe_delay_ms (default: every switch)");
unsigned int stub_probe_delay_ms;
module_param_named(probe_delay_ms, stub_probe_delay_ms, uint, 0);
MODULE_PARM_DESC(probe_delay_ms, "how long the probe of a switch takes");
char *stub_blacklist;
module_param_named(blacklist, stub_blacklist, charp, 0);
MODULE_PARM_DESC(blacklist, "PCI addresses of switches that are blacklisted");
unsigned int stub_blacklist_reason = 1;
module_param_named(blacklist_reason, stub_blacklist_reason, uint, 0);
MODULE_PARM_DESC(blacklist_reason, "deviceReason of these (1 manual, 4 trunk link failure, 8 device failure)");
unsigned int stub_fm_timeout_ms = 10000;
module_param_named(fm_timeout_ms, stub_fm_timeout_ms, uint, 0);
MODULE_PARM_DESC(fm_timeout_ms, "silence of Fabric Manager after which driverState is MANAGER_TIMEOUT");
unsigned int stub_v2_size;
module_param_named(v2_size, stub_v2_size, uint, 0);
MODULE_PARM_DESC(v2_size, "bytes of an entry of GET_DEVICES_V2: 52 or 56 (default: what the version has)");
static int init_errno;
module_param(init_errno, int, 0);
MODULE_PARM_DESC(init_errno, "the load fails with this errno after the switches were probed");
static unsigned int init_delay_ms;
module_param(init_delay_ms, uint, 0);
MODULE_PARM_DESC(init_delay_ms, "how long the load takes before anything happens");

/* Real parameters. The other NVreg_ ones that people set are known too, see nvidia_procfs.c. */
char *stub_switch_blacklist;
module_param_named(NvSwitchBlacklist, stub_switch_blacklist, charp, 0);
MODULE_PARM_DESC(NvSwitchBlacklist, "NvSwitchBlacklist=uuid[,uuid...]");
unsigned int stub_register_pci_driver = 1;
module_param_named(NVreg_RegisterPCIDriver, stub_register_pci_driver, uint, 0);
MODULE_PARM_DESC(NVreg_RegisterPCIDriver, "0: bind no GPU");
unsigned int stub_imex_channel_count = 2048;
module_param_named(NVreg_ImexChannelCount, stub_imex_channel_count, uint, 0);
MODULE_PARM_DESC(NVreg_ImexChannelCount, "0: no nvidia-caps-imex-channels");

bool stub_is_at_least(unsigned int major, unsigned int minor)
{
	unsigned int own_major = 0, own_minor = 0;

	if (sscanf(stub_version, "%u.%u", &own_major, &own_minor) < 1)
		return false;
	return own_major > major || (own_major == major && own_minor >= minor);
}

bool stub_is_listed(const char *list, const char *word)
{
	size_t length = strlen(word);

	for (; list; list = strchr(list, ',')) {
		list += *list == ',';
		if (!strncmp(list, word, length) && (list[length] == ',' || !list[length]))
			return true;
	}
	return false;
}

/* The same device has the same UUID at each load, as in hardware; here it spells the PCI address. */
void stub_uuid_of(struct pci_dev *pdev, u8 uuid[16])
{
	unsigned int domain = pci_domain_nr(pdev->bus);

	memset(uuid, 0, 16);
	uuid[0] = 0xfa;
	uuid[1] = 0xcc;
	uuid[12] = domain >> 8;
	uuid[13] = domain;
	uuid[14] = pdev->bus->number;
	uuid[15] = pdev->devfn;
}

void stub_format_uuid(char *text, size_t size, const char *prefix, const u8 uuid[16])
{
	scnprintf(text, size, "%s-%4phN-%2phN-%2phN-%2phN-%6phN", prefix, uuid, uuid + 4, uuid + 6, uuid + 8,
		  uuid + 10);
	for (; *text; text++)
		*text = toupper(*text);
}

bool stub_is_answering(struct pci_dev *pdev)
{
	u16 vendor = 0xffff;

	pci_read_config_word(pdev, PCI_VENDOR_ID, &vendor);
	return vendor != 0xffff;
}

/* The wish of init_errno=. EIO is what the real module returns when its resource manager does not come up. */
static int fail_on_demand(void)
{
	if (!init_errno)
		return 0;
	if (init_errno == EIO)
		nvrm("NVRM: rm_init_rm() failed!\n");
	nvrm("NVRM: failed to initialize module.\n");
	return -abs(init_errno);
}

static int __init stub_init(void)
{
	int error;

#ifdef STUB_NEEDS_DEP
	if (!nvidia_dep_is_here())
		return -ENODEV;
#endif
	msleep(init_delay_ms);
	error = stub_procfs_init();
	if (error)
		return error;
	error = stub_links_init();
	if (error)
		goto no_links;
	error = stub_switch_init();
	if (error)
		goto no_switches;
	error = fail_on_demand();
	if (error)
		goto no_gpus;
	error = stub_gpu_init();
	if (error)
		goto no_gpus;
	nvrm("NVRM: loading %s\n", stub_module_id());
	error = stub_gpu_nodes_init();
	if (error)
		goto no_nodes;
	stub_debug_init();
	return 0;

no_nodes:
	stub_gpu_exit();
no_gpus:
	stub_switch_exit();
no_switches:
	stub_links_exit();
no_links:
	stub_procfs_exit();
	return error;
}

static void __exit stub_exit(void)
{
	stub_debug_exit();
	stub_gpu_nodes_exit();
	stub_gpu_exit();
	stub_switch_exit();
	stub_links_exit();
	stub_procfs_exit();
}

module_init(stub_init);
module_exit(stub_exit);

static const struct pci_device_id stub_modalias_table[] = {
	{ PCI_DEVICE(NVIDIA_VENDOR, PCI_ANY_ID), .class = PCI_CLASS_DISPLAY_VGA << 8, .class_mask = ~0 },
	{ PCI_DEVICE(NVIDIA_VENDOR, PCI_ANY_ID), .class = PCI_CLASS_DISPLAY_3D << 8, .class_mask = ~0 },
	{ PCI_DEVICE(NVIDIA_VENDOR, PCI_ANY_ID), .class = PCI_CLASS_BRIDGE_OTHER << 8, .class_mask = ~0 },
	{}
};
MODULE_DEVICE_TABLE(pci, stub_modalias_table);
MODULE_ALIAS_CHARDEV_MAJOR(195);
MODULE_DESCRIPTION("A stand-in for the NVIDIA module");
MODULE_LICENSE("Dual MIT/GPL");
MODULE_VERSION(VERSION_TEXT);
MODULE_INFO(supported, "external");
MODULE_SOFTDEP("pre: ecdh_generic,ecdsa_generic");
MODULE_FIRMWARE("nvidia/" VERSION_TEXT "/gsp_tu10x.bin");
MODULE_FIRMWARE("nvidia/" VERSION_TEXT "/gsp_ga10x.bin");
