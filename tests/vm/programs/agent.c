/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0 */
/*
 * Does what the host of this virtual machine asks for through a serial port, one request at a time.
 *
 *   "VERB SIZE SECONDS\n" and SIZE bytes come in, "STATUS SIZE\n" and SIZE bytes go out:
 *
 *   run SCRIPT          by bash in /root; the status is its own, or 124: it took longer than SECONDS and was ended
 *   get PATH            the file
 *   put MODE PATH\0...  the file is written; its directory is made
 *   change PATH         the file as soon as it is another one than at the last "change"; after SECONDS as it is
 *
 * Status 1 of the last three: the text is the error. A program of its own, not a script: without KVM the five programs
 * that a script needs for each request take longer than most of what is asked for, and "change" starts none at all.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PORT "/dev/virtio-ports/agent"
#define SCRIPT "/run/agent/script"
#define OUTPUT "/run/agent/output"
#define KILL_AFTER 5000 /* ms after SIGTERM */
#define LOOK_EVERY 20 /* ms */

static int port;

static void end(const char *what)
{
	perror(what);
	exit(1);
}

static void read_all(char *data, size_t size)
{
	while (size) {
		ssize_t got = read(port, data, size);

		if (got < 0)
			end("read");
		if (!got) { /* nobody has opened the other end yet */
			usleep(10000);
			continue;
		}
		data += got;
		size -= got;
	}
}

static void write_all(int fd, const char *data, size_t size)
{
	while (size) {
		ssize_t sent = write(fd, data, size);

		if (sent < 0)
			end("write");
		data += sent;
		size -= sent;
	}
}

static void answer(int status, const char *data, size_t size)
{
	char head[64];

	write_all(port, head, snprintf(head, sizeof(head), "%d %zu\n", status, size));
	write_all(port, data, size);
}

static void answer_error(const char *path)
{
	char text[4200];

	answer(1, text, snprintf(text, sizeof(text), "%s: %s", path, strerror(errno)));
}

/* The whole file; NULL with errno set. */
static char *content_of(const char *path, size_t *size)
{
	size_t room = 1 << 16;
	char *data = malloc(room);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t got = -1;

	*size = 0;
	while (fd >= 0 && (got = read(fd, data + *size, room - *size)) > 0) {
		*size += got;
		if (*size == room)
			data = realloc(data, room *= 2);
	}
	if (fd >= 0) {
		int error = errno;

		close(fd);
		errno = error;
	}
	if (got < 0) {
		free(data);
		return NULL;
	}
	return data;
}

static void answer_file(int status, const char *path)
{
	size_t size;
	char *data = content_of(path, &size);

	if (!data) {
		answer_error(path);
		return;
	}
	answer(status, data, size);
	free(data);
}

/* 0 with errno set when it could not be written. */
static int write_file(const char *path, mode_t mode, const char *data, size_t size)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, mode);

	if (fd < 0)
		return 0;
	while (size) {
		ssize_t sent = write(fd, data, size);

		if (sent < 0)
			break;
		data += sent;
		size -= sent;
	}
	if (!size && !fchmod(fd, mode)) {
		close(fd);
		return 1;
	}
	close(fd);
	return 0;
}

static int has_ended(int process, int milliseconds)
{
	struct pollfd wait = { .fd = process, .events = POLLIN };

	return poll(&wait, 1, milliseconds) == 1;
}

static void run(const char *script, size_t size, double seconds)
{
	int status, process;
	int is_late = 0;
	pid_t child;

	if (!write_file(SCRIPT, 0600, script, size))
		end(SCRIPT);
	child = fork();
	if (child < 0)
		end("fork");
	if (!child) {
		int output = open(OUTPUT, O_WRONLY | O_CREAT | O_TRUNC, 0600);

		setpgid(0, 0);
		if (output < 0 || dup2(output, 1) < 0 || dup2(output, 2) < 0 || dup2(open("/dev/null", O_RDONLY), 0) < 0)
			_exit(126);
		if (output > 2)
			close(output);
		if (!chdir("/root"))
			execl("/bin/bash", "bash", SCRIPT, NULL);
		_exit(126);
	}
	setpgid(child, child);
	process = syscall(SYS_pidfd_open, child, 0);
	if (process < 0)
		end("pidfd_open");
	if (!has_ended(process, (int)(seconds * 1000))) {
		is_late = 1;
		kill(-child, SIGTERM);
		if (!has_ended(process, KILL_AFTER))
			kill(-child, SIGKILL);
	}
	close(process);
	if (waitpid(child, &status, 0) < 0)
		end("waitpid");
	answer_file(is_late ? 124 : WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), OUTPUT);
}

static void put(char *request, size_t size)
{
	char *path, *content;
	mode_t mode = strtoul(request, &path, 8);

	path++;
	content = path + strlen(path) + 1;
	for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
		*slash = 0;
		mkdir(path, 0755);
		*slash = '/';
	}
	if (write_file(path, mode, content, size - (content - request)))
		answer(0, "", 0);
	else
		answer_error(path);
}

static void change(const char *path, double seconds)
{
	static struct stat last;
	const struct timespec pause = { .tv_nsec = LOOK_EVERY * 1000000L };

	for (int tries = seconds * 1000 / LOOK_EVERY; tries > 0; tries--) {
		struct stat found;

		if (!stat(path, &found) &&
		    (found.st_ino != last.st_ino || found.st_mtim.tv_sec != last.st_mtim.tv_sec ||
		     found.st_mtim.tv_nsec != last.st_mtim.tv_nsec)) {
			last = found;
			break;
		}
		nanosleep(&pause, NULL);
	}
	answer_file(0, path);
}

/* 0: a line that is none of ours. */
static int read_head(char *verb, size_t *size, double *seconds)
{
	char line[128];
	size_t length = 0;

	do {
		read_all(line + length, 1);
	} while (line[length] != '\n' && ++length < sizeof(line) - 1);
	line[length] = 0;
	return sscanf(line, "%15s %zu %lf", verb, size, seconds) == 3;
}

int main(void)
{
	char verb[16];
	size_t size;
	double seconds;

	port = open(PORT, O_RDWR | O_CLOEXEC);
	if (port < 0)
		end(PORT);
	mkdir("/run/agent", 0755);
	write_all(port, "ready\n", 6);
	while (read_head(verb, &size, &seconds)) {
		char *request = malloc(size + 1);

		read_all(request, size);
		request[size] = 0;
		if (!strcmp(verb, "run"))
			run(request, size, seconds);
		else if (!strcmp(verb, "get"))
			answer_file(0, request);
		else if (!strcmp(verb, "put"))
			put(request, size);
		else
			change(request, seconds);
		free(request);
	}
	return 1;
}
