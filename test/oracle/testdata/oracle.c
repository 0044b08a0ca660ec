/* Asks cuGetProcAddress for every name, CUDA version and flag. It answers without a GPU and before
 * cuInit, so a real driver library is the reference on any machine.
 *
 *   oracle table DRIVER           names on stdin; on stdout the driver's table: one row per change
 *   oracle compare OURS DRIVER    names on stdin; OURS is our library, already linked to DRIVER by
 *                                 the loader's path. Ours must return the hook of exactly the
 *                                 symbol that the driver returns, the driver's own pointer where
 *                                 that symbol is not hooked, and its errors and status unchanged.
 *
 * Exit code 0 only if everything agrees; differences go to stderr. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int (*get_v1)(const char *, void **, int, uint64_t);
typedef int (*get_v2)(const char *, void **, int, uint64_t, int *);

enum { FIRST = 2000, LAST = 13000, STEP = 10, N_FLAGS = 3, MAX_REPORTS = 40 };

static const char *const hooked[] = {
#define TR_HOOK(name) #name,
#include "hooks.def"
#undef TR_HOOK
};
enum { N_HOOKED = sizeof(hooked) / sizeof(hooked[0]) };

struct driver {
	void *handle;
	get_v1 v1;
	get_v2 v2;
};

/* What one look-up gave. `untouched` stands in the pointer until the function writes it. */
struct answer {
	int rc, status;
	void *pointer;
};
static char untouched;

static unsigned long differences, lookups;

static void open_driver(struct driver *d, const char *path)
{
	d->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!d->handle) {
		fprintf(stderr, "oracle: %s\n", dlerror());
		exit(2);
	}
	*(void **)&d->v1 = dlsym(d->handle, "cuGetProcAddress");
	*(void **)&d->v2 = dlsym(d->handle, "cuGetProcAddress_v2");
	if (!d->v1 || !d->v2) {
		fprintf(stderr, "oracle: %s lacks cuGetProcAddress\n", path);
		exit(2);
	}
}

static struct answer ask_v2(const struct driver *d, const char *name, int version, uint64_t flags)
{
	struct answer a = { .status = -1, .pointer = &untouched };

	a.rc = d->v2(name, &a.pointer, version, flags, &a.status);
	lookups++;
	return a;
}

static struct answer ask_v1(const struct driver *d, const char *name, int version, uint64_t flags)
{
	struct answer a = { .status = -1, .pointer = &untouched };

	a.rc = d->v1(name, &a.pointer, version, flags);
	lookups++;
	return a;
}

/* The exported symbol that starts at P, NULL if there is none. */
static const char *symbol_at(const void *p)
{
	Dl_info info;

	if (!p || p == &untouched || !dladdr(p, &info) || info.dli_saddr != p)
		return NULL;
	return info.dli_sname;
}

static bool same_answer(struct answer a, struct answer b)
{
	return a.rc == b.rc && a.status == b.status && a.pointer == b.pointer;
}

/* One name and flag, all versions: a row wherever the answer changes. The table can only say
 * "from this version on, this symbol", so everything else is reported. */
static void tabulate(const struct driver *d, const char *name, uint64_t flags)
{
	struct answer last = { .rc = -1 };
	bool first = true, found = false;

	for (int version = FIRST; version <= LAST; version += STEP) {
		struct answer a = ask_v2(d, name, version, flags);
		bool changed = first || !same_answer(a, last);

		last = a;
		first = false;
		if (!changed)
			continue;
		if (a.rc == 0 && a.status == 0 && symbol_at(a.pointer)) {
			found = true;
			printf("%s\t%d\t%d\t%s\n", name, version, (int)flags, symbol_at(a.pointer));
		} else if (found || a.rc != 0 || a.pointer || (a.status != 1 && a.status != 2)) {
			fprintf(stderr, "oracle: %s, version %d, flags %d: rc %d, status %d, %p %s\n", name,
				version, (int)flags, a.rc, a.status, a.pointer, symbol_at(a.pointer) ?: "?");
			differences++;
		}
	}
}

static void differ(const char *name, int version, uint64_t flags, const char *call,
		   struct answer want, struct answer got)
{
	if (differences++ >= MAX_REPORTS)
		return;
	fprintf(stderr,
		"oracle: %s(%s, version %d, flags %d): want rc %d status %d %s (%p), "
		"got rc %d status %d %s (%p)\n",
		call, name, version, (int)flags, want.rc, want.status,
		symbol_at(want.pointer) ?: "?", want.pointer, got.rc, got.status,
		symbol_at(got.pointer) ?: "?", got.pointer);
}

/* The pointer that ours must return where the driver returned REAL. Cached: runs of versions have
 * the same answer. */
