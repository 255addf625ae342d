// SPDX-License-Identifier: MIT OR GPL-2.0
/*
 * /proc/driver/nvidia: version, params, registry, suspend and the empty gpus/, which nvidia_gpu.c fills.
 * The parameters here are known to insmod and shown in "params", and do nothing else.
 */
#include <linux/module.h>
#include <linux/moduleparam.h>
#include <linux/utsname.h>

#include "nvidia_stub.h"

static struct proc_dir_entry *root, *gpus;
static char module_id[160];

#define STUB_PARAMETER(name, value)                                 \
	static unsigned int name = value;                           \
	module_param_named(NVreg_##name, name, uint, 0)
STUB_PARAMETER(ResmanDebugLevel, 0xffffffff);
STUB_PARAMETER(RmLogonRC, 1);
STUB_PARAMETER(ModifyDeviceFiles, 1);
STUB_PARAMETER(DeviceFileUID, 0);
STUB_PARAMETER(DeviceFileGID, 0);
STUB_PARAMETER(DeviceFileMode, 0666);
STUB_PARAMETER(EnableMSI, 1);
STUB_PARAMETER(NvLinkDisable, 0);
STUB_PARAMETER(EnableGpuFirmware, 18);
STUB_PARAMETER(EnableNonblockingOpen, 1);
STUB_PARAMETER(OpenRmEnableUnsupportedGpus, 1);
STUB_PARAMETER(CreateImexChannel0, 0);

static const struct {
	const char *name;
	const unsigned int *value;
} numbers[] = {
#define SHOW(name) { #name, &name }
	SHOW(ResmanDebugLevel),
	SHOW(RmLogonRC),
	SHOW(ModifyDeviceFiles),
	SHOW(DeviceFileUID),
	SHOW(DeviceFileGID),
	SHOW(DeviceFileMode),
	SHOW(EnableMSI),
	SHOW(NvLinkDisable),
	{ "RegisterPCIDriver", &stub_register_pci_driver },
	SHOW(EnableGpuFirmware),
	SHOW(EnableNonblockingOpen),
	SHOW(OpenRmEnableUnsupportedGpus),
	{ "ImexChannelCount", &stub_imex_channel_count },
	SHOW(CreateImexChannel0),
};

static char *RegistryDwords, *RegistryDwordsPerDevice, *GpuBlacklist, *ExcludedGpus, *CoherentGPUMemoryMode;
module_param_named(NVreg_RegistryDwords, RegistryDwords, charp, 0);
module_param_named(NVreg_RegistryDwordsPerDevice, RegistryDwordsPerDevice, charp, 0);
module_param_named(NVreg_GpuBlacklist, GpuBlacklist, charp, 0);
module_param_named(NVreg_ExcludedGpus, ExcludedGpus, charp, 0);
module_param_named(NVreg_CoherentGPUMemoryMode, CoherentGPUMemoryMode, charp, 0);
static char *NvSwitchRegDwords; /* not shown in "params" */
module_param(NvSwitchRegDwords, charp, 0);

static int show_params(struct seq_file *file, void *unused)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(numbers); i++)
		seq_printf(file, "%s: %u\n", numbers[i].name, *numbers[i].value);
	seq_printf(file, "RegistryDwords: \"%s\"\n", RegistryDwords ?: "");
	seq_printf(file, "RegistryDwordsPerDevice: \"%s\"\n", RegistryDwordsPerDevice ?: "");
	seq_printf(file, "GpuBlacklist: \"%s\"\n", GpuBlacklist ?: "");
	seq_printf(file, "ExcludedGpus: \"%s\"\n", ExcludedGpus ?: "");
	if (stub_is_at_least(580, 0))
		seq_printf(file, "CoherentGPUMemoryMode: \"%s\"\n", CoherentGPUMemoryMode ?: "");
	return 0;
}

static int show_version(struct seq_file *file, void *unused)
{
	seq_printf(file, "NVRM version: %s\n", module_id);
	seq_puts(file, "GCC version:  gcc version " __VERSION__ "\n");
	return 0;
}

int stub_show_text(struct seq_file *file, void *unused)
{
	seq_puts(file, file->private);
	return 0;
}

struct proc_dir_entry *stub_proc_text(const char *name, struct proc_dir_entry *parent, const char *text)
{
	return proc_create_single_data(name, 0444, parent, stub_show_text, (void *)text);
}

const char *stub_module_id(void)
{
	return module_id;
}

struct proc_dir_entry *stub_procfs_gpus(void)
{
	return gpus;
}

static void add_texts(void)
{
	struct proc_dir_entry *warnings = proc_mkdir("warnings", root);
	struct proc_dir_entry *patches = proc_mkdir("patches", root);
	struct proc_dir_entry *capabilities = proc_mkdir("capabilities", root);
	struct proc_dir_entry *mig = proc_mkdir("mig", capabilities);

	stub_proc_text("registry", root, "Binary: \"\"\n");
	stub_proc_text("suspend", root, "suspend hibernate resume\n");
	stub_proc_text("suspend_depth", root, "default modeset uvm\n");
	stub_proc_text("README", warnings, "A warning is a file in this directory.\n");
	stub_proc_text("README", patches, "A patch is a file in this directory.\n");
	stub_proc_text("config", mig, "DeviceFileMinor: 1\nDeviceFileMode: 256\nDeviceFileModify: 1\n");
	stub_proc_text("monitor", mig, "DeviceFileMinor: 2\nDeviceFileMode: 256\nDeviceFileModify: 1\n");
	if (stub_is_at_least(550, 0))
		stub_proc_text("fabric-imex-mgmt", capabilities,
			       "DeviceFileMinor: 3\nDeviceFileMode: 256\nDeviceFileModify: 1\n");
}

int stub_procfs_init(void)
{
	scnprintf(module_id, sizeof(module_id),
		  "NVIDIA UNIX Open Kernel Module for %s  %s  Release Build  (stub@bed)  ", utsname()->machine,
		  stub_version);
	root = proc_mkdir("driver/nvidia", NULL);
	if (!root)
		goto failed;
	gpus = proc_mkdir("gpus", root);
	if (!gpus || !proc_create_single("version", 0444, root, show_version) ||
	    !proc_create_single("params", 0444, root, show_params))
		goto failed;
	add_texts();
	return 0;
failed:
	nvrm("NVRM: failed to initialize procfs.\n");
	stub_procfs_exit();
	return -ENOMEM;
}

void stub_procfs_exit(void)
{
	proc_remove(root);
	root = NULL;
}
