/* Everything on a stream that is neither a kernel nor an event: copies and memsets, host functions,
 * waits for values in memory. */
#include <stdlib.h>
#include <string.h>
#include "graph.h"

/* --- copies ------------------------------------------------------------------------------------------ */

#define COPY_START_NS 1500 /* what a copy costs beside its bytes */

/* Directions as sim_memop_bytes numbers them. */
enum { HOST_HOST, TO_DEVICE, TO_HOST, IN_DEVICE, BETWEEN_DEVICES };

/* MB/s are bytes per microsecond. */
static void copy_desc(const struct sim_model *m, const struct sim_memop *op, struct sim_op_desc *d)
{
	int direction = HOST_HOST;
	uint64_t bytes = sim_memop_bytes(op, &direction);
	uint64_t pcie = m->pcie_mbps ? m->pcie_mbps : 20000, mem = m->mem_mbps ? m->mem_mbps : 1000000;
	bool inside = direction == IN_DEVICE || op->kind == SIM_MEMOP_MEMSET;
	*d = (struct sim_op_desc){ .kind = SIM_OP_COPY };
	d->dur_ns = COPY_START_NS + bytes * 1000 / (inside ? mem : pcie);
	d->copy_engine = inside ? SIM_COPY_D2D : direction == TO_HOST ? SIM_COPY_D2H : SIM_COPY_H2D;
}

/* The bytes move at once, unless something that the host still has to do comes before: then the
 * worker moves them in its turn. Kernels do not touch memory here, so nobody can tell. */
static CUresult move(struct CUstream_st *s, const struct sim_memop *op)
{
	if (!s->ctx->time->actions)
		return sim_memop_run(op);
	CUresult r = sim_memop_check(op);
	if (r)
		return r;
	struct sim_action *a = sim_action_new(SIM_ACT_MEMOP, s->ctx);
	struct sim_memop *copy = malloc(sizeof *copy);
	if (!a || !copy) {
		free(copy);
		free(a);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*copy = *op;
	a->memop = copy;
	return sim_enqueue_action(s, a);
}

static CUresult submit(struct CUstream_st *s, const struct sim_memop *op, struct sim_ticket *t)
{
	struct sim_op_desc d;
	CUresult r = move(s, op);
	if (r)
		return r;
	copy_desc(&sim_ctx_gpu(s->ctx)->model, op, &d);
	return sim_enqueue(s, &d, t, NULL);
}

CUresult sim_do_memop(struct CUstream_st *s, const struct sim_memop *op)
{
	return submit(s, op, NULL);
}

CUresult sim_submit_memop(struct CUctx_st *ctx, CUstream stream, const struct sim_memop *op, bool sync)
{
	struct CUstream_st *s;
	struct sim_capture *capture;
	struct sim_ticket t;
	CUresult r;
	if (sync && (r = sim_capture_guard(ctx)))
		return r;
	r = sim_begin_op(ctx, stream, &s, &capture);
	if (r)
		return r;
	if (capture && sync) {
		sim_capture_unlock();
		sim_capture_invalidate(s);
		return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	}
	if (capture) {
		struct sim_node body = { .type = op->kind == SIM_MEMOP_COPY ? CU_GRAPH_NODE_TYPE_MEMCPY :
									     CU_GRAPH_NODE_TYPE_MEMSET,
					 .ctx = s->ctx };
		body.memop.op = *op;
		r = sim_memop_check(op);
		if (!r)
			return sim_capture_add(s, &body, NULL);
		sim_capture_unlock();
		return r;
	}
	struct CUctx_st *owner = s->ctx;
	r = submit(s, op, &t);
	if (r || !sync || op->kind == SIM_MEMOP_MEMSET)
		return r;
	r = sim_wait(sim_ctx_gpu(owner), &t);
	if (!r)
		sim_mem_on_sync(owner);
	return r;
}

/* --- host functions ------------------------------------------------------------------------------------ */

static CUresult host_func(struct CUctx_st *ctx, CUstream stream, CUhostFn fn, void *arg)
{
	struct CUstream_st *s;
	struct sim_capture *capture;
	if (!fn)
		return CUDA_ERROR_INVALID_VALUE;
	CUresult r = sim_begin_op(ctx, stream, &s, &capture);
	if (r)
		return r;
	if (capture) {
		struct sim_node body = { .type = CU_GRAPH_NODE_TYPE_HOST, .ctx = s->ctx,
					 .host = { .fn = fn, .userData = arg } };
		return sim_capture_add(s, &body, NULL);
	}
	struct sim_action *a = sim_action_new(SIM_ACT_CALL, s->ctx);
	if (a) {
		a->fn = fn;
		a->arg = arg;
	}
	return sim_enqueue_action(s, a);
}

CUresult cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void *userData)
{
	SIM_CALL_CTX(cuLaunchHostFunc, ctx);
	return host_func(ctx, hStream, fn, userData);
}

