/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0 */
/*
 * Talks to the nvidia stub as the daemon and Fabric Manager do. Static, makes the nodes it needs itself.
 *
 *   selftest list                       the switches: minor, PCI address, driverState, deviceState, reason, physical id
 *   selftest heartbeat all|MINOR 0|1    one heartbeat of the simulated Fabric Manager (fake_fm_ioctl.h)
 *   selftest check-version STRING       compatible or not (the kernel logs a mismatch)
 *   selftest check COUNT                the whole contract with COUNT switches; exit status 1 and a line per failure
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "fake_fm_ioctl.h"

#define NODES "/dev/.selftest"
#define GET_DEVICES 0x85046301U
#define CHECK_VERSION 0xC0816302U
#define GET_DEVICES_V2_52 0x8D046303U
#define GET_DEVICES_V2_56 0x8E046303U
#define CONTROL 255

struct entry { /* GET_DEVICES_V2; followed by 4 more bytes in the form of 56 */
	uint32_t minor;
	uint8_t uuid[16];
	uint32_t domain, bus, device, function, driver_state, device_state, reason, physical_id;
};

static unsigned int failures;

static void expect(int is_true, const char *sentence)
{
	if (!is_true) {
		printf("not so: %s (errno %d, %s)\n", sentence, errno, strerror(errno));
		failures++;
	}
}

/* The major of exactly that name in /proc/devices, or -1. */
static int major_of(const char *name)
{
	char line[128], found[96];
	int major, result = -1;
	FILE *file = fopen("/proc/devices", "r");

	while (file && result < 0 && fgets(line, sizeof(line), file))
		if (sscanf(line, "%d %95s", &major, found) == 2 && !strcmp(found, name))
			result = major;
	if (file)
		fclose(file);
	return result;
}

/* Open the node of a driver, or -1 with errno. */
static int open_minor(const char *driver, int minor)
{
	char path[128];
	int major = major_of(driver);

	if (major < 0) {
		errno = ENXIO;
		return -1;
	}
	mkdir(NODES, 0700);
	snprintf(path, sizeof(path), NODES "/%s-%d", driver, minor);
	unlink(path);
	if (mknod(path, S_IFCHR | 0600, makedev(major, minor)))
		return -1;
	return open(path, O_RDWR | O_CLOEXEC);
}

/* Entries of GET_DEVICES_V2 in the form that the module knows: their number, or -1. */
static int get_devices(int control, struct entry *entries)
{
	static unsigned char buffer[4 + 64 * 56];
	uint32_t count, i;
	size_t size = 56;

	if (ioctl(control, GET_DEVICES_V2_56, buffer)) {
		size = 52;
		if (errno != EINVAL || ioctl(control, GET_DEVICES_V2_52, buffer))
			return -1;
	}
	memcpy(&count, buffer, sizeof(count));
	for (i = 0; i < count && i < 64; i++)
		memcpy(&entries[i], buffer + 4 + i * size, sizeof(*entries));
	return count;
}

static int list(int control)
{
	struct entry e[64];
	int i, count = get_devices(control, e);

	for (i = 0; i < count; i++)
		printf("%u %04x:%02x:%02x.%x driver=%u device=%u reason=%u physical=%u\n", e[i].minor, e[i].domain,
		       e[i].bus, e[i].device, e[i].function, e[i].driver_state, e[i].device_state, e[i].reason,
		       e[i].physical_id);
	if (count < 0)
		perror("GET_DEVICES_V2");
	return count < 0;
}

static int heartbeat(int control, unsigned int minor, unsigned int configured)
{
	struct fake_fm_heartbeat heartbeat = { minor, configured };

	return ioctl(control, FAKE_FM_HEARTBEAT, &heartbeat);
}

/* 1 compatible, 0 not, -1 error */
static int check_version(int control, const char *version)
{
	unsigned char buffer[129] = { 0 };

	strncpy((char *)buffer, version, 63);
	return ioctl(control, CHECK_VERSION, buffer) ? -1 : buffer[128];
}

static int all_have(int control, uint32_t driver_state, uint32_t device_state)
{
	struct entry e[64];
	int i, count = get_devices(control, e);

	for (i = 0; i < count; i++)
		if (e[i].driver_state != driver_state || e[i].device_state != device_state)
			return 0;
	return count > 0;
}

