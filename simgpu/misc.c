/* What has no better place: profiler switches, undocumented tables, range attributes. */
#include <stdio.h>
#include <string.h>
#include "mem.h"

CUresult cuProfilerInitialize(const char *configFile, const char *outputFile, int outputMode);
CUresult cuProfilerStart(void);
CUresult cuProfilerStop(void);

__attribute__((visibility("default"))) CUresult cuProfilerInitialize(const char *configFile, const char *outputFile,
								    int outputMode)
{
	SIM_CALL(cuProfilerInitialize);
	(void)configFile;
	(void)outputFile;
	(void)outputMode;
	return CUDA_ERROR_NOT_SUPPORTED;
}

__attribute__((visibility("default"))) CUresult cuProfilerStart(void)
{
	SIM_CALL_CTX(cuProfilerStart, ctx);
	(void)ctx;
	return CUDA_SUCCESS;
}

__attribute__((visibility("default"))) CUresult cuProfilerStop(void)
{
	SIM_CALL_CTX(cuProfilerStop, ctx);
	(void)ctx;
	return CUDA_SUCCESS;
}

/* The driver's private tables of functions, by UUID. None is simulated. */
CUresult cuGetExportTable(const void **ppExportTable, const CUuuid *pExportTableId)
{
	SIM_CALL_UNINIT(cuGetExportTable);
	char text[40] = "";
	if (!ppExportTable || !pExportTableId)
		return CUDA_ERROR_INVALID_VALUE;
	for (int i = 0; i < 16; i++)
		snprintf(text + 2 * i, 3, "%02x", (unsigned char)pExportTableId->bytes[i]);
	SIM_TRACE("cuGetExportTable: no table %s", text);
	*ppExportTable = NULL;
	return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuFlushGPUDirectRDMAWrites(CUflushGPUDirectRDMAWritesTarget target, CUflushGPUDirectRDMAWritesScope scope)
{
	SIM_CALL_CTX(cuFlushGPUDirectRDMAWrites, ctx);
	(void)ctx;
	(void)target;
	(void)scope;
	return CUDA_ERROR_NOT_SUPPORTED;
}

static CUresult range_attribute(void *data, size_t n, CUmem_range_attribute a, CUdeviceptr p, size_t count)
{
	if (!data || n < 4 || !count)
		return CUDA_ERROR_INVALID_VALUE;
	mem_lock();
	struct mem_range *r = mem_find(p);
	bool ok = r && r->kind == MEM_MANAGED;
	mem_unlock();
	if (!ok)
		return CUDA_ERROR_INVALID_VALUE;
	/* No advice is kept: read-mostly is off, the others name no device. */
	int v = a == CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY ? 0 : -2;
	for (size_t i = 0; i + 4 <= n; i += 4)
		memcpy((char *)data + i, &v, 4);
	return CUDA_SUCCESS;
}

CUresult cuMemRangeGetAttribute(void *data, size_t dataSize, CUmem_range_attribute attribute, CUdeviceptr devPtr,
				size_t count)
{
	SIM_CALL(cuMemRangeGetAttribute);
	return range_attribute(data, dataSize, attribute, devPtr, count);
}

CUresult cuMemRangeGetAttributes(void **data, size_t *dataSizes, CUmem_range_attribute *attributes,
				 size_t numAttributes, CUdeviceptr devPtr, size_t count)
{
	SIM_CALL(cuMemRangeGetAttributes);
	if (!data || !dataSizes || !attributes || !numAttributes)
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < numAttributes; i++) {
		CUresult e = range_attribute(data[i], dataSizes[i], attributes[i], devPtr, count);
		if (e)
			return e;
	}
	return CUDA_SUCCESS;
}
