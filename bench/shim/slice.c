#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "bench.h"
#include "slice.h"
#include "tranche_abi.h"

static void put_file(const char *dir, const char *name, const void *data, size_t n, size_t size)
{
	char path[PATH_MAX];
	int fd;

	snprintf(path, sizeof path, "%s/%s", dir, name);
	fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0700);
	if (fd < 0 || ftruncate(fd, (off_t)size) || write(fd, data, n) != (ssize_t)n || close(fd))
		die("cannot write %s", path);
}

static void put_limits(const char *dir, const struct slice_spec *s)
{
	struct tr_limits l = {
		.magic = TR_LIMITS_MAGIC, .version = TR_ABI_VERSION, .size = sizeof l,
		.generation = 2, .n_devices = 1, .name = "bench",
	};
	struct tr_limits_dev *d = &l.dev[0];

	memcpy(d->uuid, s->uuid, sizeof d->uuid);
	d->memory_limit = 1ull << 44;
	d->context_bytes = 256ull << 20;
	d->cores = d->cores_ceiling = s->cores ? s->cores : TR_CORES_WHOLE;
	d->flags = TR_DEV_MEMORY_LIMITED | (s->cores ? TR_DEV_CORES_LIMITED : 0);
	put_file(dir, TR_FILE_LIMITS, &l, sizeof l, TR_LEASES_OFFSET + 4096);
}

static void put_ledger(const char *dir)
{
	struct tr_ledger head = {
		.magic = TR_LEDGER_MAGIC, .version = TR_ABI_VERSION, .size = sizeof head,
		.n_slots = TR_MAX_PROCS,
	};

	put_file(dir, TR_FILE_LEDGER, &head, offsetof(struct tr_ledger, account), sizeof head);
}

/* Overwrites `field` bytes at the only place where `mark` is followed by padding. */
static void patch(char *image, size_t size, const char *mark, size_t field, const char *value,
		  char pad, bool keep_mark)
{
	char *at = memmem(image, size, mark, strlen(mark));
	size_t skip = keep_mark ? strlen(mark) : 0;

	if (!at || at + field > image + size || strlen(value) + skip >= field)
		die("the library has no field %s", mark);
	memset(at + skip, pad, field - skip - 1);
	memcpy(at + skip, value, strlen(value) + (pad == 0));
}

static void put_library(const char *dir, const char *real_dir, const char *from)
{
	struct stat st;
	int fd = open(from, O_RDONLY);
	char *image;

	if (fd < 0 || fstat(fd, &st))
		die("cannot read %s", from);
	image = malloc((size_t)st.st_size);
	if (!image || read(fd, image, (size_t)st.st_size) != st.st_size)
		die("cannot read %s", from);
	close(fd);
	patch(image, (size_t)st.st_size, TR_SLICE_MARK, TR_SLICE_FIELD, real_dir, 0, true);
	patch(image, (size_t)st.st_size, TR_RPATH_MARK, TR_RPATH_FIELD, real_dir, '/', false);
	put_file(dir, "libcuda.so.1", image, (size_t)st.st_size, (size_t)st.st_size);
	free(image);
}

void slice_lay_out(const char *dir, const struct slice_spec *s, char *library, unsigned size)
{
	char real_dir[PATH_MAX], driver[PATH_MAX], link[PATH_MAX + 32];

	if ((mkdir(dir, 0700) && access(dir, W_OK)) || !realpath(dir, real_dir) ||
	    !realpath(s->driver, driver))
		die("cannot make %s for %s", dir, s->driver);
	snprintf(link, sizeof link, "%s/libcuda-driver.so.1", real_dir);
	unlink(link);
	if (symlink(driver, link))
		die("cannot link %s", link);
	put_limits(real_dir, s);
	put_ledger(real_dir);
	put_library(real_dir, real_dir, s->shim);
	snprintf(library, size, "%s/libcuda.so.1", real_dir);
}

uint64_t slice_used(const char *dir)
{
	struct tr_account a = {0};
	char path[PATH_MAX];
	int fd;

	snprintf(path, sizeof path, "%s/%s", dir, TR_FILE_LEDGER);
	fd = open(path, O_RDONLY);
	if (fd < 0 || pread(fd, &a, sizeof a, offsetof(struct tr_ledger, account)) != sizeof a)
		die("cannot read %s", path);
	close(fd);
	return (a.word & ((1ull << TR_WORD_AMOUNT_BITS) - 1)) * TR_UNIT;
}

void slice_remove(const char *dir)
{
	static const char *const name[] = {TR_FILE_LIMITS, TR_FILE_LEDGER, "libcuda.so.1",
					   "libcuda-driver.so.1"};
	char path[PATH_MAX];

	for (unsigned i = 0; i < sizeof name / sizeof *name; i++) {
		snprintf(path, sizeof path, "%s/%s", dir, name[i]);
		unlink(path);
	}
	rmdir(dir);
}
