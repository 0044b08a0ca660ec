/* Copies and memsets in their general form: checked, then done by the calling thread. */
#include <string.h>
#include <sys/mman.h>
#include "mem.h"

/* One side of a copy. */
struct side {
	bool array;
	bool device;
	int gpu;
	uint8_t *base;
	CUarray handle;
	size_t x, y, z, pitch, slice;
};

static bool resolve(struct side *s, CUmemorytype type, const void *host, CUdeviceptr dev, CUarray array,
		    const CUDA_MEMCPY3D_PEER *c)
{
	size_t bytes = (c->Depth - 1) * s->slice + (c->Height - 1) * s->pitch + c->WidthInBytes;
	s->gpu = -1;
	if (type == CU_MEMORYTYPE_ARRAY) {
		s->array = true;
		s->handle = array;
		s->gpu = array_gpu(array);
		s->device = true;
		return s->gpu >= 0 && array_row(array, s->x, s->y + c->Height - 1, s->z + c->Depth - 1, c->WidthInBytes) &&
		       array_row(array, s->x, s->y, s->z, c->WidthInBytes);
	}
	if ((c->Height > 1 && s->pitch < c->WidthInBytes) || (c->Depth > 1 && s->slice < s->pitch))
		return false;
	uint64_t p = type == CU_MEMORYTYPE_HOST ? (uint64_t)(uintptr_t)host : dev;
	if (!p)
		return false;
	s->base = (uint8_t *)(uintptr_t)p + s->z * s->slice + s->y * s->pitch + s->x;
	s->device = sim_mem_is_device((uint64_t)(uintptr_t)s->base, bytes, &s->gpu);
	if (s->device || type == CU_MEMORYTYPE_HOST || type == CU_MEMORYTYPE_UNIFIED) {
		if (!s->device) {
			/* A pointer into device memory whose end is outside is an error; host memory that CUDA
			 * does not know is the application's own. */
			mem_lock();
			struct mem_range *r = mem_find((uint64_t)(uintptr_t)s->base);
			bool bad = r && (r->gpu >= 0 || r->base + r->size < (uint64_t)(uintptr_t)s->base + bytes);
			bad = bad && r->gpu >= 0;
			mem_unlock();
			return !bad;
		}
		return true;
	}
	/* Page-locked host memory has a device address too. */
	mem_lock();
	struct mem_range *r = mem_find((uint64_t)(uintptr_t)s->base);
	bool ok = r && r->gpu < 0 && (uint64_t)(uintptr_t)s->base + bytes <= r->base + r->size;
	mem_unlock();
	return ok;
}

static bool sides(const CUDA_MEMCPY3D_PEER *c, struct side *src, struct side *dst)
{
	*src = (struct side){ .x = c->srcXInBytes, .y = c->srcY, .z = c->srcZ,
			      .pitch = c->srcPitch ? c->srcPitch : c->WidthInBytes };
	*dst = (struct side){ .x = c->dstXInBytes, .y = c->dstY, .z = c->dstZ,
			      .pitch = c->dstPitch ? c->dstPitch : c->WidthInBytes };
	src->slice = src->pitch * (c->srcHeight ? c->srcHeight : c->Height);
	dst->slice = dst->pitch * (c->dstHeight ? c->dstHeight : c->Height);
	return resolve(src, c->srcMemoryType, c->srcHost, c->srcDevice, c->srcArray, c) &&
	       resolve(dst, c->dstMemoryType, c->dstHost, c->dstDevice, c->dstArray, c);
}

static uint8_t *row(const struct side *s, size_t y, size_t z, size_t width)
{
	if (s->array)
		return array_row(s->handle, s->x, s->y + y, s->z + z, width);
	return s->base + z * s->slice + y * s->pitch;
}

static bool empty(const CUDA_MEMCPY3D_PEER *c)
{
	return !c->WidthInBytes || !c->Height || !c->Depth;
}

static CUresult copy_run(const CUDA_MEMCPY3D_PEER *c)
{
	struct side src, dst;
	if (empty(c))
		return CUDA_SUCCESS;
	if (!sides(c, &src, &dst))
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t z = 0; z < c->Depth; z++)
		for (size_t y = 0; y < c->Height; y++)
			memmove(row(&dst, y, z, c->WidthInBytes), row(&src, y, z, c->WidthInBytes), c->WidthInBytes);
	return CUDA_SUCCESS;
}