CUresult cuLaunchHostFunc_ptsz(CUstream hStream, CUhostFn fn, void *userData)
{
	SIM_CALL_CTX(cuLaunchHostFunc_ptsz, ctx);
	return host_func(ctx, sim_pt(hStream), fn, userData);
}

static CUresult add_callback(struct CUctx_st *ctx, CUstream stream, CUstreamCallback callback, void *arg,
			     unsigned flags)
{
	struct CUstream_st *s;
	struct sim_capture *capture;
	if (!callback || flags)
		return CUDA_ERROR_INVALID_VALUE;
	CUresult r = sim_begin_op(ctx, stream, &s, &capture);
	if (r)
		return r;
	if (capture) { /* documented: use cuLaunchHostFunc */
		sim_capture_unlock();
		sim_capture_invalidate(s);
		return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	}
	struct sim_action *a = sim_action_new(SIM_ACT_CALLBACK, s->ctx);
	if (a) {
		a->callback = callback;
		a->stream = stream;
		a->arg = arg;
	}
	return sim_enqueue_action(s, a);
}

CUresult cuStreamAddCallback(CUstream hStream, CUstreamCallback callback, void *userData,
			     unsigned int flags)
{
	SIM_CALL_CTX(cuStreamAddCallback, ctx);
	return add_callback(ctx, hStream, callback, userData, flags);
}

CUresult cuStreamAddCallback_ptsz(CUstream hStream, CUstreamCallback callback, void *userData,
				  unsigned int flags)
{
	SIM_CALL_CTX(cuStreamAddCallback_ptsz, ctx);
	return add_callback(ctx, sim_pt(hStream), callback, userData, flags);
}

/* --- managed memory: attachment has no effect but its place in the stream -------------------------------- */

static CUresult attach(struct CUctx_st *ctx, CUstream stream, CUdeviceptr p, unsigned flags)
{
	struct CUstream_st *s;
	struct sim_capture *capture;
	if (!p || !(flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST ||
		    flags == CU_MEM_ATTACH_SINGLE))
		return CUDA_ERROR_INVALID_VALUE;
	CUresult r = sim_begin_op(ctx, stream, &s, &capture);
	if (!r && capture) {
		sim_capture_unlock();
		sim_capture_invalidate(s);
		r = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	}
	return r;
}

CUresult cuStreamAttachMemAsync(CUstream hStream, CUdeviceptr dptr, size_t length, unsigned int flags)
{
	SIM_CALL_CTX(cuStreamAttachMemAsync, ctx);
	(void)length;
	return attach(ctx, hStream, dptr, flags);
}

CUresult cuStreamAttachMemAsync_ptsz(CUstream hStream, CUdeviceptr dptr, size_t length,
				     unsigned int flags)
{
	SIM_CALL_CTX(cuStreamAttachMemAsync_ptsz, ctx);
	(void)length;
	return attach(ctx, sim_pt(hStream), dptr, flags);
}

/* --- values in memory ------------------------------------------------------------------------------------ */

static CUresult value_op(struct CUstream_st *s, enum sim_action_kind kind, CUdeviceptr addr, uint64_t value,
			 unsigned flags, bool wide)
{
	struct sim_action *a = sim_action_new(kind, s->ctx);
	if (!addr || (addr & (wide ? 7 : 3))) {
		free(a);
		return CUDA_ERROR_INVALID_VALUE;
	}
	if (a) {
		a->addr = addr;
		a->value = value;
		a->flags = flags;
		a->wide = wide;
	}
	return sim_enqueue_action(s, a);
}

static CUresult batch_one(struct CUstream_st *s, const CUstreamBatchMemOpParams *p)
{
	switch (p->operation) {
	case CU_STREAM_MEM_OP_WAIT_VALUE_32:
		return value_op(s, SIM_ACT_WAIT, p->waitValue.address, p->waitValue.value,
				p->waitValue.flags, false);
	case CU_STREAM_MEM_OP_WAIT_VALUE_64:
		return value_op(s, SIM_ACT_WAIT, p->waitValue.address, p->waitValue.value64,
				p->waitValue.flags, true);
	case CU_STREAM_MEM_OP_WRITE_VALUE_32:
		return value_op(s, SIM_ACT_WRITE, p->writeValue.address, p->writeValue.value, 0, false);
	case CU_STREAM_MEM_OP_WRITE_VALUE_64:
		return value_op(s, SIM_ACT_WRITE, p->writeValue.address, p->writeValue.value64, 0, true);
	case CU_STREAM_MEM_OP_BARRIER:
	case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES:
		return CUDA_SUCCESS;
	default:
		return CUDA_ERROR_INVALID_VALUE;
	}
}

