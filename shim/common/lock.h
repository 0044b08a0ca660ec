/* A lock for the threads of one process: a futex word, one locked instruction each way when free.
 * Never shared between processes, so nobody can die with it and leave others waiting. */
#ifndef TRANCHE_LOCK_H
#define TRANCHE_LOCK_H
#include <linux/futex.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

struct tr_lock {
	uint32_t word; /* 0 free, 1 held, 2 held and somebody waits */
};

static inline void tr_lock_slow(struct tr_lock *l)
{
	for (int spin = 0; spin < 100; spin++) {
		uint32_t zero = 0;
		if (__atomic_load_n(&l->word, __ATOMIC_RELAXED) == 0 &&
		    __atomic_compare_exchange_n(&l->word, &zero, 1, 0, __ATOMIC_ACQUIRE,
						__ATOMIC_RELAXED))
			return;
	}
	while (__atomic_exchange_n(&l->word, 2, __ATOMIC_ACQUIRE) != 0)
		syscall(SYS_futex, &l->word, FUTEX_WAIT_PRIVATE, 2, NULL, NULL, 0);
}

static inline void tr_lock(struct tr_lock *l)
{
	uint32_t zero = 0;
	if (!__atomic_compare_exchange_n(&l->word, &zero, 1, 0, __ATOMIC_ACQUIRE,
					 __ATOMIC_RELAXED))
		tr_lock_slow(l);
}

static inline void tr_unlock(struct tr_lock *l)
{
	if (__atomic_exchange_n(&l->word, 0, __ATOMIC_RELEASE) == 2)
		syscall(SYS_futex, &l->word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}
#endif
