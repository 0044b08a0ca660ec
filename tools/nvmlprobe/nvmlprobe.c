/* nvmlprobe LIBPATH [devices|procs|inventory|watch MS|use MS|health MS]
 *
 * Asks NVML, in a process of its own, so that a driver that hangs or crashes does not take its
 * caller along, and so that the caller needs neither cgo nor NVML. LIBPATH is opened as given.
 *
 *   devices   one line: what is there, without processes
 *   procs     one line: the same, and each GPU's processes (the default)
 *   watch MS  such a line every MS milliseconds, until standard input ends or the parent is gone
 *   use MS    a line every MS milliseconds with no more of each GPU than its processes' newest samples
 *             of use: what is asked so often is to be cheap
 *   inventory one line: what devices tells, where each GPU sits, and its health reading
 *   health MS a line at once and every MS milliseconds with each GPU's health reading, and one for each
 *             critical error as it comes, with new readings behind it (health.c)
 *
 * A line is one JSON object:
 *   {"driver_version":"550.163.01","cuda_version":12040,"devices":[{"index":0,"uuid":"GPU-...",
 *    "name":"...","minor":0,"pci":"00000000:17:00.0","memory_total":N,"memory_used":N,
 *    "memory_reserved":N,"utilization_gpu":N,"utilization_memory":N,"mig":false,
 *    "processes":[{"pid":N,"used":N}]}]}
 * with inventory each device has besides
 *   "numa":N,"compute_mode":N,"pcie_mbps":N,"ancestors":[-1,20],"nvlinks":[{"type":"switch","pci":"..."}],
 *   "nvlink_mbps":N,"recovery":N,"energy":N
 * (NVML's numbers; ancestors by index, -1 for none; MB/s in one direction, of the PCIe link and of one
 * NVLink; those NVLinks that are up, at whose other end is a gpu, a switch or other; what recovers the
 * GPU; mJ), with health only index, uuid, recovery and energy, or {"event":{"uuid":"GPU-...","xid":N}},
 * or, with use, {"devices":[{"index":0,"uuid":"GPU-...","samples":[{"pid":N,"sm":N,"at":N}]}]}.
 * Bytes, per cent, microseconds of the driver's clock; null where the driver cannot tell; samples are
 * those newer than the last ones, null where there are none. A GPU that does not answer is
 * {"index":N,"error":"...","code":N}. If nothing can be said: {"error":"...","code":N} and exit
 * status 1; code is NVML's (12: the library cannot be opened), or 2 for a wrong command line.
 *
 * How long to wait is the caller's business. */
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "probe.h"

#if defined(__x86_64__)
__asm__(".symver dlopen, dlopen@GLIBC_2.2.5");
__asm__(".symver dlsym, dlsym@GLIBC_2.2.5");
__asm__(".symver dlerror, dlerror@GLIBC_2.2.5");
#elif defined(__aarch64__)
__asm__(".symver dlopen, dlopen@GLIBC_2.17");
__asm__(".symver dlsym, dlsym@GLIBC_2.17");
__asm__(".symver dlerror, dlerror@GLIBC_2.17");
#endif

struct nvml nvml;

/* The line being written. Grows; a failed allocation ends the program. */
static struct {
	char *text;
	size_t len, cap;
} line;

static void reserve(size_t more)
{
	if (line.cap - line.len > more)
		return;
	line.cap = (line.cap + more) * 2 + 4096;
	line.text = realloc(line.text, line.cap);
	if (!line.text)
		abort();
}

void put(const char *fmt, ...)
{
	va_list ap;
	int n;

	reserve(512);
	va_start(ap, fmt);
	n = vsnprintf(line.text + line.len, line.cap - line.len, fmt, ap);
	va_end(ap);
	if (n < 0 || (size_t)n >= line.cap - line.len)
		abort(); /* every caller's text is shorter than what was reserved */
	line.len += (size_t)n;
}

/* Length of the UTF-8 sequence at s, 0 if it is not one. */
static int utf8_len(const unsigned char *s)
{
	int n = s[0] < 0x80 ? 1 : s[0] >= 0xc2 && s[0] < 0xe0 ? 2 :
		(s[0] & 0xf0) == 0xe0 ? 3 : s[0] >= 0xf0 && s[0] < 0xf5 ? 4 : 0;

	for (int i = 1; i < n; i++)
		if ((s[i] & 0xc0) != 0x80)
			return 0;
	if ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] > 0x9f) ||
	    (s[0] == 0xf0 && s[1] < 0x90) || (s[0] == 0xf4 && s[1] > 0x8f))
		return 0;
	return n;
}