CUresult sim_do_batch(struct CUstream_st *s, unsigned n, const CUstreamBatchMemOpParams *op)
{
	CUresult r = CUDA_SUCCESS;
	for (unsigned i = 0; i < n && !r; i++)
		r = batch_one(s, &op[i]);
	return r;
}

static CUresult batch(struct CUctx_st *ctx, CUstream stream, unsigned n, CUstreamBatchMemOpParams *op,
		      unsigned flags)
{
	struct CUstream_st *s;
	struct sim_capture *capture;
	if (!n || n > 256 || !op || flags)
		return CUDA_ERROR_INVALID_VALUE;
	CUresult r = sim_begin_op(ctx, stream, &s, &capture);
	if (r)
		return r;
	if (!capture)
		return sim_do_batch(s, n, op);
	struct sim_node body = { .type = CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, .ctx = s->ctx,
				 .batch = { .op = op, .count = n } };
	return sim_capture_add(s, &body, NULL);
}

static CUresult batch_wait(struct CUctx_st *ctx, CUstream stream, CUdeviceptr addr, uint64_t value,
			   unsigned flags, bool wide)
{
	CUstreamBatchMemOpParams p = { .waitValue = {
		.operation = wide ? CU_STREAM_MEM_OP_WAIT_VALUE_64 : CU_STREAM_MEM_OP_WAIT_VALUE_32,
		.address = addr, .flags = flags } };
	if (wide)
		p.waitValue.value64 = value;
	else
		p.waitValue.value = (cuuint32_t)value;
	return batch(ctx, stream, 1, &p, 0);
}

static CUresult batch_write(struct CUctx_st *ctx, CUstream stream, CUdeviceptr addr, uint64_t value,
			    unsigned flags, bool wide)
{
	CUstreamBatchMemOpParams p = { .writeValue = {
		.operation = wide ? CU_STREAM_MEM_OP_WRITE_VALUE_64 : CU_STREAM_MEM_OP_WRITE_VALUE_32,
		.address = addr, .flags = flags } };
	if (wide)
		p.writeValue.value64 = value;
	else
		p.writeValue.value = (cuuint32_t)value;
	return batch(ctx, stream, 1, &p, 0);
}

/* Four names each: version 1 and 2, NULL as the legacy and as the thread's stream. */
#define VALUE_CALL(name, impl, type, wide, to_stream)                                              \
	CUresult name(CUstream stream, CUdeviceptr addr, type value, unsigned int flags)           \
	{                                                                                          \
		SIM_CALL_CTX(name, ctx);                                                           \
		return impl(ctx, to_stream(stream), addr, value, flags, wide);                     \
	}
#define AS_IS(s) (s)
#define VALUE_CALLS(name, impl, type, wide)                                                        \
	VALUE_CALL(name, impl, type, wide, AS_IS)                                                  \
	VALUE_CALL(name##_ptsz, impl, type, wide, sim_pt)                                          \
	VALUE_CALL(name##_v2, impl, type, wide, AS_IS)                                             \
	VALUE_CALL(name##_v2_ptsz, impl, type, wide, sim_pt)
VALUE_CALLS(cuStreamWaitValue32, batch_wait, cuuint32_t, false)
VALUE_CALLS(cuStreamWaitValue64, batch_wait, cuuint64_t, true)
VALUE_CALLS(cuStreamWriteValue32, batch_write, cuuint32_t, false)
VALUE_CALLS(cuStreamWriteValue64, batch_write, cuuint64_t, true)

#define BATCH_CALL(name, to_stream)                                                                \
	CUresult name(CUstream stream, unsigned int count, CUstreamBatchMemOpParams *paramArray,   \
		      unsigned int flags)                                                          \
	{                                                                                          \
		SIM_CALL_CTX(name, ctx);                                                           \
		return batch(ctx, to_stream(stream), count, paramArray, flags);                    \
	}
BATCH_CALL(cuStreamBatchMemOp, AS_IS)
BATCH_CALL(cuStreamBatchMemOp_ptsz, sim_pt)
BATCH_CALL(cuStreamBatchMemOp_v2, AS_IS)
BATCH_CALL(cuStreamBatchMemOp_v2_ptsz, sim_pt)
