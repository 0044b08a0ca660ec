/* How busy a GPU and the processes on it were: the samples that the engine took.
 *
 * As with the real driver they are whole percents of a period of a sixth of a second, known only
 * when the period is over. */
#include "internal.h"

enum { LOOK_BACK_NS = 1000000000 }; /* what nvmlDeviceGetUtilizationRates looks at, at most */

/* The engine's samples of one kind newer than since_us, oldest first; newest `max` of them. */
/* The slot may be another process's by now. */
static unsigned pid_of(const struct sim_sample *s)
{
	bool same = sim_shared->proc[s->proc].pid == s->pid;
	return same ? sim_proc_pid_here((int)s->proc) : s->pid;
}

static unsigned samples(const struct gpu *g, bool per_process, uint64_t since_us,
			struct nvml_sample *out, unsigned max)
{
	uint64_t now = sim_now_ns(), epoch_us = sim_realtime_us() - now / 1000;
	struct sim_engine *e = &g->s->engine;
	const struct sim_sample *ring = per_process ? e->sample : e->gpu_sample;
	uint64_t size = per_process ? SIM_ENGINE_SAMPLES : SIM_ENGINE_GPU_SAMPLES;
	unsigned n = 0;

	sim_gpu_lock(g->s);
	sim_engine_advance(e, now);
	uint64_t count = per_process ? e->sample_count : e->gpu_sample_count;
	uint64_t first = count > size ? count - size : 0;
	if (count - first > max)
		first = count - max;
	for (uint64_t i = first; i < count; i++) {
		const struct sim_sample *s = &ring[i % size];
		uint64_t at = epoch_us + s->end_ns / 1000;
		if (at > since_us)
			out[n++] = (struct nvml_sample){ .time_us = at, .pid = per_process ? pid_of(s) : 0,
						    .percent = s->percent };
	}
	sim_gpu_unlock(g->s);
	return n;
}

unsigned nvml_busy_percent(const struct gpu *g)
{
	struct nvml_sample s;
	uint64_t since = sim_realtime_us() - LOOK_BACK_NS / 1000;
	return samples(g, false, since, &s, 1) ? s.percent : 0;
}

/* The share of time in which device memory was read or written is not modelled: 0. */
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
	ENTER_GPU(device, g);
	NEED(utilization);
	utilization->gpu = nvml_busy_percent(&g);
	utilization->memory = 0;
	return NVML_SUCCESS;
}

/* Engines that no simulated program uses. */
static nvmlReturn_t idle_engine(unsigned *utilization, unsigned *period_us)
{
	if (!utilization || !period_us)
		return NVML_ERROR_INVALID_ARGUMENT;
	*utilization = 0;
	*period_us = SIM_ENGINE_SAMPLE_NS / 1000;
	return NVML_SUCCESS;
}

#define IDLE_ENGINE(name)                                                                          \
	nvmlReturn_t name(nvmlDevice_t device, unsigned int *utilization,                          \
			  unsigned int *samplingPeriodUs)                                          \
	{                                                                                          \
		ENTER_GPU(device, g);                                                              \
		return idle_engine(utilization, samplingPeriodUs);                                 \
	}
IDLE_ENGINE(nvmlDeviceGetEncoderUtilization)
IDLE_ENGINE(nvmlDeviceGetDecoderUtilization)
IDLE_ENGINE(nvmlDeviceGetJpgUtilization)
IDLE_ENGINE(nvmlDeviceGetOfaUtilization)

