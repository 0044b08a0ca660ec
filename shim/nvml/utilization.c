/* How busy the slice keeps its GPUs. Other tenants' work does not show. */
#include "compat.h"
#define _GNU_SOURCE
#include "real.h"
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "ledger.h"
#include "members.h"
#include "trace.h"

/* A rate needs two readings of the ledger. NVML's own figures cover the last sixth of a second
 * to second; an interval here lasts from SHORTEST, for a process that has just begun, to a little
 * over ROTATE, or as long as the caller lets pass between two questions. */
#define SHORTEST_NS 100000000ll
#define ROTATE_NS 500000000ll

struct reading {
	int64_t at;    /* ns, tr_now_ns; 0: none */
	uint64_t busy; /* ns of GPU time, tr_account.gpu_time_ns */
};

/* A thread that finds another one at work answers from the readings as they are. */
static struct {
	int busy; /* somebody changes the readings */
	struct reading older, newer;
} sampler[TR_MAX_DEVICES];

static struct reading read_now(int dev)
{
	const struct tr_account *a = &tr_ledger()->account[dev];
	return (struct reading){.at = tr_now_ns(),
				.busy = __atomic_load_n(&a->gpu_time_ns, __ATOMIC_RELAXED)};
}

void tr_utilization_after_fork(void)
{
	for (int i = 0; i < TR_MAX_DEVICES; i++)
		__atomic_store_n(&sampler[i].busy, 0, __ATOMIC_RELAXED);
}

/* The reading to compare with. Rotates the two when the newer one is old enough. */
static struct reading compare_with(int dev, struct reading now)
{
	if (__atomic_exchange_n(&sampler[dev].busy, 1, __ATOMIC_ACQUIRE) != 0)
		return now; /* no interval: the caller falls back */
	struct reading *older = &sampler[dev].older, *newer = &sampler[dev].newer;
	if (newer->at == 0) {
		*older = *newer = now;
	} else if (now.at - newer->at >= ROTATE_NS) {
		*older = *newer;
		*newer = now;
	}
	struct reading r = *older;
	__atomic_store_n(&sampler[dev].busy, 0, __ATOMIC_RELEASE);
	return r;
}

void tr_utilization_start(void)
{
	for (int i = 0; i < tr_limits_devices(); i++)
		compare_with(i, read_now(i));
}

static unsigned percent(uint64_t part, uint64_t whole)
{
	uint64_t p = whole == 0 ? 0 : (uint64_t)((double)part * 100 / (double)whole + 0.5);
	return p > 100 ? 100 : (unsigned)p;
}

/* Share of the GPU's time that the ledger saw the slice use, 0..100; -1: nothing was metered.
 * Waits, at most SHORTEST, only in a process that asks right after its nvmlInit. */
static int metered_percent(int dev)
{
	struct reading now = read_now(dev);
	if (now.busy == 0)
		return -1;
	struct reading before = compare_with(dev, now);
	if (now.at - before.at < SHORTEST_NS) {
		struct timespec rest = {.tv_nsec = SHORTEST_NS - (now.at - before.at)};
		nanosleep(&rest, NULL);
		now = read_now(dev);
	}
	if (now.at <= before.at || now.busy <= before.busy)
		return -1;
	return (int)percent(now.busy - before.busy, (uint64_t)(now.at - before.at));
}

/* --- per process, from the driver ---------------------------------------------------------- */

/* The driver's samples of all processes. NOT_FOUND: nobody was busy. The caller frees *all. */
static nvmlReturn_t fetch_samples(nvmlDevice_t device, unsigned long long since, unsigned *n,
				  nvmlProcessUtilizationSample_t **all)
{
	*n = 0;
	nvmlReturn_t r = REAL(nvmlDeviceGetProcessUtilization)(device, NULL, n, since);
	if (r != NVML_ERROR_INSUFFICIENT_SIZE && r != NVML_SUCCESS)
		return r;
	if (*n == 0)
		return NVML_ERROR_NOT_FOUND;
	*n += 16; /* processes may have come since */
	*all = calloc(*n, sizeof **all);
	if (*all == NULL)
		return NVML_ERROR_MEMORY;
	return REAL(nvmlDeviceGetProcessUtilization)(device, *all, n, since);
}

