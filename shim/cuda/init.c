/* The library's start: the driver's functions, and cuInit. */
#include "compat.h"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "account.h"
#include "context.h"
#include "device.h"
#include "graphmem.h"
#include "meter.h"
#include "pool.h"
#include "procaddr.h"
#include "real.h"
#include "slice.h"
#include "trace.h"
#include "vmm.h"
#include <pthread.h>

struct tr_real tr_real;

/* A forked child is a process of its own and holds nothing: the driver does not let it use what
 * its parent has. Locks may have been held by threads that the child does not have. */
static void after_fork_child(void)
{
	tr_account_after_fork();
	tr_pools_after_fork();
	tr_graphmem_after_fork();
	tr_vmm_after_fork();
	tr_contexts_after_fork();
	tr_meter_after_fork_child();
}

/* Only look-ups: no file, no thread, no environment but the trace switch. The driver is already
 * loaded, as a dependency of this library; a second dlopen of its fixed name gives its handle. */
__attribute__((constructor)) static void load_driver(void)
{
	tr_trace_init();
	void *driver = dlopen("libcuda-driver.so.1", RTLD_LAZY | RTLD_NOLOAD);
	if (driver == NULL) {
		tr_complain("the NVIDIA driver's libcuda is not loaded: %s", dlerror());
		return;
	}
#define LOAD(name) tr_real.name = (__typeof__(tr_real.name))dlsym(driver, #name);
#define TR_HOOK(name) LOAD(name)
#include "hooks.def"
#undef TR_HOOK
	TR_CALLED(LOAD)
	tr_procaddr_init();
	pthread_atfork(NULL, NULL, after_fork_child);
	TR_TRACE("libcuda.so.1 in front of the driver");
}

CUresult tr_enter(void)
{
	if (__builtin_expect(tr_slice_open(true), 1))
		return CUDA_SUCCESS;
	return CUDA_ERROR_SYSTEM_NOT_READY;
}

/* The driver reads CUDA_VISIBLE_DEVICES in its first cuInit. What the user wrote counts among the
 * slice's devices, so the driver is shown the UUIDs that it means. The user's own variable is
 * never touched: the driver sees a copy of the environment's pointer table with one entry
 * replaced, for the time of the call. */
static CUresult init_with_devices(unsigned int flags, const char *uuids)
{
	static const char name[] = "CUDA_VISIBLE_DEVICES=";
	char **old = environ;
	size_t n = 0, at = SIZE_MAX;
	for (; old != NULL && old[n] != NULL; n++)
		if (strncmp(old[n], name, sizeof name - 1) == 0 && at == SIZE_MAX)
			at = n;
	char *entry = malloc(sizeof name + strlen(uuids));
	char **copy = malloc((n + 2) * sizeof *copy);
	if (entry == NULL || copy == NULL) {
		free(entry);
		free(copy);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	strcpy(stpcpy(entry, name), uuids);
	if (n > 0)
		memcpy(copy, old, n * sizeof *copy);
	size_t end = n;
	if (at == SIZE_MAX)
		at = end++;
	copy[at] = entry;
	copy[end] = NULL;

	environ = copy;
	CUresult r = REAL(cuInit)(flags);
	if (environ == copy) {
		environ = old;
	} else {
		/* Another thread set a variable meanwhile; keep its table, restore our entry. */
		for (char **e = environ; e != NULL && *e != NULL; e++)
			if (*e == entry)
				*e = at < n ? old[at] : (char *)(uintptr_t)"TRANCHE_UNUSED=";
	}
	/* entry and copy are not freed: a thread may still read them. */
	return r;
}

CUresult EXPORT cuInit(unsigned int Flags)
{
	static int inited;
	if (REAL(cuInit) == NULL)
		return CUDA_ERROR_NOT_INITIALIZED;
	if (__atomic_load_n(&inited, __ATOMIC_ACQUIRE) == (int)getpid())
		return REAL(cuInit)(Flags);
	const char *user = getenv("CUDA_VISIBLE_DEVICES");
	if (user != NULL && *user == 0) {
		TR_TRACE("cuInit: CUDA_VISIBLE_DEVICES is empty, left alone");
		return REAL(cuInit)(Flags);
	}
	CUresult r = tr_enter();
	if (r != CUDA_SUCCESS)
		return r;
	char uuids[TR_MAX_DEVICES * TR_UUID_LEN + 1];
	tr_visible_uuids(user, uuids, sizeof uuids);
	if (getenv("CUDA_MPS_PIPE_DIRECTORY") != NULL)
		tr_complain("CUDA_MPS_PIPE_DIRECTORY is set: under MPS processes run side by side "
			    "on the GPU, so the memory limit holds as ever but GPU time is "
			    "measured per process and the compute limit may be too strict");
	r = init_with_devices(Flags, *uuids == 0 ? "-1" : uuids);
	if (r == CUDA_SUCCESS) {
		tr_devices_init();
		tr_meter_arm();
		__atomic_store_n(&inited, (int)getpid(), __ATOMIC_RELEASE);
	}
	TR_TRACE("cuInit with devices [%s]: %d", uuids, (int)r);
	return r;
}