static void check_switches(int control, int count)
{
	static unsigned char v1[1284];
	struct entry e[64];
	uint32_t number;
	int i, node;

	expect(get_devices(control, e) == count, "GET_DEVICES_V2 tells as many switches as there are");
	for (i = 0; i < count; i++)
		expect(e[i].minor == (uint32_t)i && e[i].device == 0 && e[i].uuid[0], "entries are in probe order");
	expect(!ioctl(control, GET_DEVICES, v1), "GET_DEVICES works");
	memcpy(&number, v1, sizeof(number));
	expect((int)number == count, "GET_DEVICES tells the same number");
	expect(ioctl(control, GET_DEVICES_V2_52 ^ GET_DEVICES_V2_56 ^ GET_DEVICES, v1) == -1 && errno == EINVAL,
	       "another size is EINVAL");
	expect(ioctl(control, 0x5401, v1) == -1 && errno == EINVAL, "another type is EINVAL");
	node = open_minor("nvidia-nvswitch", count);
	expect(node == -1 && errno == ENODEV, "a minor without switch is ENODEV");
	node = open_minor("nvidia-nvswitch", 64);
	expect(node == -1 && errno == ENXIO, "minor 64 is ENXIO");
}

static void check_node(void)
{
	struct pollfd request = { .fd = open_minor("nvidia-nvswitch", 0), .events = POLLIN };

	expect(request.fd >= 0, "a switch can be opened");
	expect(poll(&request, 1, 0) == 1 && request.revents & POLLERR, "poll without events is POLLERR");
	expect(ioctl(request.fd, GET_DEVICES, NULL) == -1 && errno == EINVAL, "a switch knows no control command");
	close(request.fd);
}

static void check_manager(int control, int count)
{
	struct entry e[64];
	int node;

	expect(all_have(control, 1, 1), "without Fabric Manager all is STANDBY");
	expect(heartbeat(control, 63, 1) == -1 && errno == ENODEV, "a heartbeat to no switch is ENODEV");
	expect(heartbeat(control, 0, 2) == -1 && errno == EINVAL, "a strange heartbeat is EINVAL");
	expect(!heartbeat(control, FAKE_FM_ALL_SWITCHES, 0) && all_have(control, 1, 1), "not configured is STANDBY");
	expect(!heartbeat(control, FAKE_FM_ALL_SWITCHES, 1) && all_have(control, 2, 2), "then CONFIGURED");
	node = open_minor("nvidia-nvswitch", 0);
	expect(!heartbeat(node, FAKE_FM_ALL_SWITCHES, 0) && get_devices(control, e) > 0 && e[0].driver_state == 1,
	       "a heartbeat on a switch is heard");
	expect(count == 1 || e[1].driver_state == 2, "and is about that switch only");
	close(node);
}

static void check_others(void)
{
	int first = open_minor("nvidia-nvlink", 0);

	expect(first >= 0, "nvidia-nvlink can be opened");
	expect(open_minor("nvidia-nvlink", 0) == -1 && errno == EBUSY, "but only once");
	close(first);
	first = open_minor("nvidia-nvlink", 0);
	expect(first >= 0, "and again after close");
	close(first);
	first = open_minor("nvidia-caps", 0);
	expect(first >= 0, "fabric-mgmt can be opened");
	close(first);
	expect(major_of("nvidiactl") == 195 || major_of("nvidia-frontend") == 195, "major 195 is there");
}

static int check(int control, int count)
{
	check_switches(control, count);
	if (count) {
		check_node();
		check_manager(control, count);
	}
	check_others();
	printf("%u failure(s)\n", failures);
	return failures > 0;
}

int main(int argc, char **argv)
{
	const char *command = argc > 1 ? argv[1] : "";
	int control = open_minor("nvidia-nvswitch", CONTROL);

	if (control < 0) {
		perror("nvidia-nvswitchctl");
		return 1;
	}
	if (!strcmp(command, "list") && argc == 2)
		return list(control);
	if (!strcmp(command, "check") && argc == 3)
		return check(control, atoi(argv[2]));
	if (!strcmp(command, "check-version") && argc == 3) {
		int answer = check_version(control, argv[2]);

		puts(answer == 1 ? "compatible" : answer == 0 ? "not compatible" : strerror(errno));
		return answer < 0;
	}
	if (!strcmp(command, "heartbeat") && argc == 4) {
		unsigned int minor = strcmp(argv[2], "all") ? (unsigned int)atoi(argv[2]) : FAKE_FM_ALL_SWITCHES;

		if (!heartbeat(control, minor, atoi(argv[3])))
			return 0;
		perror("heartbeat");
		return 1;
	}
	fprintf(stderr, "usage: selftest list | heartbeat all|MINOR 0|1 | check-version STRING | check COUNT\n");
	return 2;
}
