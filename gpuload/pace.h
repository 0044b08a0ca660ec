/* When a thread launches. */
#ifndef GPULOAD_PACE_H
#define GPULOAD_PACE_H
#include <stdbool.h>
#include <stdint.h>
#include "options.h"

#define PACE_WAKES 64

struct pace {
	double mean_ns; /* between launches, 0: as fast as possible */
	bool poisson;
	uint64_t seed;
	double due;
	int64_t on_ns, off_ns, off_at; /* off_ns 0: never idle */
	int64_t wake[PACE_WAKES];      /* when it began to launch */
	unsigned wakes;
};

/* Of thread `number`; the launching begins now. */
void pace_start(struct pace *p, const struct options *o, unsigned number);
/* Sleeps until the next launch is due, and returns that time. */
int64_t pace_next(struct pace *p);
/* Whether it is time to be idle. */
bool pace_is_off(const struct pace *p);
/* Sleeps until it is over. */
void pace_off(struct pace *p);
#endif
