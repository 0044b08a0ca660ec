/* Occupancy: how many blocks of a function fit on a multiprocessor. */
#include "sim.h"

static int ceil_to(int n, int to)
{
	return (n + to - 1) / to * to;
}

static int blocks_per_sm(const struct sim_model *m, const struct CUfunc_st *f, int block, size_t dynamic)
{
	int threads = ceil_to(block, 32);
	int n = (int)m->max_threads_per_sm / threads;
	int by_regs = (int)m->regs_per_sm / (threads * ceil_to(f->regs, 8));
	size_t shared = (size_t)f->shared_static + dynamic;
	if (n > (int)m->max_blocks_per_sm)
		n = (int)m->max_blocks_per_sm;
	if (n > by_regs)
		n = by_regs;
	if (shared && (size_t)n > m->smem_per_sm / shared)
		n = (int)(m->smem_per_sm / shared);
	return n;
}

static CUresult active(int *out, const void *func, int block, size_t dynamic)
{
	struct CUctx_st *ctx;
	CUresult e = sim_ctx_need(&ctx);
	struct CUfunc_st *f = sim_func_of(func);
	if (e)
		return e;
	if (!out || !f || block <= 0)
		return f ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
	*out = block > f->max_threads ? 0 : blocks_per_sm(&sim_ctx_gpu(ctx)->model, f, block, dynamic);
	return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *numBlocks, CUfunction func, int blockSize,
						     size_t dynamicSMemSize)
{
	SIM_CALL(cuOccupancyMaxActiveBlocksPerMultiprocessor);
	return active(numBlocks, func, blockSize, dynamicSMemSize);
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *numBlocks, CUfunction func, int blockSize,
							      size_t dynamicSMemSize, unsigned int flags)
{
	SIM_CALL(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags);
	return flags > 1 ? CUDA_ERROR_INVALID_VALUE : active(numBlocks, func, blockSize, dynamicSMemSize);
}

static CUresult potential(int *grid, int *block, CUfunction func, CUoccupancyB2DSize size_of, size_t dynamic,
			  int limit)
{
	struct CUctx_st *ctx;
	CUresult e = sim_ctx_need(&ctx);
	struct CUfunc_st *f = sim_func_of(func);
	int best = 0, best_threads = 0, best_blocks = 0;
	if (e)
		return e;
	if (!grid || !block || !f)
		return f ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
	int top = limit > 0 && limit < f->max_threads ? limit : f->max_threads;
	for (int b = top / 32 * 32; b > 0; b -= 32) {
		int n = blocks_per_sm(&sim_ctx_gpu(ctx)->model, f, b, size_of ? size_of(b) : dynamic);
		if (n * b <= best_threads)
			continue;
		best = b;
		best_blocks = n;
		best_threads = n * b;
	}
	*block = best;
	*grid = best_blocks * (int)sim_ctx_gpu(ctx)->model.sms;
	return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxPotentialBlockSize(int *minGridSize, int *blockSize, CUfunction func,
					  CUoccupancyB2DSize blockSizeToDynamicSMemSize, size_t dynamicSMemSize,
					  int blockSizeLimit)
{
	SIM_CALL(cuOccupancyMaxPotentialBlockSize);
	return potential(minGridSize, blockSize, func, blockSizeToDynamicSMemSize, dynamicSMemSize, blockSizeLimit);
}

CUresult cuOccupancyMaxPotentialBlockSizeWithFlags(int *minGridSize, int *blockSize, CUfunction func,
						   CUoccupancyB2DSize blockSizeToDynamicSMemSize,
						   size_t dynamicSMemSize, int blockSizeLimit, unsigned int flags)
{
	SIM_CALL(cuOccupancyMaxPotentialBlockSizeWithFlags);
	return flags > 1 ? CUDA_ERROR_INVALID_VALUE :
			   potential(minGridSize, blockSize, func, blockSizeToDynamicSMemSize, dynamicSMemSize,
				     blockSizeLimit);
}

CUresult cuOccupancyAvailableDynamicSMemPerBlock(size_t *dynamicSmemSize, CUfunction func, int numBlocks,
						 int blockSize)
{
	SIM_CALL_CTX(cuOccupancyAvailableDynamicSMemPerBlock, ctx);
	struct CUfunc_st *f = sim_func_of(func);
	if (!dynamicSmemSize || !f || numBlocks <= 0 || blockSize <= 0)
		return CUDA_ERROR_INVALID_VALUE;
	size_t each = sim_ctx_gpu(ctx)->model.smem_per_sm / (size_t)numBlocks;
	size_t top = sim_ctx_gpu(ctx)->model.smem_per_block_optin;
	each = each > top ? top : each;
	*dynamicSmemSize = each > (size_t)f->shared_static ? each - (size_t)f->shared_static : 0;
	return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxPotentialClusterSize(int *clusterSize, CUfunction func, const CUlaunchConfig *config)
{
	SIM_CALL_CTX(cuOccupancyMaxPotentialClusterSize, ctx);
	if (!clusterSize || !sim_func_of(func) || !config)
		return CUDA_ERROR_INVALID_VALUE;
	*clusterSize = sim_ctx_gpu(ctx)->model.cc_major >= 9 ? 8 : 0;
	return CUDA_SUCCESS;
}
