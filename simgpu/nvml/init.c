/* Start and end, handles, the checks at each entry, error texts. */
#include <stdatomic.h>
#include <string.h>
#include "internal.h"

static atomic_int init_count;
static struct nvmlDevice_st {
	unsigned char unused;
} devices[SIM_MAX_GPUS];

#define TRACE_CALL(...)                                                                            \
	do {                                                                                       \
		if (__builtin_expect(sim_trace_level > 1, 0))                                      \
			sim_trace_write(__VA_ARGS__);                                              \
	} while (0)

nvmlReturn_t nvml_enter(const char *func)
{
	TRACE_CALL("%s", func);
	return atomic_load(&init_count) > 0 ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

nvmlReturn_t nvml_enter_gpu(const char *func, nvmlDevice_t dev, bool identity, struct gpu *g)
{
	if (atomic_load(&init_count) <= 0) {
		SIM_TRACE("%s: not initialised", func);
		return NVML_ERROR_UNINITIALIZED;
	}
	uintptr_t at = (uintptr_t)dev - (uintptr_t)devices;
	if (at >= sizeof(devices) || at % sizeof(devices[0]) ||
	    !nvml_gpu((unsigned)(at / sizeof(devices[0])), g)) {
		SIM_TRACE("%s: not a handle: %p", func, (void *)dev);
		return NVML_ERROR_INVALID_ARGUMENT;
	}
	bool lost = __atomic_load_n(&g->s->lost, __ATOMIC_ACQUIRE);
	TRACE_CALL("%s gpu %u%s", func, g->index, lost ? " (lost)" : "");
	return lost && !identity ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

nvmlDevice_t nvml_handle(unsigned index)
{
	return &devices[index];
}

bool nvml_gpu(unsigned index, struct gpu *g)
{
	if (!sim_shared || index >= sim_shared->n_gpus)
		return false;
	g->index = index;
	g->s = &sim_shared->gpu[index];
	g->m = &g->s->model;
	g->b = board_of(g->m->key);
	return true;
}

nvmlReturn_t nvml_put_string(char *buf, unsigned len, const char *s)
{
	size_t n = strlen(s) + 1;
	if (!buf)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (len < n)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	memcpy(buf, s, n);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
	TRACE_CALL("%s(%#x)", __func__, flags);
	if (flags & ~(unsigned)(NVML_INIT_FLAG_NO_GPUS | NVML_INIT_FLAG_NO_ATTACH))
		return NVML_ERROR_INVALID_ARGUMENT;
	const char *why = "no GPU";
	struct sim_state *machine = sim_state_open(NULL, &why);
	if (!machine || (machine->n_gpus == 0 && !(flags & NVML_INIT_FLAG_NO_GPUS))) {
		SIM_TRACE("nvmlInit: %s", why);
		return NVML_ERROR_DRIVER_NOT_LOADED;
	}
	uint32_t error = __atomic_load_n(&machine->nvml_error, __ATOMIC_ACQUIRE);
	if (error)
		return (nvmlReturn_t)error;
	atomic_fetch_add(&init_count, 1);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlInit_v2(void)
{
	return nvmlInitWithFlags(0);
}

nvmlReturn_t nvmlInit(void)
{
	return nvmlInitWithFlags(0);
}

nvmlReturn_t nvmlShutdown(void)
{
	TRACE_CALL("%s", __func__);
	int n = atomic_load(&init_count);
	do {
		if (n <= 0)
			return NVML_ERROR_UNINITIALIZED;
	} while (!atomic_compare_exchange_weak(&init_count, &n, n - 1));
	return NVML_SUCCESS;
}

const char *nvmlErrorString(nvmlReturn_t result)
{
	switch (result) {
	case NVML_SUCCESS: return "Success";
	case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
	case NVML_ERROR_INVALID_ARGUMENT: return "Invalid Argument";
	case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
	case NVML_ERROR_NO_PERMISSION: return "Insufficient Permissions";
	case NVML_ERROR_ALREADY_INITIALIZED: return "Already Initialized";
	case NVML_ERROR_NOT_FOUND: return "Not Found";
	case NVML_ERROR_INSUFFICIENT_SIZE: return "Insufficient Size";
	case NVML_ERROR_INSUFFICIENT_POWER: return "Insufficient External Power";
	case NVML_ERROR_DRIVER_NOT_LOADED: return "Driver Not Loaded";
	case NVML_ERROR_TIMEOUT: return "Timeout";
	case NVML_ERROR_IRQ_ISSUE: return "Interrupt Request Issue";
	case NVML_ERROR_LIBRARY_NOT_FOUND: return "NVML Shared Library Not Found";
	case NVML_ERROR_FUNCTION_NOT_FOUND: return "Function Not Found";
	case NVML_ERROR_CORRUPTED_INFOROM: return "Corrupted infoROM";
	case NVML_ERROR_GPU_IS_LOST: return "GPU is lost";
	case NVML_ERROR_RESET_REQUIRED: return "GPU requires reset";
	case NVML_ERROR_OPERATING_SYSTEM: return "GPU access blocked by the operating system";
	case NVML_ERROR_LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
	case NVML_ERROR_IN_USE: return "In use by another client";
	case NVML_ERROR_MEMORY: return "Insufficient Memory";
	case NVML_ERROR_NO_DATA: return "No data";
	case NVML_ERROR_VGPU_ECC_NOT_SUPPORTED: return "ECC not supported by vGPU";
	case NVML_ERROR_INSUFFICIENT_RESOURCES: return "Insufficient Resources";
	case NVML_ERROR_FREQ_NOT_SUPPORTED: return "Requested Frequency not supported";
	case NVML_ERROR_ARGUMENT_VERSION_MISMATCH: return "Argument Version Mismatch";
	case NVML_ERROR_DEPRECATED: return "Deprecated";
	case NVML_ERROR_NOT_READY: return "Not Ready";
	case NVML_ERROR_GPU_NOT_FOUND: return "GPU Not Found";
	case NVML_ERROR_INVALID_STATE: return "Invalid State";
	case NVML_ERROR_UNKNOWN: return "Unknown Error";
	}
	return "Unknown Error";
}
