/* Does what its arguments say, in their order, and prints one line for each result. H is the handle
 * of the last open.
 *   open=NAME,FLAGS   dlopen; FLAGS are letters: n now, z lazy, l local, g global, d deepbind
 *   mopen=NAME        dlmopen into a new namespace
 *   again=NAME        dlopen, and whether it is the same handle as H
 *   sym=NAME          the file that holds NAME as found from H
 *   default=NAME      the same from RTLD_DEFAULT
 *   call=NAME,ARG     calls NAME(ARG) from H: its result
 *   context           cuDevicePrimaryCtxRetain of device 0 and cuCtxSetCurrent, from H
 *   alloc=MIB         cuMemAlloc_v2 from H */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *handle;

static void *find(void *from, const char *name)
{
	void *p = dlsym(from, name);

	if (!p)
		printf("%s: not found\n", name);
	return p;
}

static void where(const char *name, const void *p)
{
	Dl_info info;

	if (!p)
		return;
	if (dladdr(p, &info) && info.dli_fname)
		printf("%s %s\n", name, info.dli_fname);
	else
		printf("%s ?\n", name);
}

static int flags_of(const char *letters)
{
	int flags = 0;

	for (; letters && *letters; letters++)
		flags |= *letters == 'n' ? RTLD_NOW : *letters == 'z' ? RTLD_LAZY :
			 *letters == 'g' ? RTLD_GLOBAL : *letters == 'd' ? RTLD_DEEPBIND : 0;
	return flags;
}

static void context(void)
{
	int (*init)(unsigned) = find(handle, "cuInit");
	int (*retain)(void **, int) = find(handle, "cuDevicePrimaryCtxRetain");
	int (*set)(void *) = find(handle, "cuCtxSetCurrent");
	void *ctx = NULL;
	int r = init && retain && set ? init(0) : -1;

	if (r == 0)
		r = retain(&ctx, 0);
	if (r == 0)
		r = set(ctx);
	printf("context %d\n", r);
}

static void alloc(const char *mib)
{
	int (*f)(unsigned long long *, size_t) = find(handle, "cuMemAlloc_v2");
	unsigned long long p = 0;

	printf("alloc %s %d\n", mib, f ? f(&p, (size_t)atol(mib) << 20) : -1);
}

int main(int argc, char **argv)
{
	for (int i = 1; i < argc; i++) {
		char *op = argv[i], *arg = strchr(op, '='), *more;

		if (arg)
			*arg++ = 0;
		more = arg ? strchr(arg, ',') : NULL;
		if (more)
			*more++ = 0;
		if (!strcmp(op, "open") || !strcmp(op, "mopen")) {
			handle = *op == 'o' ? dlopen(arg, flags_of(more)) :
					      dlmopen(LM_ID_NEWLM, arg, RTLD_NOW);
			if (!handle) {
				printf("%s %s\n", op, dlerror());
				return 1;
			}
		} else if (!strcmp(op, "again")) {
			printf("again %s\n", dlopen(arg, RTLD_LAZY) == handle ? "same" : "other");
		} else if (!strcmp(op, "sym")) {
			where(arg, find(handle, arg));
		} else if (!strcmp(op, "default")) {
			where(arg, find(RTLD_DEFAULT, arg));
		} else if (!strcmp(op, "call")) {
			int (*f)(long) = find(handle, arg);

			if (f)
				printf("%s %d\n", arg, f(more ? atol(more) : 0));
		} else if (!strcmp(op, "context")) {
			context();
		} else if (!strcmp(op, "alloc")) {
			alloc(arg);
		} else {
			fprintf(stderr, "probe: what is %s?\n", op);
			return 2;
		}
		fflush(stdout);
	}
	return 0;
}
