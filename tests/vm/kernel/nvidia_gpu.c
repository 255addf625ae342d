// SPDX-License-Identifier: MIT OR GPL-2.0
/*
 * The PCI driver "nvidia" for GPUs, /proc/driver/nvidia/gpus and the nodes of major 195, which are registered last of
 * all: a 195 line in /proc/devices means that the load went well. No firmware is asked for.
 */
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "nvidia_stub.h"

#define NVIDIA_MAJOR 195
#define REGULAR_MINORS 248
#define CONTROL_MINOR 255
#define ALL_MINORS 256

struct gpu {
	struct list_head entry;
	struct pci_dev *pdev;
	struct proc_dir_entry *proc;
	unsigned int minor;
};

static DEFINE_MUTEX(gpu_lock);
static LIST_HEAD(gpus);
static unsigned int probes, good_probes;
static bool is_registered;
static struct cdev regular_cdev, control_cdev;

static struct gpu *find_gpu(unsigned int minor)
{
	struct gpu *gpu;

	list_for_each_entry(gpu, &gpus, entry)
		if (gpu->minor == minor)
			return gpu;
	return NULL;
}

static const char *model_of(u16 device)
{
	switch (device) {
	case 0x2335:
		return "NVIDIA H200";
	case 0x20b2:
		return "NVIDIA A100-SXM4-80GB";
	case 0x2901:
		return "NVIDIA B200";
	default:
		return "Unknown";
	}
}

static int show_information(struct seq_file *file, void *unused)
{
	const struct gpu *gpu = file->private;

	seq_printf(file, "Model: \t\t %s\n", model_of(gpu->pdev->device));
	seq_printf(file, "IRQ:   \t\t %u\n", gpu->pdev->irq);
	seq_puts(file, "GPU UUID: \t GPU-????????-????-????-????-????????????\n"); /* until somebody opens the GPU */
	seq_puts(file, "Video BIOS: \t ??.??.??.??.??\n");
	seq_puts(file, "Bus Type: \t PCIe\n");
	seq_puts(file, "DMA Size: \t 52 bits\n");
	seq_puts(file, "DMA Mask: \t 0xfffffffffffff\n");
	seq_printf(file, "Bus Location: \t %s\n", pci_name(gpu->pdev));
	seq_printf(file, "Device Minor: \t %u\n", gpu->minor);
	seq_puts(file, "GPU Excluded:\t No\n");
	return 0;
}

static void add_to_procfs(struct gpu *gpu)
{
	gpu->proc = proc_mkdir(pci_name(gpu->pdev), stub_procfs_gpus());
	if (!gpu->proc)
		return;
	proc_create_single_data("information", 0444, gpu->proc, show_information, gpu);
	stub_proc_text("registry", gpu->proc, "Binary: \"\"\n");
	stub_proc_text("power", gpu->proc, "Runtime D3 status:          ?\n");
}

static int add_gpu(struct pci_dev *pdev)
{
	struct gpu *gpu = kzalloc(sizeof(*gpu), GFP_KERNEL);
	int error;

	if (!gpu)
		return -ENOMEM;
	error = pci_enable_device(pdev);
	if (error) {
		kfree(gpu);
		return error;
	}
	pci_set_master(pdev);
	while (find_gpu(gpu->minor))
		gpu->minor++;
	gpu->pdev = pdev;
	pci_set_drvdata(pdev, gpu);
	add_to_procfs(gpu);
	list_add_tail(&gpu->entry, &gpus);
	good_probes++;
	return 0;
}

static int probe_gpu(struct pci_dev *pdev, const struct pci_device_id *id)
{
	int error;

	probes++;
	if (!stub_is_answering(pdev)) {
		nvrm("NVRM: The NVIDIA GPU %s\nNVRM: (PCI ID: %04x:%04x) installed in this system has\n"
		     "NVRM: fallen off the bus and is not responding to commands.\n",
		     pci_name(pdev), pdev->vendor, pdev->device);
		return -1;
	}
	if (stub_is_listed(stub_fail_probe, pci_name(pdev)))
		return -1;
	mutex_lock(&gpu_lock);
	error = add_gpu(pdev);
	mutex_unlock(&gpu_lock);
	return error;
}

static void remove_gpu(struct pci_dev *pdev)
{
	struct gpu *gpu = pci_get_drvdata(pdev);

	mutex_lock(&gpu_lock);
	list_del(&gpu->entry);
	proc_remove(gpu->proc);
	pci_clear_master(pdev);
	pci_disable_device(pdev);
	kfree(gpu);
	mutex_unlock(&gpu_lock);
}

static const struct pci_device_id gpu_table[] = {
	{ PCI_DEVICE(NVIDIA_VENDOR, PCI_ANY_ID), .class = PCI_CLASS_DISPLAY_VGA << 8, .class_mask = ~0 },
	{ PCI_DEVICE(NVIDIA_VENDOR, PCI_ANY_ID), .class = PCI_CLASS_DISPLAY_3D << 8, .class_mask = ~0 },
	{}
};

static struct pci_driver gpu_driver = {
	.name = "nvidia",
	.id_table = gpu_table,
	.probe = probe_gpu,
	.remove = remove_gpu,
};