nvmlReturn_t nvmlDeviceGetEncoderStats(nvmlDevice_t device, unsigned int *sessionCount,
				       unsigned int *averageFps, unsigned int *averageLatency)
{
	ENTER_GPU(device, g);
	NEED(sessionCount && averageFps && averageLatency);
	*sessionCount = *averageFps = *averageLatency = 0;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetEncoderSessions(nvmlDevice_t device, unsigned int *sessionCount,
					  nvmlEncoderSessionInfo_t *sessionInfos)
{
	ENTER_GPU(device, g);
	(void)sessionInfos;
	NEED(sessionCount);
	*sessionCount = 0;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetEncoderCapacity(nvmlDevice_t device, nvmlEncoderType_t encoderQueryType,
					  unsigned int *encoderCapacity)
{
	ENTER_GPU(device, g);
	(void)encoderQueryType;
	NEED(encoderCapacity);
	if (!g.b->engines_enc)
		return NVML_ERROR_NOT_SUPPORTED;
	*encoderCapacity = 100;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetFBCStats(nvmlDevice_t device, nvmlFBCStats_t *fbcStats)
{
	ENTER_GPU(device, g);
	NEED(fbcStats);
	*fbcStats = (nvmlFBCStats_t){ 0 };
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetFBCSessions(nvmlDevice_t device, unsigned int *sessionCount,
				      nvmlFBCSessionInfo_t *sessionInfo)
{
	ENTER_GPU(device, g);
	(void)sessionInfo;
	NEED(sessionCount);
	*sessionCount = 0;
	return NVML_SUCCESS;
}

/* Samples without a process: use of the GPU, power, clocks. The latter two are of now. */
nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t device, nvmlSamplingType_t type,
				  unsigned long long lastSeenTimeStamp,
				  nvmlValueType_t *sampleValType, unsigned int *sampleCount,
				  nvmlSample_t *out)
{
	ENTER_GPU(device, g);
	NEED(sampleValType && sampleCount && (unsigned)type < NVML_SAMPLINGTYPE_COUNT);
	struct nvml_sample s[SIM_ENGINE_GPU_SAMPLES];
	unsigned n = samples(&g, false, lastSeenTimeStamp, s, SIM_ENGINE_GPU_SAMPLES);
	if (type == NVML_MODULE_POWER_SAMPLES)
		return NVML_ERROR_NOT_SUPPORTED;
	*sampleValType = NVML_VALUE_TYPE_UNSIGNED_INT;
	if (!n)
		return NVML_ERROR_NOT_FOUND;
	if (!out) {
		*sampleCount = SIM_ENGINE_GPU_SAMPLES;
		return NVML_SUCCESS;
	}
	const struct nvml_sample *newest = s;
	if (n > *sampleCount) {
		newest += n - *sampleCount;
		n = *sampleCount;
	}
	*sampleCount = n;
	unsigned power = nvml_power_mw(&g), sm = nvml_clock_max_mhz(&g, NVML_CLOCK_SM),
		 mem = nvml_clock_max_mhz(&g, NVML_CLOCK_MEM);
	for (unsigned i = 0; i < n; i++) {
		out[i].timeStamp = newest[i].time_us;
		out[i].sampleValue.ullVal = 0;
		out[i].sampleValue.uiVal = type == NVML_GPU_UTILIZATION_SAMPLES ? newest[i].percent :
					   type == NVML_TOTAL_POWER_SAMPLES	? power :
					   type == NVML_PROCESSOR_CLK_SAMPLES	? sm :
					   type == NVML_MEMORY_CLK_SAMPLES	? mem :
										  0;
	}
	return NVML_SUCCESS;
}

unsigned nvml_process_samples(const struct gpu *g, uint64_t since_us, struct nvml_sample *out)
{
	struct nvml_sample s[SIM_ENGINE_SAMPLES];
	unsigned n = samples(g, true, since_us, s, SIM_ENGINE_SAMPLES), found = 0;
	for (unsigned i = n; i-- > 0;) {
		unsigned j = 0;
		while (j < found && out[j].pid != s[i].pid)
			j++;
		if (j < found || found == SIM_MAX_PROCS)
			continue;
		out[found++] = s[i];
	}
	return found;
}

nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device,
					     nvmlProcessUtilizationSample_t *utilization,
					     unsigned int *processSamplesCount,
					     unsigned long long lastSeenTimeStamp)
{
	ENTER_GPU(device, g);
	NEED(processSamplesCount);
	if (g.s->hide_processes)
		return NVML_ERROR_NOT_SUPPORTED;
	struct nvml_sample s[SIM_MAX_PROCS];
	unsigned room = *processSamplesCount;
	if (!utilization) {
		*processSamplesCount = SIM_MAX_PROCS;
		return NVML_ERROR_INSUFFICIENT_SIZE;
	}
	unsigned n = nvml_process_samples(&g, lastSeenTimeStamp, s);
	*processSamplesCount = n;
	if (!n)
		return NVML_ERROR_NOT_FOUND;
	if (n > room)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	for (unsigned i = 0; i < n; i++)
		utilization[i] = (nvmlProcessUtilizationSample_t){ .pid = s[i].pid,
								   .timeStamp = s[i].time_us,
								   .smUtil = s[i].percent };
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device,
						   nvmlProcessesUtilizationInfo_t *info)
{
	ENTER_GPU(device, g);
	NEED(info);
	if (info->version != nvmlProcessesUtilizationInfo_v1)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	if (g.s->hide_processes)
		return NVML_ERROR_NOT_SUPPORTED;
	struct nvml_sample s[SIM_MAX_PROCS];
	unsigned n = nvml_process_samples(&g, info->lastSeenTimeStamp, s);
	unsigned room = info->procUtilArray ? info->processSamplesCount : 0;
	if (!n)
		return NVML_ERROR_NOT_FOUND;
	info->processSamplesCount = n;
	if (n > room)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	for (unsigned i = 0; i < n; i++)
		info->procUtilArray[i] = (nvmlProcessUtilizationInfo_v1_t){
			.pid = s[i].pid, .timeStamp = s[i].time_us, .smUtil = s[i].percent };
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetDynamicPstatesInfo(nvmlDevice_t device, nvmlGpuDynamicPstatesInfo_t *info)
{
	ENTER_GPU(device, g);
	NEED(info);
	*info = (nvmlGpuDynamicPstatesInfo_t){ 0 };
	info->utilization[NVML_GPU_UTILIZATION_DOMAIN_GPU].bIsPresent = 1;
	info->utilization[NVML_GPU_UTILIZATION_DOMAIN_GPU].percentage = nvml_busy_percent(&g);
	return NVML_SUCCESS;
}
