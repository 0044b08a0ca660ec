/* The library's start: the driver's functions, and nvmlInit. */
#include "compat.h"
#define _GNU_SOURCE
#include "real.h"
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdint.h>
#include "trace.h"

struct tr_real tr_real;

/* Where the driver's library and ours are mapped. */
static struct range {
	uintptr_t from, to;
} driver_range, own_range;

static bool in(const struct range *r, uintptr_t p)
{
	return p >= r->from && p < r->to;
}

bool tr_inside(const void *return_address)
{
	uintptr_t p = (uintptr_t)return_address;
	return in(&driver_range, p) || in(&own_range, p);
}

/* Notes the object if it is one of the two, by a function that is in it. */
static int note_range(struct dl_phdr_info *object, size_t size, void *unused)
{
	struct range r = {UINTPTR_MAX, 0};
	(void)size;
	(void)unused;
	for (int i = 0; i < object->dlpi_phnum; i++) {
		const ElfW(Phdr) *p = &object->dlpi_phdr[i];
		uintptr_t from = object->dlpi_addr + p->p_vaddr;
		if (p->p_type != PT_LOAD)
			continue;
		r.from = from < r.from ? from : r.from;
		r.to = from + p->p_memsz > r.to ? from + p->p_memsz : r.to;
	}
	if (in(&r, (uintptr_t)REAL(nvmlInit_v2)))
		driver_range = r;
	if (in(&r, (uintptr_t)tr_inside))
		own_range = r;
	return 0;
}

/* Only looks functions up: the driver's library is here already, by DT_NEEDED, and the slice is
 * opened by the first call. Never loads libcuda: by its SONAME the vendor's would then answer
 * every later request for libcuda.so.1. */
__attribute__((constructor)) static void start(void)
{
	tr_trace_init();
	pthread_atfork(NULL, NULL, tr_utilization_after_fork);
	void *driver = dlopen("libnvidia-ml-driver.so.1", RTLD_NOLOAD | RTLD_LAZY);
	if (driver == NULL) {
		tr_complain("libnvidia-ml-driver.so.1 is not loaded: %s", dlerror());
		return;
	}
#define X(name) tr_real.name = (__typeof__(&name))dlsym(driver, #name);
#define TR_HOOK(name) X(name)
#define TR_DENY(name, why)
#define TR_ABSENT(name, why)
#include "hooks.def"
#undef TR_HOOK
#undef TR_DENY
#undef TR_ABSENT
	TR_CALLED(X)
#undef X
	dl_iterate_phdr(note_range, NULL);
}

/* Without a slice NVML stays uninitialised, so that what passes through fails too. */
static nvmlReturn_t initialized(nvmlReturn_t r)
{
	TR_TRACE("nvmlInit: %d, %d devices in the slice", (int)r, tr_limits_devices());
	if (r == NVML_SUCCESS)
		tr_utilization_start();
	return r;
}

EXPORT nvmlReturn_t nvmlInit(void)
{
	TR_ENTER(nvmlInit);
	return initialized(REAL(nvmlInit)());
}

EXPORT nvmlReturn_t nvmlInit_v2(void)
{
	TR_ENTER(nvmlInit_v2);
	return initialized(REAL(nvmlInit_v2)());
}

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
	TR_ENTER(nvmlInitWithFlags, flags);
	return initialized(REAL(nvmlInitWithFlags)(flags));
}