static bool set_valid(const CUDA_MEMSET_NODE_PARAMS *s)
{
	size_t width = s->width * s->elementSize;
	if (!s->width || !s->height)
		return true;
	if (s->elementSize != 1 && s->elementSize != 2 && s->elementSize != 4)
		return false;
	if (s->dst % s->elementSize || (s->height > 1 && (s->pitch < width || s->pitch % s->elementSize)))
		return false;
	size_t bytes = (s->height - 1) * s->pitch + width;
	if (sim_mem_is_device(s->dst, bytes, NULL))
		return true;
	mem_lock();
	struct mem_range *r = mem_find(s->dst);
	bool ok = r && r->gpu < 0 && s->dst + bytes <= r->base + r->size;
	mem_unlock();
	return ok;
}

/* Device memory set to zero is as good as untouched: gives the pages back. False: not that kind. */
static bool zero_pages(uint8_t *p, size_t bytes)
{
	uintptr_t first = MEM_ROUND((uintptr_t)p, 4096), last = ((uintptr_t)p + bytes) & ~4095ul;
	if (bytes < MEM_SMALL || madvise((void *)first, last - first, MADV_REMOVE))
		return false;
	memset(p, 0, first - (uintptr_t)p);
	memset((void *)last, 0, (uintptr_t)p + bytes - last);
	return true;
}

static void set_row(uint8_t *p, unsigned value, unsigned element, size_t n)
{
	if (!value && zero_pages(p, n * element))
		return;
	if (element == 1) {
		memset(p, (int)value, n);
		return;
	}
	for (size_t i = 0; i < n; i++)
		memcpy(p + i * element, &value, element); /* little endian */
}

static CUresult set_run(const CUDA_MEMSET_NODE_PARAMS *s)
{
	if (!set_valid(s))
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t y = 0; s->width && y < s->height; y++)
		set_row((uint8_t *)(uintptr_t)s->dst + y * s->pitch, s->value, s->elementSize, s->width);
	return CUDA_SUCCESS;
}

CUresult sim_memop_run(const struct sim_memop *op)
{
	return op->kind == SIM_MEMOP_COPY ? copy_run(&op->copy) : set_run(&op->set);
}

CUresult sim_memop_check(const struct sim_memop *op)
{
	struct side src, dst;
	bool ok = op->kind == SIM_MEMOP_MEMSET ? set_valid(&op->set) :
						 empty(&op->copy) || sides(&op->copy, &src, &dst);
	return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

uint64_t sim_memop_bytes(const struct sim_memop *op, int *direction)
{
	struct side src, dst;
	int way = 3;
	if (op->kind == SIM_MEMOP_MEMSET) {
		if (direction)
			*direction = way;
		return op->set.width * op->set.elementSize * op->set.height;
	}
	const CUDA_MEMCPY3D_PEER *c = &op->copy;
	if (direction && !empty(c) && sides(c, &src, &dst))
		way = !src.device ? dst.device : !dst.device ? 2 : src.gpu == dst.gpu ? 3 : 4;
	if (direction)
		*direction = way;
	return c->WidthInBytes * c->Height * c->Depth;
}

void sim_memop_linear(struct sim_memop *op, uint64_t dst, uint64_t src, size_t bytes)
{
	memset(op, 0, sizeof *op);
	op->kind = SIM_MEMOP_COPY;
	op->copy.srcMemoryType = op->copy.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
	op->copy.srcDevice = src;
	op->copy.dstDevice = dst;
	op->copy.WidthInBytes = bytes;
	op->copy.Height = op->copy.Depth = 1;
}

void sim_memop_3d(struct sim_memop *op, const CUDA_MEMCPY3D *c)
{
	/* The two structs differ in two pointers that only the peer form has a meaning for. */
	_Static_assert(sizeof(CUDA_MEMCPY3D) == sizeof(CUDA_MEMCPY3D_PEER), "abi");
	op->kind = SIM_MEMOP_COPY;
	memcpy(&op->copy, c, sizeof op->copy);
	op->copy.srcContext = op->copy.dstContext = NULL;
}
