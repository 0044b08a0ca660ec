/* Power, temperature, clocks, performance state: a plain model. Everything lies between an idle
 * figure and a full one of the board, in proportion to how busy the GPU is. Settings are refused. */
#include "internal.h"

bool nvml_in_use(const struct gpu *g)
{
	return nvml_processes(g, NULL, 0) > 0;
}

unsigned nvml_power_mw(const struct gpu *g)
{
	unsigned idle = g->b->power_idle_mw, full = g->m->power_limit_mw;
	return idle + (full - idle) / 100 * (nvml_busy_percent(g) * 9 / 10);
}

unsigned nvml_temperature(const struct gpu *g)
{
	return g->b->temp_idle + (g->b->temp_busy - g->b->temp_idle) * nvml_busy_percent(g) / 100;
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensorType,
				      unsigned int *temp)
{
	ENTER_GPU(device, g);
	NEED(temp && sensorType == NVML_TEMPERATURE_GPU);
	*temp = nvml_temperature(&g);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device,
					       nvmlTemperatureThresholds_t thresholdType,
					       unsigned int *temp)
{
	ENTER_GPU(device, g);
	NEED(temp && (unsigned)thresholdType < NVML_TEMPERATURE_THRESHOLD_COUNT);
	switch (thresholdType) {
	case NVML_TEMPERATURE_THRESHOLD_SHUTDOWN: *temp = g.b->temp_shutdown; break;
	case NVML_TEMPERATURE_THRESHOLD_SLOWDOWN: *temp = g.b->temp_slowdown; break;
	case NVML_TEMPERATURE_THRESHOLD_MEM_MAX: *temp = g.b->temp_mem_max; break;
	case NVML_TEMPERATURE_THRESHOLD_GPU_MAX: *temp = g.b->temp_max; break;
	default: *temp = 0; break;
	}
	return *temp ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

/* These boards are cooled by the server's fans. */
nvmlReturn_t nvmlDeviceGetNumFans(nvmlDevice_t device, unsigned int *numFans)
{
	ENTER_GPU(device, g);
	NEED(numFans);
	*numFans = 0;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPowerManagementMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
	ENTER_GPU(device, g);
	NEED(mode);
	*mode = NVML_FEATURE_ENABLED;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *power)
{
	ENTER_GPU(device, g);
	NEED(power);
	*power = nvml_power_mw(&g);
	return NVML_SUCCESS;
}

static nvmlReturn_t limit(nvmlDevice_t device, const char *func, unsigned *mw)
{
	struct gpu g;
	nvmlReturn_t r = nvml_enter_gpu(func, device, false, &g);
	if (r != NVML_SUCCESS)
		return r;
	if (!mw)
		return NVML_ERROR_INVALID_ARGUMENT;
	*mw = g.m->power_limit_mw;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPowerManagementLimit(nvmlDevice_t device, unsigned int *mw)
{
	return limit(device, __func__, mw);
}

nvmlReturn_t nvmlDeviceGetPowerManagementDefaultLimit(nvmlDevice_t device, unsigned int *mw)
{
	return limit(device, __func__, mw);
}

nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned int *mw)
{
	return limit(device, __func__, mw);
}

nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device,
							  unsigned int *minLimit,
							  unsigned int *maxLimit)
{
	ENTER_GPU(device, g);
	NEED(minLimit && maxLimit);
	*minLimit = g.b->power_min_mw;
	*maxLimit = g.m->power_limit_mw;
	return NVML_SUCCESS;
}

/* Energy since the machine was made or the GPU reset: what it drew idle, and the rest for the busy time. */
nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *energy)
{
	ENTER_GPU(device, g);
	NEED(energy);
	uint64_t now = sim_now_ns();
	sim_gpu_lock(g.s);
	sim_engine_advance(&g.s->engine, now);
	uint64_t busy_ms = (g.s->engine.busy_ns - g.s->reset_busy_ns) / 1000000;
	uint64_t since = g.s->reset_ns ? g.s->reset_ns : sim_shared->created_ns;
	sim_gpu_unlock(g.s);
	uint64_t up_ms = (now - since) / 1000000;
	uint64_t idle = g.b->power_idle_mw, full = g.m->power_limit_mw;
	*energy = (up_ms * idle + busy_ms * (full - idle)) / 1000; /* mJ */
	return NVML_SUCCESS;
}

