/* nvmlprobe LIBPATH health MS: readings of each GPU, and its critical errors (XIDs) as they come.
 *
 * A GPU that is lost ends the waiting for all of a set, for good: the set is made anew without it, and
 * with it when it answers again. */
#include <string.h>
#include <unistd.h>
#include "nvml_recovery.h"
#include "probe.h"

struct gpu {
	nvmlDevice_t dev; /* NULL: never got one */
	char uuid[NVML_DEVICE_UUID_V2_BUFFER_SIZE + 1];
	nvmlReturn_t state; /* what it said last */
};

#define GPU_MAX 64
static struct gpu gpus[GPU_MAX];
static unsigned n_gpus;
static nvmlEventSet_t set;
static unsigned n_watched;

void put_reading(nvmlDevice_t dev)
{
	nvmlFieldValue_t f = { .fieldId = NVML_FI_DEV_GET_GPU_RECOVERY_ACTION };
	unsigned long long mj = 0;
	bool ok = nvml.nvmlDeviceGetFieldValues &&
		  nvml.nvmlDeviceGetFieldValues(dev, 1, &f) == NVML_SUCCESS && f.nvmlReturn == NVML_SUCCESS;

	put_number("recovery", ok, f.value.uiVal);
	ok = nvml.nvmlDeviceGetTotalEnergyConsumption &&
	     nvml.nvmlDeviceGetTotalEnergyConsumption(dev, &mj) == NVML_SUCCESS;
	put_number("energy", ok, mj);
}

/* Only what NVML defines as the state of the GPU counts: that a query is not supported says nothing. */
static nvmlReturn_t state_of(struct gpu *g, unsigned index)
{
	nvmlPstates_t p;
	nvmlDevice_t dev;
	nvmlReturn_t r = nvml.nvmlDeviceGetHandleByIndex_v2(index, &dev);

	if (r == NVML_SUCCESS)
		g->dev = dev;
	if (r == NVML_SUCCESS && !g->uuid[0])
		r = nvml.nvmlDeviceGetUUID(g->dev, g->uuid, sizeof(g->uuid) - 1);
	if (r != NVML_SUCCESS || !nvml.nvmlDeviceGetPerformanceState)
		return r;
	r = nvml.nvmlDeviceGetPerformanceState(g->dev, &p);
	return r == NVML_ERROR_GPU_IS_LOST || r == NVML_ERROR_RESET_REQUIRED ||
			       r == NVML_ERROR_GPU_NOT_FOUND || r == NVML_ERROR_UNKNOWN ?
		       r :
		       NVML_SUCCESS;
}

static bool show_event(const nvmlEventData_t *e)
{
	const char *uuid = "";

	if (e->eventType != nvmlEventTypeXidCriticalError)
		return true;
	for (unsigned i = 0; i < n_gpus; i++)
		if (gpus[i].dev && gpus[i].dev == e->device)
			uuid = gpus[i].uuid;
	put("{\"event\":{\"uuid\":");
	put_string(uuid);
	put(",\"xid\":%llu}}", e->eventData);
	return flush_line();
}

/* Shows what the set has. False: nobody reads any more. */
static bool drain(void)
{
	enum { PENDING_MAX = 1000 };
	nvmlEventData_t e = { 0 };

	for (int i = 0; n_watched && i < PENDING_MAX && nvml.nvmlEventSetWait_v2(set, &e, 0) == NVML_SUCCESS; i++)
		if (!show_event(&e))
			return false;
	return true;
}

/* A set of the GPUs that answer. Without one (an old or a virtual GPU) there are readings only. */
static bool watch_events(void)
{
	if (!drain())
		return false;
	if (set)
		nvml.nvmlEventSetFree(set);
	set = NULL;
	n_watched = 0;
	if (!nvml.nvmlEventSetCreate || !nvml.nvmlEventSetFree || !nvml.nvmlEventSetWait_v2 ||
	    !nvml.nvmlDeviceRegisterEvents || nvml.nvmlEventSetCreate(&set) != NVML_SUCCESS)
		set = NULL;
	for (unsigned i = 0; set && i < n_gpus; i++)
		n_watched += gpus[i].state == NVML_SUCCESS &&
			     nvml.nvmlDeviceRegisterEvents(gpus[i].dev, nvmlEventTypeXidCriticalError, set) ==
				     NVML_SUCCESS;
	return true;
}

/* Asks every GPU; watches those that answer if they are others than before, and does so before the
 * reader learns of it: what they raise from then on is seen. */
static bool readings(bool first)
{
	bool changed = first;

	for (unsigned i = 0; i < n_gpus; i++) {
		nvmlReturn_t r = state_of(&gpus[i], i);

		changed |= (r == NVML_SUCCESS) != (gpus[i].state == NVML_SUCCESS);
		gpus[i].state = r;
	}
	if (changed && !watch_events())
		return false;
	put("{\"devices\":[");
	for (unsigned i = 0; i < n_gpus; i++) {
		put("%s{\"index\":%u,\"uuid\":", i ? "," : "", i);
		put_string(gpus[i].uuid);
		if (gpus[i].state == NVML_SUCCESS) {
			put_reading(gpus[i].dev);
		} else {
			put(",");
			put_error(error_text(gpus[i].state), (int)gpus[i].state);
		}
		put("}");
	}
	put("]}");
	return flush_line();
}

/* Events until the deadline. *due: readings are wanted at once. False: nobody reads any more. */
static bool events(int64_t deadline, pid_t parent, bool *due, nvmlReturn_t *failed)
{
	enum { WAIT_MS = 200 }; /* so soon the end of standard input is seen */

	while (!*due) {
		int64_t left = deadline - now_ms();
		nvmlEventData_t e;
		nvmlReturn_t r;

		if (left <= 0 || n_watched == 0)
			return wait_until(deadline, parent);
		memset(&e, 0, sizeof(e));
		r = nvml.nvmlEventSetWait_v2(set, &e, left > WAIT_MS ? WAIT_MS : (unsigned)left);
		if (r == NVML_SUCCESS) {
			if (!show_event(&e))
				return false;
			*due = true; /* the driver may have an opinion by now */
		} else if (r == NVML_ERROR_GPU_IS_LOST || r == NVML_ERROR_RESET_REQUIRED) {
			*due = true;
		} else if (r != NVML_ERROR_TIMEOUT) {
			*failed = r;
			return false;
		}
		if (!wait_until(0, parent))
			return false;
	}
	return true;
}

int health(int interval_ms)
{
	enum { LEAST_MS = 100 }; /* between two readings, whatever happens */
	pid_t parent = getppid();
	nvmlReturn_t r = nvml.nvmlDeviceGetCount_v2(&n_gpus);
	bool first = true, due = false;

	if (r != NVML_SUCCESS)
		return fail(error_text(r), (int)r);
	if (n_gpus > GPU_MAX)
		n_gpus = GPU_MAX;
	for (;;) {
		int64_t began = now_ms();

		if (!readings(first))
			return 1;
		first = false;
		if (due && !wait_until(began + LEAST_MS, parent))
			break;
		due = false;
		if (!events(began + interval_ms, parent, &due, &r))
			break;
	}
	drain(); /* another probe may have taken over, which knows nothing of these */
	return r == NVML_SUCCESS ? 0 : fail(error_text(r), (int)r);
}
