/* Arrays and mipmapped arrays. Their memory has no address for the application. They are charged
 * what the hardware's layout takes and keep their bytes, row after row, in host memory from the first
 * copy on. */
#include <stdlib.h>
#include <string.h>
#include "mem.h"

#define ARRAY_MAGIC 0x41525259u
#define MIPMAP_MAGIC 0x4d495053u
#define ALLOCATION (64ull << 10) /* unit of charging */
#define GOB_WIDTH 64ull
#define GOB_HEIGHT 8ull
#define MAX_LEVELS 17

#define FLAG_LAYERED 0x01u
#define FLAG_CUBEMAP 0x04u
#define FLAG_SPARSE 0x40u
#define FLAG_DEFERRED 0x80u

struct CUarray_st {
	uint32_t magic;
	int gpu;
	struct CUctx_st *ctx;
	CUDA_ARRAY3D_DESCRIPTOR desc;
	struct CUmipmappedArray_st *mipmap; /* a level of it, not charged by itself */
	struct CUarray_st *parent;          /* a plane of it */
	struct CUarray_st *planes[3];
	uint64_t bytes;                     /* charged, 0: nothing */
	uint64_t row, rows, layers;         /* linear layout: bytes in a row, rows in a layer */
	uint8_t *data;
	struct CUarray_st *next;
};

struct CUmipmappedArray_st {
	uint32_t magic;
	int gpu;
	struct CUctx_st *ctx;
	CUDA_ARRAY3D_DESCRIPTOR desc;
	unsigned levels;
	uint64_t bytes;
	struct CUarray_st *level[MAX_LEVELS];
	struct CUmipmappedArray_st *next;
};

static pthread_mutex_t array_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct CUarray_st *arrays;
static struct CUmipmappedArray_st *mipmaps;

/* --- formats --------------------------------------------------------------------------------------- */

/* Bytes of one channel; for block-compressed formats bytes of a 4x4 block and *block is set; for packed
 * formats bytes of an element and *packed is set. 0: no such format. */
static unsigned format_bytes(CUarray_format f, bool *block, bool *packed)
{
	*block = *packed = false;
	switch ((unsigned)f) {
	case 0x01: case 0x08: return 1;
	case 0x02: case 0x09: case 0x10: return 2;
	case 0x03: case 0x0a: case 0x20: return 4;
	case 0xb0: *packed = true; return 1; /* NV12, and half as many rows of chroma */
	case 0xc0: case 0xc6: *packed = true; return 1;
	case 0xc1: case 0xc3: case 0xc7: case 0xc9: *packed = true; return 2;
	case 0xc2: case 0xc4: case 0xc8: case 0xca: *packed = true; return 4;
	case 0xc5: case 0xcb: *packed = true; return 8;
	case 0x91: case 0x92: case 0x97: case 0x98: *block = true; return 8;
	case 0x93: case 0x94: case 0x95: case 0x96: case 0x99: case 0x9a: case 0x9b: case 0x9c: case 0x9d: case 0x9e:
		*block = true;
		return 16;
	default: return 0;
	}
}

struct layout {
	uint64_t row, rows, layers;
};

/* One level's size in bytes, rows and layers. */
static bool layout(const CUDA_ARRAY3D_DESCRIPTOR *d, struct layout *l)
{
	bool block, packed;
	unsigned unit = format_bytes(d->Format, &block, &packed);
	if (!unit || !d->Width || d->Width > 1u << 28 || d->Height > 1u << 20 || d->Depth > 1u << 20)
		return false;
	if (!block && !packed && d->NumChannels != 1 && d->NumChannels != 2 && d->NumChannels != 4)
		return false;
	uint64_t element = block || packed ? unit : unit * d->NumChannels;
	uint64_t h = d->Height ? d->Height : 1;
	l->row = block ? (d->Width + 3) / 4 * element : d->Width * element;
	l->rows = block ? (h + 3) / 4 : (unsigned)d->Format == 0xb0 ? h + (h + 1) / 2 : h;
	l->layers = d->Depth ? d->Depth : 1;
	return true;
}

