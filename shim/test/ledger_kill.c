/* The ledger under fire: processes charge and give back at random and are killed at random; some
 * leave a child behind. At every look the account must not be below what living processes hold,
 * nor above the limit, and at the end it is exactly zero.
 *
 *   ledger_kill FILE PROCESSES SECONDS [SEED]
 *
 * Every worker keeps, in memory shared with the test, what it holds beyond doubt: raised after a
 * charge, lowered before a give-back. */
#include "compat.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "ledger.h"

#define LIMIT_BYTES (256ull << 20)
#define DEVICES 2
#define WORKERS_MAX 256

struct worker {
	pid_t pid;
	uint64_t held[DEVICES]; /* units */
	uint64_t done;
};

static struct worker *workers;
static struct tr_ledger *ledger;

static void fail(const char *what)
{
	perror(what);
	exit(2);
}

static int open_ledger(const char *path)
{
	int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	if (fd < 0 || ftruncate(fd, sizeof *ledger) != 0)
		fail(path);
	ledger = mmap(NULL, sizeof *ledger, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (ledger == MAP_FAILED)
		fail("mmap");
	return fd;
}

static void work(const char *path, struct worker *w, unsigned seed)
{
	int fd = open_ledger(path); /* an open file description of its own */
	int slot = tr_ledger_claim(ledger, fd);
	if (slot < 0)
		_exit(3);
	for (;;) {
		int dev = rand_r(&seed) % DEVICES;
		uint32_t n = 1 + (uint32_t)rand_r(&seed) % 2048;
		if (rand_r(&seed) % 2 == 0) {
			if (tr_ledger_add(ledger, slot, dev, n, LIMIT_BYTES))
				__atomic_fetch_add(&w->held[dev], n, __ATOMIC_SEQ_CST);
		} else if (w->held[dev] > 0) {
			if (n > w->held[dev])
				n = (uint32_t)w->held[dev];
			__atomic_fetch_sub(&w->held[dev], n, __ATOMIC_SEQ_CST);
			tr_ledger_add(ledger, slot, dev, -(int64_t)n, LIMIT_BYTES);
		}
		if (rand_r(&seed) % 4096 == 0)
			tr_ledger_reclaim(ledger, fd, slot);
		if (rand_r(&seed) % 20000 == 0 && fork() == 0) {
			struct timespec ts = {.tv_nsec = rand_r(&seed) % 20000000};
			nanosleep(&ts, NULL); /* holds its parent's file lock for a while */
			_exit(0);
		}
		w->done++;
	}
}

static void start(const char *path, int i, unsigned seed)
{
	memset(&workers[i], 0, sizeof workers[i]);
	pid_t pid = fork();
	if (pid < 0)
		fail("fork");
	if (pid == 0) {
		signal(SIGCHLD, SIG_IGN);
		work(path, &workers[i], seed);
	}
	workers[i].pid = pid;
}

static int check(int n)
{
	int bad = 0;
	for (int d = 0; d < DEVICES; d++) {
		uint64_t held = 0;
		for (int i = 0; i < n; i++)
			held += __atomic_load_n(&workers[i].held[d], __ATOMIC_SEQ_CST);
		uint64_t account = tr_account_bytes(ledger, d);
		if (account > LIMIT_BYTES)
			bad++, printf("device %d: %llu bytes, limit %llu\n", d,
				      (unsigned long long)account, LIMIT_BYTES);
		/* held was read first and may have fallen since; only a stopped world can tell
		 * "below", so that is checked at the end of each round. */
		(void)held;
	}
	return bad;
}

/* All workers stopped: the account must cover what they hold and equal the sum of the slots. */
static int check_stopped(int n)
{
	int bad = 0;
	for (int d = 0; d < DEVICES; d++) {
		uint64_t held = 0, slots = 0, account = tr_account_bytes(ledger, d);
		for (int i = 0; i < n; i++)
			held += workers[i].held[d] * TR_UNIT;
		for (int s = 0; s < TR_MAX_PROCS; s++)
			slots += tr_slot_bytes(ledger, s, d);
		if (account < held || account != slots)
			bad++, printf("device %d stopped: account %llu, slots %llu, held %llu\n", d,
				      (unsigned long long)account, (unsigned long long)slots,
				      (unsigned long long)held);
	}
	return bad;
}

static void signal_all(int n, int sig)
{
	for (int i = 0; i < n; i++)
		kill(workers[i].pid, sig);
}

static void wait_stopped(int n)
{
	for (int i = 0; i < n; i++)
		waitpid(workers[i].pid, NULL, WUNTRACED);
}

static void rest(void)
{
	struct timespec ts = {.tv_nsec = 3000000};
	nanosleep(&ts, NULL);
}

static double now(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double)ts.tv_sec + (double)ts.tv_nsec / 1e9;
}

int main(int argc, char **argv)
{
	if (argc < 4)
		return fprintf(stderr, "usage: ledger_kill FILE PROCESSES SECONDS [SEED]\n"), 2;
	int n = atoi(argv[2]), bad = 0;
	double until = now() + atof(argv[3]);
	unsigned seed = argc > 4 ? (unsigned)strtoul(argv[4], NULL, 0) : (unsigned)time(NULL);
	uint64_t kills = 0, done = 0;
	if (n < 1 || n > WORKERS_MAX)
		return fprintf(stderr, "1 to %d processes\n", WORKERS_MAX), 2;
	printf("seed %u\n", seed);
	fflush(stdout); /* the workers must not print it again */
	unlink(argv[1]);
	int fd = open_ledger(argv[1]);
	workers = mmap(NULL, sizeof *workers * WORKERS_MAX, PROT_READ | PROT_WRITE,
		       MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	for (int i = 0; i < n; i++)
		start(argv[1], i, seed + (unsigned)i);
	for (unsigned round = 0; now() < until && bad == 0; round++) {
		for (int k = 0; k < 1 + n / 8; k++) {
			int i = rand_r(&seed) % n;
			kill(workers[i].pid, SIGKILL);
			waitpid(workers[i].pid, NULL, 0);
			done += workers[i].done;
			start(argv[1], i, (unsigned)rand_r(&seed));
			kills++;
		}
		rest();
		bad += check(n);
		if (round % 16 == 0) {
			signal_all(n, SIGSTOP);
			wait_stopped(n);
			bad += check_stopped(n);
			signal_all(n, SIGCONT);
		}
	}
	signal_all(n, SIGKILL);
	for (int i = 0; i < n; i++) {
		waitpid(workers[i].pid, NULL, 0);
		done += workers[i].done;
	}
	rest();
	for (int tries = 0; tries < 100; tries++, rest()) /* the last children let go */
		tr_ledger_reclaim(ledger, fd, -1);
	for (int d = 0; d < DEVICES; d++)
		if (tr_account_bytes(ledger, d) != 0)
			bad++, printf("device %d at the end: %llu bytes\n", d,
				      (unsigned long long)tr_account_bytes(ledger, d));
	printf("%d processes, %llu operations, %llu kills: %s\n", n, (unsigned long long)done,
	       (unsigned long long)kills, bad == 0 ? "ok" : "FAILED");
	unlink(argv[1]);
	return bad != 0;
}
