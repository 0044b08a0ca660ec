#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "driver.h"

struct driver cu;
static CUdevice device;
static CUcontext context;

void die(const char *fmt, ...)
{
	va_list ap;

	fprintf(stderr, "%s: ", program);
	va_start(ap, fmt);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fputc('\n', stderr);
	exit(1);
}

int64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return ts.tv_sec * 1000000000ll + ts.tv_nsec;
}

void sleep_until_ns(int64_t t)
{
	struct timespec ts = {t / 1000000000ll, t % 1000000000ll};

	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &ts, NULL) == EINTR)
		;
}

const char *driver_error(CUresult r)
{
	const char *name = NULL;

	if (cu.cuGetErrorName && cu.cuGetErrorName(r, &name) == CUDA_SUCCESS && name)
		return name;
	static __thread char number[24];
	snprintf(number, sizeof number, "CUDA error %d", (int)r);
	return number;
}

void driver_must(CUresult r, const char *what)
{
	if (r == CUDA_SUCCESS)
		return;
	die("%.*s: %s", (int)strcspn(what, "("), what, driver_error(r));
}

static void load_symbols(void *handle)
{
	void *p;

	/* Function pointers are copied as bytes: ISO C has no cast from an object pointer. */
#define X(name)                                                                                    \
	p = dlsym(handle, #name);                                                                  \
	if (!p)                                                                                    \
		die("the driver has no %s", #name);                                                \
	memcpy(&cu.name, &p, sizeof p);
	DRIVER_NEEDED(X)
#undef X
#define X(name)                                                                                    \
	p = dlsym(handle, #name);                                                                  \
	memcpy(&cu.name, &p, sizeof p);
	DRIVER_WANTED(X)
#undef X
}

void driver_open(const char *path, int ordinal)
{
	void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	int n = 0;

	if (!handle)
		die("no CUDA driver: %s", dlerror());
	load_symbols(handle);
	MUST(cuInit(0));
	MUST(cuDeviceGetCount(&n));
	if (ordinal >= n)
		die("GPU %d asked for, %d visible", ordinal, n);
	MUST(cuDeviceGet(&device, ordinal));
	MUST(cuDevicePrimaryCtxRetain(&context, device));
	driver_attach();
}

CUdevice driver_device(void)
{
	return device;
}

void driver_attach(void)
{
	MUST(cuCtxSetCurrent(context));
}
