/* The cost of an executable graph, by its handle. A graph that has not been measured is a launch
 * of unknown cost like any other: charged a little, launched alone, and the next one of unknown
 * cost waits for its marker. So no walk over its nodes is needed, which could not tell loops,
 * conditional nodes and data-dependent kernels anyway. */
#include "compat.h"
#include "meter.h"

uint64_t tr_graphcost_tag(CUgraphExec exec)
{
	return tr_cost_tag(exec, 0x67726170685f65ull);
}

void tr_graphcost_forget(CUgraphExec exec)
{
	if (!tr_meter_on())
		return;
	tr_lock(&tr_meter.lock);
	tr_cost_forget(tr_graphcost_tag(exec));
	tr_unlock(&tr_meter.lock);
}
