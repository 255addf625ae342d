/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0 */
/*
 * PROGRAM (-D) as an ELF file: this process becomes a Python interpreter that runs HOME/run-PROGRAM.py.
 *
 * Not exec: /proc/PID/exe and the name of the process must be the program's. The interpreter is loaded, not linked, so
 * that one launcher fits every version of it. Isolated (-I), without site (-S), without writing bytecode (-B).
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <wchar.h>

#define HOME "/usr/local/lib/fmsupervisor"
#define STRING(text) #text
#define TEXT(macro) STRING(macro)

static void *symbol(void *library, const char *name)
{
	void *found = library ? dlsym(library, name) : NULL;

	if (!found) {
		fprintf(stderr, "%s\n", dlerror());
		exit(127);
	}
	return found;
}

int main(int count, char **given)
{
	static const char *const options[] = { "-I", "-S", "-B", HOME "/run-" TEXT(PROGRAM) ".py" };
	const int added = sizeof(options) / sizeof(*options);
	/* Found by its name later, when a module needs it, wherever that module looks. */
	void *library = dlopen(HOME "/lib/libffi.so", RTLD_LAZY) ? dlopen(HOME "/lib/libpython.so", RTLD_NOW | RTLD_GLOBAL) : NULL;
	void (*set_home)(const wchar_t *) = symbol(library, "Py_SetPythonHome");
	int (*run)(int, char **) = symbol(library, "Py_BytesMain");
	char **arguments = calloc(count + added + 1, sizeof(*arguments));
	int n = 0;

	arguments[n++] = given[0];
	for (int i = 0; i < added; i++)
		arguments[n++] = (char *)options[i];
	for (int i = 1; i < count; i++)
		arguments[n++] = given[i];
	set_home(L"" HOME);
	return run(n, arguments);
}
