#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "alloc.h"
#include "options.h"

const char *const family_name[FAMILY_COUNT] = {
	"plain", "pitched", "managed", "array2d", "array3d",
	"mipmap", "async", "pool", "vmm", "graph",
};

enum family family_find(const char *name)
{
	enum family f = 0;

	while (f < FAMILY_COUNT && strcmp(name, family_name[f]))
		f++;
	return f;
}

/* Calls a driver function that may be missing, and notes its name for the report. */
#define CALL(name, ...) (*what = #name, cu.name ? cu.name(__VA_ARGS__) : CUDA_ERROR_NOT_SUPPORTED)

static uint64_t at_least_one(uint64_t n)
{
	return n ? n : 1;
}

static CUresult plain(uint64_t size, struct allocation *a, const char **what)
{
	a->bytes = size;
	return CALL(cuMemAlloc_v2, &a->ptr, size);
}

/* Rows of 4,000 bytes: the driver pads each. */
static CUresult pitched(uint64_t size, struct allocation *a, const char **what)
{
	uint64_t rows = at_least_one(size / 4096);
	size_t pitch = 0;
	CUresult r = CALL(cuMemAllocPitch_v2, &a->ptr, &pitch, 4000, rows, 4);

	a->bytes = pitch * rows;
	return r;
}

static CUresult managed(uint64_t size, struct allocation *a, const char **what)
{
	a->bytes = size;
	return CALL(cuMemAllocManaged, &a->ptr, size, CU_MEM_ATTACH_GLOBAL);
}

/* Four bytes a texel; 4,096 texels a row, or fewer for a small array. */
static CUresult array2d(uint64_t size, struct allocation *a, const char **what)
{
	CUDA_ARRAY_DESCRIPTOR d = {
		.Width = size >= 16384 ? 4096 : 64,
		.Format = CU_AD_FORMAT_UNSIGNED_INT8,
		.NumChannels = 4,
	};

	d.Height = at_least_one(size / (d.Width * 4));
	a->bytes = d.Width * d.Height * 4;
	return CALL(cuArrayCreate_v2, &a->array, &d);
}

static CUresult array3d(uint64_t size, struct allocation *a, const char **what)
{
	CUDA_ARRAY3D_DESCRIPTOR d = {
		.Width = 128, .Height = 64, .Depth = at_least_one(size / (128 * 64 * 4)),
		.Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1,
	};

	a->bytes = d.Width * d.Height * d.Depth * 4;
	return CALL(cuArray3DCreate_v2, &a->array, &d);
}

/* A square RGBA8 image with all its levels: four thirds of the first level. */
static CUresult mipmap(uint64_t size, struct allocation *a, const char **what)
{
	CUDA_ARRAY3D_DESCRIPTOR d = {.Format = CU_AD_FORMAT_UNSIGNED_INT8, .NumChannels = 4};
	unsigned side = 1, levels = 1;

	while ((uint64_t)side * side * 4 * 4 / 3 * 4 <= size && side < 16384) {
		side *= 2;
		levels++;
	}
	d.Width = d.Height = side;
	for (unsigned s = side; s; s /= 2)
		a->bytes += (uint64_t)s * s * 4;
	return CALL(cuMipmappedArrayCreate, &a->mipmap, &d, levels);
}

static CUresult async(uint64_t size, struct allocation *a, const char **what)
{
	a->bytes = size;
	return CALL(cuMemAllocAsync, &a->ptr, size, NULL);
}

static CUresult own_pool(CUmemoryPool *out, const char **what)
{
	static CUmemoryPool pool;
	CUmemPoolProps props = {
		.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
		.location = {CU_MEM_LOCATION_TYPE_DEVICE, driver_device()},
	};
	CUresult r = CUDA_SUCCESS;

	if (!pool)
		r = CALL(cuMemPoolCreate, &pool, &props);
	*out = pool;
	return r;
}

static CUresult pool(uint64_t size, struct allocation *a, const char **what)
{
	CUmemoryPool p;
	CUresult r = own_pool(&p, what);

	a->bytes = size;
	if (r)
		return r;
	return CALL(cuMemAllocFromPoolAsync, &a->ptr, size, p, NULL);
}

static CUresult vmm_map(struct allocation *a, const char **what)
{
	CUmemAccessDesc access = {
		.location = {CU_MEM_LOCATION_TYPE_DEVICE, driver_device()},
		.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
	};
	CUresult r = CALL(cuMemAddressReserve, &a->ptr, a->bytes, 0, 0, 0);

	if (r)
		return r;
	r = CALL(cuMemMap, a->ptr, a->bytes, 0, a->handle, 0);
	if (!r) {
		r = CALL(cuMemSetAccess, a->ptr, a->bytes, &access, 1);
		if (!r)
			return r;
		cu.cuMemUnmap(a->ptr, a->bytes);
	}
	cu.cuMemAddressFree(a->ptr, a->bytes);
	return r;
}

static CUresult vmm(uint64_t size, struct allocation *a, const char **what)
{
	CUmemAllocationProp prop = {
		.type = CU_MEM_ALLOCATION_TYPE_PINNED,
		.location = {CU_MEM_LOCATION_TYPE_DEVICE, driver_device()},
	};
	size_t granule = 0;
	CUresult r = CALL(cuMemGetAllocationGranularity, &granule, &prop,
			  CU_MEM_ALLOC_GRANULARITY_MINIMUM);

	if (r)
		return r;
	a->bytes = (size + granule - 1) / granule * granule;
	r = CALL(cuMemCreate, &a->handle, a->bytes, &prop, 0);
	if (r)
		return r;
	r = vmm_map(a, what);
	if (r)
		cu.cuMemRelease(a->handle);
	return r;
}