unsigned nvml_clock_max_mhz(const struct gpu *g, nvmlClockType_t type)
{
	switch (type) {
	case NVML_CLOCK_GRAPHICS:
	case NVML_CLOCK_SM: return g->m->clock_khz / 1000;
	case NVML_CLOCK_MEM: return g->m->mem_clock_khz / 1000;
	case NVML_CLOCK_VIDEO: return g->b->clock_video_mhz;
	default: return 0;
	}
}

static unsigned clock_now(const struct gpu *g, nvmlClockType_t type)
{
	if (type == NVML_CLOCK_MEM || nvml_in_use(g))
		return nvml_clock_max_mhz(g, type);
	return type == NVML_CLOCK_VIDEO ? g->b->clock_idle_mhz + 375 : g->b->clock_idle_mhz;
}

static unsigned clock_app(const struct gpu *g, nvmlClockType_t type)
{
	if (type == NVML_CLOCK_MEM)
		return nvml_clock_max_mhz(g, type);
	return type == NVML_CLOCK_VIDEO ? 0 : g->b->clock_app_mhz;
}

static nvmlReturn_t clock_answer(unsigned mhz, unsigned *out)
{
	if (!out)
		return NVML_ERROR_INVALID_ARGUMENT;
	*out = mhz;
	return mhz ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *clock)
{
	ENTER_GPU(device, g);
	NEED((unsigned)type < NVML_CLOCK_COUNT);
	return clock_answer(clock_now(&g, type), clock);
}

nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, nvmlClockType_t type,
				       unsigned int *clock)
{
	ENTER_GPU(device, g);
	NEED((unsigned)type < NVML_CLOCK_COUNT);
	return clock_answer(nvml_clock_max_mhz(&g, type), clock);
}

nvmlReturn_t nvmlDeviceGetApplicationsClock(nvmlDevice_t device, nvmlClockType_t clockType,
					    unsigned int *clockMHz)
{
	ENTER_GPU(device, g);
	NEED((unsigned)clockType < NVML_CLOCK_COUNT);
	return clock_answer(clock_app(&g, clockType), clockMHz);
}

nvmlReturn_t nvmlDeviceGetDefaultApplicationsClock(nvmlDevice_t device, nvmlClockType_t clockType,
						   unsigned int *clockMHz)
{
	ENTER_GPU(device, g);
	NEED((unsigned)clockType < NVML_CLOCK_COUNT);
	return clock_answer(clock_app(&g, clockType), clockMHz);
}

nvmlReturn_t nvmlDeviceGetMaxCustomerBoostClock(nvmlDevice_t device, nvmlClockType_t clockType,
						unsigned int *clockMHz)
{
	ENTER_GPU(device, g);
	NEED((unsigned)clockType < NVML_CLOCK_COUNT);
	return clock_answer(nvml_clock_max_mhz(&g, clockType), clockMHz);
}

nvmlReturn_t nvmlDeviceGetClock(nvmlDevice_t device, nvmlClockType_t clockType,
				nvmlClockId_t clockId, unsigned int *clockMHz)
{
	ENTER_GPU(device, g);
	NEED((unsigned)clockType < NVML_CLOCK_COUNT && (unsigned)clockId < NVML_CLOCK_ID_COUNT);
	unsigned mhz = clockId == NVML_CLOCK_ID_CURRENT		   ? clock_now(&g, clockType) :
		       clockId == NVML_CLOCK_ID_CUSTOMER_BOOST_MAX ? nvml_clock_max_mhz(&g, clockType) :
								     clock_app(&g, clockType);
	return clock_answer(mhz, clockMHz);
}

