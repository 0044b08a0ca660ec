/* Allocates and frees device memory of all families at random: the load of the kill test. */
#ifndef GPULOAD_RANDOM_H
#define GPULOAD_RANDOM_H
#include "options.h"

/* Runs for o->random_s, holds at most o->random_max bytes at a time, and frees everything at the
 * end. Being refused memory is a normal outcome, any other error ends the program. */
void random_run(const struct options *o, unsigned proc);
#endif