static uint64_t level_bytes(const struct layout *l)
{
	return MEM_ROUND(l->row, GOB_WIDTH) * MEM_ROUND(l->rows, GOB_HEIGHT) * l->layers;
}

static bool free_of_charge(unsigned flags)
{
	return flags & (FLAG_DEFERRED | FLAG_SPARSE);
}

/* --- arrays ---------------------------------------------------------------------------------------- */

static struct CUarray_st *find(CUarray h)
{
	struct CUarray_st *a = arrays;
	while (a && a != h)
		a = a->next;
	return a;
}

int array_gpu(CUarray h)
{
	pthread_mutex_lock(&array_mutex);
	struct CUarray_st *a = find(h);
	int gpu = a ? a->gpu : -1;
	pthread_mutex_unlock(&array_mutex);
	return gpu;
}

static uint8_t *data_of(struct CUarray_st *a)
{
	if (!a->data)
		a->data = calloc(a->layers * a->rows, a->row);
	return a->data;
}

uint8_t *array_row(CUarray h, size_t x, size_t y, size_t z, size_t width)
{
	uint8_t *p = NULL;
	pthread_mutex_lock(&array_mutex);
	struct CUarray_st *a = find(h);
	if (a && x <= a->row && width <= a->row - x && y < a->rows && z < a->layers && (p = data_of(a)))
		p += (z * a->rows + y) * a->row + x;
	pthread_mutex_unlock(&array_mutex);
	return p;
}

/* array_mutex held. */
static struct CUarray_st *add(struct CUctx_st *ctx, const CUDA_ARRAY3D_DESCRIPTOR *d, const struct layout *l)
{
	struct CUarray_st *a = calloc(1, sizeof *a);
	if (!a)
		return NULL;
	a->magic = ARRAY_MAGIC;
	a->gpu = ctx->gpu;
	a->ctx = ctx;
	a->desc = *d;
	a->row = l->row;
	a->rows = l->rows;
	a->layers = l->layers;
	a->next = arrays;
	arrays = a;
	return a;
}

static void drop(struct CUarray_st *a)
{
	for (struct CUarray_st **at = &arrays; *at; at = &(*at)->next)
		if (*at == a) {
			*at = a->next;
			break;
		}
	for (int i = 0; i < 3; i++)
		if (a->planes[i])
			drop(a->planes[i]);
	if (a->bytes)
		sim_mem_uncharge(a->gpu, a->bytes);
	free(a->data);
	a->magic = 0;
	free(a);
}

static bool charge(int gpu, uint64_t bytes)
{
	mem_lock();
	bool ok = !bytes || mem_charge(gpu, bytes);
	mem_unlock();
	return ok;
}