/* Keeps the slice's samples, in place. */
static void keep_samples(nvmlProcessUtilizationSample_t *all, unsigned *n,
			 const struct tr_members *m)
{
	unsigned kept = 0;
	for (unsigned i = 0; i < *n; i++) {
		const struct tr_member *found = tr_member_find(m, all[i].pid);
		if (found == NULL)
			continue;
		all[kept] = all[i];
		all[kept++].pid = found->pid;
	}
	*n = kept;
}

/* The slice's samples of one device. NOT_FOUND: none. The caller frees *all. */
static nvmlReturn_t slice_samples(nvmlDevice_t device, int dev, unsigned long long since,
				  unsigned *n, nvmlProcessUtilizationSample_t **all)
{
	nvmlReturn_t r = fetch_samples(device, since, n, all);
	if (r != NVML_SUCCESS)
		return r;
	struct tr_members *m = tr_members(dev);
	if (m == NULL)
		return NVML_ERROR_MEMORY;
	keep_samples(*all, n, m);
	free(m);
	return *n == 0 ? NVML_ERROR_NOT_FOUND : NVML_SUCCESS;
}

/* The driver stamps samples with the wall clock, in microseconds. */
static unsigned long long second_ago_us(void)
{
	struct timespec t;
	clock_gettime(CLOCK_REALTIME, &t);
	return (unsigned long long)(t.tv_sec - 1) * 1000000 + (unsigned long long)t.tv_nsec / 1000;
}

/* Sum over the slice's processes of what the driver sampled in the last second. */
static unsigned sampled_percent(nvmlDevice_t device, int dev)
{
	nvmlProcessUtilizationSample_t *all = NULL;
	unsigned n = 0, sum = 0;
	if (REAL(nvmlDeviceGetProcessUtilization) != NULL &&
	    slice_samples(device, dev, second_ago_us(), &n, &all) == NVML_SUCCESS)
		for (unsigned i = 0; i < n; i++)
			sum += all[i].smUtil > 100 ? 100 : all[i].smUtil;
	free(all);
	return sum > 100 ? 100 : sum;
}

/* --- the entry points ---------------------------------------------------------------------- */

/* gpu: the slice's share of the whole GPU's time. memory: how full the slice's memory is; NVML
 * means the memory bus by it, which nobody can tell per slice. */
EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device,
						  nvmlUtilization_t *utilization)
{
	struct tr_limits_dev d;
	int dev;
	TR_ENTER(nvmlDeviceGetUtilizationRates, device, utilization);
	nvmlReturn_t r = REAL(nvmlDeviceGetUtilizationRates)(device, utilization);
	if (r == NVML_SUCCESS)
		r = tr_device_index(device, &dev);
	if (r != NVML_SUCCESS)
		return r;
	int metered = metered_percent(dev);
	utilization->gpu = metered >= 0 ? (unsigned)metered : sampled_percent(device, dev);
	tr_limits_read_dev(dev, &d);
	if ((d.flags & TR_DEV_MEMORY_LIMITED) != 0)
		utilization->memory = percent(tr_account_bytes(tr_ledger(), dev), d.memory_limit);
	TR_TRACE("utilisation of device %d: %u%% (%s), memory %u%%", dev, utilization->gpu,
		 metered >= 0 ? "metered" : "sampled", utilization->memory);
	return r;
}

