#include "compat.h"
#define _GNU_SOURCE
#include "test/slice.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "ledger.h"

static void check(int ok, const char *what)
{
	if (ok)
		return;
	printf("%s: %s\n", what, strerror(errno));
	exit(2);
}

/* Replaces the one field that starts with mark; keeps that many bytes of it. */
static void fill(char *image, size_t size, const char *mark, size_t keep, const char *value,
		 char pad)
{
	char *at = memmem(image, size, mark, strlen(mark));
	check(at != NULL && strlen(value) + keep < TR_SLICE_FIELD, mark);
	memset(at + keep, pad, TR_SLICE_FIELD - keep);
	memcpy(at + keep, value, strlen(value));
}

void lay_out(const char *our_lib, const char *driver_lib, const char *dir)
{
	char path[8192], driver[4096];
	struct stat st;
	snprintf(driver, sizeof driver, "%s/driver", dir);
	mkdir(dir, 0700);
	mkdir(driver, 0700);
	snprintf(path, sizeof path, "%s/libnvidia-ml-driver.so.1", driver);
	unlink(path);
	check(symlink(driver_lib, path) == 0, path);

	int fd = open(our_lib, O_RDONLY);
	check(fd >= 0 && fstat(fd, &st) == 0, our_lib);
	size_t size = (size_t)st.st_size;
	char *image = malloc(size);
	check(image != NULL && read(fd, image, size) == (ssize_t)size, our_lib);
	close(fd);
	fill(image, size, TR_SLICE_MARK, strlen(TR_SLICE_MARK), dir, 0);
	/* DT_RPATH is a string: no NUL before its end */
	fill(image, size - 1, TR_RPATH_MARK, 0, driver, '/');
	snprintf(path, sizeof path, "%s/libnvidia-ml.so.1", dir);
	fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0700);
	check(fd >= 0 && write(fd, image, size) == (ssize_t)size, path);
	close(fd);
	free(image);
}

static void *map_new(const char *dir, const char *file, size_t size)
{
	char path[4096];
	snprintf(path, sizeof path, "%s/%s", dir, file);
	int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
	check(fd >= 0 && ftruncate(fd, (off_t)size) == 0, path);
	void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	check(p != MAP_FAILED, path);
	close(fd);
	return p;
}

struct tr_limits *new_limits(const char *dir)
{
	struct tr_limits *l = map_new(dir, TR_FILE_LIMITS, TR_LEASES_OFFSET + 4096);
	*l = (struct tr_limits){.magic = TR_LIMITS_MAGIC,
				.version = TR_ABI_VERSION,
				.size = sizeof *l,
				.generation = 2};
	return l;
}

struct tr_ledger *new_ledger(const char *dir)
{
	struct tr_ledger *l = map_new(dir, TR_FILE_LEDGER, sizeof *l);
	l->magic = TR_LEDGER_MAGIC;
	l->version = TR_ABI_VERSION;
	l->size = sizeof *l;
	l->n_slots = TR_MAX_PROCS;
	return l;
}

void add_member(struct tr_ledger *l, int slot, int dev, unsigned pid, uint64_t starttime,
		uint64_t pidns, uint64_t bytes)
{
	struct tr_slot *s = &l->slot[slot];
	s->pid = pid;
	s->starttime = starttime;
	s->pidns = pidns;
	__atomic_store_n(&s->state, TR_SLOT_USED, __ATOMIC_RELEASE);
	tr_ledger_add(l, slot, dev, (int64_t)(bytes / TR_UNIT), UINT64_MAX);
}
