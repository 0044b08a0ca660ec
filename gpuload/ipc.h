/* One process shares its device memory with others. */
#ifndef GPULOAD_IPC_H
#define GPULOAD_IPC_H
#include "options.h"

/* Forks, so CUDA must not be initialised yet: one exporter of o->ipc_size bytes and
 * o->ipc_importers importers, each of which checks what it sees. Holds for o->hold_s. Returns the
 * exit status: 0 when every importer saw the exporter's bytes. */
int ipc_run(const struct options *o);
#endif
