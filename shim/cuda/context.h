/* Contexts: which device they are for, and what they are charged. */
#ifndef TRANCHE_CONTEXT_H
#define TRANCHE_CONTEXT_H
void tr_contexts_after_fork(void);
#endif