void put_string(const char *text)
{
	const unsigned char *s = (const unsigned char *)text;

	put("\"");
	while (*s) {
		int n = utf8_len(s);

		if (n == 0)
			put("\\ufffd");
		else if (*s == '"' || *s == '\\')
			put("\\%c", *s);
		else if (*s < 0x20 || *s == 0x7f)
			put("\\u%04x", *s);
		else
			put("%.*s", n, (const char *)s);
		s += n ? n : 1;
	}
	put("\"");
}

void put_number(const char *key, bool known, unsigned long long value)
{
	if (known)
		put(",\"%s\":%llu", key, value);
	else
		put(",\"%s\":null", key);
}

bool flush_line(void)
{
	size_t done = 0;

	put("\n");
	while (done < line.len) {
		ssize_t n = write(STDOUT_FILENO, line.text + done, line.len - done);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return false;
		done += (size_t)n;
	}
	line.len = 0;
	return true;
}

void put_error(const char *what, int code)
{
	put("\"error\":");
	put_string(what);
	put(",\"code\":%d", code);
}

int fail(const char *what, int code)
{
	line.len = 0;
	put("{");
	put_error(what, code);
	put("}");
	flush_line();
	return 1;
}

const char *error_text(nvmlReturn_t r)
{
	return nvml.nvmlErrorString ? nvml.nvmlErrorString(r) : "NVML error";
}

/* Processes of one GPU, each pid once with the largest figure that any list gives for it. */
struct procs {
	struct proc {
		unsigned pid;
		bool known;
		unsigned long long used;
	} *list;
	size_t n, cap;
};

static void add_proc(struct procs *p, unsigned pid, unsigned long long used)
{
	bool known = used != ~0ull; /* NVML_VALUE_NOT_AVAILABLE */

	for (size_t i = 0; i < p->n; i++) {
		if (p->list[i].pid != pid)
			continue;
		if (known && (!p->list[i].known || used > p->list[i].used)) {
			p->list[i].used = used;
			p->list[i].known = true;
		}
		return;
	}
	if (p->n == p->cap) {
		p->cap = p->cap * 2 + 16;
		p->list = realloc(p->list, p->cap * sizeof(*p->list));
		if (!p->list)
			abort();
	}
	p->list[p->n++] = (struct proc){ .pid = pid, .known = known, .used = known ? used : 0 };
}

/* Room for n entries of any release: version 3 had a fifth field (32 bytes) in drivers 530 and
 * early 535, under the same name. */
#define ENTRY_MAX 32
#define UNTOUCHED 0xa5
typedef nvmlReturn_t (*list_fn)(nvmlDevice_t, unsigned *, void *);

/* Entry size that the driver used: how far it wrote into the buffer tells. */
static size_t entry_size(const unsigned char *buf, unsigned n, size_t documented)
{
	for (size_t i = n * documented; i < (size_t)n * ENTRY_MAX; i++)
		if (buf[i] != UNTOUCHED)
			return ENTRY_MAX;
	return documented;
}

static bool list_once(struct procs *p, list_fn fn, nvmlDevice_t dev, size_t documented)
{
	for (unsigned room = 64, tries = 0; tries < 8; tries++, room *= 4) {
		size_t bytes = (size_t)room * ENTRY_MAX;
		unsigned char *buf = malloc(bytes);
		unsigned n = room;
		nvmlReturn_t r;

		if (!buf)
			abort();
		memset(buf, UNTOUCHED, bytes);
		r = fn(dev, &n, buf);
		if (r == NVML_SUCCESS && n <= room) {
			size_t size = entry_size(buf, n, documented);

			for (unsigned i = 0; i < n; i++) {
				nvmlProcessInfo_v1_t e; /* the common first fields */

				memcpy(&e, buf + i * size, sizeof(e));
				add_proc(p, e.pid, e.usedGpuMemory);
			}
		}
		free(buf);
		if (r != NVML_ERROR_INSUFFICIENT_SIZE)
			return r == NVML_SUCCESS;
	}
	return false;
}

/* True if one of the three versions answered. */
static bool list_kind(struct procs *p, nvmlDevice_t dev, void *v3, void *v2, void *v1)
{
	if (v3 && list_once(p, (list_fn)v3, dev, sizeof(nvmlProcessInfo_v2_t)))
		return true;
	if (v2 && list_once(p, (list_fn)v2, dev, sizeof(nvmlProcessInfo_v2_t)))
		return true;
	return v1 && list_once(p, (list_fn)v1, dev, sizeof(nvmlProcessInfo_v1_t));
}

