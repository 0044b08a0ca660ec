/* Every way the driver gives out device memory, under one handle. */
#ifndef GPULOAD_ALLOC_H
#define GPULOAD_ALLOC_H
#include <stdint.h>
#include "driver.h"

enum family {
	FAMILY_PLAIN, FAMILY_PITCHED, FAMILY_MANAGED, FAMILY_ARRAY2D, FAMILY_ARRAY3D,
	FAMILY_MIPMAP, FAMILY_ASYNC, FAMILY_POOL, FAMILY_VMM, FAMILY_GRAPH, FAMILY_COUNT,
};
extern const char *const family_name[FAMILY_COUNT];
/* FAMILY_COUNT when there is no such family. */
enum family family_find(const char *name);

struct allocation {
	enum family family;
	uint64_t bytes; /* asked for, after what the family's own shape rounds */
	CUdeviceptr ptr;
	CUarray array;
	CUmipmappedArray mipmap;
	CUmemGenericAllocationHandle handle;
	CUgraphExec exec;
};

/* One allocation of about `size` bytes. On an error nothing is held and *what names the driver
 * function that refused. CUDA_ERROR_NOT_SUPPORTED also when the driver lacks the function. */
CUresult alloc_one(enum family f, uint64_t size, struct allocation *out, const char **what);
void alloc_free(struct allocation *a);

struct alloc_pattern;
/* Allocates as the pattern says and reports it, as one line or one JSON object. */
void alloc_fill(const struct alloc_pattern *p, bool json);
#endif
