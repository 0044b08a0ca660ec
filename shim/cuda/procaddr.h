/* From the driver's own function pointers to our hooks of exactly those entry points. */
#ifndef TRANCHE_PROCADDR_H
#define TRANCHE_PROCADDR_H
void tr_procaddr_init(void);
#endif
