/* A machine in virtual time: GPUs, tenants, their processes and threads, on one thread of ours.
 *
 * GPUs are the simulator's own engines (simgpu/engine.c). Each process has a private copy of the
 * shipped meter (process.so). Programs and helper threads are coroutines that take turns by their
 * virtual time, so a run is exact and repeats itself for a seed. What the arbiter would read and
 * write is handed in and out here; the arbiter itself is the caller's.
 *
 * The score is share_api.busy: the engine's own count, which no library sees. */
#ifndef SHARE_WORLD_H
#define SHARE_WORLD_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SHARE_GPUS 4
#define SHARE_TENANTS 17
#define SHARE_PROCS 48
#define SHARE_UNITS 4
#define SHARE_NEVER INT64_MAX

struct share_conf {
	uint64_t seed;
	const char *process; /* path of process.so */
	int32_t gpus;
	int32_t dvfs;  /* the clock wanders by +-10 % */
	int32_t trace; /* 1: a time line on stderr; 2: with every launch */
	int64_t slice_ns, switch_ns;
	int64_t launch_ns;	   /* host cost of a launch */
	int64_t wake_ns, wake_tail_ns; /* a sleeper runs that long after its wake-up, plus an exponential tail */
	int64_t hop_ns, hop_tail_ns;   /* the same for the arbiter */
	int64_t stall_every_ns, stall_ns; /* mean time between, and length of, losses of the processor; 0: none */
};

struct share_limits {
	int32_t cores, ceiling, weight;
	int32_t limited, latency;
};

enum share_limiter {
	SHARE_SHIPPED, /* the shipped library */
	SHARE_NONE,    /* the driver itself */
	SHARE_FEEDBACK /* the control: blocks, steered by utilisation */
};

enum share_kind {
	SHARE_LOOP,	  /* launches, one after the other */
	SHARE_REQUESTS,	  /* open loop: Poisson arrivals, one unit each, waited for */
	SHARE_CAPTURE,	  /* captures graphs and launches them */
	SHARE_FLAG,	  /* a kernel that spins on a host flag, which is set after later launches */
	SHARE_COLLECTIVE, /* kernels that spin until their peer on the next GPU runs too */
	SHARE_DISGUISE,	  /* sync_every short kernels that are waited for, then a long one of the same function and
			     grid; late: that just before its turn ends */
};

struct share_program {
	int32_t kind;
	int32_t gpu;
	int32_t units;	    /* of unit_ns, taken in turn */
	int32_t graph;	    /* units are graphs */
	int32_t sync_every; /* waits for the stream after so many units; 0: never */
	int32_t streams;    /* launches go to so many streams in turn; 0: one */
	uint32_t blocks;
	int32_t peers;	    /* COLLECTIVE: processes with this program and number take part */
	int32_t late;	    /* DISGUISE */
	int64_t unit_ns[SHARE_UNITS];
	int64_t start_ns, stop_ns; /* stop 0: never */
	int64_t host_ns;	   /* works on the CPU after each wait */
	int64_t on_ns, off_ns;	   /* launches for on_ns, then rests for off_ns */
	int64_t period_ns;	   /* mean time between arrivals; or a fixed time between units of a LOOP */
	double sigma;		   /* of the kernels' log-normal jitter */
};

/* What one thread of a program has seen. */
struct share_stats {
	int64_t launches, errors;
	int64_t longest_ns;	 /* a launch call */
	int64_t beyond_ns;	 /* the longest beyond what the tenant's own debt asked for */
	int64_t rounds;		 /* collectives, captures, flags */
	int64_t n_latency;
	const int64_t *latency; /* of requests, from their arrival */
};

struct share_report {
	int32_t slot;
	uint32_t in_flight, waiting;
	int64_t waiting_since, pending_ns, work_end_ns, last_end_ns, longest_ns, first_ns;
	uint64_t closed_seq, gpu_time_ns;
};

struct share_grant {
	uint64_t seq;
	uint32_t slot, flags;
	int64_t start_ns, end_ns, since_ns, in_flight_ns, beside_ns, beside_since_ns;
};

struct share_lease {
	uint32_t flags, pad;
	struct share_grant grant[2];
	int64_t eligible_ns, tat;
	uint64_t gpu_time_ns;
	uint32_t wanted, got;
	uint64_t grants;
};

struct share_usage {
	uint64_t gpu_time_ns, throttled_ns, launches;
};

struct share_api {
	/* NULL: why, in words. */
	const char *(*start)(const struct share_conf *conf);
	int64_t (*now)(void);
	/* Runs everybody until then, or until the arbiter hears a bell before. Returns the time. */
	int64_t (*run)(int64_t until_ns);
	/* Tenants whose bell the arbiter has heard since the last call, a bit each. */
	uint32_t (*heard)(void);
	void (*listen)(bool on); /* an arbiter is there */
	int64_t (*hop)(void);	 /* how long it takes to wake up, drawn anew */

	int32_t (*tenant)(const struct share_limits *l);
	void (*set_limits)(int32_t tenant, const struct share_limits *l);
	int32_t (*process)(int32_t tenant, int32_t limiter);
	int32_t (*program)(int32_t process, const struct share_program *p);
	void (*kill)(int32_t process);	  /* -9 */
	void (*reclaim)(int32_t process); /* its slot, as a supervisor does later */

	/* Of a tenant: those of its processes that ever asked for a turn; how many. */
	int32_t (*reports)(int32_t tenant, int32_t gpu, struct share_report *out, int32_t max,
			   uint64_t *gpu_time_ns);
	void (*lease_get)(int32_t tenant, int32_t gpu, struct share_lease *out);
	void (*lease_set)(int32_t tenant, int32_t gpu, const struct share_lease *l);
	void (*beat)(bool alive);
	void (*usage)(int32_t tenant, int32_t gpu, struct share_usage *out);

	/* The truth. */
	int64_t (*busy)(int32_t process, int32_t gpu);
	int64_t (*switched)(int32_t gpu);
	void (*stats)(int32_t program, struct share_stats *out);
	void (*stats_reset)(void); /* maxima and latencies from here on */
	int64_t (*breaches)(void); /* calls of the library that a capture forbids */
};
const struct share_api *share_world(void);
#endif
