#define _GNU_SOURCE
#include "meter_world.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "graphmem.h"
#include "meter.h"
#include "pool.h"
#include "slice.h"

/* Each world forgets the one before as a forked child does, without giving anything back. */
__attribute__((visibility("default"))) const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
	return "detect_leaks=0";
}

int64_t world_now;
struct world_conf world;
struct world_calls world_calls;
bool world_capturing[8];
struct tr_real tr_real;
int tr_visible_devices = 1;

static struct tr_limits limits;
static struct tr_ledger ledger;
static struct {
	int64_t from, to;
} *runs;
static size_t n_runs, max_runs;
static int64_t stream_free[8], engine_free, next_dur, spin_at;
static int64_t next_stall;
static uint64_t seed;

#define NEVER (INT64_MAX / 4)

/* --- what the meter takes from the rest of the library ---------------------------------------- */

/* No pools in this world. */
void tr_pools_after_sync(void)
{
}

const struct tr_limits *tr_limits(void)
{
	return &limits;
}
const struct tr_leases *tr_leases(void)
{
	static const struct tr_leases none;
	return &none;
}
bool tr_ledger_shared(void)
{
	return true;
}
struct tr_ledger *tr_ledger(void)
{
	return &ledger;
}
int tr_slot_index(void)
{
	return 1;
}
int tr_limits_devices(void)
{
	return 1;
}
int tr_current_device(void)
{
	return 0;
}
int64_t tr_now_ns(void)
{
	return world_now;
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

/* --- the driver ------------------------------------------------------------------------------- */

static uint64_t rnd(void)
{
	seed ^= seed << 13;
	seed ^= seed >> 7;
	return seed ^= seed << 17;
}

static void host(int64_t ns)
{
	world_now += ns;
	if (world.stall_every_ns != 0 && world_now >= next_stall) {
		world_now += world.stall_ns;
		next_stall = world_now + world.stall_every_ns;
	}
}

static int index_of(CUstream s)
{
	return (int)((uintptr_t)s >> 12) & 7;
}

CUstream world_stream(int i)
{
	return (CUstream)(uintptr_t)(0x10000 + i * 0x1000);
}

static int64_t max64(int64_t a, int64_t b)
{
	return a > b ? a : b;
}

static CUresult start_kernel(CUstream s)
{
	int i = index_of(s);
	world_calls.launches++;
	host(world.launch_ns);
	if (world_capturing[i])
		return CUDA_SUCCESS;
	int64_t from = max64(max64(world_now, stream_free[i]), world.parallel ? 0 : engine_free);
	int64_t to = next_dur < 0 ? NEVER : from + next_dur;
	if (n_runs == max_runs)
		runs = realloc(runs, (max_runs = max_runs * 2 + 1024) * sizeof *runs);
	runs[n_runs].from = from;
	runs[n_runs++].to = to;
	if (next_dur < 0)
		spin_at = (int64_t)n_runs - 1;
	stream_free[i] = to;
	if (!world.parallel && next_dur >= 0)
		engine_free = to;
	return CUDA_SUCCESS;
}

static CUresult fake_launch(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
			    unsigned by, unsigned bz, unsigned shared, CUstream s, void **params,
			    void **extra)
{
	(void)f, (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz;
	(void)shared, (void)params, (void)extra;
	return start_kernel(s);
}

static CUresult fake_graph_launch(CUgraphExec e, CUstream s)
{
	(void)e;
	return start_kernel(s);
}

struct fake_event {
	int64_t ts;
	int stream;
};

static CUresult fake_event_create(CUevent *e, unsigned flags)
{
	(void)flags;
	*e = (CUevent)calloc(1, sizeof(struct fake_event));
	return CUDA_SUCCESS;
}

static CUresult fake_record(CUevent e, CUstream s)
{
	struct fake_event *f = (struct fake_event *)e;
	int i = index_of(s);
	world_calls.records++;
	host(700);
	if (world_capturing[i]) {
		world_calls.on_capturing++;
		return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	}
	f->stream = i;
	f->ts = max64(world_now, stream_free[i]);
	return CUDA_SUCCESS;
}

static int64_t stamp(struct fake_event *f)
{
	return f->ts == NEVER && stream_free[f->stream] != NEVER ? stream_free[f->stream] : f->ts;
}

static CUresult fake_query(CUevent e)
{
	world_calls.queries++;
	host(200);
	return stamp((struct fake_event *)e) <= world_now ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

/* Half a microsecond is the device clock's step. */
static CUresult fake_elapsed(float *ms, CUevent a, CUevent b)
{
	int64_t ta = stamp((struct fake_event *)a) / 500, tb = stamp((struct fake_event *)b) / 500;
	*ms = (float)((double)(tb - ta) * 0.0005);
	return CUDA_SUCCESS;
}

static CUresult fake_capturing(CUstream s, CUstreamCaptureStatus *st)
{
	*st = world_capturing[index_of(s)] ? CU_STREAM_CAPTURE_STATUS_ACTIVE
					   : CU_STREAM_CAPTURE_STATUS_NONE;
	return CUDA_SUCCESS;
}

static CUresult fake_begin(CUstream s, CUstreamCaptureMode mode)
{
	(void)mode;
	world_capturing[index_of(s)] = true;
	return CUDA_SUCCESS;
}

static CUresult fake_end(CUstream s, CUgraph *g)
{
	(void)g;
	world_capturing[index_of(s)] = false;
	return CUDA_SUCCESS;
}

static CUresult fake_ctx(CUcontext *c)
{
	*c = (CUcontext)(uintptr_t)0xc0;
	return CUDA_SUCCESS;
}

static CUresult fake_stream_ctx(CUstream s, CUcontext *c)
{
	(void)s;
	return fake_ctx(c);
}

static CUresult fake_exchange(CUstreamCaptureMode *mode)
{
	(void)mode;
	return CUDA_SUCCESS;
}

static CUresult fake_sync(CUstream s)
{
	int64_t until = stream_free[index_of(s)];
	while (world_now < until) {
		world_now += until - world_now < TR_MS / 2 ? until - world_now : TR_MS / 2;
		tr_meter_round();
	}
	host(20000);
	return CUDA_SUCCESS;
}

static void sleep_until(int64_t at)
{
	if (world_now < at)
		world_now = at;
	if (world.late_ns != 0)
		world_now += (int64_t)(rnd() % (uint64_t)world.late_ns);
}

/* --- the program's side ------------------------------------------------------------------------ */

void world_set_cores(int cores)
{
	limits.dev[0].cores = (uint32_t)(cores == 0 ? 100 : cores);
	limits.dev[0].flags = cores == 0 ? 0 : TR_DEV_CORES_LIMITED;
	limits.generation += 2;
	tr_meter_rearm();
}

void world_start(int cores)
{
	tr_meter_after_fork_child(); /* forgets what the last world left */
	memset(&ledger, 0, sizeof ledger);
	memset(tr_costs, 0, sizeof tr_costs);
	memset(stream_free, 0, sizeof stream_free);
	memset(world_capturing, 0, sizeof world_capturing);
	memset(&world_calls, 0, sizeof world_calls);
	limits.n_devices = 1;
	n_runs = 0;
	engine_free = 0;
	seed = 88172645463325252ull;
	world_now = 1000 * 1000 * TR_MS;
	next_stall = world_now + world.stall_every_ns;
	tr_sleep_until = sleep_until;
	tr_helper_wanted = false;
	tr_real.cuLaunchKernel = fake_launch;
	tr_real.cuGraphLaunch = fake_graph_launch;
	tr_real.cuEventCreate = fake_event_create;
	tr_real.cuEventRecord = fake_record;
	tr_real.cuEventRecord_ptsz = fake_record;
	tr_real.cuEventQuery = fake_query;
	tr_real.cuEventElapsedTime = fake_elapsed;
	tr_real.cuStreamIsCapturing = fake_capturing;
	tr_real.cuStreamBeginCapture_v2 = fake_begin;
	tr_real.cuStreamEndCapture = fake_end;
	tr_real.cuCtxGetCurrent = fake_ctx;
	tr_real.cuStreamGetCtx = fake_stream_ctx;
	tr_real.cuThreadExchangeStreamCaptureMode = fake_exchange;
	tr_real.cuStreamSynchronize = fake_sync;
	world_set_cores(cores);
	tr_meter_arm();
}

void world_compute(int64_t ns)
{
	for (int64_t end = world_now + ns; world_now < end;) {
		world_now += end - world_now < TR_MS / 2 ? end - world_now : TR_MS / 2;
		if (ns >= TR_MS / 2)
			tr_meter_round();
	}
}

CUresult world_launch(int k, int64_t dur, unsigned blocks, CUstream s)
{
	next_dur = dur;
	return cuLaunchKernel((CUfunction)(uintptr_t)(0x5000 + k * 64), blocks, 1, 1, 256, 1, 1, 0, s,
			      NULL, NULL);
}

CUresult world_launch_graph(int k, int64_t dur, CUstream s)
{
	next_dur = dur;
	return cuGraphLaunch((CUgraphExec)(uintptr_t)(0x9000 + k * 64), s);
}

void world_release(void)
{
	for (int i = 0; i < 8; i++)
		if (stream_free[i] == NEVER)
			stream_free[i] = world_now;
	runs[spin_at].to = world_now;
}

void world_sync(CUstream s)
{
	cuStreamSynchronize(s);
}

static int by_from(const void *a, const void *b)
{
	int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
	return x < y ? -1 : x > y;
}

int64_t world_busy(int64_t from, int64_t to)
{
	int64_t busy = 0, at = from;
	qsort(runs, n_runs, sizeof *runs, by_from);
	for (size_t i = 0; i < n_runs; i++) {
		int64_t a = max64(runs[i].from, at), b = runs[i].to < to ? runs[i].to : to;
		if (b > a) {
			busy += b - a;
			at = b;
		}
	}
	return busy;
}

int64_t world_queued(void)
{
	int64_t sum = 0;
	for (size_t i = 0; i < n_runs; i++)
		if (runs[i].to > world_now)
			sum += runs[i].to - max64(runs[i].from, world_now);
	return sum;
}

struct tr_account *world_account(void)
{
	return &ledger.account[0];
}