EXPORT nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device,
						    nvmlProcessUtilizationSample_t *utilization,
						    unsigned int *processSamplesCount,
						    unsigned long long lastSeenTimeStamp)
{
	nvmlProcessUtilizationSample_t *all = NULL;
	unsigned n = 0;
	int dev;
	TR_ENTER(nvmlDeviceGetProcessUtilization, device, utilization, processSamplesCount,
		 lastSeenTimeStamp);
	nvmlReturn_t r = tr_device_index(device, &dev);
	if (r != NVML_SUCCESS)
		return r;
	/* The number that the driver asks room for is a capacity, not a count of processes. */
	if (utilization == NULL || processSamplesCount == NULL)
		return REAL(nvmlDeviceGetProcessUtilization)(device, utilization,
							     processSamplesCount,
							     lastSeenTimeStamp);
	r = slice_samples(device, dev, lastSeenTimeStamp, &n, &all);
	if (r == NVML_SUCCESS && n > *processSamplesCount)
		r = NVML_ERROR_INSUFFICIENT_SIZE;
	else if (r == NVML_SUCCESS)
		memcpy(utilization, all, n * sizeof *all);
	if (r == NVML_SUCCESS || r == NVML_ERROR_INSUFFICIENT_SIZE || r == NVML_ERROR_NOT_FOUND)
		*processSamplesCount = n;
	free(all);
	return r;
}

/* Fetches everything with the caller's version and time stamp, which the driver judges. */
static nvmlReturn_t fetch_infos(nvmlDevice_t device, nvmlProcessesUtilizationInfo_t *ask)
{
	nvmlReturn_t r = REAL(nvmlDeviceGetProcessesUtilizationInfo)(device, ask);
	if (r != NVML_ERROR_INSUFFICIENT_SIZE && r != NVML_SUCCESS)
		return r;
	if (ask->version != nvmlProcessesUtilizationInfo_v1)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	ask->processSamplesCount += 16; /* processes may have come since */
	ask->procUtilArray = calloc(ask->processSamplesCount, sizeof *ask->procUtilArray);
	if (ask->procUtilArray == NULL)
		return NVML_ERROR_MEMORY;
	return REAL(nvmlDeviceGetProcessesUtilizationInfo)(device, ask);
}

static void keep_infos(nvmlProcessesUtilizationInfo_t *all, const struct tr_members *m)
{
	unsigned kept = 0;
	for (unsigned i = 0; i < all->processSamplesCount; i++) {
		const struct tr_member *found = tr_member_find(m, all->procUtilArray[i].pid);
		if (found == NULL)
			continue;
		all->procUtilArray[kept] = all->procUtilArray[i];
		all->procUtilArray[kept++].pid = found->pid;
	}
	all->processSamplesCount = kept;
}

EXPORT nvmlReturn_t
nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device,
				      nvmlProcessesUtilizationInfo_t *procesesUtilInfo)
{
	int dev;
	TR_ENTER(nvmlDeviceGetProcessesUtilizationInfo, device, procesesUtilInfo);
	nvmlReturn_t r = tr_device_index(device, &dev);
	if (r != NVML_SUCCESS)
		return r;
	if (procesesUtilInfo == NULL || procesesUtilInfo->procUtilArray == NULL)
		return REAL(nvmlDeviceGetProcessesUtilizationInfo)(device, procesesUtilInfo);
	nvmlProcessesUtilizationInfo_t all = {
		.version = procesesUtilInfo->version,
		.lastSeenTimeStamp = procesesUtilInfo->lastSeenTimeStamp};
	struct tr_members *m = tr_members(dev);
	if (m == NULL)
		return NVML_ERROR_MEMORY;
	r = fetch_infos(device, &all);
	if (r == NVML_SUCCESS) {
		unsigned room = procesesUtilInfo->processSamplesCount;
		keep_infos(&all, m);
		procesesUtilInfo->processSamplesCount = all.processSamplesCount;
		procesesUtilInfo->lastSeenTimeStamp = all.lastSeenTimeStamp;
		if (all.processSamplesCount == 0)
			r = NVML_ERROR_NOT_FOUND;
		else if (all.processSamplesCount > room)
			r = NVML_ERROR_INSUFFICIENT_SIZE;
		else
			memcpy(procesesUtilInfo->procUtilArray, all.procUtilArray,
			       all.processSamplesCount * sizeof *all.procUtilArray);
	}
	free(m);
	free(all.procUtilArray);
	return r;
}