static CUresult create(struct CUctx_st *ctx, CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *d)
{
	struct layout l;
	if (!out || !layout(d, &l) || (d->Flags & FLAG_CUBEMAP && (d->Width != d->Height || d->Depth % 6)))
		return CUDA_ERROR_INVALID_VALUE;
	CUresult e = sim_capture_guard(ctx);
	if (e)
		return e;
	uint64_t bytes = free_of_charge(d->Flags) ? 0 : MEM_ROUND(level_bytes(&l), ALLOCATION);
	if (!charge(ctx->gpu, bytes))
		return CUDA_ERROR_OUT_OF_MEMORY;
	pthread_mutex_lock(&array_mutex);
	struct CUarray_st *a = add(ctx, d, &l);
	if (a)
		a->bytes = bytes;
	pthread_mutex_unlock(&array_mutex);
	if (!a && bytes)
		sim_mem_uncharge(ctx->gpu, bytes);
	*out = a;
	return a ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

#define ARRAY_CREATE(name, type, depth, flags)                                                     \
	CUresult name(CUarray *pHandle, const type *d)                                             \
	{                                                                                          \
		SIM_CALL_CTX(name, ctx);                                                           \
		if (!d)                                                                            \
			return CUDA_ERROR_INVALID_VALUE;                                           \
		CUDA_ARRAY3D_DESCRIPTOR full = { .Width = d->Width, .Height = d->Height,           \
						 .Depth = depth, .Format = d->Format,              \
						 .NumChannels = d->NumChannels, .Flags = flags };  \
		return create(ctx, pHandle, &full);                                                \
	}
ARRAY_CREATE(cuArrayCreate, CUDA_ARRAY_DESCRIPTOR_v1, 0, 0)
ARRAY_CREATE(cuArrayCreate_v2, CUDA_ARRAY_DESCRIPTOR, 0, 0)
ARRAY_CREATE(cuArray3DCreate, CUDA_ARRAY3D_DESCRIPTOR_v1, d->Depth, d->Flags)
ARRAY_CREATE(cuArray3DCreate_v2, CUDA_ARRAY3D_DESCRIPTOR, d->Depth, d->Flags)

CUresult cuArrayDestroy(CUarray hArray)
{
	SIM_CALL_CTX(cuArrayDestroy, ctx);
	CUresult e = sim_ctx_sync(ctx);
	if (e)
		return e;
	pthread_mutex_lock(&array_mutex);
	struct CUarray_st *a = find(hArray);
	bool ok = a && !a->mipmap && !a->parent;
	if (ok)
		drop(a);
	pthread_mutex_unlock(&array_mutex);
	return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

static bool descriptor(CUarray h, CUDA_ARRAY3D_DESCRIPTOR *d)
{
	pthread_mutex_lock(&array_mutex);
	struct CUarray_st *a = find(h);
	if (a)
		*d = a->desc;
	pthread_mutex_unlock(&array_mutex);
	return a != NULL;
}

#define ARRAY_GET(name, type, width, ...)                                                          \
	CUresult name(type *out, CUarray hArray)                                                   \
	{                                                                                          \
		SIM_CALL(name);                                                                    \
		CUDA_ARRAY3D_DESCRIPTOR d;                                                         \
		if (!out)                                                                          \
			return CUDA_ERROR_INVALID_VALUE;                                           \
		if (!descriptor(hArray, &d))                                                       \
			return CUDA_ERROR_INVALID_HANDLE;                                          \
		*out = (type){ .Width = (width)d.Width, .Height = (width)d.Height, .Format = d.Format, \
			       .NumChannels = d.NumChannels, __VA_ARGS__ };                        \
		return CUDA_SUCCESS;                                                               \
	}
ARRAY_GET(cuArrayGetDescriptor, CUDA_ARRAY_DESCRIPTOR_v1, unsigned)
ARRAY_GET(cuArrayGetDescriptor_v2, CUDA_ARRAY_DESCRIPTOR, size_t)
ARRAY_GET(cuArray3DGetDescriptor, CUDA_ARRAY3D_DESCRIPTOR_v1, unsigned, .Depth = (unsigned)d.Depth, .Flags = d.Flags)
ARRAY_GET(cuArray3DGetDescriptor_v2, CUDA_ARRAY3D_DESCRIPTOR, size_t, .Depth = d.Depth, .Flags = d.Flags)

CUresult cuArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *m, CUarray array, CUdevice device)
{
	SIM_CALL(cuArrayGetMemoryRequirements);
	CUDA_ARRAY3D_DESCRIPTOR d;
	struct layout l;
	if (!m || sim_dev_gpu(device) < 0)
		return CUDA_ERROR_INVALID_VALUE;
	if (!descriptor(array, &d) || !layout(&d, &l))
		return CUDA_ERROR_INVALID_HANDLE;
	if (!(d.Flags & FLAG_DEFERRED)) /* only these have their memory mapped by the application */
		return CUDA_ERROR_INVALID_VALUE;
	memset(m, 0, sizeof *m);
	m->size = MEM_ROUND(level_bytes(&l), ALLOCATION);
	m->alignment = ALLOCATION;
	return CUDA_SUCCESS;
}

static CUresult sparse(CUDA_ARRAY_SPARSE_PROPERTIES *p, unsigned flags)
{
	if (!p || !(flags & FLAG_SPARSE))
		return CUDA_ERROR_INVALID_VALUE;
	memset(p, 0, sizeof *p);
	p->tileExtent.width = p->tileExtent.height = 128;
	p->tileExtent.depth = 1;
	return CUDA_SUCCESS;
}

CUresult cuArrayGetSparseProperties(CUDA_ARRAY_SPARSE_PROPERTIES *sparseProperties, CUarray array)
{
	SIM_CALL(cuArrayGetSparseProperties);
	CUDA_ARRAY3D_DESCRIPTOR d;
	return descriptor(array, &d) ? sparse(sparseProperties, d.Flags) : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuArrayGetPlane(CUarray *pPlaneArray, CUarray hArray, unsigned int planeIdx)
{
	SIM_CALL_CTX(cuArrayGetPlane, ctx);
	CUresult e = CUDA_ERROR_INVALID_VALUE;
	if (!pPlaneArray)
		return e;
	pthread_mutex_lock(&array_mutex);
	struct CUarray_st *a = find(hArray);
	if (a && (unsigned)a->desc.Format == 0xb0 && planeIdx < 2) {
		CUDA_ARRAY3D_DESCRIPTOR d = a->desc;
		struct layout l;
		d.Format = CU_AD_FORMAT_UNSIGNED_INT8;
		d.NumChannels = planeIdx + 1;
		d.Width >>= planeIdx;
		d.Height >>= planeIdx;
		if (!a->planes[planeIdx] && layout(&d, &l) && (a->planes[planeIdx] = add(ctx, &d, &l)))
			a->planes[planeIdx]->parent = a;
		*pPlaneArray = a->planes[planeIdx];
		e = *pPlaneArray ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
	}
	pthread_mutex_unlock(&array_mutex);
	return e;
}

/* --- mipmapped arrays --------------------------------------------------------------------------------- */

static void shrink(CUDA_ARRAY3D_DESCRIPTOR *d)
{
	d->Width = d->Width > 1 ? d->Width / 2 : 1;
	d->Height = d->Height > 1 ? d->Height / 2 : d->Height;
	if (!(d->Flags & (FLAG_LAYERED | FLAG_CUBEMAP)))
		d->Depth = d->Depth > 1 ? d->Depth / 2 : d->Depth;
}

static unsigned max_levels(const CUDA_ARRAY3D_DESCRIPTOR *d)
{
	size_t n = d->Width > d->Height ? d->Width : d->Height;
	if (!(d->Flags & (FLAG_LAYERED | FLAG_CUBEMAP)) && d->Depth > n)
		n = d->Depth;
	unsigned levels = 1;
	while (n >>= 1)
		levels++;
	return levels < MAX_LEVELS ? levels : MAX_LEVELS;
}

static uint64_t mipmap_bytes(CUDA_ARRAY3D_DESCRIPTOR d, unsigned levels)
{
	struct layout l;
	uint64_t n = 0;
	for (unsigned i = 0; i < levels; i++, shrink(&d))
		n += layout(&d, &l) ? level_bytes(&l) : 0;
	return MEM_ROUND(n, ALLOCATION);
}

CUresult cuMipmappedArrayCreate(CUmipmappedArray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *desc,
				unsigned int numMipmapLevels)
{
	SIM_CALL_CTX(cuMipmappedArrayCreate, ctx);
	struct layout l;
	if (!pHandle || !desc || !layout(desc, &l) || !numMipmapLevels)
		return CUDA_ERROR_INVALID_VALUE;
	CUresult e = sim_capture_guard(ctx);
	if (e)
		return e;
	unsigned levels = numMipmapLevels < max_levels(desc) ? numMipmapLevels : max_levels(desc);
	uint64_t bytes = free_of_charge(desc->Flags) ? 0 : mipmap_bytes(*desc, levels);
	struct CUmipmappedArray_st *m = calloc(1, sizeof *m);
	if (!m || !charge(ctx->gpu, bytes)) {
		free(m);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*m = (struct CUmipmappedArray_st){ .magic = MIPMAP_MAGIC, .gpu = ctx->gpu, .ctx = ctx, .desc = *desc,
					   .levels = levels, .bytes = bytes };
	pthread_mutex_lock(&array_mutex);
	m->next = mipmaps;
	mipmaps = m;
	pthread_mutex_unlock(&array_mutex);
	*pHandle = m;
	return CUDA_SUCCESS;
}

static struct CUmipmappedArray_st *find_mipmap(CUmipmappedArray h)
{
	struct CUmipmappedArray_st *m = mipmaps;
	while (m && m != h)
		m = m->next;
	return m;
}

CUresult cuMipmappedArrayGetLevel(CUarray *pLevelArray, CUmipmappedArray hMipmappedArray, unsigned int level)
{
	SIM_CALL_CTX(cuMipmappedArrayGetLevel, ctx);
	CUresult e = CUDA_SUCCESS;
	struct layout l;
	pthread_mutex_lock(&array_mutex);
	struct CUmipmappedArray_st *m = find_mipmap(hMipmappedArray);
	if (!m || !pLevelArray || level >= m->levels) {
		e = m ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
	} else if (!m->level[level]) {
		CUDA_ARRAY3D_DESCRIPTOR d = m->desc;
		for (unsigned i = 0; i < level; i++)
			shrink(&d);
		m->level[level] = layout(&d, &l) ? add(ctx, &d, &l) : NULL;
		if (m->level[level])
			m->level[level]->mipmap = m;
		else
			e = CUDA_ERROR_OUT_OF_MEMORY;
	}
	if (!e)
		*pLevelArray = m->level[level];
	pthread_mutex_unlock(&array_mutex);
	return e;
}

static void drop_mipmap(struct CUmipmappedArray_st *m)
{
	for (struct CUmipmappedArray_st **at = &mipmaps; *at; at = &(*at)->next)
		if (*at == m) {
			*at = m->next;
			break;
		}
	for (unsigned i = 0; i < m->levels; i++)
		if (m->level[i])
			drop(m->level[i]);
	if (m->bytes)
		sim_mem_uncharge(m->gpu, m->bytes);
	free(m);
}

CUresult cuMipmappedArrayDestroy(CUmipmappedArray hMipmappedArray)
{
	SIM_CALL_CTX(cuMipmappedArrayDestroy, ctx);
	CUresult e = sim_ctx_sync(ctx);
	if (e)
		return e;
	pthread_mutex_lock(&array_mutex);
	struct CUmipmappedArray_st *m = find_mipmap(hMipmappedArray);
	if (m)
		drop_mipmap(m);
	pthread_mutex_unlock(&array_mutex);
	return m ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuMipmappedArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *r, CUmipmappedArray mipmap,
					       CUdevice device)
{
	SIM_CALL(cuMipmappedArrayGetMemoryRequirements);
	CUresult e = CUDA_ERROR_INVALID_VALUE;
	if (!r || sim_dev_gpu(device) < 0)
		return e;
	pthread_mutex_lock(&array_mutex);
	struct CUmipmappedArray_st *m = find_mipmap(mipmap);
	if (m && m->desc.Flags & FLAG_DEFERRED) {
		memset(r, 0, sizeof *r);
		r->size = mipmap_bytes(m->desc, m->levels);
		r->alignment = ALLOCATION;
		e = CUDA_SUCCESS;
	}
	pthread_mutex_unlock(&array_mutex);
	return e;
}

CUresult cuMipmappedArrayGetSparseProperties(CUDA_ARRAY_SPARSE_PROPERTIES *sparseProperties, CUmipmappedArray mipmap)
{
	SIM_CALL(cuMipmappedArrayGetSparseProperties);
	pthread_mutex_lock(&array_mutex);
	struct CUmipmappedArray_st *m = find_mipmap(mipmap);
	unsigned flags = m ? m->desc.Flags : 0;
	pthread_mutex_unlock(&array_mutex);
	return m ? sparse(sparseProperties, flags) : CUDA_ERROR_INVALID_HANDLE;
}

void array_ctx_end(struct CUctx_st *ctx)
{
	pthread_mutex_lock(&array_mutex);
	for (struct CUmipmappedArray_st *m = mipmaps, *next; m; m = next) {
		next = m->next;
		if (m->ctx == ctx)
			drop_mipmap(m);
	}
	for (struct CUarray_st *a = arrays; a;) {
		if (a->ctx == ctx && !a->parent) {
			drop(a);
			a = arrays; /* its planes went too */
		} else {
			a = a->next;
		}
	}
	pthread_mutex_unlock(&array_mutex);
}