/* With NVreg_RegisterPCIDriver=0 the real module counts none at all. */
static unsigned int count_gpus(void)
{
	static const unsigned int classes[] = { PCI_CLASS_DISPLAY_VGA << 8, PCI_CLASS_DISPLAY_3D << 8 };
	unsigned int i, count = 0;

	if (!stub_register_pci_driver)
		return 0;
	for (i = 0; i < ARRAY_SIZE(classes); i++) {
		struct pci_dev *pdev = NULL;

		while ((pdev = pci_get_class(classes[i], pdev))) {
			if (pdev->vendor != NVIDIA_VENDOR)
				continue;
			count++;
			if (pdev->dev.driver)
				nvrm("NVRM: GPU %s is already bound to %s.\n", pci_name(pdev),
				     pdev->dev.driver->name);
		}
	}
	return count;
}

static void complain_of_owner(unsigned int missed)
{
	nvrm("NVRM: The NVIDIA probe routine was not called for %u device(s).\n", missed);
	if (stub_is_at_least(550, 0))
		nvrm("NVRM: This can occur when another driver was loaded and \n"
		     "NVRM: obtained ownership of the NVIDIA device(s).\n");
	else
		nvrm("NVRM: This can occur when a driver such as: \nNVRM: nouveau, rivafb, nvidiafb or rivatv \n"
		     "NVRM: was loaded and obtained ownership of the NVIDIA device(s).\n");
	nvrm("NVRM: Try unloading the conflicting kernel module (and/or\n"
	     "NVRM: reconfigure your kernel without the conflicting\n"
	     "NVRM: driver(s)), then try loading the NVIDIA kernel module\n"
	     "NVRM: again.\n");
}

/* Is there anything to drive? Says why not, or what is missing. */
static int judge(unsigned int count, bool has_switch)
{
	if (probes < count)
		complain_of_owner(count - probes);
	if (!probes && !has_switch) {
		nvrm("NVRM: No NVIDIA devices probed.\n");
		return -ENODEV;
	}
	if (probes != good_probes)
		nvrm("NVRM: The NVIDIA probe routine failed for %u device(s).\n", probes - good_probes);
	if (!good_probes && !has_switch) {
		nvrm("NVRM: None of the NVIDIA devices were initialized.\n");
		return -ENODEV;
	}
	return 0;
}

int stub_gpu_init(void)
{
	bool has_switch = stub_switch_is_present();
	unsigned int count = count_gpus();
	int error;

	if (!count && !has_switch) {
		nvrm("NVRM: No NVIDIA GPU found.\n");
		return -ENODEV;
	}
	if (stub_register_pci_driver) {
		if (pci_register_driver(&gpu_driver)) {
			nvrm("NVRM: No NVIDIA PCI devices found.\n");
			return -ENODEV;
		}
		is_registered = true;
	}
	error = judge(count, has_switch);
	if (error)
		stub_gpu_exit();
	return error;
}

void stub_gpu_exit(void)
{
	if (is_registered)
		pci_unregister_driver(&gpu_driver);
	is_registered = false;
}

/* ---- nodes ---- */

static int open_node(struct inode *inode, struct file *file)
{
	int error = 0;

	if (iminor(inode) == CONTROL_MINOR)
		return 0;
	mutex_lock(&gpu_lock);
	if (!find_gpu(iminor(inode)))
		error = -ENODEV;
	mutex_unlock(&gpu_lock);
	return error;
}

static const struct file_operations node_operations = { .owner = THIS_MODULE, .open = open_node };

static int add_nodes(struct cdev *cdev, unsigned int minor, unsigned int count, const char *name)
{
	int error = register_chrdev_region(MKDEV(NVIDIA_MAJOR, minor), count, name);

	if (error) {
		nvrm("NVRM: register_chrdev_region() failed for %s!\n", name);
		return error;
	}
	cdev_init(cdev, &node_operations);
	cdev->owner = THIS_MODULE;
	error = cdev_add(cdev, MKDEV(NVIDIA_MAJOR, minor), count);
	if (error) {
		nvrm("NVRM: cdev_add() failed for %s!\n", name);
		unregister_chrdev_region(MKDEV(NVIDIA_MAJOR, minor), count);
	}
	return error;
}

static void remove_nodes(struct cdev *cdev, unsigned int minor, unsigned int count)
{
	cdev_del(cdev);
	unregister_chrdev_region(MKDEV(NVIDIA_MAJOR, minor), count);
}

/* Branches before 545 have one line "nvidia-frontend" in /proc/devices, later ones "nvidia" and "nvidiactl". */
int stub_gpu_nodes_init(void)
{
	int error;

	if (!stub_is_at_least(545, 0))
		return add_nodes(&regular_cdev, 0, ALL_MINORS, "nvidia-frontend");
	error = add_nodes(&regular_cdev, 0, REGULAR_MINORS, "nvidia");
	if (error)
		return error;
	error = add_nodes(&control_cdev, CONTROL_MINOR, 1, "nvidiactl");
	if (error)
		remove_nodes(&regular_cdev, 0, REGULAR_MINORS);
	return error;
}

void stub_gpu_nodes_exit(void)
{
	if (!stub_is_at_least(545, 0)) {
		remove_nodes(&regular_cdev, 0, ALL_MINORS);
		return;
	}
	remove_nodes(&control_cdev, CONTROL_MINOR, 1);
	remove_nodes(&regular_cdev, 0, REGULAR_MINORS);
}
