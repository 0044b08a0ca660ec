/* Other lists that name processes: codec and capture sessions, and accounting. Only what belongs
 * to the slice's processes is shown, by the numbers that the tenant knows. */
#include "compat.h"
#define _GNU_SOURCE
#include "real.h"
#include <stdlib.h>
#include <string.h>
#include "members.h"

/* The members of the slice that has this GPU. */
static nvmlReturn_t members_of(nvmlDevice_t device, struct tr_members **m)
{
	int dev;
	nvmlReturn_t r = tr_device_index(device, &dev);
	if (r != NVML_SUCCESS)
		return r;
	*m = tr_members(dev);
	return *m == NULL ? NVML_ERROR_MEMORY : NVML_SUCCESS;
}

/* The driver's whole list in `all`, which has room for it; *n says how many. */
#define DEFINE_FETCH(fetch, fn, type)                                                              \
	static nvmlReturn_t fetch(nvmlDevice_t device, unsigned *n, type **all)                    \
	{                                                                                          \
		nvmlReturn_t r = NVML_ERROR_UNKNOWN;                                               \
		for (unsigned room = 64, tries = 0; tries < 8; room *= 4, tries++) {               \
			*n = room;                                                                 \
			*all = calloc(room, sizeof **all);                                         \
			if (*all == NULL)                                                          \
				return NVML_ERROR_MEMORY;                                          \
			r = REAL(fn)(device, n, *all);                                             \
			if (r == NVML_SUCCESS && *n <= room)                                       \
				return NVML_SUCCESS;                                               \
			free(*all);                                                                \
			*all = NULL;                                                               \
			if (r != NVML_ERROR_INSUFFICIENT_SIZE)                                     \
				return r;                                                          \
		}                                                                                  \
		return r;                                                                          \
	}
DEFINE_FETCH(fetch_encoder, nvmlDeviceGetEncoderSessions, nvmlEncoderSessionInfo_t)
DEFINE_FETCH(fetch_fbc, nvmlDeviceGetFBCSessions, nvmlFBCSessionInfo_t)
DEFINE_FETCH(fetch_pids, nvmlDeviceGetAccountingPids, unsigned)

/* Keeps the entries of members in place and gives them the tenant's numbers. */
#define KEEP(all, n, m, pid_of)                                                                    \
	do {                                                                                       \
		unsigned kept = 0;                                                                 \
		for (unsigned i = 0; i < n; i++) {                                                 \
			const struct tr_member *found = tr_member_find(m, (all)[i] pid_of);        \
			if (found == NULL)                                                         \
				continue;                                                          \
			(all)[kept] = (all)[i];                                                    \
			(all)[kept++] pid_of = found->pid;                                         \
		}                                                                                  \
		n = kept;                                                                          \
	} while (0)

/* Copies n elements out. *count zero asks for the number, which gives `ask`. */
static nvmlReturn_t give(const void *all, unsigned n, size_t size, unsigned *count, void *out,
			 nvmlReturn_t ask)
{
	unsigned room = *count;
	*count = n;
	if (room == 0 && n != 0)
		return ask;
	if (n > room)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	if (n != 0 && out == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (n != 0)
		memcpy(out, all, n * size);
	return NVML_SUCCESS;
}

#define SHOW(fn, fetch, type, pid_of, count, out, ask)                                             \
	type *all = NULL;                                                                          \
	unsigned n = 0;                                                                            \
	struct tr_members *m;                                                                      \
	TR_ENTER(fn, device, count, out);                                                          \
	if (count == NULL)                                                                         \
		return NVML_ERROR_INVALID_ARGUMENT;                                                \
	nvmlReturn_t r = members_of(device, &m);                                                   \
	if (r != NVML_SUCCESS)                                                                     \
		return r;                                                                          \
	r = fetch(device, &n, &all);                                                               \
	if (r == NVML_SUCCESS) {                                                                   \
		KEEP(all, n, m, pid_of);                                                           \
		r = give(all, n, sizeof *all, count, out, ask);                                    \
	}                                                                                          \
	free(all);                                                                                 \
	free(m);                                                                                   \
	return r

EXPORT nvmlReturn_t nvmlDeviceGetEncoderSessions(nvmlDevice_t device, unsigned int *sessionCount,
						 nvmlEncoderSessionInfo_t *sessionInfos)
{
	SHOW(nvmlDeviceGetEncoderSessions, fetch_encoder, nvmlEncoderSessionInfo_t, .pid,
	     sessionCount, sessionInfos, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetFBCSessions(nvmlDevice_t device, unsigned int *sessionCount,
					     nvmlFBCSessionInfo_t *sessionInfo)
{
	SHOW(nvmlDeviceGetFBCSessions, fetch_fbc, nvmlFBCSessionInfo_t, .pid, sessionCount,
	     sessionInfo, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetAccountingPids(nvmlDevice_t device, unsigned int *count,
						unsigned int *pids)
{
	SHOW(nvmlDeviceGetAccountingPids, fetch_pids, unsigned, , count, pids,
	     NVML_ERROR_INSUFFICIENT_SIZE);
}

/* Turns the number that the tenant has for a process into the driver's; NOT_FOUND if the process
 * is not the slice's. */
static nvmlReturn_t driver_pid(nvmlDevice_t device, unsigned *pid)
{
	struct tr_members *m;
	nvmlReturn_t r = members_of(device, &m);
	if (r != NVML_SUCCESS)
		return r;
	const struct tr_member *found = tr_member_by_pid(m, *pid);
	if (found == NULL)
		r = NVML_ERROR_NOT_FOUND;
	else if (found->host_pid != 0)
		*pid = found->host_pid;
	free(m);
	return r;
}

EXPORT nvmlReturn_t nvmlDeviceGetAccountingStats(nvmlDevice_t device, unsigned int pid,
						 nvmlAccountingStats_t *stats)
{
	TR_ENTER(nvmlDeviceGetAccountingStats, device, pid, stats);
	nvmlReturn_t r = driver_pid(device, &pid);
	return r == NVML_SUCCESS ? REAL(nvmlDeviceGetAccountingStats)(device, pid, stats) : r;
}

EXPORT nvmlReturn_t nvmlDeviceGetAccountingStats_v2(nvmlDevice_t device,
						    nvmlAccountingStats_v2_t *stats)
{
	TR_ENTER(nvmlDeviceGetAccountingStats_v2, device, stats);
	if (stats == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	unsigned asked = stats->pid;
	nvmlReturn_t r = driver_pid(device, &stats->pid);
	if (r == NVML_SUCCESS)
		r = REAL(nvmlDeviceGetAccountingStats_v2)(device, stats);
	stats->pid = asked;
	return r;
}