#define LIST(p, dev, kind)                                                                         \
	list_kind(p, dev, (void *)nvml.nvmlDeviceGet##kind##RunningProcesses_v3,                   \
		  (void *)nvml.nvmlDeviceGet##kind##RunningProcesses_v2,                           \
		  (void *)nvml.nvmlDeviceGet##kind##RunningProcesses)

static void put_processes(nvmlDevice_t dev)
{
	struct procs p = { 0 };
	bool known = LIST(&p, dev, Compute);

	known |= LIST(&p, dev, Graphics);
	LIST(&p, dev, MPSCompute);
	if (!known && p.n == 0) {
		put(",\"processes\":null");
		return;
	}
	put(",\"processes\":[");
	for (size_t i = 0; i < p.n; i++) {
		put("%s{\"pid\":%u", i ? "," : "", p.list[i].pid);
		put_number("used", p.list[i].known, p.list[i].used);
		put("}");
	}
	put("]");
	free(p.list);
}

/* The newest sample of each process that was busy after *seen (the driver's clock), which moves on. */
static void put_samples(nvmlDevice_t dev, unsigned long long *seen)
{
	nvmlProcessUtilizationSample_t *s = NULL;
	unsigned long long newest = *seen;
	nvmlReturn_t r = NVML_ERROR_NOT_SUPPORTED;
	unsigned n = 0;

	if (nvml.nvmlDeviceGetProcessUtilization)
		r = nvml.nvmlDeviceGetProcessUtilization(dev, NULL, &n, *seen);
	if ((r == NVML_ERROR_INSUFFICIENT_SIZE || r == NVML_SUCCESS) && n > 0) {
		n += 16; /* processes may have come since */
		s = calloc(n, sizeof(*s));
		if (!s)
			abort();
		r = nvml.nvmlDeviceGetProcessUtilization(dev, s, &n, *seen);
	}
	if (!s || r != NVML_SUCCESS) {
		free(s);
		put(",\"samples\":null");
		return;
	}
	put(",\"samples\":[");
	for (unsigned i = 0, shown = 0; i < n; i++) {
		if (s[i].timeStamp <= *seen)
			continue;
		put("%s{\"pid\":%u,\"sm\":%u,\"at\":%llu}", shown++ ? "," : "", s[i].pid, s[i].smUtil,
		    s[i].timeStamp);
		if (s[i].timeStamp > newest)
			newest = s[i].timeStamp;
	}
	put("]");
	*seen = newest;
	free(s);
}

static void put_memory(nvmlDevice_t dev)
{
	nvmlMemory_v2_t v2 = { .version = nvmlMemory_v2 };
	nvmlMemory_t v1 = { 0 };
	bool has2 = nvml.nvmlDeviceGetMemoryInfo_v2 &&
		    nvml.nvmlDeviceGetMemoryInfo_v2(dev, &v2) == NVML_SUCCESS;
	bool has1 = !has2 && nvml.nvmlDeviceGetMemoryInfo &&
		    nvml.nvmlDeviceGetMemoryInfo(dev, &v1) == NVML_SUCCESS;

	put_number("memory_total", has1 || has2, has2 ? v2.total : v1.total);
	put_number("memory_used", has1 || has2, has2 ? v2.used : v1.used);
	put_number("memory_reserved", has2, v2.reserved);
}

static void put_rest(nvmlDevice_t dev)
{
	nvmlUtilization_t util = { 0 };
	nvmlPciInfo_t pci = { 0 };
	unsigned minor = 0, mig = 0, pending = 0;
	char name[NVML_DEVICE_NAME_V2_BUFFER_SIZE + 1] = "";
	bool ok;

	if (nvml.nvmlDeviceGetName)
		nvml.nvmlDeviceGetName(dev, name, sizeof(name) - 1);
	put(",\"name\":");
	put_string(name);
	ok = nvml.nvmlDeviceGetMinorNumber &&
	     nvml.nvmlDeviceGetMinorNumber(dev, &minor) == NVML_SUCCESS;
	put_number("minor", ok, minor);
	if (nvml.nvmlDeviceGetPciInfo_v3)
		nvml.nvmlDeviceGetPciInfo_v3(dev, &pci);
	pci.busId[sizeof(pci.busId) - 1] = 0;
	put(",\"pci\":");
	put_string(pci.busId);
	put_memory(dev);
	ok = nvml.nvmlDeviceGetUtilizationRates &&
	     nvml.nvmlDeviceGetUtilizationRates(dev, &util) == NVML_SUCCESS;
	put_number("utilization_gpu", ok, util.gpu);
	put_number("utilization_memory", ok, util.memory);
	ok = nvml.nvmlDeviceGetMigMode &&
	     nvml.nvmlDeviceGetMigMode(dev, &mig, &pending) == NVML_SUCCESS;
	put(",\"mig\":%s", !ok ? "null" : mig ? "true" : "false");
}

enum detail { DEVICES, PROCESSES, USE, INVENTORY };

#define SEEN_MAX 64
static unsigned long long seen_us[SEEN_MAX]; /* by device: time of the newest sample shown */

static void put_device(unsigned index, unsigned count, enum detail detail)
{
	char uuid[NVML_DEVICE_UUID_V2_BUFFER_SIZE + 1] = "";
	nvmlDevice_t dev = NULL;
	nvmlReturn_t r = nvml.nvmlDeviceGetHandleByIndex_v2(index, &dev);

	if (r == NVML_SUCCESS)
		r = nvml.nvmlDeviceGetUUID(dev, uuid, sizeof(uuid) - 1);
	put("%s{\"index\":%u,", index ? "," : "", index);
	if (r != NVML_SUCCESS) {
		put_error(error_text(r), (int)r);
	} else {
		put("\"uuid\":");
		put_string(uuid);
		if (detail != USE)
			put_rest(dev);
		else if (index < SEEN_MAX)
			put_samples(dev, &seen_us[index]);
		if (detail == PROCESSES)
			put_processes(dev);
		if (detail == INVENTORY) {
			put_inventory(dev, count);
			put_reading(dev);
		}
	}
	put("}");
}

static int report(enum detail detail)
{
	char version[NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE + 1] = "";
	unsigned count = 0;
	int cuda = 0;
	nvmlReturn_t r = nvml.nvmlDeviceGetCount_v2(&count);

	if (r != NVML_SUCCESS)
		return fail(error_text(r), (int)r);
	put("{");
	if (detail != USE) {
		if (nvml.nvmlSystemGetDriverVersion)
			nvml.nvmlSystemGetDriverVersion(version, sizeof(version) - 1);
		if (nvml.nvmlSystemGetCudaDriverVersion)
			nvml.nvmlSystemGetCudaDriverVersion(&cuda);
		put("\"driver_version\":");
		put_string(version);
		put_number("cuda_version", cuda > 0, (unsigned)cuda);
		put(",");
	}
	put("\"devices\":[");
	for (unsigned i = 0; i < count; i++)
		put_device(i, count, detail);
	put("]}");
	return flush_line() ? 0 : 1;
}

int64_t now_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

bool wait_until(int64_t deadline, pid_t parent)
{
	for (;;) {
		struct pollfd in = { .fd = STDIN_FILENO, .events = POLLIN };
		int64_t left = deadline - now_ms();
		int slice = left < 0 ? 0 : left > 1000 ? 1000 : (int)left;
		char drop[256];
		ssize_t n;

		if (poll(&in, 1, slice) > 0) {
			n = read(STDIN_FILENO, drop, sizeof(drop));
			if (n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN))
				return false;
		}
		if (getppid() != parent)
			return false;
		if (now_ms() >= deadline)
			return true;
	}
}

