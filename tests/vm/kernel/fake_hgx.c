// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0
/*
 * A software HGX baseboard: one PCI root bus with one device on it for each NVSwitch and each GPU, without BARs and
 * interrupts. Everything above (sysfs, uevents, driver core, remove and rescan, vfio-pci) is the real kernel.
 *
 *   board=h200 (default)   4 x 10de:22a3 at buses 83-86, 8 x 10de:2335
 *   board=a100             6 x 10de:1af1 at buses 83-88, 8 x 10de:20b2
 *   board=b200             no PCI switch, 8 x 10de:2901
 *   board=v100             6 x 10de:1ac2, 8 x 10de:1db8: switches that the open driver refuses (-22)
 *   GPUs are at buses 91 92 a1 a2 b1 b2 c1 c2.
 *   domain=, nvswitches=, gpus=   PCI domain; take only the first so many
 *
 * /sys/module/fake_hgx/parameters/absent (writable, also at load) is a mask of slots that do not answer: their
 * configuration space reads ff. Bits 0.. are the board's switches, the bits after them its GPUs, whatever nvswitches=
 * and gpus= say (h200: 0-3 and 4-11; a100, v100: 0-5 and 6-13; b200: 0-7).
 *   surprise loss   set the bit: no uevent, sysfs looks healthy, only "config" reads ff
 *   removal         write 1 to the device's "remove", or set the bit before that
 *   return          clear the bit, write 1 to /sys/bus/pci/rescan
 *   late arrival    load with the bit set; later clear it and rescan
 */
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/slab.h>
#include <linux/spinlock.h>

#define VENDOR_NVIDIA 0x10de
#define MAX_SLOTS 16
#define CONFIG_SIZE 256

struct board {
	const char *name;
	unsigned int switches;
	u16 switch_device;
	u16 gpu_device;
	u16 gpu_subsystem;
};

struct slot {
	struct pci_sysdata sysdata; /* x86 takes the domain from here: must be what bus->sysdata points to */
	unsigned int number;
	u8 bus;
	u8 config[CONFIG_SIZE];
	u8 fresh[CONFIG_SIZE]; /* as after power on */
	struct pci_host_bridge *bridge;
};

static const struct board boards[] = {
	{ "h200", 4, 0x22a3, 0x2335, 0x18be },
	{ "a100", 6, 0x1af1, 0x20b2, 0x1463 },
	{ "b200", 0, 0, 0x2901, 0x1999 },
	{ "v100", 6, 0x1ac2, 0x1db8, 0x131d },
};
static const u8 first_switch_bus = 0x83;
static const u8 gpu_buses[] = { 0x91, 0x92, 0xa1, 0xa2, 0xb1, 0xb2, 0xc1, 0xc2 };

static struct slot *slots[MAX_SLOTS];
static unsigned long absent_slots;
static DEFINE_SPINLOCK(config_lock); /* absent_slots and all configuration spaces */

static char *board = "h200";
module_param(board, charp, 0444);
MODULE_PARM_DESC(board, "h200, a100, b200 or v100");
static int domain;
module_param(domain, int, 0444);
MODULE_PARM_DESC(domain, "PCI domain of the board");
static unsigned int nvswitches = MAX_SLOTS;
module_param(nvswitches, uint, 0444);
MODULE_PARM_DESC(nvswitches, "take only the first so many switches");
static unsigned int gpus = MAX_SLOTS;
module_param(gpus, uint, 0444);
MODULE_PARM_DESC(gpus, "take only the first so many GPUs");

/* A slot that stops to answer has lost its power: when it is back its registers are as new. */
static int set_absent(const char *text, const struct kernel_param *parameter)
{
	unsigned long mask, lost, flags;
	unsigned int i;
	int error = kstrtoul(text, 0, &mask);

	if (error)
		return error;
	spin_lock_irqsave(&config_lock, flags);
	lost = mask & ~absent_slots;
	absent_slots = mask;
	for (i = 0; i < MAX_SLOTS; i++)
		if (slots[i] && (lost & BIT(i)))
			memcpy(slots[i]->config, slots[i]->fresh, CONFIG_SIZE);
	spin_unlock_irqrestore(&config_lock, flags);
	return 0;
}

static int get_absent(char *buffer, const struct kernel_param *parameter)
{
	return sysfs_emit(buffer, "0x%lx\n", READ_ONCE(absent_slots));
}

static const struct kernel_param_ops absent_ops = { .set = set_absent, .get = get_absent };
module_param_cb(absent, &absent_ops, NULL, 0644);
MODULE_PARM_DESC(absent, "mask of slots that do not answer (switches first, then GPUs)");

static struct slot *slot_of(struct pci_bus *bus)
{
	return container_of((struct pci_sysdata *)bus->sysdata, struct slot, sysdata);
}

static bool is_answering(const struct slot *slot, unsigned int devfn, int where, int size)
{
	return devfn == 0 && where + size <= CONFIG_SIZE && !(absent_slots & BIT(slot->number));
}

static int read_config(struct pci_bus *bus, unsigned int devfn, int where, int size, u32 *value)
{
	struct slot *slot = slot_of(bus);
	unsigned long flags;

	*value = ~0U >> (32 - 8 * size);
	spin_lock_irqsave(&config_lock, flags);
	if (is_answering(slot, devfn, where, size)) {
		*value = 0;
		memcpy(value, slot->config + where, size); /* both are little-endian */
	}
	spin_unlock_irqrestore(&config_lock, flags);
	return PCIBIOS_SUCCESSFUL;
}

