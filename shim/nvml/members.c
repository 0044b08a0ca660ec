#include "compat.h"
#define _GNU_SOURCE
#include "members.h"
#include <stdlib.h>
#include "ledger.h"
#include "slice.h"

/* The initial PID namespace has this inode on every Linux (PROC_PID_INIT_INO). */
#define INITIAL_PIDNS 0xeffffffcull

/* A process in a namespace below the caller's has another number here, which only the supervisor
 * could know, and it tells the host's. Where that does not help either, the number by which the
 * process knows itself is the best there is. */
static unsigned visible_pid(const struct tr_slot *s, uint64_t own_ns)
{
	if (s->pidns != own_ns && own_ns == INITIAL_PIDNS && s->host_pid != 0)
		return s->host_pid;
	return s->pid;
}

struct tr_members *tr_members(int dev)
{
	const struct tr_ledger *l = tr_ledger();
	struct tr_members *m = malloc(sizeof *m);
	uint32_t pid;
	uint64_t start, ns;
	if (m == NULL)
		return NULL;
	tr_self(&pid, &start, &ns);
	m->n = 0;
	for (int i = 1; i < TR_MAX_PROCS; i++) {
		const struct tr_slot *s = &l->slot[i];
		if (__atomic_load_n(&s->state, __ATOMIC_ACQUIRE) != TR_SLOT_USED ||
		    tr_slot_gone(l, i, ns))
			continue;
		m->list[m->n++] = (struct tr_member){
			.pid = visible_pid(s, ns),
			.host_pid = s->host_pid,
			.same_ns = s->pidns == ns,
			.bytes = tr_slot_bytes(l, i, dev),
		};
	}
	return m;
}

const struct tr_member *tr_member_find(const struct tr_members *m, unsigned nvml_pid)
{
	for (int i = 0; i < m->n; i++)
		if (nvml_pid != 0 && m->list[i].host_pid == nvml_pid)
			return &m->list[i];
	for (int i = 0; i < m->n; i++)
		if (m->list[i].same_ns && m->list[i].pid == nvml_pid)
			return &m->list[i];
	return NULL;
}

const struct tr_member *tr_member_by_pid(const struct tr_members *m, unsigned pid)
{
	for (int i = 0; i < m->n; i++)
		if (m->list[i].pid == pid)
			return &m->list[i];
	return NULL;
}
