/* nvmlDeviceGetFieldValues: figures by number. */
#include <stdlib.h>
#include "internal.h"
#include "nvml_recovery.h"

static nvmlReturn_t put_u(nvmlFieldValue_t *f, unsigned v)
{
	f->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
	f->value.ullVal = 0;
	f->value.uiVal = v;
	return NVML_SUCCESS;
}

static nvmlReturn_t put_ull(nvmlFieldValue_t *f, unsigned long long v)
{
	f->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
	f->value.ullVal = v;
	return NVML_SUCCESS;
}

static nvmlReturn_t nvlink_field(const struct gpu *g, nvmlFieldValue_t *f)
{
	unsigned peer, up = nvml_links_up(g);
	if (!g->m->nvlinks)
		return NVML_ERROR_NOT_SUPPORTED;
	switch (f->fieldId) {
	case NVML_FI_DEV_NVLINK_LINK_COUNT: return put_u(f, g->m->nvlinks);
	case NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON: return put_u(f, up ? g->b->nvlink_mbps : 0);
	case NVML_FI_DEV_NVLINK_GET_SPEED:
		return put_u(f, f->scopeId < up ? g->b->nvlink_mbps : 0);
	case NVML_FI_DEV_NVLINK_GET_STATE: return put_u(f, f->scopeId < up);
	case NVML_FI_DEV_NVLINK_GET_VERSION: return put_u(f, g->b->nvlink_version);
	case NVML_FI_DEV_NVSWITCH_CONNECTED_LINK_COUNT:
		return put_u(f, nvml_link_peer(g, 0, &peer) == NVML_PEER_SWITCH ? up : 0);
	case NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY:
	case NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY:
	case NVML_FI_DEV_NVLINK_ERROR_DL_CRC: return put_ull(f, 0);
	}
	if (f->fieldId >= NVML_FI_DEV_NVLINK_SPEED_MBPS_L0 &&
	    f->fieldId <= NVML_FI_DEV_NVLINK_SPEED_MBPS_L5) {
		unsigned link = f->fieldId - NVML_FI_DEV_NVLINK_SPEED_MBPS_L0;
		return put_u(f, link < up ? g->b->nvlink_mbps : 0);
	}
	if (f->fieldId >= NVML_FI_DEV_NVLINK_SPEED_MBPS_L6 &&
	    f->fieldId <= NVML_FI_DEV_NVLINK_SPEED_MBPS_L11) {
		unsigned link = 6 + f->fieldId - NVML_FI_DEV_NVLINK_SPEED_MBPS_L6;
		return put_u(f, link < up ? g->b->nvlink_mbps : 0);
	}
	return NVML_ERROR_NOT_SUPPORTED;
}

/* Drivers tell since 570. */
static nvmlReturn_t recovery(const struct gpu *g, nvmlFieldValue_t *f)
{
	if (atoi(sim_shared->driver_version) < 570)
		return NVML_ERROR_NOT_SUPPORTED;
	return put_u(f, __atomic_load_n(&g->s->recovery, __ATOMIC_ACQUIRE));
}

static nvmlReturn_t field(const struct gpu *g, nvmlFieldValue_t *f)
{
	unsigned long long energy;
	switch (f->fieldId) {
	case NVML_FI_DEV_ECC_CURRENT:
	case NVML_FI_DEV_ECC_PENDING: return put_u(f, g->m->ecc != 0);
	case NVML_FI_DEV_POWER_AVERAGE:
	case NVML_FI_DEV_POWER_INSTANT:
		return f->scopeId == NVML_POWER_SCOPE_GPU ? put_u(f, nvml_power_mw(g)) :
							    NVML_ERROR_NOT_SUPPORTED;
	case NVML_FI_DEV_POWER_MIN_LIMIT:
		return f->scopeId == NVML_POWER_SCOPE_GPU ? put_u(f, g->b->power_min_mw) :
							    NVML_ERROR_NOT_SUPPORTED;
	case NVML_FI_DEV_POWER_MAX_LIMIT:
	case NVML_FI_DEV_POWER_DEFAULT_LIMIT:
	case NVML_FI_DEV_POWER_CURRENT_LIMIT:
	case NVML_FI_DEV_POWER_REQUESTED_LIMIT:
		return f->scopeId == NVML_POWER_SCOPE_GPU ? put_u(f, g->m->power_limit_mw) :
							    NVML_ERROR_NOT_SUPPORTED;
	case NVML_FI_DEV_ENERGY:
	case NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION:
		nvmlDeviceGetTotalEnergyConsumption(nvml_handle(g->index), &energy);
		return put_ull(f, energy);
	case NVML_FI_DEV_MEMORY_TEMP:
		return g->b->temp_mem_max ? put_u(f, nvml_temperature(g) + 2) :
					    NVML_ERROR_NOT_SUPPORTED;
	case NVML_FI_DEV_REMAPPED_COR:
	case NVML_FI_DEV_REMAPPED_UNC:
	case NVML_FI_DEV_REMAPPED_PENDING:
	case NVML_FI_DEV_REMAPPED_FAILURE:
		return g->b->row_remap ? put_u(f, 0) : NVML_ERROR_NOT_SUPPORTED;
	case NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: return recovery(g, f);
	case NVML_FI_DEV_PCIE_REPLAY_COUNTER: return put_u(f, 0);
	}
	return nvlink_field(g, f);
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int valuesCount,
				      nvmlFieldValue_t *values)
{
	ENTER_GPU(device, g);
	NEED(values && valuesCount > 0);
	for (int i = 0; i < valuesCount; i++) {
		values[i].timestamp = (long long)sim_realtime_us();
		values[i].latencyUsec = 0;
		values[i].nvmlReturn = field(&g, &values[i]);
	}
	return NVML_SUCCESS;
}
