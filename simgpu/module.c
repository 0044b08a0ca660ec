/* Modules, libraries and functions. Any image is taken for a module that has every function and
 * every global that anybody asks for. */
#include <stdlib.h>
#include <string.h>
#include "mem.h"

#define MODULE_BYTES (64ull << 10) /* what its code takes of device memory */
#define GLOBAL_BYTES 4096

struct global {
	char *name;
	struct mem_range *range;
	struct global *next;
};

struct CUmod_st {
	uint32_t magic;
	bool dead;
	struct CUctx_st *ctx;
	struct CUlib_st *library;
	struct mem_range *code;
	struct global *globals;
	struct CUfunc_st *functions;
	struct CUmod_st *next;
};

struct CUlib_st {
	uint32_t magic;
	bool dead;
	struct CUfunc_st *kernels;
	struct CUlib_st *next;
};

#define MODULE_MAGIC 0x4d4f4455u
#define LIBRARY_MAGIC 0x4c494252u

static pthread_mutex_t module_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct CUmod_st *modules;
static struct CUlib_st *libraries;

/* Handles are compared, never followed before they are known. */
static struct CUmod_st *module_of(CUmodule h)
{
	struct CUmod_st *m = __atomic_load_n(&modules, __ATOMIC_ACQUIRE);
	while (m && m != h)
		m = m->next;
	return m && !m->dead ? m : NULL;
}

static struct CUlib_st *library_of(CUlibrary h)
{
	struct CUlib_st *l = __atomic_load_n(&libraries, __ATOMIC_ACQUIRE);
	while (l && l != h)
		l = l->next;
	return l && !l->dead ? l : NULL;
}

struct CUfunc_st *sim_func_of(const void *h)
{
	/* Launches come here: a look at the magic has to do. Functions are never freed. */
	const struct CUfunc_st *f = h;
	if (!f || (uintptr_t)f % _Alignof(struct CUfunc_st) || f->magic != SIM_FUNC_MAGIC || f->dead)
		return NULL;
	return (struct CUfunc_st *)(uintptr_t)h;
}

/* --- modules ------------------------------------------------------------------------------------- */

static CUresult load(struct CUctx_st *ctx, struct CUlib_st *library, CUmodule *out)
{
	struct CUmod_st *m = calloc(1, sizeof *m);
	if (!m)
		return CUDA_ERROR_OUT_OF_MEMORY;
	mem_lock();
	CUresult e = mem_alloc(ctx, MEM_PLAIN, MODULE_BYTES, false, &m->code);
	if (!e)
		m->code->ctx = NULL; /* cuMemFree of the context's memory leaves it alone */
	mem_unlock();
	if (e) {
		free(m);
		return e;
	}
	m->magic = MODULE_MAGIC;
	m->ctx = ctx;
	m->library = library;
	pthread_mutex_lock(&module_mutex);
	m->next = modules;
	__atomic_store_n(&modules, m, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&module_mutex);
	*out = m;
	return CUDA_SUCCESS;
}

static CUresult load_image(struct CUctx_st *ctx, CUmodule *out, const void *image)
{
	if (!out || !image)
		return CUDA_ERROR_INVALID_VALUE;
	CUresult e = sim_capture_guard(ctx);
	return e ? e : load(ctx, NULL, out);
}

CUresult cuModuleLoad(CUmodule *module, const char *fname)
{
	SIM_CALL_CTX(cuModuleLoad, ctx);
	return load_image(ctx, module, fname);
}

CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
	SIM_CALL_CTX(cuModuleLoadData, ctx);
	return load_image(ctx, module, image);
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int numOptions, CUjit_option *options,
			    void **optionValues)
{
	SIM_CALL_CTX(cuModuleLoadDataEx, ctx);
	if (numOptions && (!options || !optionValues))
		return CUDA_ERROR_INVALID_VALUE;
	return load_image(ctx, module, image);
}

CUresult cuModuleLoadFatBinary(CUmodule *module, const void *fatCubin)
{
	SIM_CALL_CTX(cuModuleLoadFatBinary, ctx);
	return load_image(ctx, module, fatCubin);
}

