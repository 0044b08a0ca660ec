/* Virtual memory management: physical memory is charged from cuMemCreate until the last handle,
 * the last mapping and the last multicast or array binding are gone. */
#ifndef TRANCHE_VMM_H
#define TRANCHE_VMM_H
void tr_vmm_after_fork(void);
#endif