static bool is_writable(int where)
{
	return where == PCI_COMMAND || where == PCI_COMMAND + 1 || where == PCI_CACHE_LINE_SIZE ||
	       where == PCI_LATENCY_TIMER || where == PCI_INTERRUPT_LINE;
}

static int write_config(struct pci_bus *bus, unsigned int devfn, int where, int size, u32 value)
{
	struct slot *slot = slot_of(bus);
	unsigned long flags;
	int i;

	spin_lock_irqsave(&config_lock, flags);
	if (is_answering(slot, devfn, where, size))
		for (i = 0; i < size; i++)
			if (is_writable(where + i))
				slot->config[where + i] = value >> (8 * i);
	spin_unlock_irqrestore(&config_lock, flags);
	return PCIBIOS_SUCCESSFUL;
}

static struct pci_ops config_ops = { .read = read_config, .write = write_config };

static void put16(u8 *config, int where, u16 value)
{
	config[where] = value;
	config[where + 1] = value >> 8;
}

static void fill_config(u8 *config, u16 device, u16 class, u16 subsystem)
{
	put16(config, PCI_VENDOR_ID, VENDOR_NVIDIA);
	put16(config, PCI_DEVICE_ID, device);
	config[PCI_CLASS_REVISION] = 0xa1;
	put16(config, PCI_CLASS_DEVICE, class);
	put16(config, PCI_SUBSYSTEM_VENDOR_ID, VENDOR_NVIDIA);
	put16(config, PCI_SUBSYSTEM_ID, subsystem);
}

static int scan_slot(struct slot *slot)
{
	struct pci_host_bridge *bridge = pci_alloc_host_bridge(0);
	struct resource *buses;
	int error = -ENOMEM;

	if (!bridge)
		return -ENOMEM;
	buses = devm_kzalloc(&bridge->dev, sizeof(*buses), GFP_KERNEL);
	if (!buses)
		goto failed;
	buses->name = "fake_hgx bus";
	buses->start = slot->bus;
	buses->end = slot->bus;
	buses->flags = IORESOURCE_BUS;
	pci_add_resource(&bridge->windows, buses);

	slot->sysdata.domain = domain;
	slot->sysdata.node = NUMA_NO_NODE;
	bridge->sysdata = &slot->sysdata;
	bridge->ops = &config_ops;
	bridge->busnr = slot->bus;
	error = pci_scan_root_bus_bridge(bridge);
	if (error)
		goto failed;
	slot->bridge = bridge;
	pci_lock_rescan_remove();
	pci_bus_add_devices(bridge->bus);
	pci_unlock_rescan_remove();
	return 0;
failed:
	pci_free_host_bridge(bridge);
	return error;
}

static int add_slot(unsigned int number, u8 bus, u16 device, u16 class, u16 subsystem)
{
	struct slot *slot = kzalloc(sizeof(*slot), GFP_KERNEL);

	if (!slot)
		return -ENOMEM;
	slot->number = number;
	slot->bus = bus;
	fill_config(slot->fresh, device, class, subsystem);
	memcpy(slot->config, slot->fresh, CONFIG_SIZE);
	slots[number] = slot;
	return scan_slot(slot);
}

static void remove_slots(void)
{
	unsigned int i;

	pci_lock_rescan_remove();
	for (i = 0; i < MAX_SLOTS; i++) {
		struct pci_host_bridge *bridge = slots[i] ? slots[i]->bridge : NULL;

		if (!bridge)
			continue;
		pci_stop_root_bus(bridge->bus);
		pci_remove_root_bus(bridge->bus);
		pci_free_host_bridge(bridge);
	}
	pci_unlock_rescan_remove();
	for (i = 0; i < MAX_SLOTS; i++) {
		kfree(slots[i]);
		slots[i] = NULL;
	}
}

static int add_slots(const struct board *kind)
{
	unsigned int i;
	int error = 0;

	for (i = 0; !error && i < min(kind->switches, nvswitches); i++)
		error = add_slot(i, first_switch_bus + i, kind->switch_device, PCI_CLASS_BRIDGE_OTHER, 0x1796);
	for (i = 0; !error && i < min_t(unsigned int, ARRAY_SIZE(gpu_buses), gpus); i++)
		error = add_slot(kind->switches + i, gpu_buses[i], kind->gpu_device, PCI_CLASS_DISPLAY_3D,
				 kind->gpu_subsystem);
	return error;
}

static int __init fake_hgx_init(void)
{
	unsigned int i;
	int error;

	for (i = 0; i < ARRAY_SIZE(boards); i++)
		if (!strcmp(board, boards[i].name))
			break;
	if (i == ARRAY_SIZE(boards))
		return -EINVAL;
	error = add_slots(&boards[i]);
	if (error)
		remove_slots();
	return error;
}

static void __exit fake_hgx_exit(void)
{
	remove_slots();
}

module_init(fake_hgx_init);
module_exit(fake_hgx_exit);
MODULE_DESCRIPTION("A software HGX baseboard on the PCI bus");
MODULE_LICENSE("GPL");