static void *expected(const struct driver *ours, void *real)
{
	static void *last_real, *last_expected;
	const char *symbol;

	if (real == last_real && real)
		return last_expected;
	last_real = last_expected = real;
	symbol = symbol_at(real);
	for (int i = 0; symbol && i < N_HOOKED; i++)
		if (!strcmp(symbol, hooked[i]))
			last_expected = dlsym(ours->handle, symbol);
	return last_expected;
}

/* The driver answers with its own functions: one that is not linked symbolically would find ours. */
static void check_own(const struct driver *real, const char *name, const void *p)
{
	static const void *last;
	Dl_info at, driver;

	if (p == last || !p || p == &untouched)
		return;
	last = p;
	if (dladdr(p, &at) && dladdr(*(void *const *)&real->v2, &driver) &&
	    at.dli_fbase == driver.dli_fbase)
		return;
	fprintf(stderr, "oracle: the driver answers %s with a function of %s\n", name, at.dli_fname);
	differences++;
}

static void compare(const struct driver *ours, const struct driver *real, const char *name,
		    int version, uint64_t flags)
{
	struct answer want = ask_v2(real, name, version, flags);
	struct answer got = ask_v2(ours, name, version, flags);

	check_own(real, name, want.pointer);
	want.pointer = expected(ours, want.pointer);
	if (!same_answer(want, got))
		differ(name, version, flags, "cuGetProcAddress_v2", want, got);

	want = ask_v1(real, name, version, flags);
	got = ask_v1(ours, name, version, flags);
	want.pointer = expected(ours, want.pointer);
	if (!same_answer(want, got))
		differ(name, version, flags, "cuGetProcAddress", want, got);
}

/* Each hook is ours, and never the driver's: else `compare` would agree with a library that hooks
 * nothing. */
static void check_hooks(const struct driver *ours, const char *path)
{
	Dl_info info;
	void *base = NULL;

	if (dladdr(*(void *const *)&ours->v2, &info))
		base = info.dli_fbase;
	for (int i = 0; i < N_HOOKED; i++) {
		void *p = dlsym(ours->handle, hooked[i]);

		if (p && dladdr(p, &info) && info.dli_fbase == base)
			continue;
		fprintf(stderr, "oracle: %s is not in %s\n", hooked[i], path);
		differences++;
	}
}

/* Odd versions and flags (above 2 there is 3, then errors that write nothing), no status. A NULL
 * name or pointer crashes in the real driver. */
static void compare_misuse(const struct driver *ours, const struct driver *real)
{
	static const char *const names[] = { "cuMemAlloc", "cuNoSuchFunction", "" };
	static const uint64_t flags[] = { 3, 4, 7, 1ull << 32 };
	static const int versions[] = { -1, 0, 1, 1000, 1999, 2001, 12041, 20000, 2147483647 };

	for (unsigned n = 0; n < 3; n++)
		for (unsigned v = 0; v < sizeof(versions) / sizeof(versions[0]); v++) {
			for (unsigned f = 0; f < 4; f++)
				compare(ours, real, names[n], versions[v], flags[f]);
			compare(ours, real, names[n], versions[v], 0);
		}

	for (unsigned n = 0; n < 3; n++) {
		void *a = &untouched, *b = &untouched;
		int want = real->v2(names[n], &a, 12000, 0, NULL);
		int got = ours->v2(names[n], &b, 12000, 0, NULL);

		if (want != got || expected(ours, a) != b) {
			fprintf(stderr, "oracle: (%s), no status: want %d %p, got %d %p\n", names[n], want,
				expected(ours, a), got, b);
			differences++;
		}
	}
}

int main(int argc, char **argv)
{
	struct driver ours = { 0 }, real;
	bool table = argc == 3 && !strcmp(argv[1], "table");
	char name[256];
	unsigned long names = 0;

	if (!table && !(argc == 4 && !strcmp(argv[1], "compare"))) {
		fprintf(stderr, "usage: oracle table DRIVER | oracle compare OURS DRIVER\n");
		return 2;
	}
	if (!table) {
		open_driver(&ours, argv[2]);
		check_hooks(&ours, argv[2]);
	}
	open_driver(&real, argv[argc - 1]);
	if (!table)
		compare_misuse(&ours, &real);

	while (fgets(name, sizeof(name), stdin)) {
		name[strcspn(name, "\n")] = 0;
		names++;
		for (uint64_t flags = 0; flags < N_FLAGS; flags++) {
			if (table) {
				tabulate(&real, name, flags);
				continue;
			}
			for (int version = FIRST; version <= LAST; version += STEP)
				compare(&ours, &real, name, version, flags);
		}
	}
	fprintf(stderr, "oracle: %lu names, %lu look-ups, %lu differences\n", names, lookups,
		differences);
	return differences || !names ? 1 : 0;
}
