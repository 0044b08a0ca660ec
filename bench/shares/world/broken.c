/* A charge that is wrong on purpose: half of the busy time is reported. Linked into process-broken.so
 * in front of the shipped function; the suite must turn red. */
#include "compat.h"
#include "meter.h"

void __real_tr_credit_report(int dev, int64_t busy_ns, int64_t settle_ns);
void __wrap_tr_credit_report(int dev, int64_t busy_ns, int64_t settle_ns);
void __wrap_tr_credit_report(int dev, int64_t busy_ns, int64_t settle_ns)
{
	int64_t half = busy_ns / 2;
	__real_tr_credit_report(dev, busy_ns - half, settle_ns - half);
}