static int watch(int interval_ms, enum detail detail)
{
	pid_t parent = getppid();
	int64_t next = now_ms();
	int status;

	do {
		status = report(detail);
		next += interval_ms;
		if (next < now_ms()) /* the driver was slow: no burst afterwards */
			next = now_ms();
	} while (status == 0 && wait_until(next, parent));
	return status;
}

static int load(const char *path)
{
	void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	nvmlReturn_t r;

	if (!lib)
		return fail(dlerror(), NVML_ERROR_LIBRARY_NOT_FOUND);
#define X(name) nvml.name = (__typeof__(&name))dlsym(lib, #name);
	FUNCTIONS(X)
#undef X
	if (!nvml.nvmlInit_v2 || !nvml.nvmlDeviceGetCount_v2 ||
	    !nvml.nvmlDeviceGetHandleByIndex_v2 || !nvml.nvmlDeviceGetUUID)
		return fail("not an NVML library, or one older than 2012",
			    NVML_ERROR_FUNCTION_NOT_FOUND);
	r = nvml.nvmlInit_v2();
	return r == NVML_SUCCESS ? 0 : fail(error_text(r), (int)r);
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		bool interval;
		enum detail detail;
	} modes[] = { { "procs", false, PROCESSES }, { "devices", false, DEVICES },
		      { "inventory", false, INVENTORY }, { "watch", true, PROCESSES }, { "use", true, USE },
		      { "health", true, DEVICES } };
	size_t m = 0, n = sizeof(modes) / sizeof(modes[0]);
	long interval = argc == 4 ? strtol(argv[3], NULL, 10) : 0;

	while (argc > 2 && m < n && strcmp(argv[2], modes[m].name) != 0)
		m++;
	if (argc < 2 || m == n || argc > (modes[m].interval ? 4 : 3) ||
	    (modes[m].interval && (interval < 1 || interval > 3600000)))
		return fail("usage: nvmlprobe LIBPATH [devices|procs|inventory|watch MS|use MS|health MS]", 2);
	if (load(argv[1]) != 0)
		return 1;
	if (!modes[m].interval)
		return report(modes[m].detail);
	if (strcmp(modes[m].name, "health") == 0)
		return health((int)interval);
	return watch((int)interval, modes[m].detail);
}
