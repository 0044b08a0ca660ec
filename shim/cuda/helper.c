/* The helper: a thread of ours that looks at markers while work is in flight and sleeps on a futex
 * when there is none. It takes no signal, owns nothing that others wait for without bound, and
 * ends when the driver shuts down. Without it launches look for themselves. */
#include "compat.h"
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include "meter.h"
#include "slice.h"
#include "trace.h"

#define CMD_PRIVATE_EXPEDITED (1 << 3) /* of membarrier(2), Linux 4.14 */
#define CMD_REGISTER_PRIVATE_EXPEDITED (1 << 4)

enum { NONE, STARTING, RUNNING, STOPPING, GONE, FAILED };
static int state = NONE;
static uint32_t bell; /* 1: rung; 0: not */
static bool sleeping;
static bool have_barrier;
bool tr_helper_wanted = true;

void tr_barrier_init(void)
{
#ifdef SYS_membarrier
	have_barrier = syscall(SYS_membarrier, CMD_REGISTER_PRIVATE_EXPEDITED, 0) == 0;
#endif
	if (!have_barrier)
		TR_TRACE("meter: no membarrier here, batches of idle threads stay open");
}

bool tr_barrier_all(void)
{
#ifdef SYS_membarrier
	return have_barrier && syscall(SYS_membarrier, CMD_PRIVATE_EXPEDITED, 0) == 0;
#else
	return false;
#endif
}

static void sleep_until(int64_t at)
{
	int64_t left;
	while ((left = at - tr_now_ns()) > 0) {
		/* The clock may be shifted against this process's; the difference is not. */
		struct timespec ts = {left / 1000000000, left % 1000000000};
		struct timespec now;
		clock_gettime(CLOCK_MONOTONIC, &now);
		ts.tv_sec += now.tv_sec;
		ts.tv_nsec += now.tv_nsec;
		if (ts.tv_nsec >= 1000000000) {
			ts.tv_nsec -= 1000000000;
			ts.tv_sec++;
		}
		/* Not by the C library, where a thread could be cancelled in the middle of a launch. */
		if (syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, TIMER_ABSTIME, &ts, NULL) != 0)
			return; /* a signal: the caller looks again */
	}
}
void (*tr_sleep_until)(int64_t at) = sleep_until;

static void wait_bell(int64_t ns)
{
	struct timespec ts = {ns / 1000000000, ns % 1000000000};
	syscall(SYS_futex, &bell, FUTEX_WAIT_PRIVATE, 0, ns > 0 ? &ts : NULL, NULL, 0);
}

static void *work(void *arg)
{
	(void)arg;
	/* Looking at events must never break the capture of another thread. */
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	if (REAL(cuThreadExchangeStreamCaptureMode) != NULL)
		REAL(cuThreadExchangeStreamCaptureMode)(&mode);
	/* Turns end, and are handed on, to the microsecond; by default sleeps are rounded up by 50. */
	syscall(SYS_prctl, PR_SET_TIMERSLACK, 1000, 0, 0, 0);
	int expected = STARTING;
	__atomic_compare_exchange_n(&state, &expected, RUNNING, false, __ATOMIC_RELEASE,
				    __ATOMIC_RELAXED);
	while (__atomic_load_n(&state, __ATOMIC_ACQUIRE) == RUNNING) {
		/* Before looking, so that what comes in after the look rings. */
		__atomic_store_n(&bell, 0, __ATOMIC_SEQ_CST);
		__atomic_store_n(&sleeping, true, __ATOMIC_SEQ_CST);
		int64_t pause = tr_meter_round();
		if (pause < 0)
			break;
		if (pause > 0)
			__atomic_store_n(&sleeping, false, __ATOMIC_SEQ_CST);
		wait_bell(pause);
	}
	__atomic_store_n(&state, GONE, __ATOMIC_RELEASE);
	return NULL;
}

static int start(void)
{
	pthread_t thread;
	sigset_t all, old;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	int r = pthread_create(&thread, NULL, work, NULL);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (r == 0)
		pthread_detach(thread);
	return r;
}

void tr_helper_wake(void)
{
	int none = NONE;
	if (!tr_helper_wanted)
		return;
	if (__atomic_load_n(&state, __ATOMIC_RELAXED) == NONE &&
	    __atomic_compare_exchange_n(&state, &none, STARTING, false, __ATOMIC_ACQ_REL,
					__ATOMIC_RELAXED)) {
		int r = start();
		if (r != 0) {
			__atomic_store_n(&state, FAILED, __ATOMIC_RELEASE);
			TR_TRACE("meter: no helper thread (%s), launches look at markers", strerror(r));
		}
		return;
	}
	if (!__atomic_load_n(&sleeping, __ATOMIC_SEQ_CST))
		return;
	if (__atomic_exchange_n(&bell, 1, __ATOMIC_SEQ_CST) == 0)
		syscall(SYS_futex, &bell, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

bool tr_helper_running(void)
{
	int s = __atomic_load_n(&state, __ATOMIC_ACQUIRE);
	return s == STARTING || s == RUNNING;
}

void tr_helper_after_fork_child(void)
{
	state = NONE;
	bell = 0;
	sleeping = false;
}

/* Before the driver's own end: this library's destructors run before those of what it depends on.
 * Bounded, because the helper may be inside a driver call that waits. */
__attribute__((destructor)) static void stop(void)
{
	int s = RUNNING;
	tr_meter_end_all();
	if (!__atomic_compare_exchange_n(&state, &s, STOPPING, false, __ATOMIC_ACQ_REL,
					 __ATOMIC_ACQUIRE) &&
	    s != STARTING)
		return;
	__atomic_store_n(&state, STOPPING, __ATOMIC_RELEASE);
	__atomic_store_n(&bell, 1, __ATOMIC_SEQ_CST);
	syscall(SYS_futex, &bell, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
	struct timespec ms = {0, 200000};
	for (int i = 0; i < 50 && __atomic_load_n(&state, __ATOMIC_ACQUIRE) != GONE; i++)
		nanosleep(&ms, NULL);
}
