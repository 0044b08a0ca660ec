/* Texture and surface objects: handles that remember what they were made from. */
#include <stdlib.h>
#include "sim.h"

struct object {
	uint64_t id;
	bool surface;
	CUDA_RESOURCE_DESC resource;
	CUDA_TEXTURE_DESC texture;
	CUDA_RESOURCE_VIEW_DESC view;
	bool has_view;
	struct object *next;
};

static pthread_mutex_t texture_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct object *objects;
static uint64_t next_id = 1;

static CUresult create(unsigned long long *out, const CUDA_RESOURCE_DESC *r, const CUDA_TEXTURE_DESC *t,
		       const CUDA_RESOURCE_VIEW_DESC *v, bool surface)
{
	if (!out || !r || (!surface && !t))
		return CUDA_ERROR_INVALID_VALUE;
	struct object *o = calloc(1, sizeof *o);
	if (!o)
		return CUDA_ERROR_OUT_OF_MEMORY;
	o->surface = surface;
	o->resource = *r;
	if (t)
		o->texture = *t;
	if (v)
		o->view = *v;
	o->has_view = v != NULL;
	pthread_mutex_lock(&texture_mutex);
	o->id = next_id++;
	o->next = objects;
	objects = o;
	pthread_mutex_unlock(&texture_mutex);
	*out = o->id;
	return CUDA_SUCCESS;
}

static struct object **find(unsigned long long id, bool surface)
{
	struct object **at = &objects;
	while (*at && ((*at)->id != id || (*at)->surface != surface))
		at = &(*at)->next;
	return at;
}

static CUresult destroy(unsigned long long id, bool surface)
{
	pthread_mutex_lock(&texture_mutex);
	struct object **at = find(id, surface), *o = *at;
	if (o)
		*at = o->next;
	pthread_mutex_unlock(&texture_mutex);
	free(o);
	return o ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static bool get(unsigned long long id, bool surface, struct object *out)
{
	pthread_mutex_lock(&texture_mutex);
	struct object *o = *find(id, surface);
	if (o)
		*out = *o;
	pthread_mutex_unlock(&texture_mutex);
	return o != NULL;
}

CUresult cuTexObjectCreate(CUtexObject *pTexObject, const CUDA_RESOURCE_DESC *pResDesc,
			   const CUDA_TEXTURE_DESC *pTexDesc, const CUDA_RESOURCE_VIEW_DESC *pResViewDesc)
{
	SIM_CALL_CTX(cuTexObjectCreate, ctx);
	(void)ctx;
	return create(pTexObject, pResDesc, pTexDesc, pResViewDesc, false);
}

CUresult cuTexObjectDestroy(CUtexObject texObject)
{
	SIM_CALL(cuTexObjectDestroy);
	return destroy(texObject, false);
}

CUresult cuSurfObjectCreate(CUsurfObject *pSurfObject, const CUDA_RESOURCE_DESC *pResDesc)
{
	SIM_CALL_CTX(cuSurfObjectCreate, ctx);
	(void)ctx;
	return create(pSurfObject, pResDesc, NULL, NULL, true);
}

CUresult cuSurfObjectDestroy(CUsurfObject surfObject)
{
	SIM_CALL(cuSurfObjectDestroy);
	return destroy(surfObject, true);
}

#define GET(name, type, surface, field, condition)                                                 \
	CUresult name(type *out, unsigned long long id)                                            \
	{                                                                                          \
		struct object o;                                                                   \
		SIM_CALL(name);                                                                    \
		if (!out || !get(id, surface, &o) || !(condition))                                 \
			return CUDA_ERROR_INVALID_VALUE;                                           \
		*out = o.field;                                                                    \
		return CUDA_SUCCESS;                                                               \
	}
GET(cuTexObjectGetResourceDesc, CUDA_RESOURCE_DESC, false, resource, true)
GET(cuTexObjectGetTextureDesc, CUDA_TEXTURE_DESC, false, texture, true)
GET(cuTexObjectGetResourceViewDesc, CUDA_RESOURCE_VIEW_DESC, false, view, o.has_view)
GET(cuSurfObjectGetResourceDesc, CUDA_RESOURCE_DESC, true, resource, true)