static void unload(struct CUmod_st *m)
{
	m->dead = true;
	for (struct CUfunc_st *f = m->functions; f; f = f->next)
		f->dead = true;
	mem_lock();
	mem_free(m->code);
	for (struct global *g = m->globals; g; g = g->next)
		mem_free(g->range);
	mem_unlock();
}

CUresult cuModuleUnload(CUmodule hmod)
{
	SIM_CALL_CTX(cuModuleUnload, ctx);
	CUresult e = sim_ctx_sync(ctx);
	if (e)
		return e;
	pthread_mutex_lock(&module_mutex);
	struct CUmod_st *m = module_of(hmod);
	if (m)
		unload(m);
	pthread_mutex_unlock(&module_mutex);
	return m ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

void module_ctx_end(struct CUctx_st *ctx)
{
	pthread_mutex_lock(&module_mutex);
	for (struct CUmod_st *m = modules; m; m = m->next)
		if (!m->dead && m->ctx == ctx)
			unload(m);
	pthread_mutex_unlock(&module_mutex);
}

CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode *mode)
{
	SIM_CALL(cuModuleGetLoadingMode);
	if (!mode)
		return CUDA_ERROR_INVALID_VALUE;
	*mode = CU_MODULE_LAZY_LOADING;
	return CUDA_SUCCESS;
}

/* --- functions ----------------------------------------------------------------------------------- */

static struct CUfunc_st *function(struct CUfunc_st **list, const char *name)
{
	struct CUfunc_st *f;
	for (f = *list; f; f = f->next)
		if (!strcmp(f->name, name))
			return f;
	f = calloc(1, sizeof *f);
	if (!f || !(f->name = strdup(name))) {
		free(f);
		return NULL;
	}
	f->magic = SIM_FUNC_MAGIC;
	f->regs = 32;
	f->max_threads = 1024;
	f->carveout = -1;
	f->block_x = f->block_y = f->block_z = 1;
	f->next = *list;
	*list = f;
	return f;
}

static CUresult module_function(struct CUmod_st *m, const char *name, CUfunction *out)
{
	pthread_mutex_lock(&module_mutex);
	struct CUfunc_st *f = function(&m->functions, name);
	if (f) {
		f->module = m;
		f->ctx = m->ctx;
	}
	pthread_mutex_unlock(&module_mutex);
	*out = f;
	return f ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuModuleGetFunction(CUfunction *hfunc, CUmodule hmod, const char *name)
{
	SIM_CALL_CTX(cuModuleGetFunction, ctx);
	(void)ctx;
	struct CUmod_st *m = module_of(hmod);
	if (!hfunc || !name || !*name)
		return CUDA_ERROR_INVALID_VALUE;
	return m ? module_function(m, name, hfunc) : CUDA_ERROR_INVALID_HANDLE;
}

static unsigned count(const struct CUfunc_st *f)
{
	unsigned n = 0;
	for (; f; f = f->next)
		n++;
	return n;
}

CUresult cuModuleGetFunctionCount(unsigned int *n, CUmodule mod)
{
	SIM_CALL(cuModuleGetFunctionCount);
	struct CUmod_st *m = module_of(mod);
	if (!n || !m)
		return n ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
	*n = count(m->functions);
	return CUDA_SUCCESS;
}

static CUresult global(struct CUctx_st *ctx, struct CUmod_st *m, const char *name, CUdeviceptr *p, size_t *n)
{
	CUresult e = CUDA_SUCCESS;
	pthread_mutex_lock(&module_mutex);
	struct global *g = m->globals;
	while (g && strcmp(g->name, name))
		g = g->next;
	if (!g && (g = calloc(1, sizeof *g))) {
		g->name = strdup(name);
		mem_lock();
		e = mem_alloc(ctx, MEM_PLAIN, GLOBAL_BYTES, false, &g->range);
		if (!e)
			g->range->ctx = NULL;
		mem_unlock();
		if (!e) {
			g->next = m->globals;
			m->globals = g;
		}
	}
	if (!g)
		e = CUDA_ERROR_OUT_OF_MEMORY;
	if (!e && p)
		*p = g->range->base;
	if (!e && n)
		*n = GLOBAL_BYTES;
	pthread_mutex_unlock(&module_mutex);
	return e;
}

CUresult cuModuleGetGlobal_v2(CUdeviceptr *dptr, size_t *bytes, CUmodule hmod, const char *name)
{
	SIM_CALL_CTX(cuModuleGetGlobal_v2, ctx);
	struct CUmod_st *m = module_of(hmod);
	if (!name || !*name || (!dptr && !bytes))
		return CUDA_ERROR_INVALID_VALUE;
	return m ? global(ctx, m, name, dptr, bytes) : CUDA_ERROR_INVALID_HANDLE;
}

/* --- libraries: kernels that belong to no context ------------------------------------------------- */

static CUresult library_load(CUlibrary *out, const void *code)
{
	if (!out || !code)
		return CUDA_ERROR_INVALID_VALUE;
	struct CUlib_st *l = calloc(1, sizeof *l);
	if (!l)
		return CUDA_ERROR_OUT_OF_MEMORY;
	l->magic = LIBRARY_MAGIC;
	pthread_mutex_lock(&module_mutex);
	l->next = libraries;
	__atomic_store_n(&libraries, l, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&module_mutex);
	*out = l;
	return CUDA_SUCCESS;
}

#pragma GCC diagnostic ignored "-Wunused-parameter"
CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jitOptions, void **jitOptionsValues,
			   unsigned int numJitOptions, CUlibraryOption *libraryOptions, void **libraryOptionValues,
			   unsigned int numLibraryOptions)
{
	SIM_CALL(cuLibraryLoadData);
	return library_load(library, code);
}

