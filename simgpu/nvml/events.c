/* Event sets: XID errors, as they are raised on the machine. */
#include <stdlib.h>
#include <time.h>
#include "internal.h"

struct nvmlEventSet_st {
	unsigned long long types[SIM_MAX_GPUS]; /* asked for, per GPU */
	uint64_t seen;				/* events of the machine looked at so far */
	bool any;
};

enum { SUPPORTED = nvmlEventTypeXidCriticalError, POLL_MS = 50 };

static uint64_t events_ever(void)
{
	sim_lock();
	uint64_t n = sim_shared->xid_head;
	sim_unlock();
	return n;
}

nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *eventTypes)
{
	ENTER_GPU(device, g);
	NEED(eventTypes);
	*eventTypes = SUPPORTED;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
	ENTER();
	NEED(set);
	*set = calloc(1, sizeof(**set));
	return *set ? NVML_SUCCESS : NVML_ERROR_MEMORY;
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
	ENTER();
	NEED(set);
	free(set);
	return NVML_SUCCESS;
}

/* From now on: what was raised before the first registration is not reported. */
nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long eventTypes,
				      nvmlEventSet_t set)
{
	ENTER_GPU(device, g);
	NEED(set);
	if (eventTypes & ~(unsigned long long)SUPPORTED)
		return NVML_ERROR_NOT_SUPPORTED;
	if (!set->any)
		set->seen = events_ever();
	set->any = true;
	set->types[g.index] |= eventTypes;
	return NVML_SUCCESS;
}

/* The next event that the set asked for; false: none yet. */
static bool next_event(nvmlEventSet_t set, nvmlEventData_t *data)
{
	bool found = false;
	sim_lock();
	uint64_t head = sim_shared->xid_head;
	if (head - set->seen > SIM_MAX_XIDS) /* overrun: the oldest are lost */
		set->seen = head - SIM_MAX_XIDS;
	while (!found && set->seen < head) {
		const struct sim_xid_event *x = &sim_shared->xid[set->seen++ % SIM_MAX_XIDS];
		if (x->gpu >= sim_shared->n_gpus || !set->types[x->gpu])
			continue;
		*data = (nvmlEventData_t){ .device = nvml_handle(x->gpu),
					   .eventType = nvmlEventTypeXidCriticalError,
					   .eventData = x->xid, .gpuInstanceId = 0xFFFFFFFF,
					   .computeInstanceId = 0xFFFFFFFF };
		found = true;
	}
	sim_unlock();
	return found;
}

/* A GPU of the set is lost: it will never report anything. */
static bool some_lost(const struct nvmlEventSet_st *set)
{
	for (unsigned i = 0; i < sim_shared->n_gpus; i++)
		if (set->types[i] && __atomic_load_n(&sim_shared->gpu[i].lost, __ATOMIC_ACQUIRE))
			return true;
	return false;
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeoutms)
{
	ENTER();
	NEED(set && data);
	uint64_t end = sim_now_ns() + timeoutms * 1000000ull;
	for (;;) {
		if (next_event(set, data))
			return NVML_SUCCESS;
		if (some_lost(set))
			return NVML_ERROR_GPU_IS_LOST;
		uint64_t now = sim_now_ns();
		if (now >= end)
			return NVML_ERROR_TIMEOUT;
		uint64_t nap = end - now < POLL_MS * 1000000ull ? end - now : POLL_MS * 1000000ull;
		nanosleep(&(struct timespec){ .tv_nsec = (long)nap }, NULL);
	}
}

nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeoutms)
{
	return nvmlEventSetWait_v2(set, data, timeoutms);
}
