#include "../../../gpuload/ptx.h"
#include "calibrate.h"

static CUmodule module(void)
{
	static CUmodule m;

	if (!m)
		MUST(cuModuleLoadData(&m, spin_ptx));
	return m;
}

const char *kernels_text(void)
{
	return spin_ptx;
}

CUfunction kernel_spin(void)
{
	static CUfunction f;

	if (!f)
		MUST(cuModuleGetFunction(&f, module(), "tranche_spin"));
	return f;
}

CUfunction kernel_stamp(void)
{
	static CUfunction f;

	if (!f)
		MUST(cuModuleGetFunction(&f, module(), "tranche_stamp"));
	return f;
}

CUstream stream_new(void)
{
	CUstream s;

	MUST(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	return s;
}

CUevent event_new(bool timing)
{
	CUevent e;

	MUST(cuEventCreate(&e, timing ? CU_EVENT_DEFAULT : CU_EVENT_DISABLE_TIMING));
	return e;
}

/* One block to each of some 132 multiprocessors: the GPU is as full as with gpuload's. */
void spin(CUstream s, uint64_t ns)
{
	void *args[] = {&ns};

	MUST(cuLaunchKernel(kernel_spin(), 132, 1, 1, 128, 1, 1, 0, s, args, NULL));
}

void poll_event(CUevent e)
{
	CUresult r;

	while ((r = cu.cuEventQuery(e)) == CUDA_ERROR_NOT_READY)
		;
	driver_must(r, "cuEventQuery");
}

double elapsed_us(CUevent a, CUevent b)
{
	float ms;

	if (!cu.cuEventElapsedTime)
		die("the driver has no cuEventElapsedTime");
	MUST(cuEventElapsedTime(&ms, a, b));
	return (double)ms * 1e3;
}

bool kernels_run(void)
{
	uint64_t word[STAMP_GAP] = {0}, ns = 1000, room = 0;
	CUdeviceptr at;

	if (!cu.cuMemsetD8_v2 || !cu.cuMemcpyDtoH_v2)
		die("the driver copies no memory");
	MUST(cuMemAlloc_v2(&at, sizeof word));
	MUST(cuMemsetD8_v2(at, 0, sizeof word));
	void *args[] = {&ns, &at, &room};
	MUST(cuLaunchKernel(kernel_stamp(), 1, 1, 1, 1, 1, 1, 0, NULL, args, NULL));
	MUST(cuCtxSynchronize());
	MUST(cuMemcpyDtoH_v2(word, at, sizeof word));
	MUST(cuMemFree_v2(at));
	return word[STAMP_END_NS] > word[STAMP_START_NS];
}
