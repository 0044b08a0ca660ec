/* Start-up, what every call checks first, and errors on demand. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include "sim.h"

#define MAX_FAULTS 16

struct sim_fault {
	char name[64];
	unsigned nth; /* 1 is the first call; 0: every call */
	CUresult error;
	_Atomic unsigned calls;
};

static struct sim_fault faults[MAX_FAULTS];
static int n_faults = -1;
static pthread_mutex_t init_mutex = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int ready; /* 1: cuInit succeeded in this process; -1: forked after it did */
static int visible[SIM_MAX_GPUS];
static int n_visible;

/* --- faults ----------------------------------------------------------------------------------- */

__attribute__((constructor)) static void faults_init(void)
{
	const char *text = getenv("TRANCHE_SIM_FAIL");
	n_faults = 0;
	while (text && *text && n_faults < MAX_FAULTS) {
		struct sim_fault *f = &faults[n_faults];
		unsigned error;
		if (sscanf(text, "%63[^:,]:%u:%u", f->name, &f->nth, &error) == 3) {
			f->error = (CUresult)error;
			n_faults++;
		} else {
			sim_trace_write("TRANCHE_SIM_FAIL: '%s' is not function:nth:error", text);
		}
		text = strchr(text, ',');
		text = text ? text + 1 : NULL;
	}
}

static CUresult fault_of(const struct sim_call *c)
{
	for (int i = 0; i < n_faults; i++) {
		struct sim_fault *f = &faults[i];
		if (strcmp(f->name, c->name))
			continue;
		unsigned n = __atomic_add_fetch(&f->calls, 1, __ATOMIC_RELAXED);
		if (!f->nth || n == f->nth) {
			SIM_TRACE("%s: call %u fails as asked: %d", c->name, n, (int)f->error);
			return f->error;
		}
	}
	return CUDA_SUCCESS;
}

CUresult sim_enter_uninit(struct sim_call *c)
{
	if (__builtin_expect(sim_trace_level > 1, 0))
		sim_trace_write("%s", c->name);
	return __builtin_expect(n_faults > 0, 0) ? fault_of(c) : CUDA_SUCCESS;
}

CUresult sim_enter(struct sim_call *c)
{
	if (__builtin_expect(ready != 1, 0))
		return CUDA_ERROR_NOT_INITIALIZED;
	return sim_enter_uninit(c);
}

int sim_stub(const char *name);
int sim_stub(const char *name)
{
	SIM_TRACE("%s: not simulated", name);
	return CUDA_ERROR_NOT_SUPPORTED;
}

/* --- CUDA_VISIBLE_DEVICES ---------------------------------------------------------------------- */

static uint64_t speed(int g)
{
	return (uint64_t)sim_shared->gpu[g].model.sms * sim_shared->gpu[g].model.clock_khz;
}

/* CUDA_DEVICE_ORDER: the fastest first and the rest as they come, or all by PCI address. */
static void device_order(int *order, int n)
{
	const char *how = getenv("CUDA_DEVICE_ORDER");
	bool by_pci = how && !strcasecmp(how, "PCI_BUS_ID");
	for (int i = 0; i < n; i++)
		order[i] = i;
	for (int i = 1; by_pci && i < n; i++)
		for (int j = i; j > 0; j--) {
			const struct sim_gpu *a = &sim_shared->gpu[order[j - 1]], *b = &sim_shared->gpu[order[j]];
			if (strcmp(a->pci, b->pci) <= 0)
				break;
			int t = order[j];
			order[j] = order[j - 1];
			order[j - 1] = t;
		}
	int best = 0;
	for (int i = 1; !by_pci && i < n; i++)
		if (speed(order[i]) > speed(order[best]))
			best = i;
	for (; !by_pci && best > 0; best--) {
		int t = order[best];
		order[best] = order[best - 1];
		order[best - 1] = t;
	}
}

/* The GPU that one item names, -1: none. An index, or a UUID or an unambiguous beginning of one. */
static int named_gpu(const char *item, size_t len, const int *order, int n)
{
	if (len > 4 && !strncasecmp(item, "GPU-", 4)) {
		int found = -1;
		for (int i = 0; i < n; i++) {
			if (strncasecmp(sim_shared->gpu[i].uuid, item, len))
				continue;
			if (found >= 0)
				return -1;
			found = i;
		}
		return found;
	}
	char *end;
	long v = strtol(item, &end, 10);
	return end == item + len && len && v >= 0 && v < n ? order[v] : -1;
}

/* The list ends at the first item that names no GPU; a GPU named twice makes the list void. */
static void find_visible(void)
{
	const char *list = getenv("CUDA_VISIBLE_DEVICES");
	int order[SIM_MAX_GPUS], n = (int)sim_shared->n_gpus;
	device_order(order, n);
	n_visible = 0;
	for (int i = 0; !list && i < n; i++)
		visible[n_visible++] = order[i];
	while (list) {
		list += strspn(list, " \t");
		size_t len = strcspn(list, ","), word = len;
		while (word && (list[word - 1] == ' ' || list[word - 1] == '\t'))
			word--;
		int g = named_gpu(list, word, order, n);
		if (g < 0)
			return;
		for (int i = 0; i < n_visible; i++)
			if (visible[i] == g) {
				n_visible = 0;
				return;
			}
		visible[n_visible++] = g;
		list = list[len] ? list + len + 1 : NULL;
	}
}

int sim_dev_count(void)
{
	return n_visible;
}

int sim_dev_gpu(CUdevice dev)
{
	return dev >= 0 && dev < n_visible ? visible[dev] : -1;
}

CUdevice sim_gpu_dev(int gpu)
{
	for (int i = 0; i < n_visible; i++)
		if (visible[i] == gpu)
			return i;
	return -1;
}

/* --- start ------------------------------------------------------------------------------------ */

static void forked(void)
{
	if (ready == 1)
		ready = -1;
	pthread_mutex_init(&init_mutex, NULL);
}

static CUresult start(void)
{
	static bool hooked;
	const char *why;
	if (!sim_state_open(NULL, &why)) {
		SIM_TRACE("cuInit: %s", why);
		return CUDA_ERROR_NO_DEVICE;
	}
	find_visible();
	if (!n_visible)
		return CUDA_ERROR_NO_DEVICE;
	if (sim_proc_claim() < 0) {
		SIM_TRACE("cuInit: all %d process slots are taken", SIM_MAX_PROCS);
		return CUDA_ERROR_OPERATING_SYSTEM;
	}
	if (!hooked)
		hooked = !pthread_atfork(NULL, NULL, forked);
	ready = 1;
	return CUDA_SUCCESS;
}

CUresult cuInit(unsigned int Flags)
{
	SIM_CALL_UNINIT(cuInit);
	if (Flags)
		return CUDA_ERROR_INVALID_VALUE;
	if (ready == 1)
		return CUDA_SUCCESS;
	if (ready < 0)
		return CUDA_ERROR_NOT_INITIALIZED;
	pthread_mutex_lock(&init_mutex);
	CUresult r = ready == 1 ? CUDA_SUCCESS : start();
	pthread_mutex_unlock(&init_mutex);
	return r;
}

CUresult cuDriverGetVersion(int *driverVersion)
{
	SIM_CALL_UNINIT(cuDriverGetVersion);
	if (!driverVersion)
		return CUDA_ERROR_INVALID_VALUE;
	struct sim_state *s = sim_state_open(NULL, NULL);
	*driverVersion = s ? (int)s->cuda_version : 12040;
	return CUDA_SUCCESS;
}
