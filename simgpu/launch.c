/* Launching kernels: today's calls and those of the first CUDA. */
#include <string.h>
#include "graph.h"

/* spec `launch_ns`: what a launch costs the calling thread. */
static void host_cost(void)
{
	if (!sim_shared->launch_ns)
		return;
	uint64_t end = sim_now_ns() + sim_shared->launch_ns;
	while (sim_now_ns() < end)
		__asm__ volatile("" ::: "memory");
}

static CUresult launch(struct CUctx_st *ctx, CUstream stream, const struct sim_launch *l)
{
	struct CUstream_st *s;
	struct sim_capture *capture;
	struct sim_cost cost;
	CUresult r = sim_begin_op(ctx, stream, &s, &capture);
	if (r)
		return r;
	if (capture) {
		struct sim_node body;
		r = sim_body_kernel(&body, s->ctx, l);
		if (!r)
			return sim_capture_add(s, &body, NULL);
		sim_capture_unlock();
		return r;
	}
	r = sim_kernel_cost(s->ctx, l, &cost);
	if (r)
		return r;
	host_cost();
	return sim_do_kernel(s, &cost);
}

static CUresult launch_plain(struct CUctx_st *ctx, CUfunction f, unsigned gx, unsigned gy, unsigned gz,
			     unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream stream,
			     void **params, void **extra, bool cooperative)
{
	struct sim_launch l = { .f = f, .grid = { gx, gy, gz }, .block = { bx, by, bz },
				.shared = shared, .params = params, .extra = extra,
				.cooperative = cooperative };
	return launch(ctx, stream, &l);
}

CUresult cuLaunchKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
			unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,
			unsigned int sharedMemBytes, CUstream hStream, void **kernelParams, void **extra)
{
	SIM_CALL_CTX(cuLaunchKernel, ctx);
	return launch_plain(ctx, f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ,
			    sharedMemBytes, hStream, kernelParams, extra, false);
}

CUresult cuLaunchKernel_ptsz(CUfunction f, unsigned int gridDimX, unsigned int gridDimY,
			     unsigned int gridDimZ, unsigned int blockDimX, unsigned int blockDimY,
			     unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream hStream,
			     void **kernelParams, void **extra)
{
	SIM_CALL_CTX(cuLaunchKernel_ptsz, ctx);
	return launch_plain(ctx, f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ,
			    sharedMemBytes, sim_pt(hStream), kernelParams, extra, false);
}

CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY,
				   unsigned int gridDimZ, unsigned int blockDimX, unsigned int blockDimY,
				   unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream hStream,
				   void **kernelParams)
{
	SIM_CALL_CTX(cuLaunchCooperativeKernel, ctx);
	return launch_plain(ctx, f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ,
			    sharedMemBytes, hStream, kernelParams, NULL, true);
}

CUresult cuLaunchCooperativeKernel_ptsz(CUfunction f, unsigned int gridDimX, unsigned int gridDimY,
					unsigned int gridDimZ, unsigned int blockDimX,
					unsigned int blockDimY, unsigned int blockDimZ,
					unsigned int sharedMemBytes, CUstream hStream, void **kernelParams)
{
	SIM_CALL_CTX(cuLaunchCooperativeKernel_ptsz, ctx);
	return launch_plain(ctx, f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ,
			    sharedMemBytes, sim_pt(hStream), kernelParams, NULL, true);
}

/* Events among the attributes: recorded when the kernel is done (programmatic ones come a little
 * late with that, which is allowed). */
static CUresult record_attr(struct CUctx_st *ctx, CUstream stream, const CUlaunchAttribute *a, bool pt)
{
	CUevent e = a->id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT ? a->value.programmaticEvent.event
		    : a->id == CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT ?
			    a->value.launchCompletionEvent.event : NULL;
	(void)ctx;
	if (!e)
		return CUDA_SUCCESS;
	return pt ? cuEventRecord_ptsz(e, stream) : cuEventRecord(e, stream);
}

static CUresult launch_ex(struct CUctx_st *ctx, const CUlaunchConfig *c, CUfunction f, void **params,
			  void **extra, bool pt)
{
	bool cooperative = false;
	if (!c || (c->numAttrs && !c->attrs))
		return CUDA_ERROR_INVALID_VALUE;
	for (unsigned i = 0; i < c->numAttrs; i++)
		if (c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
			cooperative = c->attrs[i].value.cooperative != 0;
	CUresult r = launch_plain(ctx, f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX,
				  c->blockDimY, c->blockDimZ, c->sharedMemBytes,
				  pt ? sim_pt(c->hStream) : c->hStream, params, extra, cooperative);
	for (unsigned i = 0; i < c->numAttrs && !r; i++)
		r = record_attr(ctx, c->hStream, &c->attrs[i], pt);
	return r;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra)
{
	SIM_CALL_CTX(cuLaunchKernelEx, ctx);
	return launch_ex(ctx, config, f, kernelParams, extra, false);
}

CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction f, void **kernelParams,
			       void **extra)
{
	SIM_CALL_CTX(cuLaunchKernelEx_ptsz, ctx);
	return launch_ex(ctx, config, f, kernelParams, extra, true);
}

CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *launchParamsList, unsigned int numDevices,
					      unsigned int flags)
{
	SIM_CALL_CTX(cuLaunchCooperativeKernelMultiDevice, ctx);
	if (!launchParamsList || !numDevices || (flags & ~3u))
		return CUDA_ERROR_INVALID_VALUE;
	for (unsigned i = 0; i < numDevices; i++) { /* streams of distinct devices, none a default one */
		const CUDA_LAUNCH_PARAMS *p = &launchParamsList[i];
		struct CUstream_st *s;
		if (!p->hStream || p->hStream == CU_STREAM_LEGACY_HANDLE ||
		    p->hStream == CU_STREAM_PER_THREAD_HANDLE)
			return CUDA_ERROR_INVALID_VALUE;
		CUresult r = sim_stream_of(ctx, p->hStream, &s);
		for (unsigned k = 0; k < i && !r; k++)
			if (launchParamsList[k].hStream->ctx->gpu == s->ctx->gpu)
				r = CUDA_ERROR_INVALID_VALUE;
		if (r)
			return r;
	}
	for (unsigned i = 0; i < numDevices; i++) {
		const CUDA_LAUNCH_PARAMS *p = &launchParamsList[i];
		CUresult r = launch_plain(ctx, p->function, p->gridDimX, p->gridDimY, p->gridDimZ,
					  p->blockDimX, p->blockDimY, p->blockDimZ, p->sharedMemBytes,
					  p->hStream, p->kernelParams, NULL, true);
		if (r)
			return r;
	}
	return CUDA_SUCCESS;
}

/* --- of old ----------------------------------------------------------------------------------------- */

static CUresult launch_old(struct CUctx_st *ctx, CUfunction h, int w, int height, CUstream stream)
{
	struct CUfunc_st *f = sim_func_of(h);
	if (!f)
		return CUDA_ERROR_INVALID_HANDLE;
	if (w <= 0 || height <= 0)
		return CUDA_ERROR_INVALID_VALUE;
	size_t size = sizeof f->param;
	void *extra[] = { (void *)1, f->param, (void *)2, &size, NULL };
	return launch_plain(ctx, h, (unsigned)w, (unsigned)height, 1, (unsigned)(f->block_x ? f->block_x : 1),
			    (unsigned)(f->block_y ? f->block_y : 1), (unsigned)(f->block_z ? f->block_z : 1),
			    f->shared_dynamic, stream, NULL, extra, false);
}

CUresult cuLaunch(CUfunction f)
{
	SIM_CALL_CTX(cuLaunch, ctx);
	return launch_old(ctx, f, 1, 1, NULL);
}

CUresult cuLaunchGrid(CUfunction f, int grid_width, int grid_height)
{
	SIM_CALL_CTX(cuLaunchGrid, ctx);
	return launch_old(ctx, f, grid_width, grid_height, NULL);
}

CUresult cuLaunchGridAsync(CUfunction f, int grid_width, int grid_height, CUstream hStream)
{
	SIM_CALL_CTX(cuLaunchGridAsync, ctx);
	return launch_old(ctx, f, grid_width, grid_height, hStream);
}

CUresult cuFuncSetBlockShape(CUfunction hfunc, int x, int y, int z)
{
	SIM_CALL(cuFuncSetBlockShape);
	struct CUfunc_st *f = sim_func_of(hfunc);
	if (!f)
		return CUDA_ERROR_INVALID_HANDLE;
	if (x <= 0 || y <= 0 || z <= 0)
		return CUDA_ERROR_INVALID_VALUE;
	f->block_x = x;
	f->block_y = y;
	f->block_z = z;
	return CUDA_SUCCESS;
}

CUresult cuFuncSetSharedSize(CUfunction hfunc, unsigned int bytes)
{
	SIM_CALL(cuFuncSetSharedSize);
	struct CUfunc_st *f = sim_func_of(hfunc);
	if (!f)
		return CUDA_ERROR_INVALID_HANDLE;
	f->shared_dynamic = bytes;
	return CUDA_SUCCESS;
}

CUresult cuParamSetSize(CUfunction hfunc, unsigned int numbytes)
{
	SIM_CALL(cuParamSetSize);
	struct CUfunc_st *f = sim_func_of(hfunc);
	if (!f)
		return CUDA_ERROR_INVALID_HANDLE;
	if (numbytes > sizeof f->param)
		return CUDA_ERROR_INVALID_VALUE;
	f->param_size = numbytes;
	return CUDA_SUCCESS;
}

static CUresult set_param(CUfunction h, int offset, const void *p, unsigned n)
{
	struct CUfunc_st *f = sim_func_of(h);
	if (!f)
		return CUDA_ERROR_INVALID_HANDLE;
	if (!p || offset < 0 || n > sizeof f->param || (unsigned)offset > sizeof f->param - n)
		return CUDA_ERROR_INVALID_VALUE;
	memcpy(f->param + offset, p, n);
	return CUDA_SUCCESS;
}

CUresult cuParamSeti(CUfunction hfunc, int offset, unsigned int value)
{
	SIM_CALL(cuParamSeti);
	return set_param(hfunc, offset, &value, sizeof value);
}

CUresult cuParamSetf(CUfunction hfunc, int offset, float value)
{
	SIM_CALL(cuParamSetf);
	return set_param(hfunc, offset, &value, sizeof value);
}

CUresult cuParamSetv(CUfunction hfunc, int offset, void *ptr, unsigned int numbytes)
{
	SIM_CALL(cuParamSetv);
	return set_param(hfunc, offset, ptr, numbytes);
}