/* A graph of one allocation node, launched once. The memory stays until it is freed. */
static CUresult graph(uint64_t size, struct allocation *a, const char **what)
{
	CUDA_MEM_ALLOC_NODE_PARAMS p = {
		.poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
			      .location = {CU_MEM_LOCATION_TYPE_DEVICE, driver_device()}},
		.bytesize = size,
	};
	CUgraphNode node;
	CUgraph g;
	CUresult r = CALL(cuGraphCreate, &g, 0);

	if (r)
		return r;
	r = CALL(cuGraphAddMemAllocNode, &node, g, NULL, 0, &p);
	if (!r)
		r = CALL(cuGraphInstantiateWithFlags, &a->exec, g, 0);
	cu.cuGraphDestroy(g);
	if (r)
		return r;
	a->ptr = p.dptr;
	a->bytes = size;
	r = CALL(cuGraphLaunch, a->exec, NULL);
	if (!r)
		r = CALL(cuStreamSynchronize, NULL);
	if (r)
		cu.cuGraphExecDestroy(a->exec);
	return r;
}

CUresult alloc_one(enum family f, uint64_t size, struct allocation *out, const char **what)
{
	static CUresult (*const how[FAMILY_COUNT])(uint64_t, struct allocation *, const char **) = {
		plain, pitched, managed, array2d, array3d, mipmap, async, pool, vmm, graph,
	};

	*out = (struct allocation){.family = f};
	return how[f](size, out, what);
}

void alloc_free(struct allocation *a)
{
	switch (a->family) {
	case FAMILY_PLAIN: case FAMILY_PITCHED: case FAMILY_MANAGED:
		MUST(cuMemFree_v2(a->ptr));
		break;
	case FAMILY_ARRAY2D: case FAMILY_ARRAY3D:
		MUST(cuArrayDestroy(a->array));
		break;
	case FAMILY_MIPMAP:
		MUST(cuMipmappedArrayDestroy(a->mipmap));
		break;
	case FAMILY_ASYNC: case FAMILY_POOL:
		MUST(cuMemFreeAsync(a->ptr, NULL));
		break;
	case FAMILY_VMM:
		MUST(cuMemUnmap(a->ptr, a->bytes));
		MUST(cuMemAddressFree(a->ptr, a->bytes));
		MUST(cuMemRelease(a->handle));
		break;
	case FAMILY_GRAPH:
		MUST(cuMemFree_v2(a->ptr));
		MUST(cuGraphExecDestroy(a->exec));
		if (cu.cuDeviceGraphMemTrim)
			MUST(cuDeviceGraphMemTrim(driver_device()));
		break;
	case FAMILY_COUNT:
		break;
	}
}

static uint64_t free_bytes(void)
{
	size_t avail = 0, total = 0;

	MUST(cuMemGetInfo_v2(&avail, &total));
	return avail;
}

struct fill {
	uint64_t n, bytes, free_before, free_after;
	uint64_t granule; /* smallest amount by which free memory went down, 0: it never did */
	CUresult result;
	const char *what; /* the function that refused */
};

static void report(const struct alloc_pattern *p, const struct fill *f, bool json)
{
	const char *error = f->result ? driver_error(f->result) : "";
	const double mib = 1048576.0;

	if (json) {
		printf("{\"alloc\":\"%s\",\"size\":%llu,\"count\":%llu,\"bytes\":%llu,"
		       "\"free_before\":%llu,\"free_after\":%llu,\"granule\":%llu,"
		       "\"error\":\"%s\",\"refused_by\":\"%s\"}\n",
		       p->family, (unsigned long long)p->size, (unsigned long long)f->n,
		       (unsigned long long)f->bytes, (unsigned long long)f->free_before,
		       (unsigned long long)f->free_after, (unsigned long long)f->granule, error,
		       f->result ? f->what : "");
		return;
	}
	printf("%s: got %llu x %.3f MiB = %.1f MiB, free memory %.1f -> %.1f MiB", p->family,
	       (unsigned long long)f->n, (double)p->size / mib, (double)f->bytes / mib,
	       (double)f->free_before / mib, (double)f->free_after / mib);
	if (f->granule)
		printf(" in steps of %.3f MiB", (double)f->granule / mib);
	if (f->result)
		printf("; then %s said %s", f->what, error);
	putchar('\n');
}

void alloc_fill(const struct alloc_pattern *p, bool json)
{
	enum family family = family_find(p->family);
	struct fill f = {.what = ""};
	struct allocation a;
	uint64_t before, after;

	if (family == FAMILY_COUNT)
		die("--alloc %s: no such family (gpuload --help)", p->family);
	f.free_before = before = free_bytes();
	/* What is allocated is not freed: it is held until the program ends. */
	while (!p->count || f.n < p->count) {
		f.result = alloc_one(family, p->size, &a, &f.what);
		if (f.result)
			break;
		f.n++;
		f.bytes += a.bytes;
		after = free_bytes();
		if (after < before && (!f.granule || before - after < f.granule))
			f.granule = before - after;
		before = after;
	}
	f.free_after = free_bytes();
	report(p, &f, json);
	fflush(stdout);
}
