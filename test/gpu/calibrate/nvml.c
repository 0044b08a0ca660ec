/* 8: what NVML tells about processes with this driver: whether it names them as they name themselves,
 * and how late and how fine their utilisation is. */
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "../../../gpuload/compat.h"
#include "calibrate.h"
#include "nvml_abi.h"

#define FUNCTIONS(X)                                                                               \
	X(nvmlInit_v2)                                                                             \
	X(nvmlErrorString)                                                                         \
	X(nvmlDeviceGetHandleByIndex_v2)                                                           \
	X(nvmlDeviceGetUtilizationRates)                                                           \
	X(nvmlDeviceGetComputeRunningProcesses_v3)                                                 \
	X(nvmlDeviceGetProcessUtilization)

static struct {
#define X(name) __typeof__(&name) name;
	FUNCTIONS(X)
#undef X
} nvml;

static bool nvml_open(void)
{
	void *p, *handle = dlopen(config->libnvml, RTLD_NOW | RTLD_LOCAL);

	if (!handle)
		return false;
#define X(name)                                                                                    \
	p = dlsym(handle, #name);                                                                  \
	if (!p)                                                                                    \
		return false;                                                                      \
	memcpy(&nvml.name, &p, sizeof p);
	FUNCTIONS(X)
#undef X
	return nvml.nvmlInit_v2() == NVML_SUCCESS;
}

static int64_t wall_us(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_REALTIME, &ts);
	return ts.tv_sec * 1000000ll + ts.tv_nsec / 1000;
}

struct seen {
	unsigned looks, with_us;
	double util, lag_ms, period_ms;
	unsigned samples;
	nvmlReturn_t result;
};

/* One look at the samples since the last; ours among them. */
static void samples(nvmlDevice_t d, unsigned long long *last, struct seen *seen)
{
	nvmlProcessUtilizationSample_t v[128];
	unsigned n = sizeof v / sizeof *v;

	seen->looks++;
	seen->result = nvml.nvmlDeviceGetProcessUtilization(d, v, &n, *last);
	if (seen->result != NVML_SUCCESS)
		return;
	for (unsigned i = 0; i < n; i++) {
		if (v[i].pid != (unsigned)getpid() || v[i].timeStamp <= *last)
			continue;
		if (*last && seen->samples)
			seen->period_ms += (double)(v[i].timeStamp - *last) / 1e3;
		seen->util += v[i].smUtil;
		seen->lag_ms += (double)(wall_us() - (int64_t)v[i].timeStamp) / 1e3;
		seen->samples++;
		seen->with_us++;
		*last = v[i].timeStamp;
	}
}

/* Half load for some seconds, with a look every 50 ms. */
static void load(nvmlDevice_t d, struct seen *seen)
{
	CUstream s = stream_new();
	int64_t end = now_ns() + (int64_t)(5000 * MS * config->scale), look = now_ns() + 1000 * MS;
	unsigned long long last = (unsigned long long)wall_us();

	while (now_ns() < end) {
		spin(s, 5 * MS);
		MUST(cuStreamSynchronize(s));
		sleep_until_ns(now_ns() + 5 * MS);
		if (now_ns() < look)
			continue;
		samples(d, &last, seen);
		look = now_ns() + 50 * MS;
	}
}

/* Whether the list of processes has us, and with how much memory (MiB). */
static bool listed(nvmlDevice_t d, unsigned *n, double *memory)
{
	nvmlProcessInfo_t info[128];
	nvmlReturn_t r;

	*n = sizeof info / sizeof *info;
	r = nvml.nvmlDeviceGetComputeRunningProcesses_v3(d, n, info);
	if (r != NVML_SUCCESS)
		*n = 0;
	for (unsigned i = 0; i < *n; i++)
		if (info[i].pid == (unsigned)getpid()) {
			*memory = info[i].usedGpuMemory == ~0ull ? NAN : (double)(info[i].usedGpuMemory >> 20);
			return true;
		}
	return false;
}

enum { HAVE, LISTED, OTHERS, MEMORY, DEVICE, SAMPLES, UTIL, LAG, PERIOD };

static void ask(struct together *t, unsigned number)
{
	struct seen seen = {0};
	nvmlUtilization_t u = {0};
	nvmlDevice_t d;
	unsigned n;

	(void)number;
	if (!nvml_open() || nvml.nvmlDeviceGetHandleByIndex_v2((unsigned)config->gpu, &d) != NVML_SUCCESS)
		return;
	t->value[HAVE] = 1;
	load(d, &seen);
	t->value[MEMORY] = NAN;
	t->value[LISTED] = listed(d, &n, &t->value[MEMORY]);
	t->value[OTHERS] = n - t->value[LISTED];
	t->value[DEVICE] = nvml.nvmlDeviceGetUtilizationRates(d, &u) == NVML_SUCCESS ? u.gpu : NAN;
	t->value[SAMPLES] = seen.samples;
	t->value[UTIL] = seen.samples ? seen.util / seen.samples : NAN;
	t->value[LAG] = seen.samples ? seen.lag_ms / seen.samples : NAN;
	t->value[PERIOD] = seen.samples > 1 ? seen.period_ms / (seen.samples - 1) : NAN;
	snprintf(t->text[0], sizeof *t->text, "%s", nvml.nvmlErrorString(seen.result));
}

void item_nvml(void)
{
	struct together *t = together_new();

	json_open("nvml", '{');
	if (run_together(t, 1, ask, NULL)) {
		json_bool("there", t->value[HAVE] > 0);
		if (t->value[HAVE] > 0) {
			json_bool("lists_us_by_our_pid", t->value[LISTED] > 0);
			json_number("others_listed", t->value[OTHERS]);
			json_number("our_memory_mib", t->value[MEMORY]);
			json_number("device_utilisation", t->value[DEVICE]);
			json_text("process_utilisation", t->text[0]);
			json_number("our_samples", t->value[SAMPLES]);
			json_number("our_utilisation_at_50", t->value[UTIL]);
			json_number("sample_is_late_ms", t->value[LAG]);
			json_number("sample_period_ms", t->value[PERIOD]);
		}
	}
	json_close('}');
}