CUresult cuLibraryLoadFromFile(CUlibrary *library, const char *fileName, CUjit_option *jitOptions,
			       void **jitOptionsValues, unsigned int numJitOptions, CUlibraryOption *libraryOptions,
			       void **libraryOptionValues, unsigned int numLibraryOptions)
{
	SIM_CALL(cuLibraryLoadFromFile);
	return library_load(library, fileName);
}

CUresult cuLibraryUnload(CUlibrary library)
{
	SIM_CALL(cuLibraryUnload);
	pthread_mutex_lock(&module_mutex);
	struct CUlib_st *l = library_of(library);
	if (l) {
		l->dead = true;
		for (struct CUfunc_st *f = l->kernels; f; f = f->next)
			f->dead = true;
		for (struct CUmod_st *m = modules; m; m = m->next)
			if (m->library == l && !m->dead)
				unload(m);
	}
	pthread_mutex_unlock(&module_mutex);
	return l ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuLibraryGetKernel(CUkernel *pKernel, CUlibrary library, const char *name)
{
	SIM_CALL(cuLibraryGetKernel);
	struct CUlib_st *l = library_of(library);
	if (!pKernel || !name || !*name)
		return CUDA_ERROR_INVALID_VALUE;
	if (!l)
		return CUDA_ERROR_INVALID_HANDLE;
	pthread_mutex_lock(&module_mutex);
	struct CUfunc_st *f = function(&l->kernels, name);
	if (f) {
		f->kernel = true;
		f->library = l;
	}
	pthread_mutex_unlock(&module_mutex);
	*pKernel = (CUkernel)(void *)f;
	return f ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuLibraryGetKernelCount(unsigned int *n, CUlibrary lib)
{
	SIM_CALL(cuLibraryGetKernelCount);
	struct CUlib_st *l = library_of(lib);
	if (!n || !l)
		return n ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
	*n = count(l->kernels);
	return CUDA_SUCCESS;
}

/* The library's module in the current context, loaded at first use. */
static CUresult library_module(struct CUctx_st *ctx, CUlibrary h, CUmodule *out)
{
	struct CUlib_st *l = library_of(h);
	if (!l)
		return CUDA_ERROR_INVALID_HANDLE;
	for (struct CUmod_st *m = modules; m; m = m->next)
		if (m->library == l && m->ctx == ctx && !m->dead) {
			*out = m;
			return CUDA_SUCCESS;
		}
	return load(ctx, l, out);
}

CUresult cuLibraryGetModule(CUmodule *pMod, CUlibrary library)
{
	SIM_CALL_CTX(cuLibraryGetModule, ctx);
	return pMod ? library_module(ctx, library, pMod) : CUDA_ERROR_INVALID_VALUE;
}

static CUresult library_global(struct CUctx_st *ctx, CUdeviceptr *p, size_t *n, CUlibrary l, const char *name)
{
	CUmodule m;
	if (!name || (!p && !n))
		return CUDA_ERROR_INVALID_VALUE;
	CUresult e = library_module(ctx, l, &m);
	return e ? e : global(ctx, m, name, p, n);
}

CUresult cuLibraryGetGlobal(CUdeviceptr *dptr, size_t *bytes, CUlibrary library, const char *name)
{
	SIM_CALL_CTX(cuLibraryGetGlobal, ctx);
	return library_global(ctx, dptr, bytes, library, name);
}

CUresult cuLibraryGetManaged(CUdeviceptr *dptr, size_t *bytes, CUlibrary library, const char *name)
{
	SIM_CALL_CTX(cuLibraryGetManaged, ctx);
	return library_global(ctx, dptr, bytes, library, name);
}

CUresult cuKernelGetFunction(CUfunction *pFunc, CUkernel kernel)
{
	SIM_CALL_CTX(cuKernelGetFunction, ctx);
	struct CUfunc_st *k = sim_func_of(kernel);
	CUmodule m;
	if (!pFunc)
		return CUDA_ERROR_INVALID_VALUE;
	if (!k || !k->kernel)
		return CUDA_ERROR_INVALID_HANDLE;
	CUresult e = library_module(ctx, k->library, &m);
	return e ? e : module_function(m, k->name, pFunc);
}

/* --- attributes ---------------------------------------------------------------------------------- */

static CUresult get_attribute(int *pi, CUfunction_attribute a, const struct CUfunc_st *f)
{
	if (!pi || !f)
		return pi ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
	switch (a) {
	case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *pi = f->max_threads; break;
	case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *pi = f->shared_static; break;
	case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES: *pi = 0; break;
	case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: *pi = f->local_bytes; break;
	case CU_FUNC_ATTRIBUTE_NUM_REGS: *pi = f->regs; break;
	case CU_FUNC_ATTRIBUTE_PTX_VERSION: *pi = 70; break;
	case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *pi = 80; break;
	case CU_FUNC_ATTRIBUTE_CACHE_MODE_CA: *pi = 0; break;
	case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
		*pi = f->max_dynamic_shared ? f->max_dynamic_shared : 49152;
		break;
	case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: *pi = f->carveout; break;
	case CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET: *pi = 0; break;
	case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH: *pi = f->cluster_w; break;
	case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT: *pi = f->cluster_h; break;
	case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH: *pi = f->cluster_d; break;
	case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED: *pi = f->nonportable; break;
	case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE: *pi = 0; break;
	default: return CUDA_ERROR_INVALID_VALUE;
	}
	return CUDA_SUCCESS;
}

static CUresult set_attribute(struct CUfunc_st *f, CUfunction_attribute a, int value)
{
	if (!f)
		return CUDA_ERROR_INVALID_HANDLE;
	switch (a) {
	case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: f->max_dynamic_shared = value; break;
	case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: f->carveout = value; break;
	case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH: f->cluster_w = value; break;
	case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT: f->cluster_h = value; break;
	case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH: f->cluster_d = value; break;
	case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED: f->nonportable = value; break;
	case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE: break;
	default: return CUDA_ERROR_INVALID_VALUE;
	}
	return CUDA_SUCCESS;
}

#define ON_FUNCTION(name, params, call)                                                            \
	CUresult name params                                                                       \
	{                                                                                          \
		SIM_CALL(name);                                                                    \
		return call;                                                                       \
	}

static CUresult known(const void *f)
{
	return sim_func_of(f) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

static CUresult name_of(const char **name, const void *h)
{
	struct CUfunc_st *f = sim_func_of(h);
	if (!name || !f)
		return CUDA_ERROR_INVALID_VALUE;
	*name = f->name;
	return CUDA_SUCCESS;
}

static CUresult func_module(CUmodule *out, const void *h)
{
	struct CUfunc_st *f = sim_func_of(h);
	if (!out || !f || !f->module)
		return CUDA_ERROR_INVALID_VALUE;
	*out = f->module;
	return CUDA_SUCCESS;
}

static CUresult loaded(CUfunctionLoadingState *state, const void *h)
{
	if (!state || !sim_func_of(h))
		return CUDA_ERROR_INVALID_VALUE;
	*state = CU_FUNCTION_LOADING_STATE_LOADED;
	return CUDA_SUCCESS;
}

ON_FUNCTION(cuFuncGetAttribute, (int *pi, CUfunction_attribute a, CUfunction f), get_attribute(pi, a, sim_func_of(f)))
ON_FUNCTION(cuKernelGetAttribute, (int *pi, CUfunction_attribute a, CUkernel k, CUdevice dev),
	    get_attribute(pi, a, sim_func_of(k)))
ON_FUNCTION(cuFuncSetAttribute, (CUfunction f, CUfunction_attribute a, int v), set_attribute(sim_func_of(f), a, v))
ON_FUNCTION(cuKernelSetAttribute, (CUfunction_attribute a, int v, CUkernel k, CUdevice dev),
	    set_attribute(sim_func_of(k), a, v))
ON_FUNCTION(cuFuncSetCacheConfig, (CUfunction f, CUfunc_cache c), known(f))
ON_FUNCTION(cuKernelSetCacheConfig, (CUkernel k, CUfunc_cache c, CUdevice dev), known(k))
ON_FUNCTION(cuFuncSetSharedMemConfig, (CUfunction f, CUsharedconfig c), known(f))
ON_FUNCTION(cuFuncGetName, (const char **name, CUfunction f), name_of(name, f))
ON_FUNCTION(cuKernelGetName, (const char **name, CUkernel k), name_of(name, k))
ON_FUNCTION(cuFuncGetModule, (CUmodule *m, CUfunction f), func_module(m, f))
ON_FUNCTION(cuFuncIsLoaded, (CUfunctionLoadingState *state, CUfunction f), loaded(state, f))
ON_FUNCTION(cuFuncLoad, (CUfunction f), known(f))

/* --- the linker: gives back an image that stands for the result -------------------------------------- */

struct CUlinkState_st {
	char image[64];
};

static CUresult link_create(CUlinkState *out)
{
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = calloc(1, sizeof **out);
	if (!*out)
		return CUDA_ERROR_OUT_OF_MEMORY;
	strcpy((*out)->image, ".version 7.0\n.target sm_70\n.address_size 64\n");
	return CUDA_SUCCESS;
}

static CUresult link_add(CUlinkState state, const void *data)
{
	return state && data ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

ON_FUNCTION(cuLinkCreate, (unsigned int n, CUjit_option *o, void **v, CUlinkState *s), link_create(s))
ON_FUNCTION(cuLinkCreate_v2, (unsigned int n, CUjit_option *o, void **v, CUlinkState *s), link_create(s))
ON_FUNCTION(cuLinkAddData, (CUlinkState s, CUjitInputType t, void *data, size_t size, const char *name, unsigned int n,
			    CUjit_option *o, void **v), link_add(s, data))
ON_FUNCTION(cuLinkAddData_v2, (CUlinkState s, CUjitInputType t, void *data, size_t size, const char *name,
			       unsigned int n, CUjit_option *o, void **v), link_add(s, data))
ON_FUNCTION(cuLinkAddFile, (CUlinkState s, CUjitInputType t, const char *path, unsigned int n, CUjit_option *o,
			    void **v), link_add(s, path))
ON_FUNCTION(cuLinkAddFile_v2, (CUlinkState s, CUjitInputType t, const char *path, unsigned int n, CUjit_option *o,
			       void **v), link_add(s, path))

CUresult cuLinkComplete(CUlinkState state, void **cubinOut, size_t *sizeOut)
{
	SIM_CALL(cuLinkComplete);
	if (!state || !cubinOut)
		return CUDA_ERROR_INVALID_VALUE;
	*cubinOut = state->image;
	if (sizeOut)
		*sizeOut = strlen(state->image) + 1;
	return CUDA_SUCCESS;
}

CUresult cuLinkDestroy(CUlinkState state)
{
	SIM_CALL(cuLinkDestroy);
	if (!state)
		return CUDA_ERROR_INVALID_HANDLE;
	free(state);
	return CUDA_SUCCESS;
}
