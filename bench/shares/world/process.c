/* One process: the shipped meter, with the kernel and the driver of the virtual machine below it.
 * Linked with the meter's objects into process.so, of which each process loads a copy of its own.
 * The objects are compiled with syscall and pthread_create renamed to what stands here. */
#include "compat.h"
#define _GNU_SOURCE
#include "process.h"
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <time.h>
#include "graphmem.h"
#include "meter.h"
#include "pool.h"
#include "slice.h"
#include "trace.h"

struct tr_real tr_real;
int tr_visible_devices = 1;
static struct share_host host;

/* --- what the meter takes from the rest of the library ----------------------------------------- */

const struct tr_limits *tr_limits(void)
{
	return host.limits;
}
const struct tr_leases *tr_leases(void)
{
	return host.leases;
}
struct tr_ledger *tr_ledger(void)
{
	return host.ledger;
}
bool tr_ledger_shared(void)
{
	return true;
}
int tr_slot_index(void)
{
	return host.slot;
}
int tr_limits_devices(void)
{
	return host.devices;
}
int tr_current_device(void)
{
	return host.current_device();
}
int64_t tr_now_ns(void)
{
	return *host.now;
}

/* No pools and no graph memory here. */
void tr_pools_after_sync(void)
{
}
CUresult tr_graph_mem_before(CUgraphExec exec, CUstream stream, bool ptsz, int *token)
{
	(void)exec, (void)stream, (void)ptsz;
	*token = 0;
	return CUDA_SUCCESS;
}
void tr_graph_mem_after(CUgraphExec exec, int token, CUresult result)
{
	(void)exec, (void)token, (void)result;
}

/* --- the kernel -------------------------------------------------------------------------------- */

static int64_t deadline(int op, const struct timespec *ts)
{
	if (ts == NULL)
		return INT64_MAX;
	int64_t at = ts->tv_sec * 1000000000ll + ts->tv_nsec;
	return op == FUTEX_WAIT_BITSET ? at : *host.now + at;
}

static long futex(const uint32_t *word, int op, uint32_t value, const struct timespec *ts)
{
	bool changed = false;
	op &= FUTEX_CMD_MASK;
	if (op == FUTEX_WAKE)
		return host.wake(word, (int)value);
	if (op != FUTEX_WAIT && op != FUTEX_WAIT_BITSET) {
		errno = ENOSYS;
		return -1;
	}
	if (host.wait(word, value, deadline(op, ts), &changed))
		return 0;
	errno = changed ? EAGAIN : ETIMEDOUT;
	return -1;
}

/* Membarrier has nothing to do on one thread; the helper's coroutines share it. */
long share_syscall(long nr, ...);
long share_syscall(long nr, ...)
{
	va_list ap;
	va_start(ap, nr);
	long a[4];
	for (int i = 0; i < 4; i++)
		a[i] = va_arg(ap, long);
	va_end(ap);
	if (nr == SYS_futex)
		return futex((const uint32_t *)a[0], (int)a[1], (uint32_t)a[2],
			     (const struct timespec *)a[3]);
	if (nr == SYS_membarrier)
		return 0;
	if (nr == SYS_gettid)
		return host.slot;
	errno = ENOSYS;
	return -1;
}

int share_thread_create(pthread_t *t, const pthread_attr_t *a, void *(*body)(void *), void *arg);
int share_thread_create(pthread_t *t, const pthread_attr_t *a, void *(*body)(void *), void *arg)
{
	(void)a;
	*t = 0;
	return host.thread(body, arg);
}

int share_thread_detach(pthread_t t);
int share_thread_detach(pthread_t t)
{
	(void)t;
	return 0;
}

/* --- the copy's entry -------------------------------------------------------------------------- */

EXPORT share_process_fn share_process;
void share_process(const struct share_host *h, struct share_entry *out)
{
	host = *h;
	tr_trace_init(); /* TRANCHE_TRACE=1 */
	tr_visible_devices = h->devices;
	tr_sleep_until = h->sleep_until;
	*out = (struct share_entry){
		.real = &tr_real,
		.self = (void **)&tr_thread_self,
		.arm = tr_meter_arm,
		.rearm = tr_meter_rearm,
		.launch = cuLaunchKernel,
		.graph = cuGraphLaunch,
		.sync = cuStreamSynchronize,
		.begin = cuStreamBeginCapture_v2,
		.end = cuStreamEndCapture,
		.forget = NULL,
	};
}