nvmlReturn_t nvmlDeviceGetSupportedMemoryClocks(nvmlDevice_t device, unsigned int *count,
						unsigned int *clocksMHz)
{
	ENTER_GPU(device, g);
	NEED(count);
	bool fits = *count >= 1 && clocksMHz;
	*count = 1;
	if (!fits)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	clocksMHz[0] = nvml_clock_max_mhz(&g, NVML_CLOCK_MEM);
	return NVML_SUCCESS;
}

/* From the highest down to idle in steps of 15 MHz. */
nvmlReturn_t nvmlDeviceGetSupportedGraphicsClocks(nvmlDevice_t device, unsigned int memoryClockMHz,
						  unsigned int *count, unsigned int *clocksMHz)
{
	ENTER_GPU(device, g);
	NEED(count);
	if (memoryClockMHz != nvml_clock_max_mhz(&g, NVML_CLOCK_MEM))
		return NVML_ERROR_NOT_FOUND;
	unsigned top = nvml_clock_max_mhz(&g, NVML_CLOCK_GRAPHICS), step = 15, room = *count;
	*count = (top - g.b->clock_idle_mhz) / step + 1;
	if (*count > room || !clocksMHz)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	for (unsigned i = 0; i < *count; i++)
		clocksMHz[i] = top - i * step;
	return NVML_SUCCESS;
}

static unsigned long long clock_reasons(const struct gpu *g)
{
	return nvml_busy_percent(g) ? nvmlClocksEventReasonNone : nvmlClocksEventReasonGpuIdle;
}

nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device,
						    unsigned long long *reasons)
{
	ENTER_GPU(device, g);
	NEED(reasons);
	*reasons = clock_reasons(&g);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device,
						       unsigned long long *reasons)
{
	ENTER_GPU(device, g);
	NEED(reasons);
	*reasons = clock_reasons(&g);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetSupportedClocksEventReasons(nvmlDevice_t device,
						      unsigned long long *reasons)
{
	ENTER_GPU(device, g);
	NEED(reasons);
	*reasons = nvmlClocksEventReasonAll & ~nvmlClocksEventReasonDisplayClockSetting;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetSupportedClocksThrottleReasons(nvmlDevice_t device,
							 unsigned long long *reasons)
{
	return nvmlDeviceGetSupportedClocksEventReasons(device, reasons);
}

/* Boards with HBM stay in P0; others go down to P8 when nobody has a context. */
static nvmlReturn_t pstate(const struct gpu *g, nvmlPstates_t *out)
{
	if (!out)
		return NVML_ERROR_INVALID_ARGUMENT;
	bool hbm = g->m->bus_bits >= 1024;
	*out = hbm || nvml_in_use(g) ? NVML_PSTATE_0 : NVML_PSTATE_8;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPerformanceState(nvmlDevice_t device, nvmlPstates_t *pState)
{
	ENTER_GPU(device, g);
	return pstate(&g, pState);
}

nvmlReturn_t nvmlDeviceGetPowerState(nvmlDevice_t device, nvmlPstates_t *pState)
{
	ENTER_GPU(device, g);
	return pstate(&g, pState);
}

nvmlReturn_t nvmlDeviceGetPowerSource(nvmlDevice_t device, nvmlPowerSource_t *powerSource)
{
	ENTER_GPU(device, g);
	NEED(powerSource);
	*powerSource = NVML_POWER_SOURCE_AC;
	return NVML_SUCCESS;
}

/* Nothing ever held the clocks down. */
nvmlReturn_t nvmlDeviceGetViolationStatus(nvmlDevice_t device, nvmlPerfPolicyType_t perfPolicyType,
					  nvmlViolationTime_t *violTime)
{
	ENTER_GPU(device, g);
	(void)perfPolicyType;
	NEED(violTime);
	violTime->referenceTime = sim_realtime_us() * 1000;
	violTime->violationTime = 0;
	return NVML_SUCCESS;
}
